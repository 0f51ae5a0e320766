"""A policy that remembers nothing but how often it was asked, and what its answers say."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fake_policy import SPEC, FakeEngine, Prepared, ask, observation
from websockets.asyncio.client import ClientConnection

from relay.engine.base import Chunk, Failure, PolicySpec, Progress, Work
from relay.protocol.errors import ObservationError
from relay.protocol.messages import Observation, Options
from relay.protocol.msgpack_numpy import unpack
from relay.server.app import Server


@dataclass(eq=False)
class Count:
    """What the policy remembers of a session: how many of its observations it has answered, and the first of them."""

    answered: int = 0
    first: float = 0.0


@dataclass
class CountingEngine:
    """Answers with how many observations of the session it has answered, this one included, and with the first.

    It checks what it may rely on: no session twice in a batch, none that is not open, all calls in one thread.
    """

    spec: PolicySpec = SPEC
    fake: FakeEngine = field(default_factory=FakeEngine)
    open: set[Count] = field(default_factory=set)
    opened: int = 0
    largest_batch: int = 0
    threads: set[str] = field(default_factory=set)

    def prepare(self, observation: Observation, options: Options) -> Prepared:
        return self.fake.prepare(observation, options)

    def batch_key(self, prepared: Prepared) -> Hashable:
        return prepared.key

    def warm_up(self, progress: Progress) -> None:
        progress("warming up", 1.0)

    def open_session(self) -> Count:
        count = Count()
        self.open.add(count)
        self.opened += 1
        return count

    def close_session(self, session: Count) -> None:
        self.threads.add(threading.current_thread().name)
        self.open.remove(session)

    def infer(self, batch: Sequence[Work]) -> Sequence[Chunk | Failure]:
        self.fake.began.set()
        assert self.fake.open.wait(20)
        self.threads.add(threading.current_thread().name)
        self.largest_batch = max(self.largest_batch, len(batch))
        sessions = [work.session for work in batch]
        assert len({id(session) for session in sessions}) == len(batch)
        assert self.open.issuperset(sessions)
        if any(work.prepared.do == "raise" for work in batch):
            raise RuntimeError("out of memory")
        return [self._answer(work.prepared, work.session) for work in batch]

    def _answer(self, prepared: Prepared, count: Count) -> Chunk | Failure:
        if prepared.do == "fail":
            return Failure(ObservationError("refused by the model"))
        if prepared.do == "nan":
            return Chunk(np.full((4, 3), np.nan, np.float32))
        if not count.answered:
            count.first = prepared.state[0]
        count.answered += 1
        return Chunk(np.tile(np.array([count.answered, count.first, prepared.state[0]], np.float32), (4, 1)))


def told(reply: Any) -> tuple[float, float, float]:
    """What a reply of either path says: the count, the session's first value, and this one."""
    if isinstance(reply, bytes):
        reply = unpack(reply)
    count, first, value = (reply["actions"] if isinstance(reply, dict) else reply)[0].tolist()
    return count, first, value


async def count_of(websocket: ClientConnection, value: float = 0.0, **fields: Any) -> float:
    return told(await ask(websocket, observation(value, **fields)))[0]


async def all_closed(engine: CountingEngine, server: Server) -> None:
    for _ in range(1_000):
        if not engine.open and not server.connections:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{len(engine.open)} sessions of {len(server.connections)} connections are open")
