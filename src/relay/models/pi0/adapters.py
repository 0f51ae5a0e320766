"""LoRA adapters of π0 and π0.5: which of our packed matrices they change, and how each change is applied.

What can differ from row to row within one batch is applied beside the shared weights (`changes`); what stands before
or beside the rows, vision and time, gets weights of its own (`own`), and so does everything of an adapter that
replaces parts of the transformers in full (`alone`). Reading is done in host memory; `resident.py` knows the device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from relay.engine.adapter_rows import LinearChange, LinearShape
from relay.engine.adapters import NO_EFFECT, Adapter, Pair, find_problems, refuse
from relay.engine.orbax import OrbaxSource
from relay.engine.peft import CONFIG_FILE, is_peft, read_peft
from relay.engine.weights import CheckpointError
from relay.models.pi0.jax_adapters import find_params, read_jax_adapter
from relay.models.pi0.model import Pi0
from relay.models.pi0.settings import SETTINGS_FILE
from relay.models.pi0.weights import TIED_HEAD, UNUSED, Packed, checkpoint_shapes, packing, split

_BY_ROW = re.compile(r"(language|expert)\.(\d+)\.(qkv|out|gate_up|down)\.weight")
_HEADS = re.compile(r"(action_in|action_out|state_in|action_time_in(?!\.bias)|action_time_out)\.(weight|bias)")
_OF_THEIR_OWN = ("vision.", "time_in.", "time_out.", "modulation_", "action_time_in.")


@dataclass(frozen=True, slots=True, eq=False)
class Pi0Adapter:
    """One adapter, ready to be brought to the device.

    Attributes:
        source: what was read.
        changes: what is applied row by row.
        own: the parameters of which it needs a copy with its changes in it.
        alone: whether its rows go through a network of their own, because all its changes are in `own`.
        notes: what whoever asks for it should know.
    """

    source: Adapter
    changes: Mapping[str, Mapping[int, LinearChange]]
    own: tuple[Packed, ...]
    alone: bool
    notes: tuple[str, ...]

    @property
    def own_vision(self) -> bool:
        """Whether it sees images its own way."""
        return any(packed.name.startswith("vision.") for packed in self.own)

    @property
    def own_time(self) -> bool:
        """Whether it is told the time its own way."""
        return any(packed.name.startswith(_OF_THEIR_OWN[1:]) for packed in self.own)


def read_adapter(folder: Path, model: Pi0) -> Pi0Adapter:
    """Read an adapter of PEFT, or the changes that openpi's JAX training with LoRA made to the base.

    Args:
        model: the base, with which full tensors are compared.

    Raises:
        CheckpointError: listing everything that does not fit the base or cannot be honoured.
    """
    if not folder.is_dir():
        raise CheckpointError(f"adapter {folder} is not a folder")
    shapes = checkpoint_shapes(model.config)
    params = find_params(folder)
    if is_peft(folder):
        adapter = read_peft(folder, _linears(shapes), (*UNUSED, TIED_HEAD))
    elif params is not None:
        adapter = read_jax_adapter(OrbaxSource(params), base_tensors(model), shapes, folder / SETTINGS_FILE)
    else:
        raise CheckpointError(
            f"no adapter in {folder}: expected {CONFIG_FILE} of PEFT, or params/ of openpi's JAX training with LoRA"
        )
    refuse(folder, find_problems(adapter, shapes))
    return pack(adapter, model)


def pack(adapter: Adapter, model: Pi0) -> Pi0Adapter:
    """Sort an adapter's changes by how they are applied."""
    touched = [packed for packed in packing(model.config) if not adapter.names.isdisjoint(packed.sources)]
    alone = any(_needs_network(packed, adapter) for packed in touched)
    changes: dict[str, dict[int, LinearChange]] = {}
    for packed in [] if alone else touched:
        if match := _BY_ROW.fullmatch(packed.name):
            pairs = [adapter.pairs.get(name) for name in packed.sources]
            changes.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = _joined(pairs, packed.rows)
        elif match := _HEADS.fullmatch(packed.name):
            layers = changes.setdefault(match[1], {})
            layers[0] = layers.get(0, LinearChange()).beside(_head_change(packed, adapter, model))
    return Pi0Adapter(
        source=adapter,
        changes=changes,
        own=tuple(packed for packed in touched if alone or packed.name.startswith(_OF_THEIR_OWN)),
        alone=alone,
        notes=(*adapter.notes, *(() if adapter.has_effect else (NO_EFFECT,))),
    )


def with_changes(model: Pi0, adapter: Adapter, parts: Iterable[Packed] | None = None) -> Pi0:
    """A network with an adapter's changes in its weights, which shares all other tensors with `model`.

    Each changed parameter is `dtype(float32(base) + B·A)`, from the base that is kept.

    Args:
        parts: the parameters to change; by default all that the adapter changes.
    """
    if parts is None:
        parts = [packed for packed in packing(model.config) if not adapter.names.isdisjoint(packed.sources)]
    return model.with_parameters(
        {packed.name: merge(model.get_parameter(packed.name), packed, adapter) for packed in parts}
    )


def merge(base: Tensor, packed: Packed, adapter: Adapter) -> Tensor:
    """One of our parameters with an adapter's changes, in the base's dtype and on its device."""
    merged = base.detach().clone()
    for name, part in zip(packed.sources, split(merged, packed), strict=True):
        if name in adapter.replaced:
            part.copy_(adapter.replaced[name])
        elif name in adapter.pairs:
            a, b = (factor.to(base.device, torch.float32) for factor in adapter.pairs[name])
            part.copy_(torch.addmm(part.float(), b, a))
    return merged


def linear_shapes(model: Pi0) -> dict[str, LinearShape]:
    """Every kind of layer whose changes are applied row by row."""
    shapes: dict[str, LinearShape] = {}
    for tower, blocks in (("language", model.language), ("expert", model.expert)):
        for name in ("qkv", "out", "gate_up", "down"):
            shapes[f"{tower}.{name}"] = _shape(getattr(blocks[0], name), len(blocks))
    for name in ("action_in", "action_out", "state_in", "action_time_in", "action_time_out"):
        if hasattr(model, name):
            shapes[name] = _shape(getattr(model, name), 1)
    if "action_time_in" in shapes:  # of which rows differ in the action half; the other one is told with the time
        shapes["action_time_in"] = LinearShape(1, model.config.expert.width, model.config.expert.width, torch.float32)
    return shapes


def base_tensors(model: Pi0) -> dict[str, Tensor]:
    """The network's tensors by the checkpoint's names; views, nothing is copied."""
    return {
        name: part
        for packed in packing(model.config)
        for name, part in zip(packed.sources, split(model.get_parameter(packed.name), packed), strict=True)
    }


def _needs_network(packed: Packed, adapter: Adapter) -> bool:
    """Whether a change of this parameter can be applied neither by row nor to vision and time alone."""
    if _BY_ROW.fullmatch(packed.name):
        return not adapter.replaced.keys().isdisjoint(packed.sources)
    return not (_HEADS.fullmatch(packed.name) or packed.name.startswith(_OF_THEIR_OWN))


def _joined(pairs: list[Pair | None], rows: tuple[int, ...] | None) -> LinearChange:
    """The pairs of matrices that we keep as one: factors side by side, each reaching its own outputs only."""
    if len(pairs) == 1 or rows is None:
        (pair,) = pairs
        assert pair is not None
        return LinearChange(pair.a.T, pair.b.T)
    there = [pair for pair in pairs if pair is not None]
    down = torch.cat([pair.a.T.float() for pair in there], 1)  # (inputs, sum of ranks)
    up = torch.zeros(down.shape[1], sum(rows))
    rank = column = 0
    for pair, width in zip(pairs, rows, strict=True):
        if pair is not None:
            up[rank : rank + pair.a.shape[0], column : column + width] = pair.b.T
            rank += pair.a.shape[0]
        column += width
    return LinearChange(down, up)


def _head_change(packed: Packed, adapter: Adapter, model: Pi0) -> LinearChange:
    (name,) = packed.sources
    half = model.config.expert.width if packed.name == "action_time_in.weight" else None
    if name in adapter.pairs:
        a, b = adapter.pairs[name]
        return LinearChange(a.T[:half], b.T)
    difference = adapter.replaced[name].float() - model.get_parameter(packed.name).detach().float().cpu()
    if packed.name.endswith(".bias"):
        return LinearChange(bias=difference)
    return LinearChange(dense=difference.T[:half])


def _shape(linear: nn.Module, layers: int) -> LinearShape:
    assert isinstance(linear, nn.Linear)
    return LinearShape(layers, linear.in_features, linear.out_features, linear.weight.dtype)


def _linears(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The weights of linear layers: neither norms, nor embeddings, nor the patches' convolution."""
    return [
        name
        for name, shape in shapes.items()
        if name.endswith(".weight")
        and len(shape) == 2
        and not name.endswith(("embed_tokens.weight", "position_embedding.weight"))
    ]
