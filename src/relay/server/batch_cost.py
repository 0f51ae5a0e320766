"""How long a batch takes on the device, learnt from the batches that ran: t(rows) = rows · P + D.

P is what each row adds, D what every batch costs, both seconds. Knows no clock and no queue.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Final

REMEMBERED_BATCHES: Final = 15
"""Batches of each size that an estimate rests on; few, so that it follows a device that slows down."""

REMEMBERED_KEYS: Final = 64
"""Batch keys that are told apart; what was used least recently is forgotten."""


class BatchCosts:
    """An estimate for each batch key; a single slow batch (a compile, a pause) does not move it."""

    def __init__(self) -> None:
        self._costs: OrderedDict[Hashable, _Cost] = OrderedDict()

    def learn(self, batch_key: Hashable, rows: int, seconds: float) -> None:
        """A batch of `rows` rows took `seconds`."""
        cost = self._costs.get(batch_key)
        if cost is None:
            cost = self._costs[batch_key] = _Cost()
        self._costs.move_to_end(batch_key)
        if rows not in cost.seconds:
            cost.seconds[rows] = deque(maxlen=REMEMBERED_BATCHES)
        cost.seconds[rows].append(seconds)
        cost.line = None
        if len(self._costs) > REMEMBERED_KEYS:
            self._costs.popitem(last=False)

    def predict(self, batch_key: Hashable, rows: int) -> float:
        """Seconds that a batch will take; 0 while nothing is known about its key."""
        cost = self._costs.get(batch_key)
        if cost is None:
            return 0.0
        if cost.line is None:
            cost.line = _fit({size: median(seconds) for size, seconds in cost.seconds.items()})
        row, batch = cost.line
        return rows * row + batch


@dataclass(slots=True)
class _Cost:
    seconds: dict[int, deque[float]] = field(default_factory=lambda: dict[int, deque[float]]())
    line: tuple[float, float] | None = None


def _fit(seconds: dict[int, float]) -> tuple[float, float]:
    """P and D through the medians of all sizes (Theil and Sen's line); of one size only, all of it counts as P.

    The latter is the careful guess in both directions: a larger batch is taken to cost in proportion.
    """
    if len(seconds) == 1:
        ((rows, taken),) = seconds.items()
        return taken / rows, 0.0
    slopes = [(seconds[b] - seconds[a]) / (b - a) for a, b in combinations(sorted(seconds), 2)]
    row = max(0.0, median(slopes))
    return row, max(0.0, median(taken - row * rows for rows, taken in seconds.items()))
