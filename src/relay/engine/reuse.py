"""A cache bounded by the bytes of what it holds, which forgets what was used longest ago. Knows no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class SizedCache(Generic[_Key, _Value]):
    """Values by key; a value larger than `limit_bytes` is not kept. For one thread at a time."""

    def __init__(self, limit_bytes: int, size: Callable[[_Value], int]) -> None:
        self._limit, self._size = limit_bytes, size
        self._values: dict[_Key, _Value] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: _Key) -> _Value | None:
        """The value, which counts as used now; None if it isn't there."""
        value = self._values.pop(key, None)
        if value is not None:
            self._values[key] = value
        return value

    def put(self, key: _Key, value: _Value) -> None:
        """Keep a value, and forget others until all fit."""
        self._drop(key)
        self._values[key] = value
        self.nbytes += self._size(value)
        while self.nbytes > self._limit:
            self._drop(next(iter(self._values)))

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
        self.nbytes = 0

    def _drop(self, key: _Key) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self.nbytes -= self._size(value)
