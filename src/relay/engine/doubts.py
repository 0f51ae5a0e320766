"""Statistics that can be used but look wrong: what a person should look at before a robot moves. Changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from relay.engine.normalization import Kind, Statistics

_ALMOST_CONSTANT = 1e-3
_MOST_TURNS = 2


def doubts(statistics: Statistics, kind: Kind, units: Sequence[str] = ()) -> list[str]:
    """One remark per dimension, empty where nothing is strange.

    Args:
        kind: whose two vectors are used.
        units: by dimension, where they are known.
    """
    if kind == "none":
        return []
    first, second = statistics.pair(kind)
    spread = second if kind == "z_score" else second - first
    farthest = np.abs(first) + second if kind == "z_score" else np.maximum(np.abs(first), np.abs(second))
    remarks: list[str] = []
    for index in range(len(first)):
        said: list[str] = []
        if spread[index] < _ALMOST_CONSTANT:
            said.append(f"almost constant: an error of {spread[index]:.2g} is as large as the whole range")
        if index < len(units) and units[index] == "rad" and farthest[index] > _MOST_TURNS * 2 * math.pi:
            said.append(f"{farthest[index]:.4g} rad is more than {_MOST_TURNS} turns: degrees?")
        if not _agrees(statistics, index):
            said.append("mean or percentiles lie outside smallest and largest: damaged?")
        remarks.append("; ".join(said))
    return remarks


def never_computed(statistics: Statistics, kind: Kind) -> bool:
    """Whether every dimension has the values that stand for none: mean 0 and deviation 1, or -1 to 1."""
    if kind == "none":
        return False
    first, second = statistics.pair(kind)
    return bool(np.all(first == (0 if kind == "z_score" else -1)) and np.all(second == 1))


def _agrees(statistics: Statistics, index: int) -> bool:
    low, high = statistics.min, statistics.max
    if low is None or high is None:
        return True
    slack = 1e-3 * float(high[index] - low[index]) + 1e-6
    inside = [vector for vector in (statistics.mean, statistics.q01, statistics.q99) if vector is not None]
    return all(low[index] - slack <= vector[index] <= high[index] + slack for vector in inside)
