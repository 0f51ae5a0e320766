"""Messages that trickle in: cut off when there is no progress, taken when the link is merely slow."""

from __future__ import annotations

import asyncio
import contextlib
from time import perf_counter

import numpy as np
import pytest
from fake_policy import DIM, FakeEngine, ask, client, observation, running
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from relay.protocol.msgpack_numpy import pack, unpack
from relay.server import arrivals, keepalive
from relay.server import connection as connection_module

LIMIT = 0.4


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MESSAGE_S", LIMIT)
    monkeypatch.setattr(arrivals, "CHECK_S", LIMIT / 8)


def frame(message: bytes, *, opcode: int = 0x82) -> bytes:
    """A masked frame, the mask being zeros."""
    return bytes([opcode, 0x80 | 127]) + len(message).to_bytes(8, "big") + bytes(4) + message


async def goodbye(websocket: ClientConnection) -> tuple[int, str]:
    with pytest.raises(ConnectionClosed) as caught:
        await asyncio.wait_for(websocket.recv(), 5)
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, caught.value.rcvd.reason


async def trickle(websocket: ClientConnection, data: bytes, step: int, pause: float) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        for start in range(0, len(data), step):
            websocket.transport.write(data[start : start + step])
            await asyncio.sleep(pause)


def test_a_message_has_thirty_seconds_or_thirty_for_each_mib(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    assert (arrivals.MESSAGE_S, arrivals.PROGRESS_BYTES) == (30, 1024 * 1024)


async def test_a_frame_that_comes_byte_by_byte_is_cut_off_and_only_its_client():
    async with running() as server, client(server) as other, client(server) as websocket:
        slow = asyncio.create_task(trickle(websocket, frame(bytes(64 << 20)), 1, 0.02))
        code, reason = await goodbye(websocket)
        slow.cancel()
        assert code == 1008
        assert reason.startswith("message too slow: ")
        assert "actions" in await ask(other, observation())


async def test_fragments_do_not_start_the_time_anew():
    async with running() as server, client(server) as websocket:
        fragments = frame(b"\x81", opcode=0x02) + frame(b"\x00", opcode=0x00) * 500
        slow = asyncio.create_task(trickle(websocket, fragments, 15, 0.02))
        assert (await goodbye(websocket))[0] == 1008
        slow.cancel()


@pytest.mark.parametrize("end", [1, 2, 10, 14, 20], ids=["1", "2", "length", "mask", "payload"])
async def test_a_frame_that_stops_in_the_middle_is_cut_off(end: int):
    async with running() as server, client(server) as websocket:
        websocket.transport.write(frame(observation())[:end])
        assert (await goodbye(websocket))[0] == 1008


async def test_a_frame_that_stops_after_a_quick_start_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrivals, "PROGRESS_BYTES", 50_000)
    async with running() as server, client(server) as websocket:
        started = perf_counter()
        websocket.transport.write(frame(bytes(5_000_000))[:4_000_000])
        assert (await goodbye(websocket))[0] == 1008
        assert perf_counter() - started < 4  # the closing handshake's 2 s included


async def test_a_slow_but_honest_upload_is_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrivals, "PROGRESS_BYTES", 50_000)
    message = pack({"state": np.full(DIM, 5, np.float32), "image": bytes(1_000_000)})
    async with running() as server, client(server) as websocket:
        await trickle(websocket, frame(message), 20_000, 0.05)  # 400 KB/s at most, 2.5 s
        assert unpack(await asyncio.wait_for(websocket.recv(), 5))["actions"][0, 0] == 5


async def test_an_upload_that_takes_longer_than_a_pong_may_is_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrivals, "MESSAGE_S", 30.0)
    monkeypatch.setattr(connection_module, "keep_alive", lambda peer: keepalive.keep_alive(peer, 0.02, 0.1))
    request = (
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
    )
    upload = frame(observation(5, filling=bytes(1_000)))
    async with running() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request + upload[:100])
        await asyncio.sleep(0.6)
        writer.write(upload[100:])
        assert b"actions" in await asyncio.wait_for(reader.readuntil(b"server_timing"), 5)
        writer.transport.abort()


async def test_many_quick_messages_are_not_one_slow_one():
    message = frame(observation(1))
    async with running() as server, client(server) as websocket:
        stream = message * 60
        step = len(message) - 7  # never ends where a message does
        slow = asyncio.create_task(trickle(websocket, stream, step, 0.02))
        for _ in range(60):
            assert unpack(await asyncio.wait_for(websocket.recv(), 5))["actions"][0, 0] == 1
        await slow


async def test_time_in_which_the_server_does_not_read_does_not_count():
    engine = FakeEngine()
    async with running(engine) as server, client(server) as websocket:
        engine.open.clear()
        for value in range(40):
            await websocket.send(observation(value, filling=bytes(50_000)))
            if value == 12:
                await asyncio.sleep(2 * LIMIT)
                assert not server.connections[0].transport.is_reading()
                engine.open.set()
        values = [unpack(await asyncio.wait_for(websocket.recv(), 5))["actions"][0, 0] for _ in range(40)]
        assert values == list(range(40))


async def test_an_idle_connection_is_left_alone():
    async with running() as server, client(server) as websocket:
        await ask(websocket, observation())
        await asyncio.sleep(2 * LIMIT)
        assert "actions" in await ask(websocket, observation())
