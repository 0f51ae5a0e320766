"""A checkpoint's tensor names to our packed network, with every tensor accounted for.

The names are those of NVIDIA/Isaac-GR00T's own checkpoints; lerobot's fine-tunes have `_groot_model.` before each.
Nothing is guessed: a tensor that is unknown, missing or of the wrong shape stops the load.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from relay.engine.base import Progress
from relay.engine.weights import CheckpointError, TensorSource, no_floats
from relay.models.groot.config import GrootConfig
from relay.models.groot.dit import DiffusionBlock
from relay.models.groot.embodiment_maps import EmbodimentMaps, SlotLinear
from relay.models.groot.features import FeatureBlock
from relay.models.groot.language import LanguageLayer
from relay.models.groot.layers import Linear, Mlp
from relay.models.groot.model import Groot
from relay.models.groot.vision import Merger, VisionBlock

LEROBOT_PREFIX = "_groot_model."
_VISION = "backbone.model.model.visual."
_LANGUAGE = "backbone.model.model.language_model."
_HEAD = "action_head."
_EMBEDDING = _LANGUAGE + "embed_tokens.weight"
UNUSED = (
    _LANGUAGE + "norm.weight",  # the features are taken before it
    "backbone.model.lm_head.weight",  # nothing is generated
)


class Stored(NamedTuple):
    """A checkpoint tensor and the parts of our parameters that are made of it.

    Attributes:
        places: views of parameters.
        take: what of the tensor goes to each of them.
    """

    name: str
    shape: tuple[int, ...]
    places: Sequence[Tensor]
    take: Callable[[Tensor], Sequence[Tensor]] = lambda tensor: [tensor]


def load_weights(
    config: GrootConfig,
    source: TensorSource,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    *,
    slots: Sequence[int] | None = None,
) -> Groot:
    """Build a network and read its weights, each straight into its place on the device and in its final dtype.

    Host memory stays at one copy of what lives there plus the largest stored tensor, which therefore comes first.

    Args:
        source: Isaac-GR00T's names, with or without lerobot's `_groot_model.`.
        dtype: of all weights.
        slots: of the embodiments to be served; of other embodiments' maps nothing is kept. By default all.

    Raises:
        CheckpointError: listing every missing and unknown tensor, and those of another shape or kind, before anything
            is read.
    """
    slots = range(config.max_num_embodiments) if slots is None else slots
    outside = [slot for slot in slots if not 0 <= slot < config.max_num_embodiments]
    if outside:
        raise CheckpointError(f"no slot {outside[0]} of 0 to {config.max_num_embodiments - 1}, max_num_embodiments")
    with torch.device("meta"):
        model = Groot(config, slots)
    problems = find_problems(config, source.shapes, source.dtypes)
    if problems:
        raise CheckpointError(do_not_fit(problems))
    model.to(dtype).to_empty(device=device).requires_grad_(False)
    stored = canonical_names(source.shapes)
    parts = sorted(packing(model), key=lambda part: -torch.Size(part.shape).numel())
    total, done = sum(torch.Size(part.shape).numel() for part in parts), 0
    for part in parts:
        write(part, source.read(stored[part.name]))
        done += torch.Size(part.shape).numel()
        progress("loading weights", done / total)
    return model.eval()


def write(part: Stored, tensor: Tensor) -> None:
    """Put a tensor where it belongs."""
    for place, value in zip(part.places, part.take(tensor), strict=True):
        place.copy_(value)


def do_not_fit(problems: Sequence[str]) -> str:
    """The problems of `find_problems` as one text."""
    shown = "\n  ".join(problems[:40])
    more = f"\n  and {len(problems) - 40} more" if len(problems) > 40 else ""
    return (
        "the checkpoint's tensors do not fit a GR00T N1.7 network of these sizes; take a whole, unmodified checkpoint:"
        f"\n  {shown}{more}"
    )


def find_problems(
    config: GrootConfig, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
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


def checkpoint_shapes(config: GrootConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that such a network is loaded from."""
    with torch.device("meta"):
        return {part.name: part.shape for part in packing(Groot(config, [0]))}


def ignored_names(names: Collection[str]) -> list[str]:
    """The stored names of tensors that are known and of no use to action sampling."""
    unused = {stored for name, stored in canonical_names(names).items() if name in UNUSED}
    return [name for name in names if name in unused]


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Isaac-GR00T's name of each stored tensor to its name in the file.

    Raises:
        CheckpointError: when a tensor is there under both names.
    """
    stored: dict[str, str] = {}
    for name in names:
        plain = name.removeprefix(LEROBOT_PREFIX)
        if plain in stored:
            raise CheckpointError(f"the checkpoint holds {plain} twice, once as {LEROBOT_PREFIX}{plain}")
        stored[plain] = name
    return stored


def packing(model: Groot) -> Iterator[Stored]:
    """Every checkpoint tensor of the network and its place, in the order of one inference."""
    yield from _vision(model)
    yield from _language(model)
    yield from _adaptation(model)
    yield from _diffusion(model)
    yield from _embodiments(model)
    yield _whole(_HEAD + "position_embedding.weight", model.action_positions)


def _vision(model: Groot) -> Iterator[Stored]:
    tower = model.vision
    sizes = tower.sizes
    yield Stored(
        _VISION + "patch_embed.proj.weight",
        (sizes.width, 3, sizes.frames, sizes.patch, sizes.patch),
        [tower.patch_projection.weight.t()],
        # A still image is every frame of its patches, so the sum of the frames' weights does the same (exact).
        lambda tensor: [tensor.float().sum(2).flatten(1)],
    )
    yield _whole(_VISION + "patch_embed.proj.bias", _bias(tower.patch_projection))
    yield _whole(_VISION + "pos_embed.weight", tower.positions)
    for i, block in enumerate(cast("list[VisionBlock]", list(tower.blocks))):
        theirs = f"{_VISION}blocks.{i}."
        yield from _norm(theirs + "norm1", block.attention_norm)
        yield from _linear(theirs + "attn.qkv", block.qkv)
        yield from _linear(theirs + "attn.proj", block.out)
        yield from _norm(theirs + "norm2", block.mlp_norm)
        yield from _linear(theirs + "mlp.linear_fc1", block.mlp.fc1)
        yield from _linear(theirs + "mlp.linear_fc2", block.mlp.fc2)
    mergers = {f"{_VISION}deepstack_merger_list.{i}.": merger for i, merger in enumerate(tower.deepstack)}
    for theirs, merger in cast("dict[str, Merger]", {**mergers, _VISION + "merger.": tower.merger}).items():
        yield from _norm(theirs + "norm", merger.norm)
        yield from _linear(theirs + "linear_fc1", merger.fc1)
        yield from _linear(theirs + "linear_fc2", merger.fc2)


def _language(model: Groot) -> Iterator[Stored]:
    sizes = model.language.sizes
    yield _whole(_EMBEDDING, model.language.token_embedding)
    for i, layer in enumerate(cast("list[LanguageLayer]", list(model.language.layers))):
        theirs = f"{_LANGUAGE}layers.{i}."
        yield _whole(theirs + "input_layernorm.weight", layer.attention_norm)
        heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
        names = [f"{theirs}self_attn.{part}_proj" for part in "qkv"]
        yield from _joined(names, layer.qkv, [count * sizes.head_dim for count in heads])
        of_heads = layer.head_norms.split(heads[:2])
        for part, place in zip("qk", of_heads, strict=True):
            yield Stored(f"{theirs}self_attn.{part}_norm.weight", (sizes.head_dim,), [place])
        yield from _linear(theirs + "self_attn.o_proj", layer.out)
        yield _whole(theirs + "post_attention_layernorm.weight", layer.mlp_norm)
        yield from _joined([f"{theirs}mlp.{part}_proj" for part in ("gate", "up")], layer.gate_up, [sizes.mlp] * 2)
        yield from _linear(theirs + "mlp.down_proj", layer.down)


def _adaptation(model: Groot) -> Iterator[Stored]:
    yield from _norm(_HEAD + "vlln", model.adaptation.norm)
    width = model.config.vl.width
    for i, block in enumerate(cast("list[FeatureBlock]", list(model.adaptation.blocks))):
        theirs = f"{_HEAD}vl_self_attention.transformer_blocks.{i}."
        yield from _norm(theirs + "norm1", block.attention_norm)
        yield from _joined([f"{theirs}attn1.to_{part}" for part in "qkv"], block.qkv, [width] * 3)
        yield from _linear(theirs + "attn1.to_out.0", block.out)
        yield from _norm(theirs + "norm3", block.mlp_norm)
        yield from _mlp(theirs, block.mlp)


def _diffusion(model: Groot) -> Iterator[Stored]:
    dit, width, head = model.dit, model.config.dit.width, _HEAD + "model."
    looks = {True: dit.text_keys_values, False: dit.image_keys_values}
    names: dict[bool, list[str]] = {True: [], False: []}
    for i, block in enumerate(cast("list[DiffusionBlock]", list(dit.blocks))):
        theirs = f"{head}transformer_blocks.{i}."
        yield from _modulation(theirs + "norm1.linear", model, i, scale_first=True)
        if i % 2 == 0:
            yield from _linear(theirs + "attn1.to_q", block.q)
            names[dit.looks_at_text[i // 2]] += [f"{theirs}attn1.to_k", f"{theirs}attn1.to_v"]
        else:
            yield from _joined([f"{theirs}attn1.to_{part}" for part in "qkv"], block.qkv, [width] * 3)
        yield from _linear(theirs + "attn1.to_out.0", block.out)
        yield from _mlp(theirs, block.mlp)
    for at_text, linear in looks.items():
        yield from _joined(names[at_text], linear, [width] * len(names[at_text]))
    yield from _linear(head + "timestep_encoder.timestep_embedder.linear_1", dit.time_in)
    yield from _linear(head + "timestep_encoder.timestep_embedder.linear_2", dit.time_out)
    yield from _modulation(head + "proj_out_1", model, len(dit.blocks), scale_first=False)
    yield from _linear(head + "proj_out_2", dit.out)


def _modulation(theirs: str, model: Groot, norm: int, *, scale_first: bool) -> Iterator[Stored]:
    """The reference splits scale and shift in this order in every block, and in the other one at the end."""
    for kind, whole in (("weight", model.dit.modulation_weight), ("bias", model.dit.modulation_bias)):
        scale, shift = whole[norm].chunk(2)
        yield Stored(
            f"{theirs}.{kind}",
            tuple(whole.shape[1:]),
            [scale, shift] if scale_first else [shift, scale],
            lambda tensor: tensor.chunk(2),
        )


def _embodiments(model: Groot) -> Iterator[Stored]:
    maps, slots = cast("list[EmbodimentMaps]", list(model.maps.values())), model.slots
    for theirs, pick in (
        ("state_encoder.layer1", lambda m: m.state_in),
        ("state_encoder.layer2", lambda m: m.state_out),
        ("action_encoder.W1", lambda m: m.action_in),
        ("action_encoder.W3", lambda m: m.action_out),
        ("action_decoder.layer1", lambda m: m.decode_in),
        ("action_decoder.layer2", lambda m: m.decode_out),
    ):
        linears: list[SlotLinear] = [pick(m) for m in maps]
        yield _of_slots(f"{_HEAD}{theirs}.W", model, [linear.weight for linear in linears])
        yield _of_slots(f"{_HEAD}{theirs}.b", model, [linear.bias for linear in linears])
    width = model.config.input_embedding_dim
    yield Stored(
        _HEAD + "action_encoder.W2.W",
        (model.config.max_num_embodiments, 2 * width, width),
        [half for m in maps for half in (m.mix_action.weight, m.mix_time)],
        lambda tensor: [half for slot in slots for half in tensor[slot].chunk(2)],
    )
    yield _of_slots(_HEAD + "action_encoder.W2.b", model, [m.mix_action.bias for m in maps])


def _of_slots(name: str, model: Groot, places: Sequence[Tensor]) -> Stored:
    slots = model.slots
    shape = (model.config.max_num_embodiments, *places[0].shape)
    return Stored(name, shape, places, lambda tensor: [tensor[slot] for slot in slots])


def _whole(name: str, place: Tensor) -> Stored:
    return Stored(name, tuple(place.shape), [place])


def _norm(theirs: str, norm: nn.LayerNorm) -> Iterator[Stored]:
    yield _whole(theirs + ".weight", norm.weight)
    yield _whole(theirs + ".bias", norm.bias)


def _linear(theirs: str, linear: Linear) -> Iterator[Stored]:
    return _joined([theirs], linear, [linear.weight.shape[1]])


def _joined(names: Sequence[str], linear: Linear, outputs: Sequence[int]) -> Iterator[Stored]:
    """Layers that stand beside each other in one of ours, with so many outputs each."""
    for name, place in zip(names, linear.weight.t().split(list(outputs)), strict=True):
        yield _whole(name + ".weight", place)
    if linear.bias is not None:
        for name, place in zip(names, linear.bias.split(list(outputs)), strict=True):
            yield _whole(name + ".bias", place)


def _mlp(theirs: str, mlp: Mlp) -> Iterator[Stored]:
    yield from _linear(theirs + "ff.net.0.proj", mlp.fc1)
    yield from _linear(theirs + "ff.net.2", mlp.fc2)


def _bias(linear: Linear) -> Tensor:
    assert linear.bias is not None
    return linear.bias
