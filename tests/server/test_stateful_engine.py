"""A policy that remembers: sessions never mix, run in order, fail without a trace, and are freed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from fake_policy import SPEC, FakeEngine, Prepared, ask, client, dial, observation, running
from websockets.asyncio.client import ClientConnection

from relay.engine.base import Chunk, Failure, PolicySpec, Progress, Work
from relay.protocol.errors import ObservationError
from relay.protocol.messages import Observation, Options
from relay.protocol.msgpack_numpy import pack, unpack
from relay.server.app import Server

PATHS = ("/", "/v1/realtime/robot/openpi")
RESET = pack({"endpoint": "reset"})


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


@pytest.mark.parametrize("path", PATHS)
async def test_two_connections_that_use_the_same_name_count_to_fifty_side_by_side(path: str):
    async def robot(websocket: ClientConnection, value: float) -> list[tuple[float, float, float]]:
        return [told(await ask(websocket, observation(value + i, session_id="default"))) for i in range(50)]

    engine = CountingEngine()
    async with running(engine) as server, client(server, path) as first, client(server, path) as second:
        left, right = await asyncio.gather(robot(first, 1_000), robot(second, 2_000))
    assert left == [(i + 1, 1_000, 1_000 + i) for i in range(50)]
    assert right == [(i + 1, 2_000, 2_000 + i) for i in range(50)]
    assert engine.opened == 2


async def test_robots_on_one_connection_do_not_mix():
    async with running(CountingEngine()) as server, client(server) as websocket:
        counts = [await count_of(websocket, session_id=name) for name in ("left", "right", "left", "left", "right")]
        assert counts == [1, 1, 2, 3, 2]


async def test_requests_sent_ahead_are_answered_in_order_one_at_a_time():
    async with running(CountingEngine(), prepare_threads=4) as server, client(server) as websocket:
        for value in range(20):
            await websocket.send(observation(value))
        replies = [told(await websocket.recv()) for _ in range(20)]
        assert replies == [(value + 1, 0, value) for value in range(20)]


async def test_requests_sent_while_the_policy_loads_keep_their_order():
    go_on = threading.Event()
    engine = CountingEngine()

    def load(progress: Progress) -> CountingEngine:
        assert go_on.wait(20)
        return engine

    async with running(load, prepare_threads=4) as server:
        async with dial(server.port) as websocket:
            for value in range(4):
                await websocket.send(observation(value))
            go_on.set()
            await websocket.recv()
            assert [told(await websocket.recv()) for _ in range(4)] == [(value + 1, 0, value) for value in range(4)]
        await all_closed(engine, server)


async def test_sessions_of_different_robots_share_a_batch():
    engine = CountingEngine()
    async with running(engine) as server, client(server) as first, client(server) as second, client(server) as third:
        engine.fake.open.clear()
        await first.send(observation())
        await asyncio.to_thread(engine.fake.began.wait, 5)
        for websocket in (second, third):
            await websocket.send(observation())
        while server.outstanding < 3:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        engine.fake.open.set()
        assert [told(await websocket.recv())[0] for websocket in (first, second, third)] == [1, 1, 1]
        assert engine.largest_batch == 2


async def test_reset_starts_every_session_anew_and_frees_the_old_ones():
    engine = CountingEngine()
    async with running(engine) as server, client(server) as websocket:
        for name in ("left", "right", "left"):
            await count_of(websocket, session_id=name)
        await ask(websocket, RESET)
        assert [await count_of(websocket, session_id=name) for name in ("left", "right")] == [1, 1]
        assert len(engine.open) == 2


async def test_reset_on_one_connection_leaves_the_other_alone():
    async with running(CountingEngine()) as server, client(server) as first, client(server) as second:
        for websocket in (first, second):
            await count_of(websocket)
        await ask(first, RESET)
        assert [await count_of(first), await count_of(second)] == [1, 2]


async def test_a_reset_sent_ahead_ends_the_session_of_the_requests_before_it():
    async with running(CountingEngine()) as server, client(server) as websocket:
        for message in (observation(1), observation(2), RESET, observation(3)):
            await websocket.send(message)
        replies = [await websocket.recv() for _ in range(4)]
        assert [told(replies[i]) for i in (0, 1, 3)] == [(1, 1, 1), (2, 1, 2), (1, 3, 3)]


@pytest.mark.parametrize("trouble", ["fail", "nan", "raise"])
async def test_a_failed_request_leaves_no_trace_in_its_session(trouble: str):
    engine = CountingEngine()
    async with running(engine) as server, client(server, PATHS[1]) as websocket:
        counts: list[Any] = []
        for do in (trouble, "", trouble, "", ""):
            reply = await ask(websocket, observation(do=do))
            counts.append(reply["type"] if isinstance(reply, dict) else told(reply)[0])
        assert counts == ["error", 1, "error", 2, 3]
        assert len(engine.open) == 1


async def test_a_refused_first_request_leaves_the_fresh_start_to_the_next_in_line():
    engine = CountingEngine()
    async with running(engine) as server, client(server, PATHS[1]) as websocket:
        for message in (observation(1, do="fail"), pack({"stat": 0}), observation(2), observation(3)):
            await websocket.send(message)
        replies = [await websocket.recv() for _ in range(4)]
        assert [told(reply) for reply in replies[2:]] == [(1, 2, 2), (2, 2, 3)]
        assert len(engine.open) == 1


async def test_a_failing_robot_does_not_disturb_the_sessions_in_its_batch():
    engine = CountingEngine()
    async with running(engine) as server, client(server) as first, client(server, PATHS[1]) as bad:
        assert await count_of(first) == 1
        engine.fake.began.clear()
        engine.fake.open.clear()
        async with client(server) as holds:
            await holds.send(observation())
            await asyncio.to_thread(engine.fake.began.wait, 5)
            await first.send(observation())
            await bad.send(observation(do="raise"))
            while server.outstanding < 3:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            engine.fake.open.set()
            await holds.recv()
        assert told(await first.recv())[0] == 2
        assert unpack(await bad.recv())["type"] == "error"
        assert await count_of(first) == 3


async def test_five_hundred_sessions_of_one_connection_leave_no_state_behind():
    engine = CountingEngine()
    async with running(engine) as server:
        async with client(server) as websocket:
            for number in range(500):
                counts = [await count_of(websocket, session_id=str(number)) for _ in range(2)]
                assert counts == [1, 2]
            assert len(engine.open) == 500
        await all_closed(engine, server)
    assert engine.opened == 500


async def test_episodes_divided_by_reset_hold_one_state_at_a_time():
    engine = CountingEngine()
    async with running(engine) as server, client(server) as websocket:
        for _ in range(100):
            assert [await count_of(websocket) for _ in range(2)] == [1, 2]
            assert len(engine.open) == 1
            await ask(websocket, RESET)


async def test_connections_one_after_the_other_leave_no_state_behind():
    engine = CountingEngine()
    async with running(engine) as server:
        for _ in range(100):
            async with client(server) as websocket:
                assert [await count_of(websocket) for _ in range(2)] == [1, 2]
        await all_closed(engine, server)
    assert engine.opened == 100


async def test_a_client_that_vanishes_in_mid_inference_frees_its_session_after_the_batch():
    engine = CountingEngine()
    async with running(engine) as server, client(server) as stays:
        async with client(server) as leaves:
            await count_of(leaves)
            engine.fake.began.clear()
            engine.fake.open.clear()
            for value in range(3):
                await leaves.send(observation(value))
            await asyncio.to_thread(engine.fake.began.wait, 5)
            leaves.transport.abort()
        while len(server.connections) > 1:
            await asyncio.sleep(0.005)
        assert len(engine.open) == 1
        engine.fake.open.set()
        assert await count_of(stays) == 1
        assert len(engine.open) == 1
    assert engine.threads == {"relay-worker"}


async def test_a_drained_server_has_freed_every_session():
    engine = CountingEngine()
    async with running(engine) as server:
        async with client(server) as first, client(server) as second:
            for websocket in (first, second):
                await count_of(websocket)
            await server.drain()
        assert engine.open == set()
