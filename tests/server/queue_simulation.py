"""A device and its robots on a virtual clock: how many deadlines two orders of service miss at the same load."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from relay.server.batch_cost import BatchCosts
from relay.server.waiting_line import Waiting, WaitingLine

ROW_S, BATCH_S, MOST = 0.003, 0.017, 8
"""What a row adds and a batch costs (a pass of 20 ms alone, 41 ms with eight rows), and the largest batch."""

OUTSTANDING = 4
"""A robot with as many unanswered requests sends none, as the server stops reading from it."""


@dataclass(frozen=True)
class Robot:
    """How often a robot asks and how long it can wait, in seconds."""

    period: float
    patience: float = math.inf


@dataclass
class Request:
    robot: int
    sent: float
    deadline: float


@dataclass
class Outcome:
    """What became of all requests."""

    with_deadline: int = 0
    missed: int = 0
    waits: dict[int, list[float]] = field(default_factory=dict)
    """By robot, for the answered ones: seconds from sending to the answer."""

    @property
    def longest_wait(self) -> float:
        return max(max(waits) for waits in self.waits.values())


class Order(Protocol):
    """How the next batch is chosen."""

    def join(self, request: Request) -> None: ...

    def take(self, now: float) -> tuple[list[Request], list[Request]]:
        """What expired, and the batch."""
        ...

    def ran(self, rows: int, seconds: float) -> None: ...


class FirstComeFirstServed:
    """The plain queue; it does not run what has expired either."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def join(self, request: Request) -> None:
        self._queue.append(request)

    def take(self, now: float) -> tuple[list[Request], list[Request]]:
        expired = [request for request in self._queue if now > request.deadline]
        alive = deque(request for request in self._queue if now <= request.deadline)
        batch = [alive.popleft() for _ in range(min(MOST, len(alive)))]
        self._queue = alive
        return expired, batch

    def ran(self, rows: int, seconds: float) -> None:
        pass


class ByUrgency:
    """The server's order."""

    def __init__(self) -> None:
        self._costs = BatchCosts()
        self._line: WaitingLine[Request] = WaitingLine(self._costs)

    def join(self, request: Request) -> None:
        self._line.join(Waiting(request, request.robot, "key", request.sent, request.deadline))

    def take(self, now: float) -> tuple[list[Request], list[Request]]:
        expired = [waiting.item for waiting in self._line.take_expired(now)]
        return expired, [waiting.item for waiting in self._line.take_batch(now, MOST)]

    def ran(self, rows: int, seconds: float) -> None:
        self._costs.learn("key", rows, seconds)


def simulate(order: Order, robots: Sequence[Robot], seconds: float, seed: int) -> Outcome:
    """Robots ask at their period, each time up to a fifth early or late; the device always runs what waits."""
    chance = random.Random(seed)
    outcome = Outcome(waits={index: [] for index in range(len(robots))})
    asking = [(chance.uniform(0, robot.period), index) for index, robot in enumerate(robots)]
    heapq.heapify(asking)
    outstanding = [0] * len(robots)
    now = 0.0
    waiting = 0
    while asking or waiting:
        if not waiting:
            now = max(now, asking[0][0])
        while asking and asking[0][0] <= now:
            sent, index = heapq.heappop(asking)
            robot = robots[index]
            if outstanding[index] < OUTSTANDING:
                order.join(Request(index, sent, sent + robot.patience))
                outstanding[index] += 1
                waiting += 1
                outcome.with_deadline += robot.patience < math.inf
            again = sent + robot.period * chance.uniform(0.8, 1.2)
            if again < seconds:
                heapq.heappush(asking, (again, index))
        expired, batch = order.take(now)
        duration = (len(batch) * ROW_S + BATCH_S) * chance.uniform(0.95, 1.1) if batch else 0.0
        finished = now + duration
        outcome.missed += len(expired) + sum(finished > request.deadline for request in batch)
        for request in (*expired, *batch):
            outstanding[request.robot] -= 1
            waiting -= 1
        for request in batch:
            outcome.waits[request.robot].append(finished - request.sent)
        if batch:
            order.ran(len(batch), duration)
        now = finished
    return outcome


def fleet(load: float, seed: int, robots: int = 24) -> list[Robot]:
    """Robots that together ask for `load` times what full batches could serve; a quarter of them state no deadline."""
    capacity = MOST / (MOST * ROW_S + BATCH_S)
    chance = random.Random(1_000_003 * seed + 17)
    weights = [chance.uniform(0.5, 1.5) for _ in range(robots)]
    scale = load * capacity / sum(weights)
    choices = ((0.06, 0.10), (0.12, 0.25), (0.3, 0.6), None)
    fleet: list[Robot] = []
    for index, weight in enumerate(weights):
        range_s = choices[index % len(choices)]
        fleet.append(Robot(1 / (weight * scale), chance.uniform(*range_s) if range_s else math.inf))
    return fleet
