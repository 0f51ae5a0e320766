"""Which of the waiting requests go next: urgent ones first, clients in turn, nobody for ever.

The rules, for one free device and batches that take t(rows) = rows · P + D (`batch_cost.py`):

* A request is *due* at its deadline, less the time that the device needs for it. One without a deadline is due
  `PATIENCE_S` after it came, and so passes every request whose deadline lies further off: neither kind starves.
* Each client has a line of its own, served from the front. A request that stood behind others of its client counts as
  come when it reaches the front, so that sending four at once gains nothing over sending one after the other.
* A batch takes the request due first, then others with its batch key in the order in which they are due: one of every
  client, then a second of every client, and so on, while it has room and is predicted to meet the deadlines in it.
* When clients for more than `CROWD` batches wait, full batches serve most of them: one that would shrink the batch is
  left for later, as it would cost several others their deadlines.
* What has expired is not run. What is predicted to miss its deadline gives way to what can meet its own, and runs
  only when nothing else waits: a prediction alone refuses nobody.

Knows no clock, no asyncio, no engine: times are seconds that the caller names; a test can play a day in a moment.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, Generic, TypeVar

from relay.server.batch_cost import BatchCosts

PATIENCE_S: Final = 0.25
"""When a request without a deadline is due: a robot that replans at 4 Hz would want its actions by then."""

CROWD: Final = 2

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class Waiting(Generic[Item]):
    """One request in line.

    Attributes:
        item: whatever the caller wants back.
        client: whose turn it is; one connection, for the server.
        batch_key: requests with equal keys may share a batch.
        came: when it joined the line; when it reached the front of its client's, if others stood before it.
        deadline: when its answer is worth nothing any more; infinite without one.
    """

    item: Item
    client: Hashable
    batch_key: Hashable
    came: float
    deadline: float = math.inf


class WaitingLine(Generic[Item]):
    """Requests that wait for one device.

    Args:
        costs: what batches take; read here, taught by whoever runs them.
    """

    def __init__(self, costs: BatchCosts) -> None:
        self._costs = costs
        self._lines: dict[Hashable, deque[Waiting[Item]]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Waiting[Item]]:
        for line in self._lines.values():
            yield from line

    def join(self, waiting: Waiting[Item]) -> None:
        """Stand at the end of the client's own line."""
        self._lines.setdefault(waiting.client, deque()).append(waiting)
        self._length += 1

    def leave(self, waiting: Waiting[Item], now: float) -> bool:
        """Go without being served; whether it still stood in line."""
        line = self._lines.get(waiting.client, ())
        if waiting not in line:
            return False
        self._remove([waiting], now)
        return True

    def take_all(self) -> list[Waiting[Item]]:
        """Remove and return everything."""
        everything = list(self)
        self._lines.clear()
        self._length = 0
        return everything

    def take_expired(self, now: float) -> list[Waiting[Item]]:
        """Remove and return what is too late to be run."""
        expired = [waiting for waiting in self if now > waiting.deadline]
        self._remove(expired, now)
        return expired

    def take_batch(self, now: float, most: int) -> list[Waiting[Item]]:
        """Remove and return what goes to the device together, at most `most`; empty only if nobody waits."""
        if self._length == 1:
            return self.take_all()
        fronts = sorted((line[0] for line in self._lines.values()), key=self._due)
        able = [front for front in fronts if self._can_meet(front.deadline, front.batch_key, 1, now)]
        batch = (
            self._full_batch(able, now, most)
            or self._timely_batch(able, now, most)
            or self._timely_batch(fronts, now, most, late=True)
        )
        self._remove(batch, now)
        return batch

    def _full_batch(self, fronts: list[Waiting[Item]], now: float, most: int) -> list[Waiting[Item]]:
        """When a crowd waits, as many as the device takes of those that this serves in time; else none."""
        if len(fronts) <= CROWD * most:
            return []
        key = fronts[0].batch_key
        patient = (
            front for front in fronts if front.batch_key == key and self._can_meet(front.deadline, key, most, now)
        )
        batch = list(islice(patient, most))
        return batch if len(batch) == most else []

    def _timely_batch(
        self, fronts: list[Waiting[Item]], now: float, most: int, late: bool = False
    ) -> list[Waiting[Item]]:
        """The first of `fronts` and what may join it; unless all are `late` anyway, every deadline in it is met."""
        batch: list[Waiting[Item]] = []
        tightest = math.inf
        standing, depth = fronts, 0
        while standing:
            joining: list[Waiting[Item]] = []
            for waiting in standing:
                rows = len(batch) + len(joining) + 1
                deadline = min(tightest, waiting.deadline)
                alike = waiting.batch_key == fronts[0].batch_key
                if alike and rows <= most and (late or self._can_meet(deadline, waiting.batch_key, rows, now)):
                    joining.append(waiting)
                    tightest = deadline
            batch += joining
            depth += 1
            behind = (self._lines[waiting.client] for waiting in joining)
            standing = sorted((line[depth] for line in behind if len(line) > depth), key=self._due)
        return batch

    def _due(self, waiting: Waiting[Item]) -> float:
        if waiting.deadline == math.inf:
            return waiting.came + PATIENCE_S
        return waiting.deadline - self._costs.predict(waiting.batch_key, 1)

    def _can_meet(self, deadline: float, batch_key: Hashable, rows: int, now: float) -> bool:
        return deadline == math.inf or now + self._costs.predict(batch_key, rows) <= deadline

    def _remove(self, leaving: list[Waiting[Item]], now: float) -> None:
        for waiting in leaving:
            line = self._lines[waiting.client]
            was_in_front = line[0] is waiting
            line.remove(waiting)
            if not line:
                del self._lines[waiting.client]
            elif was_in_front:
                line[0].came = max(line[0].came, now)
        self._length -= len(leaving)
