"""openpi's tensor names to our packed network and back, with every tensor accounted for.

The names are those of openpi's PyTorch checkpoints (openpi: src/openpi/models_pytorch/pi0_pytorch.py). Nothing is
guessed: a tensor that is unknown, missing or of the wrong shape stops the load.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from relay.engine.base import Progress
from relay.engine.weights import CheckpointError as CheckpointError
from relay.engine.weights import TensorSource, no_floats
from relay.models.pi0.config import Pi0Config, TransformerSize, VisionSize
from relay.models.pi0.model import Pi0

_PALIGEMMA = "paligemma_with_expert.paligemma."
_VISION = _PALIGEMMA + "model.vision_tower.vision_model."
_PROJECTOR = _PALIGEMMA + "model.multi_modal_projector.linear."
_LANGUAGE = _PALIGEMMA + "model.language_model."
_EXPERT = "paligemma_with_expert.gemma_expert.model."

_EMBEDDING = _LANGUAGE + "embed_tokens.weight"
TIED_HEAD = _PALIGEMMA + "lm_head.weight"
UNUSED = (
    _LANGUAGE + "norm.weight",  # the prefix's final norm: action sampling reads keys and values only
    "paligemma_with_expert.gemma_expert.lm_head.weight",  # never set by openpi's converter: random
)


@dataclass(frozen=True, slots=True)
class Packed:
    """One of our tensors and the checkpoint tensors it is made of.

    `join` says how: concatenated on axis 0 with `rows` rows each, or stacked on a new axis 0.
    """

    name: str
    sources: tuple[str, ...]
    join: Literal["concatenate", "stack"] = "concatenate"
    rows: tuple[int, ...] | None = None


def load_weights(
    config: Pi0Config, source: TensorSource, device: torch.device, dtype: torch.dtype, progress: Progress
) -> Pi0:
    """Build a network and read its weights; each parameter is made once, on its device and in its final dtype.

    Host memory stays at one copy of what lives there plus the largest stored tensors, which therefore come first.

    Args:
        source: openpi-PyTorch names, with or without lerobot's leading `model.`.
        dtype: of the large matrices; the rest is float32.

    Raises:
        CheckpointError: listing every missing and unknown tensor, and those of another shape or kind, before anything
            is read.
    """
    with torch.device("meta"):
        model = Pi0(config).to_compute_dtype(dtype)
    stored = canonical_names(source.shapes)
    problems = find_problems(config, source.shapes, source.dtypes)
    if problems:
        raise CheckpointError(do_not_fit(config.family, problems))
    empty = dict(model.named_parameters())
    total = sum(parameter.numel() for parameter in empty.values())
    state: dict[str, Tensor] = {}
    done = 0
    for packed in _largest_first(packing(config), empty):
        state[packed.name] = _read(packed, source, stored, empty[packed.name], device)
        done += empty[packed.name].numel()
        progress("loading weights", done / total)
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False)


def do_not_fit(family: str, problems: Sequence[str]) -> str:
    """The problems of `find_problems` as one text."""
    shown = "\n  ".join(problems[:40])
    more = f"\n  and {len(problems) - 40} more" if len(problems) > 40 else ""
    return (
        f"the checkpoint's tensors do not fit a {family} network of these sizes; take a whole, unmodified checkpoint:"
        f"\n  {shown}{more}"
    )


def ignored_names(names: Collection[str]) -> list[str]:
    """The stored names of tensors that are known and of no use to action sampling."""
    read = {stored for name, stored in canonical_names(names).items() if name not in UNUSED}
    return [name for name in names if name not in read]


def checkpoint_shapes(config: Pi0Config) -> dict[str, tuple[int, ...]]:
    """Every tensor that such a network is loaded from, under openpi's names."""
    with torch.device("meta"):
        parameters = dict(Pi0(config).named_parameters())
    return {
        name: tuple(part.shape)
        for packed in packing(config)
        for name, part in zip(packed.sources, split(parameters[packed.name], packed), strict=True)
    }


def find_problems(
    config: Pi0Config, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> list[str]:
    """What keeps tensors of these names and shapes from filling such a network, a sentence each; sorted."""
    stored, expected = canonical_names(shapes), checkpoint_shapes(config)
    problems = [f"missing: {name}" for name in expected.keys() - stored.keys()]
    problems += [
        f"wrong shape: {name} is {shapes[stored[name]]}, expected {shape}"
        for name, shape in expected.items()
        if name in stored and shapes[stored[name]] != shape
    ]
    problems += no_floats((stored[name] for name in expected if name in stored), dtypes)
    unknown = sorted(stored.keys() - expected.keys() - set(UNUSED))
    adapters = [name for name in unknown if "lora_" in name.lower()]
    problems += [f"unknown: {name}" for name in unknown if name not in adapters]
    if adapters:
        problems.append(
            f"adapter: {adapters[0]} and {len(adapters) - 1} more LoRA tensors; serve the adapter with --adapter "
            "NAME=DIR beside its base, or take a checkpoint in which it is merged into the weights"
        )
    return sorted(problems)


def _largest_first(packings: Iterable[Packed], parameters: Mapping[str, Tensor]) -> list[Packed]:
    """One kind of parameter after the other, all layers of it together, as JAX checkpoints stack them."""
    kinds: dict[str, list[Packed]] = {}
    for packed in packings:
        kinds.setdefault(re.sub(r"\d+", "*", packed.name), []).append(packed)
    by_size = sorted(kinds.values(), key=lambda kind: -sum(parameters[packed.name].numel() for packed in kind))
    return [packed for kind in by_size for packed in kind]


def _read(
    packed: Packed, source: TensorSource, stored: Mapping[str, str], empty: Tensor, device: torch.device
) -> Tensor:
    if len(packed.sources) == 1:
        return source.read(stored[packed.sources[0]]).to(device, empty.dtype)
    whole = torch.empty(empty.shape, dtype=empty.dtype, device=device)
    for name, place in zip(packed.sources, split(whole, packed), strict=True):
        place.copy_(source.read(stored[name]))
    return whole


def save_weights(model: Pi0, dtype: torch.dtype) -> dict[str, Tensor]:
    """The checkpoint tensors of `model` under openpi's names, in `dtype`."""
    parameters = dict(model.named_parameters())
    tensors = {_LANGUAGE + "norm.weight": torch.zeros(model.config.language.width, dtype=dtype)}
    for packed in packing(model.config):
        for name, part in zip(packed.sources, split(parameters[packed.name].detach(), packed), strict=True):
            tensors[name] = part.to(dtype).contiguous().clone()
    return tensors


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """openpi's name of each stored tensor to its name in the file.

    Strips lerobot's `model.` prefix and resolves the tied embedding: openpi's `save_model` keeps only `lm_head` of the
    tied pair; where both exist they are untied copies, and the embedding counts.

    Raises:
        CheckpointError: when a tensor is there under both names.
    """
    stored: dict[str, str] = {}
    for name in names:
        plain = name.removeprefix("model.")
        if plain in stored:
            raise CheckpointError(f"the checkpoint holds {plain} twice, once as model.{plain}")
        stored[plain] = name
    head = stored.pop(TIED_HEAD, None)
    if head is not None:
        stored.setdefault(_EMBEDDING, head)
    return stored


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the tensors alone tell of a network."""

    family: Literal["pi0", "pi05"]
    vision_width: int
    vision_depth: int
    vision_mlp: int
    patch: int
    image_size: int
    language: TransformerSize
    expert: TransformerSize
    query_width: int
    head_dim: int
    vocab_size: int
    action_dim: int

    def vision(self, heads: int) -> VisionSize:
        """The vision tower, given its number of heads."""
        return VisionSize(self.vision_width, self.vision_depth, self.vision_mlp, heads, self.patch, self.image_size)


def read_sizes(stored_shapes: Mapping[str, tuple[int, ...]]) -> Sizes:
    """Family and sizes from the tensors' names and shapes.

    Raises:
        CheckpointError: when a tensor that tells a size is missing or has other axes.
    """
    shapes = {name: stored_shapes[stored] for name, stored in canonical_names(stored_shapes).items()}

    def shape(name: str, axes: int = 2) -> tuple[int, ...]:
        if name not in shapes:
            raise CheckpointError(
                f"not a pi0 or pi05 checkpoint: it has no tensor {name}; take a whole one of these models"
            )
        if len(shapes[name]) != axes or 0 in shapes[name]:
            raise CheckpointError(
                f"wrong shape: {name} is {shapes[name]}, expected {axes} axes, none of them empty; take a whole, "
                "unmodified checkpoint"
            )
        return shapes[name]

    def depth(prefix: str) -> int:
        layers = (name[len(prefix) :].split(".", 1)[0] for name in shapes if name.startswith(prefix))
        return 1 + max((int(layer) for layer in layers if _LAYER.fullmatch(layer)), default=-1)

    def transformer(prefix: str) -> TransformerSize:
        mlp, width = shape(prefix + "layers.0.mlp.up_proj.weight")
        return TransformerSize(width=width, depth=depth(prefix + "layers."), mlp=mlp)

    vision_width, _, patch, _ = shape(_VISION + "embeddings.patch_embedding.weight", axes=4)
    patches, _ = shape(_VISION + "embeddings.position_embedding.weight")
    action_dim = shape("action_out_proj.weight")[0]
    return Sizes(
        family="pi05" if _EXPERT + "layers.0.input_layernorm.dense.weight" in shapes else "pi0",
        vision_width=vision_width,
        vision_depth=depth(_VISION + "encoder.layers."),
        vision_mlp=shape(_VISION + "encoder.layers.0.mlp.fc1.weight")[0],
        patch=patch,
        image_size=round(patches**0.5) * patch,
        language=transformer(_LANGUAGE),
        expert=transformer(_EXPERT),
        query_width=shape(_LANGUAGE + "layers.0.self_attn.q_proj.weight")[0],
        head_dim=shape(_LANGUAGE + "layers.0.self_attn.k_proj.weight")[0],
        vocab_size=shape(_EMBEDDING)[0],
        action_dim=action_dim,
    )


_LAYER = re.compile(r"\d{1,3}")


def packing(config: Pi0Config) -> Iterator[Packed]:
    """Every parameter of the network, in the order of one inference, with its checkpoint tensors."""
    yield from _linear("vision.patch_embedding", _VISION + "embeddings.patch_embedding")
    yield Packed("vision.position_embedding", (_VISION + "embeddings.position_embedding.weight",))
    for i in range(config.vision.depth):
        ours, theirs = f"vision.blocks.{i}.", f"{_VISION}encoder.layers.{i}."
        yield from _linear(ours + "attention_norm", theirs + "layer_norm1")
        for kind in ("weight", "bias"):
            sources = tuple(f"{theirs}self_attn.{part}_proj.{kind}" for part in "qkv")
            yield Packed(f"{ours}qkv.{kind}", sources, rows=(config.vision.width,) * 3)
        yield from _linear(ours + "out", theirs + "self_attn.out_proj")
        yield from _linear(ours + "mlp_norm", theirs + "layer_norm2")
        yield from _linear(ours + "fc1", theirs + "mlp.fc1")
        yield from _linear(ours + "fc2", theirs + "mlp.fc2")
    yield from _linear("vision.final_norm", _VISION + "post_layernorm")
    yield from _linear("vision.projector", _PROJECTOR.removesuffix("."))
    yield Packed("token_embedding", (_EMBEDDING,))

    modulated = config.family == "pi05"
    yield from _blocks("language", _LANGUAGE, config.language, config, modulated=False)
    yield from _blocks("expert", _EXPERT, config.expert, config, modulated=modulated)
    yield from _linear("action_in", "action_in_proj")
    yield from _linear("action_out", "action_out_proj")
    if modulated:
        yield from _linear("time_in", "time_mlp_in")
        yield from _linear("time_out", "time_mlp_out")
        norms = [
            f"{_EXPERT}layers.{i}.{norm}.dense."
            for i in range(config.expert.depth)
            for norm in ("input_layernorm", "post_attention_layernorm")
        ]
        norms.append(_EXPERT + "norm.dense.")
        for kind in ("weight", "bias"):
            yield Packed(f"modulation_{kind}", tuple(norm + kind for norm in norms), join="stack")
    else:
        yield Packed("expert_norm", (_EXPERT + "norm.weight",))
        yield from _linear("state_in", "state_proj")
        yield from _linear("action_time_in", "action_time_mlp_in")
        yield from _linear("action_time_out", "action_time_mlp_out")


def _linear(ours: str, theirs: str) -> Iterator[Packed]:
    for kind in ("weight", "bias"):
        yield Packed(f"{ours}.{kind}", (f"{theirs}.{kind}",))


def _blocks(ours: str, theirs: str, size: TransformerSize, config: Pi0Config, *, modulated: bool) -> Iterator[Packed]:
    query_rows, head_dim = config.heads * config.head_dim, config.head_dim
    for i in range(size.depth):
        block, layer = f"{ours}.{i}.", f"{theirs}layers.{i}."
        if not modulated:
            yield Packed(block + "attention_norm", (layer + "input_layernorm.weight",))
            yield Packed(block + "mlp_norm", (layer + "post_attention_layernorm.weight",))
        qkv = tuple(f"{layer}self_attn.{part}_proj.weight" for part in "qkv")
        yield Packed(block + "qkv.weight", qkv, rows=(query_rows, head_dim, head_dim))
        yield Packed(block + "out.weight", (layer + "self_attn.o_proj.weight",))
        gate_up = tuple(f"{layer}mlp.{part}_proj.weight" for part in ("gate", "up"))
        yield Packed(block + "gate_up.weight", gate_up, rows=(size.mlp, size.mlp))
        yield Packed(block + "down.weight", (layer + "mlp.down_proj.weight",))


def split(tensor: Tensor, packed: Packed) -> tuple[Tensor, ...]:
    """Views of `tensor` that correspond to each source."""
    if packed.join == "stack":
        return tensor.unbind(0)
    return tensor.split(list(packed.rows)) if packed.rows else (tensor,)
