"""openpi's JAX checkpoints that were trained with LoRA: what they change about a base.

Such a checkpoint is a full tree: frozen weights as they were, `lora_a` and `lora_b` beside them, and everything that is
no transformer trained in full (openpi: src/openpi/models/{lora,gemma,pi0_config}.py). Shapes in the comments are those
of one layer: D is the width, N heads of H channels, F the MLP's width, r the rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from relay.engine.adapters import Adapter, Pair, refuse
from relay.engine.orbax import METADATA_FILE, OrbaxSource
from relay.engine.weights import CheckpointError
from relay.models.pi0.jax_names import from_jax
from relay.models.pi0.settings import read_settings
from relay.models.pi0.weights import UNUSED
from relay.protocol.wording import shown

_LLM = "PaliGemma/llm/layers/"
_LANGUAGE = "paligemma_with_expert.paligemma.model.language_model.layers."
_EXPERT = "paligemma_with_expert.gemma_expert.model.layers."
_SHIPPED = {"language": 16, "expert": 32}
"""Ranks of openpi's gemma_2b_lora and gemma_300m_lora, whose alpha is the rank: the factor is 1."""


class JaxWithLora:
    """A checkpoint of openpi's LoRA training with the changes in its weights, under openpi-PyTorch names.

    Args:
        settings: the file that may say alpha, which openpi's files don't.
    """

    def __init__(self, source: OrbaxSource, settings: Path) -> None:
        self._source, self._settings = source, settings
        self._full = from_jax(source)
        self._pairs: dict[str, Pair] | None = None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shape for name, shape in self._full.shapes.items() if "lora_" not in name}

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: dtype for name, dtype in self._full.dtypes.items() if "lora_" not in name}

    def read(self, name: str) -> Tensor:
        if self._pairs is None:
            self._pairs = dict(_read_pairs(self._source, self._settings))
        tensor, pair = self._full.read(name), self._pairs.get(name)
        return tensor if pair is None else tensor.float() + pair.delta


def has_lora(source: OrbaxSource) -> bool:
    """Whether a tree was trained with LoRA."""
    return any("lora_" in name for name in source.shapes)


class _Rule(NamedTuple):
    """The pairs of some linear layers, in the order of `targets`, from one layer's `lora_a` and `lora_b`."""

    a: str
    b: str
    targets: tuple[str, ...]
    pairs: Callable[[Tensor, Tensor, float], tuple[Pair, ...]]


def find_params(folder: Path) -> Path | None:
    """The tree of a checkpoint folder, or the folder itself if it is one."""
    return next((path for path in (folder / "params", folder) if (path / METADATA_FILE).is_file()), None)


def read_jax_adapter(
    source: OrbaxSource, base: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], settings: Path
) -> Adapter:
    """What a checkpoint of openpi's LoRA training changes about its base.

    Full tensors count as changed where they differ from the base at the coarser of the two precisions: what was
    frozen is stored in bfloat16 whatever the base is.

    Args:
        base: the base's tensors by their names in openpi's PyTorch checkpoints.
        shapes: of all of them.
        settings: the file that may say alpha, which openpi's files don't.

    Raises:
        CheckpointError: a tensor that is missing or unknown, or an alpha that nothing tells.
    """
    if not has_lora(source):
        raise CheckpointError(f"{settings.parent} has no lora_a and lora_b: serve it as a checkpoint of its own")
    pairs = dict(_read_pairs(source, settings))
    full = from_jax(source)
    stored = {name for name in full.shapes if "lora_" not in name}
    refuse(
        settings.parent,
        sorted(
            [f"missing: {name}" for name in shapes.keys() - stored]
            + [f"unknown: {name}" for name in stored - shapes.keys() - set(UNUSED)]
            + [
                f"wrong shape: {name} is {full.shapes[name]}, expected {shapes[name]}"
                for name in stored & shapes.keys()
                if full.shapes[name] != shapes[name]
            ]
        ),
    )
    replaced: dict[str, Tensor] = {}
    for name in sorted(shapes, key=lambda name: re.sub(r"\d+", "*", name)):  # all layers of an array together
        tensor = full.read(name)
        if not _same(tensor, base[name]):
            replaced[name] = tensor
    return Adapter(pairs, replaced)


def _same(stored: Tensor, base: Tensor) -> bool:
    dtype = min((base.dtype, stored.dtype), key=lambda dtype: dtype.itemsize)
    return torch.equal(stored.to(base.device, dtype), base.to(dtype))


def _read_pairs(source: OrbaxSource, settings: Path) -> Iterator[tuple[str, Pair]]:
    """Every pair of LoRA factors by the name of the weight that it changes."""
    scales = _Scales(settings)
    unknown = {name for name in source.shapes if "lora_" in name}
    for tower, suffix, layers in (("language", "", _LANGUAGE), ("expert", "_1", _EXPERT)):
        for rule in _rules(suffix):
            known = {rule.a, rule.b} & unknown
            unknown -= known
            if not known:
                continue
            if len(known) == 1:
                raise CheckpointError(f"missing: {({rule.a, rule.b} - known).pop()}, beside {known.pop()}")
            a, b = source.read(rule.a).float(), source.read(rule.b).float()
            scale = 1.0 if "/mlp" in rule.a else scales.of(tower, a.shape[-1])
            try:
                for layer in range(len(a)):
                    for target, pair in zip(rule.targets, rule.pairs(a[layer], b[layer], scale), strict=True):
                        yield f"{layers}{layer}.{target}.weight", pair
            except (RuntimeError, IndexError, ValueError):
                raise CheckpointError(
                    f"{rule.a} and {rule.b} have the shapes {tuple(a.shape)} and {tuple(b.shape)}, which no pair has"
                ) from None
    if unknown:
        raise CheckpointError(f"unknown: {', '.join(sorted(unknown))}")


def _rules(suffix: str) -> Iterator[_Rule]:
    attention, mlp = _LLM + "attn/", f"{_LLM}mlp{suffix}/"

    def einsum(
        name: str, targets: tuple[str, ...], pairs: Callable[[Tensor, Tensor, float], tuple[Pair, ...]]
    ) -> _Rule:
        whole = f"{attention}{name}{suffix}/"
        return _Rule(whole + "lora_a", whole + "lora_b", targets, pairs)

    yield einsum("q_einsum", ("self_attn.q_proj",), _queries)
    yield einsum("kv_einsum", ("self_attn.k_proj", "self_attn.v_proj"), _keys_values)
    yield einsum("attn_vec_einsum", ("self_attn.o_proj",), _outputs)
    gating, linear = mlp + "gating_einsum_lora_", mlp + "linear_lora_"
    yield _Rule(gating + "a", gating + "b", ("mlp.gate_proj", "mlp.up_proj"), _gate_up)
    yield _Rule(linear + "a", linear + "b", ("mlp.down_proj",), _down)


def _queries(a: Tensor, b: Tensor, scale: float) -> tuple[Pair, ...]:
    """a (N, D, r), b (N, r, H): each head has factors of its own, together of rank N·r."""
    heads, width, rank = a.shape
    channels = b.shape[2]
    whole = b.new_zeros(heads, channels, heads, rank)
    for head in range(heads):
        whole[head, :, head] = scale * b[head].T
    return (Pair(a.permute(0, 2, 1).reshape(heads * rank, width), whole.reshape(heads * channels, heads * rank)),)


def _keys_values(a: Tensor, b: Tensor, scale: float) -> tuple[Pair, ...]:
    """a (2, 1, D, r), b (2, 1, r, H)."""
    return tuple(Pair(a[i, 0].T, scale * b[i, 0].T) for i in range(2))


def _outputs(a: Tensor, b: Tensor, scale: float) -> tuple[Pair, ...]:
    """a (N, H, r), b (N, r, D): the einsum sums the heads into r channels before b, so each head meets the sum of b."""
    return (Pair(a.flatten(0, 1).T, scale * b.sum(0).T),)


def _gate_up(a: Tensor, b: Tensor, scale: float) -> tuple[Pair, ...]:
    """a (2, D, r), b (2, r, F)."""
    return tuple(Pair(a[i].T, scale * b[i].T) for i in range(2))


def _down(a: Tensor, b: Tensor, scale: float) -> tuple[Pair, ...]:
    """a (F, r), b (r, D)."""
    return (Pair(a.T, scale * b.T),)


class _Scales:
    """alpha / rank of a tower's attention; the MLP's is always 1, since openpi ignores alpha there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._settings = read_settings(path) if path.is_file() else {}
        for tower, alpha in self._settings.get("lora_alpha", {}).items():
            if tower not in _SHIPPED or isinstance(alpha, bool) or not isinstance(alpha, int | float) or not alpha > 0:
                raise CheckpointError(
                    f"{path}: lora_alpha says {tower!r}: {shown(alpha)}; expected a positive number "
                    "for language or expert"
                )

    def of(self, tower: str, rank: int) -> float:
        """The factor of a tower's changes."""
        alpha = self._settings.get("lora_alpha", {}).get(tower)
        if alpha is None and rank == _SHIPPED[tower]:
            return 1.0
        if alpha is None:
            raise CheckpointError(
                f"the {tower} tower's LoRA has rank {rank}, and openpi's files do not say its alpha: write "
                f'{{"lora_alpha": {{"language": …, "expert": …}}}} into {self._path}'
            )
        return alpha / (math.sqrt(rank) if self._settings.get("rslora") else rank)
