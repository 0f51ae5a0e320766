"""Who is closed for silence: clients of vLLM-Omni's endpoint, while they are owed nothing and send nothing."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from fake_policy import FakeEngine, ask, client, dial, observation, running
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from relay.engine.base import Progress
from relay.protocol.msgpack_numpy import pack, unpack
from relay.server.idle import QuietTime
from relay.server.settings import ServerSettings

PATH = "/v1/realtime/robot/openpi"
LIMIT = 0.4
LONGER = 0.7
IDLE = (1000, "idle timeout: no message for 0.4 s")


async def goodbye(websocket: ClientConnection) -> tuple[int, str]:
    with pytest.raises(ConnectionClosed) as caught:
        await asyncio.wait_for(websocket.recv(), 5)
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, caught.value.rcvd.reason


def test_the_limit_is_thirty_seconds():
    assert ServerSettings().idle_timeout == 30.0


async def test_a_client_that_never_sends_is_closed_with_the_reason():
    async with running(idle_timeout=LIMIT) as server, client(server, PATH) as websocket:
        assert await goodbye(websocket) == IDLE


async def test_a_client_that_stops_sending_is_closed_too():
    async with running(idle_timeout=LIMIT) as server, client(server, PATH) as websocket:
        await ask(websocket, observation())
        await ask(websocket, b"not a request")
        assert await goodbye(websocket) == IDLE


async def test_every_message_starts_the_time_anew():
    async with running(idle_timeout=LIMIT) as server, client(server, PATH) as websocket:
        for message in (observation(), pack({"endpoint": "reset"}), b"", observation()):
            await asyncio.sleep(LIMIT / 2)
            await ask(websocket, message)


async def test_pings_do_not_count():
    async with running(idle_timeout=LIMIT) as server, client(server, PATH) as websocket:
        closed = asyncio.create_task(goodbye(websocket))
        while not closed.done():
            try:
                await websocket.ping()
            except ConnectionClosed:
                break
            await asyncio.sleep(LIMIT / 8)
        assert await closed == IDLE


async def test_time_in_the_engine_and_in_the_queue_does_not_count():
    engine = FakeEngine()
    async with (
        running(engine, idle_timeout=LIMIT) as server,
        client(server, PATH) as runs,
        client(server, PATH) as waits,
    ):
        engine.open.clear()
        await runs.send(observation(1))
        await asyncio.to_thread(engine.began.wait, 5)
        await waits.send(observation(2))
        await asyncio.sleep(LONGER)
        engine.open.set()
        assert unpack(await runs.recv())[0, 0] == 1
        assert unpack(await waits.recv())[0, 0] == 2
        assert await goodbye(waits) == IDLE


async def test_time_to_load_does_not_count():
    go_on = threading.Event()

    def load(progress: Progress) -> Any:
        assert go_on.wait(20)
        return FakeEngine()

    async with running(load, idle_timeout=LIMIT) as server, dial(server.port, PATH) as websocket:
        await asyncio.sleep(LONGER)
        go_on.set()
        assert "instance_id" in unpack(await websocket.recv())
        assert await goodbye(websocket) == IDLE


async def test_a_message_on_its_way_is_waited_for():
    async with running(idle_timeout=LIMIT) as server, client(server, PATH) as websocket:
        message = observation(6)
        assert len(message) < 126
        frame = bytes([0x82, 0x80 | len(message)]) + bytes(4) + message  # masked with zeros
        websocket.transport.write(frame[:40])
        await asyncio.sleep(LONGER)
        websocket.transport.write(frame[40:])
        assert np.all(unpack(await websocket.recv()) == 6)


async def test_zero_means_never():
    async with running(idle_timeout=0) as server, client(server, PATH) as websocket:
        await asyncio.sleep(LONGER)
        assert isinstance(await ask(websocket, observation()), np.ndarray)


async def test_openpis_path_has_no_limit():
    async with running(idle_timeout=LIMIT) as server, client(server) as websocket:
        await asyncio.sleep(LONGER)
        assert "actions" in await ask(websocket, observation())


async def test_an_idle_close_leaves_nothing_behind():
    async with running(idle_timeout=LIMIT) as server:
        async with client(server, PATH) as websocket:
            assert await goodbye(websocket) == IDLE
        for _ in range(400):
            if not server.connections:
                break
            await asyncio.sleep(0.005)
        assert server.connections == ()


def test_quiet_time_begins_with_the_last_answer_that_is_owed():
    quiet = QuietTime()
    quiet.owe()
    assert quiet.seconds == 0
    quiet.settle()
    assert quiet.seconds == 0
    quiet.settle()
    first = quiet.seconds
    assert 0 <= first <= quiet.seconds
