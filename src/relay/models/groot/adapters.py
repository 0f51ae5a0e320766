"""LoRA adapters of GR00T N1.7: PEFT folders, for any linear layer and with any other tensor saved in full.

Changes of low rank are applied beside the shared weights, row by row. An adapter that also holds whole tensors runs
alone, in a network of its own that has its changes in its weights and shares everything else with the base: of what is
made once per request or per schedule (norms, the maps of an embodiment) a row has no second form. Reading is done in
host memory; `resident.py` knows the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from relay.engine.adapter_rows import Changes, LinearChange
from relay.engine.adapters import NO_EFFECT, Adapter, find_problems, refuse
from relay.engine.peft import CONFIG_FILE, is_peft, read_peft
from relay.engine.weights import CheckpointError
from relay.models.groot.changes import OF_TIME, is_of_images, linear_shapes, spot
from relay.models.groot.model import Groot
from relay.models.groot.weights import UNUSED, Stored, checkpoint_shapes, packing, write

_NO_LINEARS = ("embed_tokens.weight", "pos_embed.weight", "position_embedding.weight")


@dataclass(frozen=True, slots=True, eq=False)
class GrootAdapter:
    """One adapter in host memory.

    Attributes:
        source: what was read.
        rows: what is applied row by row.
        images: what is applied to each image of a row.
        time: what is applied when a schedule is made.
        parameters: names of the parameters that a network with its changes has of its own.
        notes: what whoever asks for it should know.
    """

    source: Adapter
    rows: Changes
    images: Changes
    time: Changes
    parameters: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def alone(self) -> bool:
        """Whether its rows go through a network of their own, because it holds whole tensors."""
        return bool(self.source.replaced)


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
    return pack(adapter, model)


def pack(adapter: Adapter, model: Groot) -> GrootAdapter:
    """Sort an adapter's changes by how they are applied."""
    touched = _touched(adapter, model)
    changes = {} if adapter.replaced else _changes(adapter, touched, model)
    of_time = {kind: layers for kind, layers in changes.items() if kind in OF_TIME}
    of_images = {kind: layers for kind, layers in changes.items() if is_of_images(kind)}
    return GrootAdapter(
        source=adapter,
        rows={kind: layers for kind, layers in changes.items() if kind not in of_time and kind not in of_images},
        images=of_images,
        time=of_time,
        parameters=tuple(dict.fromkeys(name for _, parameters in touched for name in parameters)),
        notes=(*adapter.notes, *(() if adapter.has_effect else (NO_EFFECT,))),
    )


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


_Touched = Sequence[tuple[Stored, Sequence[str]]]
"""Tensors of the checkpoint, each with the parameters that hold its places."""


def _touched(adapter: Adapter, model: Groot) -> _Touched:
    """What an adapter changes; each parameter has memory of its own."""
    owners = {parameter.untyped_storage().data_ptr(): name for name, parameter in model.named_parameters()}
    return [
        (part, [owners[place.untyped_storage().data_ptr()] for place in part.places])
        for part in packing(model)
        if part.name in adapter.names
    ]


def _changes(adapter: Adapter, touched: _Touched, model: Groot) -> Changes:
    """The pairs of matrices as changes of our layers, some of which hold several of the checkpoint's side by side."""
    shapes = linear_shapes(model)
    factors: dict[tuple[str, int], list[_Factors]] = {}
    for part, parameters in touched:
        a, b = adapter.pairs[part.name]
        outputs = [place.storage_offset() // a.shape[1] for place in part.places]
        spots = [spot(model, *named) for named in zip(parameters, outputs, strict=True)]
        ups = [(one.output, rows) for one, rows in zip(spots, part.take(b), strict=True)]
        factors.setdefault((spots[0].kind, spots[0].number), []).append(_Factors(a, ups))
    changes: dict[str, dict[int, LinearChange]] = {}
    for (kind, number), of_layer in factors.items():
        changes.setdefault(kind, {})[number] = _joined(of_layer, shapes[kind].outputs)
    return changes


class _Factors(NamedTuple):
    """A pair's matrices: a (rank, inputs), and the rows of b with the first output that each part of them reaches."""

    a: Tensor
    ups: Sequence[tuple[int, Tensor]]


def _joined(pairs: Sequence[_Factors], outputs: int) -> LinearChange:
    """Factors side by side, each reaching its own outputs only."""
    down = torch.cat([a.T.float() for a, _ in pairs], 1)  # (inputs, sum of ranks)
    up = torch.zeros(down.shape[1], outputs)
    rank = 0
    for a, ups in pairs:
        for start, b in ups:
            up[rank : rank + len(a), start : start + len(b)] = b.T
        rank += len(a)
    return LinearChange(down, up)


def _linears(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The weights of linear layers: neither norms, nor tables, nor the patches' convolution."""
    return [
        name
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2 and not name.endswith(_NO_LINEARS)
    ]
