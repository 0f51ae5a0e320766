"""Lists of numbers, which clients without NumPy send, as arrays."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray


def as_numbers(value: Any) -> NDArray[Any] | None:
    """A number, an array of numbers or lists of them as one array; None for everything else, such as ragged lists.

    Looks before it builds: NumPy would make room for the longest text in a list at each of its items, so that a message
    of 70 KB takes a gigabyte.
    """
    if not _only_numbers(value):
        return None
    try:
        array: NDArray[Any] = np.asarray(value)
    except ValueError:  # a ragged list
        return None
    return array if array.dtype.kind in "biuf" else None


def _only_numbers(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_only_numbers, cast("list[Any]", value)))
    if isinstance(value, np.ndarray | np.generic):
        return cast("NDArray[Any]", value).dtype.kind in "biuf"
    return isinstance(value, int | float)
