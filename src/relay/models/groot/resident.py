"""The adapters that are on the device: brought there at first use, put out when others need the room.

Device thread only. A batch gets its adapters as part of its inputs; nothing in the shared network ever changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from relay.engine.adapter_rows import ChangeTables, RowChange, by_layer, groups
from relay.models.groot.adapters import GrootAdapter, with_changes
from relay.models.groot.changes import linear_shapes, network_change, time_change
from relay.models.groot.model import TABULATED_STEPS, Groot, GrootInputs, NetworkChange, Schedule, beside_each_other


class Room(NamedTuple):
    """Changes by kind at fixed places, row by row and image by image."""

    rows: dict[str, RowChange]
    images: dict[str, RowChange]

    def change(self, rows: int, images: int) -> NetworkChange:
        """Those of the first rows and images, as views."""
        by_row = {kind: by_layer(change, lambda t: t[:rows]) for kind, change in self.rows.items()}
        by_image = {kind: by_layer(change, lambda t: t[:images]) for kind, change in self.images.items()}
        return network_change(by_row, by_image)

    def fill(self, value: float) -> None:
        """Set every number."""
        for change in (*self.rows.values(), *self.images.values()):
            for part in change:
                if part is not None:
                    part.fill_(value)


class ResidentAdapters:
    """Adapters of one network on its device: the factors of some, and networks of those that run alone.

    Args:
        held: the adapters that requests may ask for at present; the same object until they change.
        memory_bytes: most memory that adapters may take; at least one always finds room. Tables of times, of which few
            are kept, and the copies that rows with different adapters need while they run are not in it.
    """

    def __init__(self, model: Groot, held: Callable[[], Sequence[GrootAdapter]], memory_bytes: int) -> None:
        self._model, self._held, self._memory_bytes = model, held, memory_bytes
        self._shapes = linear_shapes(model)
        self.capacity = 1
        """How many adapters may be in one batch: as many as the tables hold."""
        self.forget()

    def groups(self, rows: Sequence[GrootAdapter | None]) -> list[list[int]]:
        """Row numbers that can be run together: a network of one's own is run alone, and no more adapters than fit."""
        self._fit(rows)
        return groups(rows, self.capacity)

    def apply(
        self, inputs: GrootInputs, rows: Sequence[GrootAdapter | None], images: Sequence[int]
    ) -> tuple[Groot, GrootInputs]:
        """The network that runs one of the groups, and its inputs with what the rows' adapters change.

        Args:
            rows: the adapter of each row.
            images: how many of the images belong to each row.
        """
        adapters = [adapter for adapter in dict.fromkeys(rows) if adapter is not None]
        if not adapters:
            return self._model, inputs
        if not self._fitting.issuperset(adapters):  # tables made anew since the rows were grouped could hold fewer
            self._fit(rows)
        if adapters[0].alone:
            return self._network(adapters[0]), inputs
        slots = [0 if adapter is None else self._slot(adapter) for adapter in rows]
        of_images = [slot for slot, count in zip(slots, images, strict=True) for _ in range(count)]
        by_row, by_image = self._tables
        change = network_change(by_row.rows(slots, below=True), by_image.rows(of_images, below=True))
        inputs = replace(inputs, change=change)
        if any(adapter.time for adapter in adapters):
            inputs = replace(inputs, schedule=self.schedule(rows, inputs.num_steps, inputs.slot))
        return self._model, inputs

    def schedule(self, rows: Sequence[GrootAdapter | None], num_steps: int, slot: int) -> Schedule:
        """What each row is told of the time."""
        return beside_each_other([self._schedule(adapter, num_steps, slot) for adapter in rows])

    def sample(self) -> list[GrootAdapter]:
        """As many of the adapters held as fit the device together, of those that share batches."""
        held = [adapter for adapter in self._held() if not adapter.alone]
        self._fit(held)
        return held[: self.capacity]

    def buffers(self, rows: int, images: int) -> Room | None:
        """Room at a fixed place for what the adapters held now change in so many rows and images; None with none."""
        if not self.sample():
            return None
        by_row, by_image = self._tables
        return Room(by_row.buffers(rows), by_image.buffers(images))

    def gather(self, rows: Sequence[GrootAdapter | None], padded: int, images: int, room: Room) -> bool:
        """Fill `padded` rows of the room with so many images each, those behind the batch's with zeros.

        Returns:
            False if these adapters need more than that: a network of their own, or more room.
        """
        if any(adapter is not None and adapter.alone for adapter in rows):
            return False
        if not self._fitting.issuperset(adapter for adapter in rows if adapter is not None):
            self._fit(rows)
        slots = [0 if adapter is None else self._slot(adapter) for adapter in rows] + [0] * (padded - len(rows))
        by_row, by_image = self._tables
        return by_row.gather(slots, room.rows) and by_image.gather(
            [s for s in slots for _ in range(images)], room.images
        )

    def forget(self) -> None:
        """Give up all that is on the device; what is asked for comes back."""
        self._made_for: Sequence[GrootAdapter] | None = None
        self._fitting: frozenset[GrootAdapter] = frozenset()
        self._tables: tuple[ChangeTables, ...] = ()
        self._slots: OrderedDict[GrootAdapter, int] = OrderedDict()
        self._networks: OrderedDict[GrootAdapter, Groot] = OrderedDict()
        self._schedules: dict[tuple[GrootAdapter, int, int], Schedule] = {}

    def _fit(self, rows: Sequence[GrootAdapter | None]) -> None:
        """Make tables that take every adapter that is held, and those of requests that came before a change."""
        wanted = {adapter for adapter in rows if adapter is not None}
        held = self._held()
        if not wanted or (self._made_for is held and wanted <= self._fitting):
            return
        fitting = frozenset((*held, *wanted))
        beside = [adapter for adapter in fitting if not adapter.alone]
        changes = [[adapter.rows for adapter in beside], [adapter.images for adapter in beside]]
        each = sum(ChangeTables.bytes_per_slot(self._shapes, one) for one in changes)
        largest_network = max((self._bytes(adapter) for adapter in fitting if adapter.alone), default=0)
        fit = (self._memory_bytes - largest_network) // max(each, 1) - 1  # one slot is for rows without an adapter
        self.capacity = max(1, min(len(beside), fit))
        self._networks_bytes = self._memory_bytes - (self.capacity + 1) * each
        self._networks = OrderedDict(kept for kept in self._networks.items() if kept[0] in fitting)
        self._schedules = {key: schedule for key, schedule in self._schedules.items() if key[0] in fitting}
        self._slots.clear()
        self._made_for, self._fitting, self._tables = None, frozenset(), ()  # gone before the new ones are made
        self._make_room(0)
        self._tables = tuple(ChangeTables(self._shapes, one, self.capacity, self._model.device) for one in changes)
        self._made_for, self._fitting = held, fitting

    def _slot(self, adapter: GrootAdapter) -> int:
        """The adapter's place in the tables; the one that was used longest ago makes room for it."""
        if adapter not in self._slots:
            free = set(range(1, self.capacity + 1)) - set(self._slots.values())
            slot = min(free) if free else self._slots.popitem(last=False)[1]
            for table, changes in zip(self._tables, (adapter.rows, adapter.images), strict=True):
                table.write(slot, changes)
            self._slots[adapter] = slot
        self._slots.move_to_end(adapter)
        return self._slots[adapter]

    def _network(self, adapter: GrootAdapter) -> Groot:
        """The network of an adapter that runs alone; those that were used longest ago make room for it."""
        if adapter not in self._networks:
            self._make_room(self._bytes(adapter))
            self._networks[adapter] = with_changes(self._model, adapter)
        self._networks.move_to_end(adapter)
        return self._networks[adapter]

    def _make_room(self, wanted: int) -> None:
        while self._networks and wanted + sum(map(self._bytes, self._networks)) > self._networks_bytes:
            self._networks.popitem(last=False)

    def _schedule(self, adapter: GrootAdapter | None, num_steps: int, slot: int) -> Schedule:
        """What a row is told of the time; kept while there is room."""
        if adapter is None or not adapter.time:
            return self._model.schedule(num_steps, slot)
        key = adapter, num_steps, slot
        schedule = self._schedules.pop(key, None)
        if schedule is None:
            schedule = self._model.make_schedule(num_steps, slot, time_change(adapter.time, self._model))
        self._schedules[key] = schedule
        while sum(steps for _, steps, _ in self._schedules) > TABULATED_STEPS and len(self._schedules) > 1:
            del self._schedules[next(iter(self._schedules))]
        return schedule

    def _bytes(self, adapter: GrootAdapter) -> int:
        parameters = (self._model.get_parameter(name) for name in adapter.parameters)
        return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
