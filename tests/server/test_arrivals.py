"""Messages that trickle in: cut off when there is no progress, taken when the link is merely slow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from fake_policy import DIM, FakeEngine, ask, client, observation, running
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from relay.protocol.msgpack_numpy import pack, unpack
from relay.server import app, arrivals, keepalive
from relay.server import connection as connection_module

LIMIT = 0.4


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MESSAGE_S", LIMIT)
    monkeypatch.setattr(arrivals, "CHECK_S", LIMIT / 8)
    monkeypatch.setattr(app, "CLOSE_TIMEOUT_S", 0.5)  # whoever stops within a frame does not answer a goodbye


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
        assert perf_counter() - started < 4  # the closing handshake's time included


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


def cheap_frames(opcode: int, count: int, payload: bytes = b"") -> bytes:
    return bytes([opcode, 0x80 | len(payload), 0, 0, 0, 0, *payload]) * count


async def lost(websocket: ClientConnection) -> None:
    """Wait for an end without a close frame."""
    with pytest.raises(ConnectionClosed) as caught:
        await asyncio.wait_for(websocket.recv(), 5)
    assert caught.value.rcvd is None


@pytest.mark.parametrize("opcode", [0x89, 0x8A], ids=["pings", "pongs"])
async def test_a_flood_of_pings_or_pongs_is_cut_off_and_only_its_client(opcode: int, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    async with running() as server, client(server) as other, client(server) as websocket:
        websocket.transport.write(cheap_frames(opcode, 40_000))
        await lost(websocket)
        assert "actions" in await ask(other, observation())
    assert caplog.text.count("is dropped: more than 100 pings and pongs a second") == 1


@pytest.mark.parametrize("before", [b"", frame(bytes(200_000))], ids=["alone", "behind a large message"])
async def test_a_ping_flood_goes_no_further_than_its_first_slice(monkeypatch: pytest.MonkeyPatch, before: bytes):
    seen: list[Any] = []
    process_event = arrivals.PacedConnection.process_event

    def counting(self: arrivals.PacedConnection, event: Any) -> None:
        seen.append(event)
        process_event(self, event)

    monkeypatch.setattr(arrivals.PacedConnection, "process_event", counting)
    async with running() as server, client(server) as websocket:
        server.connections[0].data_received(before + cheap_frames(0x89, 40_000))
        assert 256 < len(seen) <= 2 + arrivals.SLICE_BYTES // 6
        await lost(websocket)


async def test_a_large_message_is_not_sliced(monkeypatch: pytest.MonkeyPatch):
    message = frame(observation(3, filling=bytes(200_000)))
    async with running() as server, client(server) as websocket:
        (connection,) = server.connections
        sizes: list[int] = []
        feed = connection.protocol.receive_data
        monkeypatch.setattr(connection.protocol, "receive_data", lambda data: (sizes.append(len(data)), feed(data)))
        connection.data_received(message[:150_000])
        connection.data_received(message[150_000:])
        assert sizes == [arrivals.SLICE_BYTES, 150_000 - arrivals.SLICE_BYTES, len(message) - 150_000]
        assert unpack(await websocket.recv())["actions"][0, 0] == 3


async def test_the_pongs_of_one_slice_are_written_in_one_piece(monkeypatch: pytest.MonkeyPatch):
    async with running() as server, client(server):
        (connection,) = server.connections
        written: list[bytes] = []
        monkeypatch.setattr(connection.transport, "write", written.append)
        connection.data_received(cheap_frames(0x89, 100, b"abc"))
        assert written == [b"\x8a\x03abc" * 100]


async def test_a_ping_flood_whose_sender_is_gone_leaves_no_line_for_each_ping(caplog: pytest.LogCaptureFixture):
    async with running() as server, client(server) as websocket:
        (connection,) = server.connections
        sock = websocket.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        websocket.transport.abort()
        await asyncio.sleep(0)
        connection.data_received(cheap_frames(0x89, 40_000))
        await connection.wait_closed()
    assert "socket.send() raised exception" not in caplog.text


async def test_pings_that_had_piled_up_are_answered():
    async with running() as server, client(server) as websocket:
        pongs = [await websocket.ping() for _ in range(200)]
        await asyncio.wait_for(asyncio.gather(*pongs), 5)
        assert "actions" in await ask(websocket, observation())


async def test_pings_at_a_moderate_pace_may_go_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrivals, "CONTROLS_AT_ONCE", 10)
    async with running() as server, client(server) as websocket:
        for _ in range(40):
            await asyncio.wait_for(await websocket.ping(), 5)
            await asyncio.sleep(0.02)


async def test_pings_whose_pongs_are_not_read_earn_no_new_ones(monkeypatch: pytest.MonkeyPatch):
    async with running() as server, client(server) as websocket:
        (connection,) = server.connections
        monkeypatch.setattr(connection.transport, "get_write_buffer_size", lambda: 1)
        for _ in range(3):
            connection.data_received(cheap_frames(0x89, 80))
            await asyncio.sleep(0.5)
        assert not connection.transport.is_closing()
        connection.data_received(cheap_frames(0x89, 80))
        assert connection.transport.is_closing()
        await lost(websocket)


@pytest.mark.parametrize("payload", [b"", b"a"], ids=["empty", "a byte each"])
async def test_a_message_in_very_many_fragments_is_cut_off(payload: bytes, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    async with running() as server, client(server) as other, client(server) as websocket:
        websocket.transport.write(cheap_frames(0x02, 1, payload) + cheap_frames(0x00, 20_000, payload))
        await lost(websocket)
        assert "actions" in await ask(other, observation())
    assert "is dropped: a message of more than 4096 fragments" in caplog.text


async def test_a_message_in_some_thousand_fragments_is_taken():
    message = observation(3, filling=bytes(4_000))
    parts = [message[n : n + 1] for n in range(len(message) - 1)]
    async with running() as server, client(server) as websocket:
        stream = cheap_frames(0x02, 1, parts[0]) + b"".join(cheap_frames(0x00, 1, part) for part in parts[1:])
        websocket.transport.write(stream + cheap_frames(0x80, 1, message[-1:]))
        assert unpack(await asyncio.wait_for(websocket.recv(), 5))["actions"][0, 0] == 3
