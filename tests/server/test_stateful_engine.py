"""A policy that remembers: sessions never mix, run in order, fail without a trace, and are freed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from counting_policy import CountingEngine, all_closed, count_of, told
from fake_policy import ask, client, dial, observation, running
from websockets.asyncio.client import ClientConnection

from relay.engine.base import Progress
from relay.protocol.msgpack_numpy import pack, unpack

PATHS = ("/", "/v1/realtime/robot/openpi")
RESET = pack({"endpoint": "reset"})


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
