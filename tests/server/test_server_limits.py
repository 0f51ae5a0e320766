"""One client's excess stays its own: too many connections, too many observations, too little reading, sudden death."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from time import perf_counter
from typing import Any

import pytest
from fake_policy import FakeEngine, ask, client, dial, observation, running
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from relay.protocol.limits import MAX_OUTSTANDING_REQUESTS
from relay.protocol.msgpack_numpy import unpack
from relay.server import connection as connection_module
from relay.server import keepalive
from relay.server.app import Server


async def goodbye(websocket: ClientConnection) -> tuple[int, str]:
    with pytest.raises(ConnectionClosed) as caught:
        await asyncio.wait_for(websocket.recv(), 5)
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, caught.value.rcvd.reason


async def until(condition: Any, seconds: float = 5) -> float:
    """How long it took to become true."""
    started = perf_counter()
    while not condition():
        assert perf_counter() - started < seconds, "it never became true"
        await asyncio.sleep(0.002)
    return perf_counter() - started


async def test_a_connection_too_many_gets_no_metadata_and_the_reason():
    async with running(max_connections=2) as server, client(server), client(server), dial(server.port) as third:
        assert await goodbye(third) == (1013, "server is full: 2 connections")


async def test_a_full_server_says_so_at_once_while_the_device_is_busy():
    engine = FakeEngine()
    async with running(engine, max_connections=1) as server, client(server) as robot:
        engine.open.clear()
        await robot.send(observation(1))
        await asyncio.to_thread(engine.began.wait, 5)
        waited: list[float] = []
        for _ in range(5):
            async with dial(server.port) as late:
                started = perf_counter()
                assert (await goodbye(late))[0] == 1013
                waited.append(perf_counter() - started)
        assert min(waited) < 0.1
        engine.open.set()
        assert unpack(await robot.recv())["actions"][0, 0] == 1


async def test_peers_that_never_read_their_refusal_hold_up_nobody():
    async with running(max_connections=1) as server, client(server) as robot, contextlib.AsyncExitStack() as stack:
        for _ in range(10):
            deaf = await dial(server.port)
            deaf.transport.pause_reading()
            stack.callback(deaf.transport.abort)
        async with dial(server.port) as late:
            assert (await goodbye(late))[0] == 1013
        assert "actions" in await ask(robot, observation())


async def test_a_place_is_free_again_when_its_client_leaves():
    async with running(max_connections=1) as server:
        for value in range(3):
            async with client(server) as robot:
                assert (await ask(robot, observation(value)))["actions"][0, 0] == value
            await until(lambda: not server.connections)


async def test_five_hundred_at_once_are_all_served_or_refused():
    async def come(server: Server) -> int:
        async with dial(server.port, open_timeout=None) as websocket:
            try:
                await websocket.recv()
            except ConnectionClosed as closed:
                return closed.rcvd.code if closed.rcvd else 0
            return 1000 * ("actions" in await ask(websocket, observation()))

    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= allowed < 1_200:
        pytest.skip(f"{allowed} open files are too few")
    async with running(max_connections=100) as server:
        codes = await asyncio.wait_for(asyncio.gather(*(come(server) for _ in range(500))), 30)
        assert set(codes) <= {1000, 1013}
        assert codes.count(1000) >= 100


async def test_a_client_that_vanishes_mid_frame_frees_its_place_and_its_queued_work():
    engine = FakeEngine()
    async with running(engine) as server, client(server) as stays:
        async with client(server) as leaves:
            engine.open.clear()
            await stays.send(observation(1))
            await asyncio.to_thread(engine.began.wait, 5)
            await leaves.send(observation(2))
            await leaves.send(observation(3))
            await until(lambda: server.outstanding == 3)
            leaves.transport.write(bytes([0x82, 0xFE, 0xFF, 0xFF]) + bytes(1_000))  # of 65,535
            await asyncio.sleep(0.05)
            leaves.transport.abort()
            assert await until(lambda: len(server.connections) == 1 and server.outstanding == 1) < 1
        engine.open.set()
        assert unpack(await stays.recv())["actions"][0, 0] == 1
        assert (await ask(stays, observation(4)))["actions"][0, 0] == 4
        assert engine.batches == [[1], [4]]


async def test_a_thousand_observations_without_reading_are_held_back_and_hurt_nobody():
    engine = FakeEngine()
    async with running(engine) as server, client(server) as robot, client(server) as flood:
        engine.open.clear()
        message = observation(7, filling=bytes(100_000))
        sending = asyncio.create_task(_send_all(flood, message, 1_000))
        await until(lambda: server.outstanding == MAX_OUTSTANDING_REQUESTS)
        await asyncio.sleep(0.2)
        assert server.outstanding == MAX_OUTSTANDING_REQUESTS
        assert not sending.done()
        (held,) = [peer for peer in server.connections if not peer.transport.is_reading()]
        assert len(held.protocol.reader.buffer) + sum(len(f.data) for f in held.recv_messages.frames.queue) < 2_000_000
        engine.open.set()
        assert (await ask(robot, observation(1)))["actions"][0, 0] == 1
        for _ in range(1_000):
            assert unpack(await flood.recv())["actions"][0, 0] == 7
        await sending


async def _send_all(websocket: ClientConnection, message: bytes, count: int) -> None:
    for _ in range(count):
        await websocket.send(message)


async def test_a_client_that_does_not_read_its_replies_is_dropped_and_others_go_on(monkeypatch: pytest.MonkeyPatch):
    async def impatient(websocket: Any, frame: str | bytes) -> None:
        await keepalive.send_promptly(websocket, frame, 0.5)

    monkeypatch.setattr(connection_module, "send_promptly", impatient)
    async with running() as server, client(server) as robot, client(server) as deaf:
        deaf.transport.pause_reading()
        await deaf.send(observation(do="huge"))
        answered = 0
        while len(server.connections) == 2:
            assert (await ask(robot, observation(answered)))["actions"][0, 0] == answered
            answered += 1
        assert answered > 0
        deaf.transport.abort()


def test_a_write_may_take_ten_seconds():
    assert keepalive.SEND_TIMEOUT_S == 10


async def test_refused_observations_take_few_lines_of_the_log(caplog: pytest.LogCaptureFixture):
    async with running() as server, client(server, "/v1/realtime/robot/openpi") as websocket:
        for _ in range(200):
            assert (await ask(websocket, b"\xc1"))["message"] == "Invalid request payload"
    await until(lambda: "180 more lines about failed requests from 127.0.0.1:" in caplog.text)
    assert len(caplog.text.splitlines()) == 21
