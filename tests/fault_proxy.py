"""A TCP relay on loopback that spoils what passes through it, for tests of what bad networks do.

    async with FaultProxy(server.port) as proxy:        # in an asynchronous test
        proxy.to_client.latency = 0.2

    with in_thread(FaultProxy(port)) as proxy:          # in a blocking one
        proxy.reset()

Knows bytes only. What is random comes from the seed: the same connections in the same pieces meet the same fate.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from random import Random

from free_ports import reserved_port

READ_BYTES = 64 * 1024
MAX_PIECES = 64
"""On their way in one direction of one connection; beyond them, the sender's socket fills up."""

THROTTLE_PERIOD_S = 0.01


@dataclass
class Faults:
    """What befalls the bytes of one direction; may be changed at any time, from any thread.

    Attributes:
        latency: seconds by which every byte is late.
        jitter: up to so many more, at random; the bytes stay in order.
        bytes_per_second: how fast each connection passes them on; None for as fast as they come.
        cut_after: passes so many bytes of a connection, then closes both its ends; None for all.
        swallow: takes everything and passes nothing on, not even the news that the sender has closed or died.
    """

    latency: float = 0.0
    jitter: float = 0.0
    bytes_per_second: float | None = None
    cut_after: int | None = None
    swallow: bool = False


class FaultProxy:
    """Listens on a free port of 127.0.0.1 and relays to `target`, a port there too.

    Entering and leaving belong to one event loop; everything else may come from any thread.

    Attributes:
        port: where clients connect.
        to_server, to_client: the faults of each direction, of connections to come and of those that are open.
        accepted: how many connections have come.
    """

    def __init__(self, target: int, seed: int = 0) -> None:
        self.port = 0
        self.to_server, self.to_client = Faults(), Faults()
        self.accepted = 0
        self._target, self._seed = target, seed
        self._connections: set[_Connection] = set()
        self._thread: threading.Thread
        self._loop: asyncio.AbstractEventLoop
        self._listener: socket.socket
        self._reservation: socket.socket

    async def __aenter__(self) -> FaultProxy:
        self._thread, self._loop = threading.current_thread(), asyncio.get_running_loop()
        self.port, self._reservation = reserved_port()
        self.accept()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.refuse()
        self._reservation.close()
        tasks = [connection.task for connection in self._connections]
        self.cut()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    @property
    def open(self) -> int:
        """How many connections are relayed at present."""
        return len(self._connections)

    def cut(self) -> None:
        """Close both ends of every connection, as a program that ends does: no close frame, no further byte."""
        self._now(lambda: [connection.cut() for connection in list(self._connections)])

    def reset(self) -> None:
        """End every connection with RST, at both ends."""
        self._now(lambda: [connection.reset() for connection in list(self._connections)])

    def refuse(self) -> None:
        """Refuse new connections, as a machine on which nothing listens; those that are open go on."""
        self._now(self._stop_listening)

    def accept(self) -> None:
        """Take new connections, after `refuse` on the same port as before."""
        self._now(self._listen)

    def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=1024)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._connected)

    def _stop_listening(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    def _connected(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # it is gone already
            return
        connection = _Connection()
        connection.task = self._loop.create_task(self._relay(client, connection, self.accepted))
        self._connections.add(connection)
        self.accepted += 1

        def ended(_: object) -> None:
            self._connections.discard(connection)
            if not connection.ends:  # cut before the task began
                client.close()

        connection.task.add_done_callback(ended)

    async def _relay(self, client: socket.socket, connection: _Connection, number: int) -> None:
        fates = Random(f"{self._seed}/{number}/to server"), Random(f"{self._seed}/{number}/to client")
        try:
            reader, writer = await asyncio.open_connection(sock=client)
            connection.ends.append(writer)
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
            connection.ends.append(server_writer)
            await asyncio.gather(
                _carry(reader, server_writer, self.to_server, connection, fates[0]),
                _carry(server_reader, writer, self.to_client, connection, fates[1]),
            )
        except OSError:  # nothing listens there
            connection.reset()
        finally:
            connection.close()

    def _now(self, action: Callable[[], object]) -> None:
        """Do it on the loop and return when it is done."""

        async def act() -> None:
            action()

        if threading.current_thread() is self._thread:
            action()
        else:
            asyncio.run_coroutine_threadsafe(act(), self._loop).result(10)


@contextmanager
def in_thread(proxy: FaultProxy) -> Iterator[FaultProxy]:
    """Run the proxy on an event loop of its own, for tests that have none."""
    started, stop = threading.Event(), asyncio.Event()

    async def main() -> None:
        async with proxy:
            started.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),), name="fault proxy")
    thread.start()
    try:
        assert started.wait(10)
        yield proxy
    finally:
        proxy._loop.call_soon_threadsafe(stop.set)
        thread.join()


@dataclass(eq=False)
class _Connection:
    """What writes to the ends of one connection, and the task that relays between them."""

    ends: list[asyncio.StreamWriter] = field(default_factory=list)
    task: asyncio.Task[None] = field(init=False)

    def close(self) -> None:
        for end in self.ends:
            end.close()

    def cut(self) -> None:
        self.close()
        self.task.cancel()

    def reset(self) -> None:
        for end in self.ends:
            # A socket that may not linger sends RST when it is closed.
            end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.transport.abort()
        self.task.cancel()


END, RESET = b"", None
Pieces = asyncio.Queue["tuple[float, bytes | None]"]


async def _carry(
    source: asyncio.StreamReader, sink: asyncio.StreamWriter, faults: Faults, connection: _Connection, random: Random
) -> None:
    """Carry one direction of a connection until its end has been passed on; for ever, if that is swallowed."""
    pieces: Pieces = asyncio.Queue(MAX_PIECES)
    await asyncio.gather(_take(source, pieces, faults, random), _give(sink, pieces, faults, connection))


async def _take(source: asyncio.StreamReader, pieces: Pieces, faults: Faults, random: Random) -> None:
    """Read to the end, and note with each piece when it is due."""
    due, piece = 0.0, None
    while due == 0.0 or piece:
        try:
            piece = await source.read(READ_BYTES)
        except ConnectionError:
            piece = RESET
        now = asyncio.get_running_loop().time()
        due = max(due, now + faults.latency + random.uniform(0, faults.jitter))
        await pieces.put((due, piece))


async def _give(sink: asyncio.StreamWriter, pieces: Pieces, faults: Faults, connection: _Connection) -> None:
    """Pass on, swallow or cut off what is due."""
    passed = 0
    while True:
        due, piece = await pieces.get()
        await asyncio.sleep(due - asyncio.get_running_loop().time())
        if faults.swallow:
            if not piece:
                await asyncio.Event().wait()  # the receiver must not learn of it
            continue
        if piece is RESET:
            connection.reset()
            return
        if piece == END:
            with suppress(OSError):  # the receiver is gone as well
                sink.write_eof()
            return
        if faults.cut_after is not None:
            piece = piece[: max(0, faults.cut_after - passed)]
        await _write(sink, piece, faults)
        passed += len(piece)
        if faults.cut_after is not None and passed >= faults.cut_after:
            connection.cut()
            return


async def _write(sink: asyncio.StreamWriter, piece: bytes, faults: Faults) -> None:
    """Write at the speed allowed; what a receiver that is gone cannot take is lost, as its own direction will tell."""
    with suppress(ConnectionError):
        while piece:
            rate = faults.bytes_per_second
            size = len(piece) if rate is None else max(1, int(rate * THROTTLE_PERIOD_S))
            sink.write(piece[:size])
            await sink.drain()
            if rate is not None:
                await asyncio.sleep(len(piece[:size]) / rate)
            piece = piece[size:]
