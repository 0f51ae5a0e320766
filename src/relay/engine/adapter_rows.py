"""Linear layers whose rows may each have an adapter of their own: tables of changes, picked by an index per row.

An adapter enters a network as an argument, never by changing it, so one copy of the weights serves all adapters and
rows with different ones share a batch. Knows no model: a table is a name and a number of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import le
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn


class RowChange(NamedTuple):
    """What adapters change about one linear layer, for each row of a batch; parts that nothing changes are None.

    `y = x @ weight.T + bias` becomes `y + x @ down @ up + x @ dense + bias_change`. The first axis is one entry per
    row, or a single one for all rows. Zeros where a row has no adapter, so that its result stays the same.
    For `add_change_below` a change that is one for all rows has no such axis.
    """

    down: Tensor | None = None  # (rows or 1, inputs, rank)
    up: Tensor | None = None  # (rows or 1, rank, outputs)
    dense: Tensor | None = None  # (rows or 1, inputs, outputs)
    bias: Tensor | None = None  # (rows or 1, 1, outputs)

    def from_output(self, start: int) -> RowChange:
        """The same for the outputs from `start` on."""
        return RowChange(self.down, *(part if part is None else part[..., start:] for part in self[1:]))


def adapted(linear: nn.Linear, x: Tensor, change: RowChange | None) -> Tensor:
    """`linear` of x (rows, tokens, inputs), with what each row's adapter changes about it."""
    y = linear(x)
    return y if change is None else add_change(y, x, change)


def add_change(y: Tensor, x: Tensor, change: RowChange) -> Tensor:
    """A linear layer's outputs y (rows, tokens, outputs) for x, changed in place: a copy costs more than the sum."""
    down, up, dense, bias = change
    if down is not None and up is not None:
        _add_product(y, _product(x, down), up)
    if dense is not None:
        _add_product(y, x, dense)
    return y if bias is None else y.add_(bias)


def add_change_below(y: Tensor, x: Tensor, change: RowChange) -> Tensor:
    """`add_change` of rows that stand below each other: y (rows * tokens, outputs), x (rows * tokens, inputs)."""
    down, up, dense, bias = change
    first = next(part for part in change if part is not None)
    if first.dim() == 3:
        add_change(y.view(len(first), -1, y.shape[-1]), x.view(len(first), -1, x.shape[-1]), change)
        return y
    if down is not None and up is not None:
        y.addmm_(torch.mm(x, down), up)
    if dense is not None:
        y.addmm_(x, dense)
    return y if bias is None else y.add_(bias)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight[0] if len(weight) == 1 else torch.bmm(x, weight)


def _add_product(y: Tensor, x: Tensor, weight: Tensor) -> None:
    if len(weight) == 1:
        y.view(-1, y.shape[-1]).addmm_(x.flatten(0, 1), weight[0])
    else:
        y.baddbmm_(x, weight)


class LinearChange(NamedTuple):
    """What one adapter changes about one layer; CPU, in the form of `RowChange` without rows."""

    down: Tensor | None = None  # (inputs, rank)
    up: Tensor | None = None  # (rank, outputs)
    dense: Tensor | None = None  # (inputs, outputs)
    bias: Tensor | None = None  # (outputs,)

    def beside(self, other: LinearChange) -> LinearChange:
        """Both changes; no part may be in both."""
        return LinearChange(*(mine if theirs is None else theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A kind of linear layer that adapters may change.

    Attributes:
        layers: how many of them there are, one in each block.
        inputs, outputs: widths.
        dtype: of the changes, as the layer's weights have it.
    """

    layers: int
    inputs: int
    outputs: int
    dtype: torch.dtype


Changes = Mapping[str, Mapping[int, LinearChange]]
"""One adapter: by kind and layer."""


class ChangeTables:
    """The changes of several adapters in numbered slots; slot 0 changes nothing and stays.

    Args:
        shapes: of every kind that may come.
        adapters: those that will come: only kinds and parts that one of them changes get a table, as wide as the
            largest rank among them.
        slots: how many adapters can be held at once.
    """

    def __init__(
        self, shapes: Mapping[str, LinearShape], adapters: Iterable[Changes], slots: int, device: torch.device
    ) -> None:
        self.slots = slots
        self._device, self._shapes = device, shapes
        self._needs = [dict[str, list[tuple[int, int, int] | None]]() for _ in range(slots + 1)]
        self._tables = {
            kind: RowChange(
                *(
                    None if size is None else torch.zeros(slots + 1, *size, dtype=shapes[kind].dtype, device=device)
                    for size in sizes
                )
            )
            for kind, sizes in _sizes(shapes, adapters).items()
        }

    @staticmethod
    def bytes_per_slot(shapes: Mapping[str, LinearShape], adapters: Iterable[Changes]) -> int:
        """Device memory that each slot of such tables takes."""
        return sum(
            torch.Size(size).numel() * shapes[kind].dtype.itemsize
            for kind, sizes in _sizes(shapes, adapters).items()
            for size in sizes
            if size is not None
        )

    def write(self, slot: int, changes: Changes) -> None:
        """Put an adapter in place of whatever was in the slot."""
        assert 1 <= slot <= self.slots
        self._needs[slot] = _sizes(self._shapes, [changes])
        for kind, table in self._tables.items():
            for part, whole in zip(RowChange._fields, table, strict=True):
                if whole is None:
                    continue
                whole[slot].zero_()
                for layer, change in changes.get(kind, {}).items():
                    value: Tensor | None = getattr(change, part)
                    if value is not None:
                        place = whole[slot, layer]
                        value = value[None] if part == "bias" else value
                        place[: value.shape[0], : value.shape[1]].copy_(value)

    def buffers(self, rows: int) -> dict[str, RowChange]:
        """Room at a fixed place for the changes of so many rows, every kind that has a table."""
        return {
            kind: RowChange(*(None if part is None else part.new_zeros(rows, *part.shape[1:]) for part in table))
            for kind, table in self._tables.items()
        }

    def gather(self, slots: Sequence[int], buffers: Mapping[str, RowChange]) -> bool:
        """Fill the first rows of the buffers with the adapters in these slots; False if one of them needs more room.

        The buffers may be those of other tables, of adapters that were held before some came or went.
        """
        if not all(_fits(self._needs[slot], buffers) for slot in set(slots)):
            return False
        index = torch.tensor(slots, dtype=torch.int64, device=self._device)
        for kind, change in buffers.items():
            for part, whole in zip(self._tables.get(kind, RowChange()), change, strict=True):
                if whole is None:
                    continue
                room = whole[: len(slots)]
                if part is not None and part.shape[1:] == room.shape[1:]:
                    torch.index_select(part, 0, index, out=room)
                    continue
                room.zero_()
                if part is not None:  # tables of another rank: beyond the common one these adapters change nothing
                    common = tuple(slice(min(sides)) for sides in zip(part.shape[1:], room.shape[1:], strict=True))
                    room[(slice(None), *common)] = part[(slice(None), *common)].index_select(0, index)
        return True

    def rows(self, slots: Sequence[int], *, below: bool = False) -> dict[str, list[RowChange]]:
        """What each layer needs for rows with the adapters in these slots, by kind.

        Kinds that none of them changes are left out, so a part of the network that no adapter of the batch touches runs
        without any work for adapters.

        Args:
            below: whether it is for `add_change_below`.
        """
        kinds = [kind for kind in self._tables if any(kind in self._needs[slot] for slot in slots)]
        if len(set(slots)) == 1:  # one adapter alone: nothing is copied
            place = slots[0] if below else (slots[0], None)
            return {kind: by_layer(self._tables[kind], lambda t: t[place]) for kind in kinds}
        index = torch.tensor(slots, device=self._device)
        return {kind: by_layer(self._tables[kind], lambda t: t.index_select(0, index)) for kind in kinds}


class MayRunAlone(Protocol):
    """An adapter; some need a network of their own."""

    @property
    def alone(self) -> bool: ...


A = TypeVar("A", bound=MayRunAlone)


def groups(rows: Sequence[A | None], capacity: int) -> list[list[int]]:
    """Row numbers that can be run together: with so many adapters at most, and each that runs alone by itself."""
    alone: dict[A, list[int]] = {}
    shared: list[tuple[set[A], list[int]]] = []
    for number, adapter in enumerate(rows):
        if adapter is not None and adapter.alone:
            alone.setdefault(adapter, []).append(number)
            continue
        wanted = set() if adapter is None else {adapter}
        group = next((group for group in shared if len(group[0] | wanted) <= capacity), None)
        if group is None:
            shared.append(group := (set(), []))
        group[0].update(wanted)
        group[1].append(number)
    return [*(numbers for _, numbers in shared), *alone.values()]


def _fits(needs: Mapping[str, Sequence[tuple[int, int, int] | None]], buffers: Mapping[str, RowChange]) -> bool:
    """Whether the buffers have room for an adapter with changes of these sizes."""
    return all(
        size is None or (part is not None and all(map(le, size, part.shape[1:])))
        for kind, sizes in needs.items()
        for size, part in zip(sizes, buffers.get(kind, RowChange()), strict=True)
    )


def by_layer(table: RowChange, pick: Callable[[Tensor], Tensor]) -> list[RowChange]:
    """What each layer needs, from a table of all layers; `pick` takes some rows of each of its parts."""
    picked = [None if part is None else pick(part).unbind(-3) for part in table]
    layers = max(len(part) for part in picked if part is not None)
    return [RowChange(*(None if part is None else part[layer] for part in picked)) for layer in range(layers)]


def _sizes(
    shapes: Mapping[str, LinearShape], adapters: Iterable[Changes]
) -> dict[str, list[tuple[int, int, int] | None]]:
    """For each kind that is changed, the size of one slot of down, up, dense and bias."""
    sizes: dict[str, list[tuple[int, int, int] | None]] = {}
    ranks: dict[str, int] = {}
    for kind, change in (
        (kind, c) for adapter in adapters for kind, layers in adapter.items() for c in layers.values()
    ):
        shape, size = shapes[kind], sizes.setdefault(kind, [None] * 4)
        if change.down is not None:
            ranks[kind] = rank = max(ranks.get(kind, 0), change.down.shape[1])
            size[:2] = (shape.layers, shape.inputs, rank), (shape.layers, rank, shape.outputs)
        if change.dense is not None:
            size[2] = (shape.layers, shape.inputs, shape.outputs)
        if change.bias is not None:
            size[3] = (shape.layers, 1, shape.outputs)
    return sizes
