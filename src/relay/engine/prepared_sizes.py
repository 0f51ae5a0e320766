"""Sizes that a network is prepared for, and which of them holds what comes: its tail is padding."""

from __future__ import annotations

from collections.abc import Sequence


def batch_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16 … up to `most`: at most a third of a batch is padding."""
    sizes = {size for power in range(most.bit_length()) for size in (2**power, 3 * 2**power)}
    return (*sorted(size for size in sizes if size < most), most)


def at_least(sizes: Sequence[int], needed: int) -> int | None:
    """The first of the rising sizes that is large enough."""
    return next((size for size in sizes if size >= needed), None)


def rounded_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return (value + multiple - 1) // multiple * multiple
