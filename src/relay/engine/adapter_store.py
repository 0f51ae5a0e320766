"""The adapters that a server holds, by name: read at the start, read again when told, handed out to requests.

An adapter is handed out as an object, so a request that has one keeps it whatever happens to the name meanwhile.
Knows no model: how a folder is read is the family's matter.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from relay.engine.adapter_folders import BASE, AdapterChoice, find_folders, fingerprint, is_name
from relay.protocol.errors import ObservationError
from relay.protocol.wording import quoted

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Held(Generic[T]):
    adapter: T
    folder: Path
    fingerprint: tuple[object, ...]


class AdapterStore(Generic[T]):
    """Adapters by name; look-ups from any thread, changes from one at a time.

    Args:
        choice: names, root and default.
        read: makes an adapter of a folder, in memory of the host; a folder under several names is read once.

    Raises:
        ValueError: an adapter cannot be read, or the default one isn't there.
    """

    def __init__(self, choice: AdapterChoice, read: Callable[[Path], T]) -> None:
        self._choice, self._read = choice, read
        self._changing = threading.Lock()
        self._by_call: dict[str, Path] = {}
        self._held: dict[str, _Held[T]] = {}
        held: dict[str, _Held[T]] = {}
        for name, folder in find_folders(choice).items():
            held[name] = self._load(name, folder, held)
        self._change(held)
        if choice.default is not None and choice.default not in self._held:
            raise ValueError(f"the default adapter {quoted(choice.default)} is not among {self._listed()}")

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use."""
        return tuple(sorted(self._held))

    @property
    def adapters(self) -> tuple[T, ...]:
        """All that are held; the same object until adapters come or go."""
        return self._adapters

    @property
    def default(self) -> str | None:
        """The adapter of requests that name none."""
        return self._choice.default

    def get(self, name: str) -> T | None:
        """The adapter of this name; None if there is none now."""
        held = self._held.get(name)
        return None if held is None else held.adapter

    def choose(self, asked: str | None) -> tuple[str, T] | None:
        """Name and adapter for a request that asks for this one; None where the bare policy answers it.

        Raises:
            ObservationError: it cannot be had.
        """
        name = self._choice.default if asked is None else asked
        if name == BASE and self._choice.merged:
            raise ObservationError(
                f"adapter {BASE!r} cannot be had: this server has merged {self.names[0]!r} into the weights"
            )
        if name is None or name == BASE:
            return None
        adapter = self.get(name)
        if adapter is None:  # unloaded since the server looked
            raise ObservationError(f"adapter {quoted(name)} is not loaded")
        return name, adapter

    def load(self, name: str, folder: Path) -> None:
        """Hold one more adapter, or the present content of its folder; the same content is not read twice.

        Raises:
            ValueError: the name or the folder cannot be used; what was held before stays.
        """
        self._check_not_merged()
        if not is_name(name):
            raise ValueError(f"an adapter cannot be called {quoted(name)}")
        with self._changing:
            self._change({**self._held, name: self._load(name, folder.resolve(), self._held)})
            self._by_call[name] = folder.resolve()

    def unload(self, name: str) -> None:
        """Hand an adapter out no more; requests that have it are answered.

        Raises:
            ValueError: it isn't held, or it is the default.
        """
        self._check_not_merged()
        with self._changing:
            if name not in self._held:
                raise ValueError(f"adapter {quoted(name)} is not loaded")
            if name == self._choice.default:
                raise ValueError(f"adapter {quoted(name)} is the default adapter and stays")
            self._by_call.pop(name, None)
            self._change({other: held for other, held in self._held.items() if other != name})

    def rescan(self) -> None:
        """Bring what is held in line with the folders; one that cannot be read is logged, and stays as it was held."""
        if self._choice.merged:
            return
        with self._changing:
            held: dict[str, _Held[T]] = {}
            for name, folder in {**find_folders(self._choice), **self._by_call}.items():
                try:
                    held[name] = self._load(name, folder, {**self._held, **held})
                except Exception as error:  # whatever is wrong with one, the others come and go
                    logger.error("adapter %s is not loaded anew: %s", name, error)
                    if name in self._held:
                        held[name] = self._held[name]
            default = self._choice.default
            if default is not None and default not in held:
                logger.error("the default adapter %s is gone from its folder and stays loaded", default)
                held[default] = self._held[default]
            gone = self._held.keys() - held.keys()
            if gone:
                logger.info("adapters unloaded: %s", ", ".join(sorted(gone)))
            self._change(held)

    def _check_not_merged(self) -> None:
        if self._choice.merged:
            raise ValueError("the adapter is merged into the weights; start the server without --merge-adapter")

    def _change(self, held: dict[str, _Held[T]]) -> None:
        self._held = held
        self._adapters = tuple(dict.fromkeys(one.adapter for one in held.values()))

    def _load(self, name: str, folder: Path, held: Mapping[str, _Held[T]]) -> _Held[T]:
        """Read a folder, unless it is held already as it is now."""
        present = fingerprint(folder)  # taken first: a file that changes while it is read is read again next time
        for known in held.values():
            if (known.folder, known.fingerprint) == (folder, present):
                return known
        adapter = self._read(folder)
        logger.info("adapter %s loaded from %s", name, folder)
        return _Held(adapter, folder, present)

    def _listed(self) -> str:
        return ", ".join(self.names) or "none"
