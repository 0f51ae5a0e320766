"""Handshakes that are slow, large or too many, seen from a raw socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from time import perf_counter

import pytest
import pytest_asyncio
from fake_policy import ask, client, observation, running

from relay.server import door
from relay.server.app import Server

UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"
)


class Peer:
    """One TCP connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def status(self) -> int:
        return int((await asyncio.wait_for(self.reader.readline(), 5)).split()[1])

    async def is_dropped(self, seconds: float = 5) -> bool:
        try:
            return await asyncio.wait_for(self.reader.read(), seconds) == b""
        except ConnectionError:
            return True

    def leave(self) -> None:
        self.writer.transport.abort()


Knock = Callable[[Server], Awaitable[Peer]]


@pytest_asyncio.fixture
async def knock() -> AsyncIterator[Knock]:
    """Opens a TCP connection, which is hung up on at the end."""
    peers: list[Peer] = []

    async def knock(server: Server) -> Peer:
        peers.append(Peer(*await asyncio.open_connection("127.0.0.1", server.port)))
        return peers[-1]

    yield knock
    for peer in peers:
        peer.leave()
    await asyncio.sleep(0.01)  # in which the sockets are closed


async def test_a_head_that_comes_byte_by_byte_is_taken(knock: Knock):
    async with running() as server:
        peer = await knock(server)
        for byte in UPGRADE + b"\r\n":
            peer.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert await peer.status() == 101
        peer.leave()


async def test_a_message_in_the_same_packet_as_the_head_is_answered(knock: Knock):
    async with running() as server:
        peer = await knock(server)
        message = observation(3)
        peer.writer.write(UPGRADE + b"\r\n" + bytes([0x82, 0x80 | len(message)]) + bytes(4) + message)
        assert await peer.status() == 101
        answers = await asyncio.wait_for(peer.reader.readuntil(b"server_timing"), 5)
        assert b"actions" in answers
        peer.leave()


async def test_a_handshake_that_is_not_done_in_time_is_dropped(knock: Knock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(door, "HANDSHAKE_S", 0.3)
    async with running() as server, client(server) as other:
        silent, trickling = await knock(server), await knock(server)

        async def trickle() -> None:
            for byte in UPGRADE * 100:
                trickling.writer.write(bytes([byte]))
                await asyncio.sleep(0.02)

        trickle_task = asyncio.create_task(trickle())
        assert await silent.is_dropped()
        assert await trickling.is_dropped()
        trickle_task.cancel()
        assert "actions" in await ask(other, observation())


def test_the_whole_handshake_has_ten_seconds():
    assert door.HANDSHAKE_S == 10


async def test_a_connection_is_not_dropped_once_its_head_is_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(door, "HANDSHAKE_S", 0.5)
    async with running() as server, client(server) as websocket:
        await asyncio.sleep(0.7)
        assert "actions" in await ask(websocket, observation())


async def test_headers_of_8_kb_are_taken(knock: Knock):
    async with running() as server:
        peer = await knock(server)
        peer.writer.write(UPGRADE + b"X: " + b"a" * (8_192 - len(UPGRADE) - 3) + b"\r\n\r\n")
        assert await peer.status() == 101
        peer.leave()


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
async def test_more_is_431(knock: Knock, end: bytes):
    async with running() as server:
        peer = await knock(server)
        peer.writer.write(UPGRADE + b"".join(b"X-%d: %s\r\n" % (n, b"a" * 990) for n in range(9)) + end)
        answer = (await asyncio.wait_for(peer.reader.read(), 5)).decode()
        assert answer.startswith("HTTP/1.1 431 ")
        assert answer.endswith("\r\n\r\nThe request's headers are larger than 8 KB.\n")


async def test_no_more_than_256_handshakes_are_half_done(knock: Knock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(door, "UNDISTURBED_S", 60)
    async with running() as server, client(server) as robot:
        for _ in range(door.MAX_HALF_DONE):
            peer = await knock(server)
            peer.writer.write(b"GET / HT")
        beyond = await knock(server)
        started = perf_counter()
        assert await beyond.is_dropped()
        assert perf_counter() - started < 2
        assert "actions" in await ask(robot, observation())
        peer.leave()
        await asyncio.sleep(0.1)
        async with client(server) as websocket:
            assert "actions" in await ask(websocket, observation())


async def test_silent_peers_do_not_keep_robots_out(knock: Knock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(door, "MAX_HALF_DONE", 3)
    monkeypatch.setattr(door, "UNDISTURBED_S", 0.1)
    async with running() as server:
        silent = [await knock(server) for _ in range(3)]
        await asyncio.sleep(0.2)
        async with client(server) as websocket:
            assert "actions" in await ask(websocket, observation())
        assert await silent[0].is_dropped()


async def test_open_connections_are_not_half_done_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(door, "MAX_HALF_DONE", 3)
    async with running() as server, contextlib.AsyncExitStack() as stack:
        robots = [await stack.enter_async_context(client(server)) for _ in range(12)]
        assert "actions" in await ask(robots[-1], observation())


async def test_a_drain_drops_what_is_half_done(knock: Knock):
    async with running() as server:
        peer = await knock(server)
        await asyncio.sleep(0.05)
        await server.drain()
        assert await peer.is_dropped(2)
