"""LoRA adapters of GR00T N1.7: PEFT folders, for any linear layer and with any other tensor saved in full.

An adapter's rows go through a network of its own, which has the adapter's changes in its weights and shares everything
else with the base: what is made once per request or per schedule (keys and values, norms, the maps of an embodiment)
then needs no second form. `resident.py` knows how many of these networks the device holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from relay.engine.adapters import NO_EFFECT, Adapter, find_problems, refuse
from relay.engine.peft import CONFIG_FILE, is_peft, read_peft
from relay.engine.weights import CheckpointError
from relay.models.groot.model import Groot
from relay.models.groot.weights import UNUSED, Stored, checkpoint_shapes, packing, write

_NO_LINEARS = ("embed_tokens.weight", "pos_embed.weight", "position_embedding.weight")


@dataclass(frozen=True, slots=True, eq=False)
class GrootAdapter:
    """One adapter in host memory.

    Attributes:
        source: what was read.
        parameters: names of the parameters of which it needs a copy with its changes in it.
        notes: what whoever asks for it should know.
    """

    source: Adapter
    parameters: tuple[str, ...]
    notes: tuple[str, ...]


def read_adapter(folder: Path, model: Groot) -> GrootAdapter:
    """Read an adapter that PEFT saved.

    Raises:
        CheckpointError: listing everything that does not fit the base or cannot be honoured.
    """
    if not folder.is_dir():
        raise CheckpointError(f"adapter {folder} is not a folder")
    if not is_peft(folder):
        raise CheckpointError(f"no adapter in {folder}: expected {CONFIG_FILE} of PEFT")
    shapes = checkpoint_shapes(model.config)
    adapter = read_peft(folder, _linears(shapes), UNUSED)
    refuse(folder, find_problems(adapter, shapes))
    notes = (*adapter.notes, *(() if adapter.has_effect else (NO_EFFECT,)))
    return GrootAdapter(adapter, _touched(model, adapter), notes)


def with_changes(model: Groot, adapter: GrootAdapter) -> Groot:
    """A network with an adapter's changes in its weights, which shares all parameters without any with `model`.

    Each changed weight is `dtype(float32(base) + B·A)`, from the base that is kept.
    """
    copies = {name: model.get_parameter(name).detach().clone() for name in adapter.parameters}
    other = model.with_parameters(copies)
    for part in packing(other):
        if part.name in adapter.source.replaced:
            write(part, adapter.source.replaced[part.name])
        elif part.name in adapter.source.pairs:
            _add(part, adapter.source, other.device)
    return other


def _add(part: Stored, adapter: Adapter, device: torch.device) -> None:
    a, b = (factor.to(device, torch.float32) for factor in adapter.pairs[part.name])
    for place, change in zip(part.places, part.take(b @ a), strict=True):
        place.copy_(place.float() + change)


def _touched(model: Groot, adapter: Adapter) -> tuple[str, ...]:
    """The parameters that hold a tensor which the adapter changes; each parameter has memory of its own."""
    owners = {parameter.untyped_storage().data_ptr(): name for name, parameter in model.named_parameters()}
    places = (place for part in packing(model) if part.name in adapter.names for place in part.places)
    return tuple(dict.fromkeys(owners[place.untyped_storage().data_ptr()] for place in places))


def _linears(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The weights of linear layers: neither norms, nor tables, nor the patches' convolution."""
    return [
        name
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2 and not name.endswith(_NO_LINEARS)
    ]
