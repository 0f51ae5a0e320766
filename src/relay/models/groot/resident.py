"""The adapters' networks that are on the device: made at first use, given up when others need the room.

Device thread only. Nothing in the base ever changes.
"""

from __future__ import annotations

from collections import OrderedDict

from relay.models.groot.adapters import GrootAdapter, with_changes
from relay.models.groot.model import Groot


class ResidentNetworks:
    """The base, and networks of adapters beside it.

    Args:
        memory_bytes: most memory that adapters may take; at least one always finds room.
    """

    def __init__(self, base: Groot, memory_bytes: int) -> None:
        self._base, self._memory_bytes = base, memory_bytes
        self._networks: OrderedDict[GrootAdapter, Groot] = OrderedDict()

    def network(self, adapter: GrootAdapter | None) -> Groot:
        """The network of an adapter; those that were used longest ago make room for it."""
        if adapter is None:
            return self._base
        if adapter not in self._networks:
            self._make_room(self._bytes(adapter))
            self._networks[adapter] = with_changes(self._base, adapter)
        self._networks.move_to_end(adapter)
        return self._networks[adapter]

    def forget(self) -> None:
        """Give up all of them; those that are asked for come back."""
        self._networks.clear()

    def _make_room(self, wanted: int) -> None:
        while self._networks and wanted + sum(map(self._bytes, self._networks)) > self._memory_bytes:
            self._networks.popitem(last=False)

    def _bytes(self, adapter: GrootAdapter) -> int:
        parameters = (self._base.get_parameter(name) for name in adapter.parameters)
        return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
