"""Between TCP and WebSocket: TLS and the request's head, bounded in number, time and bytes; then the connection proper.

`websockets` bounds the time of a handshake, but not how many are half done nor how much they hold. What waits here is
small and short-lived; once a request's head is complete, nothing here touches the connection any more.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import sys
from typing import Any, cast

from relay.protocol.limits import CLOSE_TIMEOUT_S
from relay.server.arrivals import PacedConnection

MAX_HALF_DONE = 256
"""Handshakes under way. A further connection takes the place of the oldest of them, or is dropped at once if none has
had its time, so that silent peers cannot keep robots out."""

UNDISTURBED_S = 1.0
"""How long a handshake keeps its place; a robot's takes two round trips and some arithmetic."""

HANDSHAKE_S = 10.0
"""From the TCP connection to the end of the request's head, TLS included; as `websockets` allows."""

MAX_HEAD_BYTES = 8 * 1024
"""Request line and headers."""

TOO_LARGE = "The request's headers are larger than 8 KB.\n"

logger = logging.getLogger(__name__)


class Entrance:
    """Makes a door for each TCP connection; stands where `websockets` expects a class of connections.

    Args:
        tls: None for plain TCP.

    Attributes:
        doors: handshakes under way and when they began, oldest first.
    """

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self.tls = tls
        self.doors: dict[Door, float] = {}

    def __call__(self, *arguments: Any, **options: Any) -> Door:
        return Door(self, PacedConnection(*arguments, **options))

    def has_room(self) -> bool:
        """Whether one more handshake may begin, if need be in place of a slow one."""
        if len(self.doors) >= MAX_HALF_DONE:
            oldest, began = next(iter(self.doors.items()))
            if asyncio.get_running_loop().time() - began < UNDISTURBED_S:
                return False
            oldest.shut()
        return True

    def close(self) -> None:
        """Drop every handshake that is half done."""
        for door in tuple(self.doors):
            door.shut()


class Door(asyncio.Protocol):
    """One TCP connection until the head of its request is there.

    Attributes:
        protocol: where `websockets` looks for it when it selects a subprotocol.
    """

    def __init__(self, entrance: Entrance, connection: PacedConnection) -> None:
        self.protocol = connection.protocol
        self._entrance = entrance
        self._connection = connection
        self._head = bytearray()
        self._plain: asyncio.Transport
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle
        self._securing: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """TCP is connected: begin with TLS, or wait for the head."""
        self._plain = cast(asyncio.Transport, transport)
        if not self._entrance.has_room():
            self._plain.abort()
            return
        loop = asyncio.get_running_loop()
        self._entrance.doors[self] = loop.time()
        self._timer = loop.call_later(HANDSHAKE_S, self.shut)
        if self._entrance.tls is None:
            self._transport = self._plain
        else:
            self._securing = loop.create_task(self._start_tls(self._entrance.tls))

    def data_received(self, data: bytes) -> None:
        """More of the head, in clear."""
        if self in self._entrance.doors:
            self._head += data
            self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer gave up."""
        self._leave()

    def shut(self) -> None:
        """Drop the peer."""
        if self._leave():
            (self._transport or self._plain).abort()

    async def _start_tls(self, tls: ssl.SSLContext) -> None:
        bounds: dict[str, Any] = {"ssl_handshake_timeout": HANDSHAKE_S}
        if sys.version_info >= (3, 11):
            bounds["ssl_shutdown_timeout"] = CLOSE_TIMEOUT_S
        loop = asyncio.get_running_loop()
        if self._head:  # uvloop reads before this task begins: these bytes are TLS's, not the head's
            loop.call_soon(_feed, self._plain, bytes(self._head))
            self._head.clear()
        try:
            transport = await loop.start_tls(self._plain, self, tls, server_side=True, **bounds)
        except OSError as error:  # of TCP and of TLS
            logger.debug("no TLS with %s: %s", self._plain.get_extra_info("peername"), error)
            self.shut()
            return
        if transport is not None and self in self._entrance.doors:
            self._transport = transport
            self._look()
        else:  # the peer gave up, or was dropped, and asyncio takes either for an end without error
            self._leave()
            (transport or self._plain).abort()

    def _look(self) -> None:
        """Let the connection begin once the head is complete."""
        if self._transport is None:
            return
        end = self._head.find(b"\r\n\r\n")
        if end > MAX_HEAD_BYTES or (end < 0 and len(self._head) > MAX_HEAD_BYTES):
            self._leave()
            self._transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: text/plain; charset=utf-8\r\n"
                b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(TOO_LARGE), TOO_LARGE.encode())
            )
            self._transport.close()
        elif end >= 0:
            self._leave()
            self._transport.set_protocol(self._connection)
            self._connection.connection_made(self._transport)
            self._connection.data_received(bytes(self._head))

    def _leave(self) -> bool:
        """Stop counting this handshake; False if it was not counted any more."""
        if self not in self._entrance.doors:
            return False
        del self._entrance.doors[self]
        self._timer.cancel()
        return True


def _feed(transport: asyncio.Transport, data: bytes) -> None:
    """Give the transport's new protocol what came before it was set."""
    protocol = cast(asyncio.BufferedProtocol, transport.get_protocol())
    while data:
        room = memoryview(protocol.get_buffer(len(data)))
        taken = min(len(room), len(data))
        room[:taken] = data[:taken]
        protocol.buffer_updated(taken)
        data = data[taken:]
