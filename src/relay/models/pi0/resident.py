"""The adapters that are on the device: brought there at first use, put out when others need the room.

Device thread only. A batch gets its adapters as
part of its inputs; nothing in the shared network ever changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from relay.engine.adapter_rows import ChangeTables, RowChange, groups
from relay.models.pi0.adapters import Pi0Adapter, linear_shapes, with_changes
from relay.models.pi0.gemma import BlockChange
from relay.models.pi0.model import Inputs, NetworkChange, Pi0, StepTable


@dataclass(frozen=True, slots=True)
class _Resident:
    """One adapter on the device: its slot in the tables, and a network that has the weights of its own."""

    slot: int
    network: Pi0


class ResidentAdapters:
    """Adapters of one network on its device.

    Args:
        held: the adapters that requests may ask for at present; the same object until they change.
        memory_bytes: most memory that adapters may take; at least one always finds room.
    """

    def __init__(self, model: Pi0, held: Callable[[], Sequence[Pi0Adapter]], memory_bytes: int) -> None:
        self._model, self._held, self._memory_bytes = model, held, memory_bytes
        self._shapes = linear_shapes(model)
        self._made_for: Sequence[Pi0Adapter] | None = None
        self._fitting: frozenset[Pi0Adapter] = frozenset()
        self._residents: OrderedDict[Pi0Adapter, _Resident] = OrderedDict()
        self._tables: ChangeTables
        self.capacity = 1
        """How many adapters the device holds at once, and so how many may be in one batch."""

    def groups(self, rows: Sequence[Pi0Adapter | None]) -> list[list[int]]:
        """Row numbers that can be run together: a network of one's own is run alone, and no more adapters than fit."""
        self._fit(rows)
        return groups(rows, self.capacity)

    def apply(self, inputs: Inputs, rows: Sequence[Pi0Adapter | None], images: Sequence[int]) -> tuple[Pi0, Inputs]:
        """The network that runs one of the groups, and its inputs with what the rows' adapters change.

        Args:
            rows: the adapter of each row.
            images: how many of the images belong to each row.
        """
        self._keep(rows)
        residents = {adapter: self._resident(adapter) for adapter in dict.fromkeys(rows) if adapter is not None}
        if not residents:
            return self._model, inputs
        if any(adapter.alone for adapter in residents):
            (resident,) = residents.values()
            return resident.network, inputs
        slots = [0 if adapter is None else residents[adapter].slot for adapter in rows]
        inputs = replace(inputs, change=network_change(self._tables.rows(slots)))
        if any(adapter.own_time for adapter in residents):
            inputs = replace(inputs, step_tables=self.step_tables(rows, inputs.num_steps))
        if any(adapter.own_vision for adapter in residents):
            seeing = [residents[a].network if a is not None and a.own_vision else self._model for a in rows]
            inputs = replace(inputs, image_tokens=_see(seeing, inputs.images, images))
        return self._model, inputs

    def step_tables(self, rows: Sequence[Pi0Adapter | None], num_steps: Sequence[int]) -> list[StepTable]:
        """What the expert is told in each row, at each step."""
        told = [self._resident(a).network if a is not None and a.own_time else self._model for a in rows]
        return [network.step_table(steps) for network, steps in zip(told, num_steps, strict=True)]

    def buffers(self, rows: int) -> dict[str, RowChange] | None:
        """Room at a fixed place for what the adapters held now change in so many rows; None if `gather` takes none."""
        if not self.sample():
            return None
        return self._tables.buffers(rows)

    def sample(self) -> list[Pi0Adapter]:
        """As many of the adapters held as fit the device together, of those that `gather` takes."""
        held = [adapter for adapter in self._held() if not (adapter.alone or adapter.own_vision)]
        self._fit(held)
        return held[: self.capacity]

    def gather(self, rows: Sequence[Pi0Adapter | None], padded: int, buffers: Mapping[str, RowChange]) -> bool:
        """Fill `padded` rows of the buffers, those behind the batch's with zeros.

        Returns:
            False if these adapters need more than that: eyes or a network of their own, or more room.
        """
        if any(adapter is not None and (adapter.alone or adapter.own_vision) for adapter in rows):
            return False
        self._keep(rows)
        slots = [0 if adapter is None else self._resident(adapter).slot for adapter in rows]
        return self._tables.gather([*slots, *[0] * (padded - len(slots))], buffers)

    def forget(self) -> None:
        """Put out all adapters; those that are asked for come back."""
        self._residents.clear()

    def _resident(self, adapter: Pi0Adapter) -> _Resident:
        """The adapter on the device; the one that was used longest ago makes room for it."""
        if adapter in self._residents:
            self._residents.move_to_end(adapter)
            return self._residents[adapter]
        taken = {resident.slot for resident in self._residents.values()}
        slot = next((slot for slot in range(1, self.capacity + 1) if slot not in taken), None)
        if slot is None:
            slot = self._residents.popitem(last=False)[1].slot
        self._tables.write(slot, adapter.changes)
        network = with_changes(self._model, adapter.source, adapter.own) if adapter.own else self._model
        self._residents[adapter] = resident = _Resident(slot, network)
        return resident

    def _keep(self, rows: Sequence[Pi0Adapter | None]) -> None:
        """Make tables only where rows came without `groups`: those made anew since then could hold fewer adapters."""
        if not self._fitting.issuperset(adapter for adapter in rows if adapter is not None):
            self._fit(rows)

    def _fit(self, rows: Sequence[Pi0Adapter | None]) -> None:
        """Make tables that take every adapter that is held, and those of requests that came before a change."""
        wanted = dict.fromkeys(adapter for adapter in rows if adapter is not None)
        if not wanted or (self._made_for is self._held() and wanted.keys() <= self._fitting):
            return
        self._made_for = self._held()
        self._fitting = frozenset((*self._made_for, *wanted))
        changes = [adapter.changes for adapter in self._fitting]
        own = max(self._own_bytes(adapter) for adapter in self._fitting)
        each = ChangeTables.bytes_per_slot(self._shapes, changes) + own
        self.capacity = min(len(self._fitting), max(1, self._memory_bytes // max(each, 1)))
        self._residents.clear()
        self._tables = ChangeTables(self._shapes, changes, self.capacity, self._model.token_embedding.device)

    def _own_bytes(self, adapter: Pi0Adapter) -> int:
        parameters = (self._model.get_parameter(packed.name) for packed in adapter.own)
        return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def network_change(rows: Mapping[str, Sequence[RowChange]]) -> NetworkChange:
    """The changes of each kind and layer, as the network takes them."""
    heads = {kind: changes[0] for kind, changes in rows.items() if "." not in kind}
    return NetworkChange(_blocks(rows, "language"), _blocks(rows, "expert"), **heads)


def _blocks(rows: Mapping[str, Sequence[RowChange]], tower: str) -> list[BlockChange]:
    kinds = {kind.partition(".")[2]: changes for kind, changes in rows.items() if kind.startswith(tower + ".")}
    layers = max((len(changes) for changes in kinds.values()), default=0)
    return [BlockChange(**{name: changes[layer] for name, changes in kinds.items()}) for layer in range(layers)]


@torch.inference_mode()
def _see(networks: Sequence[Pi0], images: Tensor, counts: Sequence[int]) -> Tensor:
    """Every row's images through its own vision tower; rows with the same one together."""
    owner = [networks[row].vision for row, count in enumerate(counts) for _ in range(count)]
    places = {tower: [i for i, one in enumerate(owner) if one is tower] for tower in dict.fromkeys(owner)}
    seen = torch.cat([tower(images[numbers]) for tower, numbers in places.items()])  # (n, tokens, width)
    order = torch.tensor([i for numbers in places.values() for i in numbers], device=images.device)
    return seen[order.argsort()]
