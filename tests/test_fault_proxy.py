"""The fault proxy does to a connection what it says, and nothing else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from time import perf_counter

import pytest

import fault_proxy
from fault_proxy import FaultProxy, in_thread
from free_ports import free_port

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def echo_server() -> AsyncIterator[int]:
    """A server that sends back what it gets, and its port."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(65536):
                writer.write(piece)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


@asynccontextmanager
async def proxied(seed: int = 0) -> AsyncIterator[FaultProxy]:
    async with echo_server() as port, FaultProxy(port, seed) as proxy:
        yield proxy


@asynccontextmanager
async def connected(proxy: FaultProxy) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def echoed(streams: Streams, message: bytes) -> bytes:
    streams[1].write(message)
    return await asyncio.wait_for(streams[0].readexactly(len(message)), 10)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never became true")


async def test_without_faults_every_byte_passes_both_ways():
    message = bytes(range(256)) * 20_000
    async with proxied() as proxy, connected(proxy) as streams:
        assert await echoed(streams, message) == message
        assert (proxy.accepted, proxy.open) == (1, 1)


async def test_the_end_of_a_stream_passes():
    async with proxied() as proxy, connected(proxy) as (reader, writer):
        writer.write(b"last")
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 10) == b"last"
        await until(lambda: proxy.open == 0)


async def test_latency_makes_each_direction_late():
    async with proxied() as proxy, connected(proxy) as streams:
        proxy.to_server.latency, proxy.to_client.latency = 0.2, 0.1
        started = perf_counter()
        await echoed(streams, b"1")
        assert perf_counter() - started >= 0.3


async def test_jitter_keeps_the_order():
    message = bytes(range(200))
    async with proxied(seed=3) as proxy, connected(proxy) as streams:
        proxy.to_server.jitter = 0.05
        for byte in message:
            streams[1].write(bytes([byte]))
            await streams[1].drain()
            await asyncio.sleep(0)
        assert await asyncio.wait_for(streams[0].readexactly(len(message)), 10) == message


async def test_the_same_seed_delays_alike(monkeypatch: pytest.MonkeyPatch):
    async def delays(seed: int) -> list[float]:
        async with proxied(seed) as proxy, connected(proxy) as streams:
            proxy.to_server.jitter = 0.01
            for _ in range(5):
                await echoed(streams, b"1")
        return drawn

    class Recording(Random):
        def uniform(self, a: float, b: float) -> float:
            drawn.append(super().uniform(a, b))
            return drawn[-1]

    monkeypatch.setattr(fault_proxy, "Random", Recording)
    runs = []
    for seed in (3, 3, 4):
        drawn: list[float] = []
        runs.append([delay for delay in await delays(seed) if delay])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


async def test_a_throttled_direction_passes_so_many_bytes_a_second():
    async with proxied() as proxy, connected(proxy) as streams:
        proxy.to_server.bytes_per_second = 10_000
        started = perf_counter()
        await echoed(streams, bytes(5_000))
        assert perf_counter() - started >= 0.5


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
async def test_a_connection_is_cut_after_so_many_bytes(direction: str):
    async with proxied() as proxy:
        getattr(proxy, direction).cut_after = 1_000
        async with connected(proxy) as (reader, writer):
            writer.write(bytes(400))
            await reader.readexactly(400)
            writer.write(bytes(900))
            got = b""
            with suppress(ConnectionError):
                while piece := await asyncio.wait_for(reader.read(4096), 10):
                    got += piece
            if direction == "to_client":
                assert len(got) == 600
            await until(lambda: proxy.open == 0)


async def test_the_server_gets_exactly_the_bytes_before_the_cut():
    got: list[bytes] = []
    ended = asyncio.Event()

    async def collect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(4096):
                got.append(piece)
        writer.close()
        ended.set()

    server = await asyncio.start_server(collect, "127.0.0.1", 0)
    async with FaultProxy(server.sockets[0].getsockname()[1]) as proxy:
        proxy.to_server.cut_after = 1_000
        async with connected(proxy) as (_, writer):
            writer.write(b"x" * 5_000)
            await asyncio.wait_for(ended.wait(), 10)
    server.close()
    assert b"".join(got) == b"x" * 1_000


async def test_a_swallowed_direction_is_silent_and_the_other_is_not():
    async with proxied() as proxy, connected(proxy) as streams:
        await echoed(streams, b"1")
        proxy.to_client.swallow = True
        streams[1].write(b"lost")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(streams[0].read(4), 0.2)
        proxy.to_client.swallow = False
        assert await echoed(streams, b"2") == b"2"


async def test_what_is_behind_a_swallowed_direction_never_learns_that_its_peer_is_gone():
    gone = asyncio.Event()

    async def wait_for_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        gone.set()
        writer.close()

    server = await asyncio.start_server(wait_for_the_end, "127.0.0.1", 0)
    async with FaultProxy(server.sockets[0].getsockname()[1]) as proxy:
        async with connected(proxy):
            await until(lambda: proxy.open == 1)
            proxy.to_server.swallow = True
        await asyncio.sleep(0.2)
        assert not gone.is_set()
        assert proxy.open == 1
    await asyncio.wait_for(gone.wait(), 10)
    server.close()


async def test_reset_reaches_the_client_as_one():
    async with proxied() as proxy, connected(proxy) as streams:
        await echoed(streams, b"1")
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(streams[0].read(1), 10)


async def test_cut_reaches_the_client_as_the_end():
    async with proxied() as proxy, connected(proxy) as streams:
        await echoed(streams, b"1")
        proxy.cut()
        assert await asyncio.wait_for(streams[0].read(1), 10) == b""


async def test_refusing_leaves_open_connections_alone_and_ends_with_accept():
    async with proxied() as proxy, connected(proxy) as streams:
        await echoed(streams, b"1")
        port = proxy.port
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        assert await echoed(streams, b"2") == b"2"
        proxy.accept()
        assert proxy.port == port
        async with connected(proxy) as again:
            assert await echoed(again, b"3") == b"3"


async def test_a_client_of_a_server_that_is_not_there_is_reset():
    async with FaultProxy(free_port()) as proxy, connected(proxy) as (reader, _):
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(1), 10)


def test_in_a_thread_it_serves_blocking_tests():
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        in_thread(FaultProxy(listening.getsockname()[1])) as proxy,
    ):
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
            server, _ = listening.accept()
            with server:
                client.sendall(b"hello")
                assert server.recv(5) == b"hello"
                proxy.reset()
                with pytest.raises(ConnectionResetError):
                    client.recv(1)
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", proxy.port), timeout=10)
        proxy.accept()
        socket.create_connection(("127.0.0.1", proxy.port), timeout=10).close()
