"""openpi's JAX parameters under the names and in the layouts of its PyTorch port.

JAX stacks the layers of a tower on axis 0 and keeps matrices as (inputs, outputs), with heads on axes of their own
(openpi: src/openpi/models/{gemma,siglip}.py; examples/convert_jax_model_to_pytorch.py). Shapes in the comments are
those of one layer: D is the width, N heads of H channels, F the MLP's width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from relay.engine.orbax import OrbaxSource
from relay.engine.weights import CheckpointError, TensorSource

_IMAGE = "PaliGemma/img/"
_BLOCK = _IMAGE + "Transformer/encoderblock/"
_LLM = "PaliGemma/llm/"
_VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model."
_LANGUAGE = "paligemma_with_expert.paligemma.model.language_model."
_EXPERT = "paligemma_with_expert.gemma_expert.model."

Layout = Callable[[Tensor], Tensor]


class Rule(NamedTuple):
    """One PyTorch tensor, or with `*` in its name one per layer, as a view of a JAX array."""

    torch: str
    jax: str
    layout: Layout


def from_jax(source: OrbaxSource) -> TensorSource:
    """The arrays of `source` under openpi-PyTorch names; those that no rule knows keep their own.

    Raises:
        CheckpointError: when an array has a shape that no array of its name has.
    """
    return _Renamed(source)


class _Renamed:
    def __init__(self, source: OrbaxSource) -> None:
        self._source = source
        self._places: dict[str, tuple[Rule, int | None]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        unknown = dict(source.shapes)
        for rule in RULES:
            if rule.jax in source.shapes:
                unknown.pop(rule.jax, None)
                self._place(rule, source.shapes[rule.jax])
        self._shapes |= unknown

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return MappingProxyType(self._shapes)

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        stored = self._source.dtypes
        return {name: stored[self._places[name][0].jax if name in self._places else name] for name in self._shapes}

    def read(self, name: str) -> Tensor:
        if name not in self._places:
            return self._source.read(name)
        rule, layer = self._places[name]
        stored = self._source.read(rule.jax) if layer is None else self._source.read_layer(rule.jax, layer)
        return rule.layout(stored).clone(memory_format=torch.contiguous_format)

    def _place(self, rule: Rule, shape: tuple[int, ...]) -> None:
        layers = range(shape[0]) if "*" in rule.torch and shape else None
        try:
            one = torch.empty(shape if layers is None else shape[1:], device="meta")
            laid_out = tuple(rule.layout(one).shape)
        except (RuntimeError, IndexError):
            raise CheckpointError(f"{rule.jax} has the shape {shape}, which no array of this name has") from None
        for layer in [None] if layers is None else layers:
            name = rule.torch.replace("*", str(layer))
            self._places[name] = (rule, layer)
            self._shapes[name] = laid_out


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _transposed(x: Tensor) -> Tensor:
    return x.permute(1, 0)  # (inputs, outputs) -> (outputs, inputs)


def _first(x: Tensor) -> Tensor:
    return x[0]  # (1, tokens, D) -> (tokens, D)


def _patches(x: Tensor) -> Tensor:
    return x.permute(3, 2, 0, 1)  # (rows, columns, 3, D) -> (D, 3, rows, columns)


def _into_heads(x: Tensor) -> Tensor:
    return x.flatten(1, 2).permute(1, 0)  # (D, N, H) -> (N * H, D)


def _out_of_heads(x: Tensor) -> Tensor:
    return x.flatten(0, 1).permute(1, 0)  # (N, H, D) -> (D, N * H)


def _head_biases(x: Tensor) -> Tensor:
    return x.flatten(0, 1)  # (N, H) -> (N * H,)


def _queries(x: Tensor) -> Tensor:
    return x.permute(0, 2, 1).flatten(0, 1)  # (N, D, H) -> (N * H, D)


def _keys(x: Tensor) -> Tensor:
    return x[0, 0].permute(1, 0)  # (2, 1, D, H) -> (H, D)


def _values(x: Tensor) -> Tensor:
    return x[1, 0].permute(1, 0)  # (2, 1, D, H) -> (H, D)


def _gate(x: Tensor) -> Tensor:
    return x[0].permute(1, 0)  # (2, D, F) -> (F, D)


def _up(x: Tensor) -> Tensor:
    return x[1].permute(1, 0)  # (2, D, F) -> (F, D)


def _rules() -> Iterator[Rule]:
    patch = _VISION + "embeddings.patch_embedding."
    yield Rule(patch + "weight", _IMAGE + "embedding/kernel", _patches)
    yield Rule(patch + "bias", _IMAGE + "embedding/bias", _as_it_is)
    yield Rule(_VISION + "embeddings.position_embedding.weight", _IMAGE + "pos_embedding", _first)
    layer = _VISION + "encoder.layers.*."
    yield from _norm(layer + "layer_norm1.", _BLOCK + "LayerNorm_0/")
    yield from _norm(layer + "layer_norm2.", _BLOCK + "LayerNorm_1/")
    yield from _dense(layer + "mlp.fc1.", _BLOCK + "MlpBlock_0/Dense_0/")
    yield from _dense(layer + "mlp.fc2.", _BLOCK + "MlpBlock_0/Dense_1/")
    attention = _BLOCK + "MultiHeadDotProductAttention_0/"
    for ours, theirs in (("q", "query"), ("k", "key"), ("v", "value")):
        yield Rule(f"{layer}self_attn.{ours}_proj.weight", f"{attention}{theirs}/kernel", _into_heads)
        yield Rule(f"{layer}self_attn.{ours}_proj.bias", f"{attention}{theirs}/bias", _head_biases)
    yield Rule(layer + "self_attn.out_proj.weight", attention + "out/kernel", _out_of_heads)
    yield Rule(layer + "self_attn.out_proj.bias", attention + "out/bias", _as_it_is)
    yield from _norm(_VISION + "post_layernorm.", _IMAGE + "Transformer/encoder_norm/")
    yield from _dense("paligemma_with_expert.paligemma.model.multi_modal_projector.linear.", _IMAGE + "head/")
    yield Rule(_LANGUAGE + "embed_tokens.weight", _LLM + "embedder/input_embedding", _as_it_is)
    yield from _gemma(_LANGUAGE, "")
    yield from _gemma(_EXPERT, "_1")
    for name in ("action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out"):
        yield from _dense(name + ".", name + "/")
    for name in ("state_proj", "action_time_mlp_in", "action_time_mlp_out"):  # π0 only
        yield from _dense(name + ".", name + "/")


def _gemma(ours: str, suffix: str) -> Iterator[Rule]:
    """One of the two towers, told apart by a suffix of the JAX names."""
    layer, theirs = ours + "layers.*.", _LLM + "layers/"
    yield Rule(layer + "self_attn.q_proj.weight", f"{theirs}attn/q_einsum{suffix}/w", _queries)
    yield Rule(layer + "self_attn.k_proj.weight", f"{theirs}attn/kv_einsum{suffix}/w", _keys)
    yield Rule(layer + "self_attn.v_proj.weight", f"{theirs}attn/kv_einsum{suffix}/w", _values)
    yield Rule(layer + "self_attn.o_proj.weight", f"{theirs}attn/attn_vec_einsum{suffix}/w", _out_of_heads)
    yield Rule(layer + "mlp.gate_proj.weight", f"{theirs}mlp{suffix}/gating_einsum", _gate)
    yield Rule(layer + "mlp.up_proj.weight", f"{theirs}mlp{suffix}/gating_einsum", _up)
    yield Rule(layer + "mlp.down_proj.weight", f"{theirs}mlp{suffix}/linear", _transposed)
    for norm, jax in (
        (layer + "input_layernorm.", f"{theirs}pre_attention_norm{suffix}/"),
        (layer + "post_attention_layernorm.", f"{theirs}pre_ffw_norm{suffix}/"),
        (ours + "norm.", f"{_LLM}final_norm{suffix}/"),
    ):
        yield Rule(norm + "weight", jax + "scale", _as_it_is)
        yield from _dense(norm + "dense.", jax + "Dense_0/")  # π0.5's expert, instead of the scale


def _dense(ours: str, theirs: str) -> Iterator[Rule]:
    yield Rule(ours + "weight", theirs + "kernel", _transposed)
    yield Rule(ours + "bias", theirs + "bias", _as_it_is)


def _norm(ours: str, theirs: str) -> Iterator[Rule]:
    yield Rule(ours + "weight", theirs + "scale", _as_it_is)
    yield Rule(ours + "bias", theirs + "bias", _as_it_is)


RULES = tuple(_rules())
