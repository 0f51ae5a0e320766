"""A connection whose messages have to arrive at some pace: one that trickles in holds memory and never gets anywhere.

A message has 30 s, and a larger one 30 s for every MiB. So a byte a second is cut off after half a minute, and a peer
that falls silent in the middle likewise, while 64 MiB over a bad radio link of 0.5 Mbit/s are taken. Time in which the
server itself does not read, for it has enough from this client, does not count.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.frames import DATA_OPCODES, Frame

MESSAGE_S = 30.0
"""From the first byte of a message to its last, or to the next full MiB."""

PROGRESS_BYTES = 1024 * 1024
"""What starts the time anew within a message."""

CHECK_S = 5.0
"""How often a message on its way is looked at. Time is counted in such looks: if the event loop stands still, what has
come meanwhile is read before the next one."""

logger = logging.getLogger(__name__)


def is_arriving(websocket: ServerConnection) -> bool:
    """Whether part of a message has come. Its sender can neither answer a ping nor be called idle meanwhile."""
    return isinstance(websocket, PacedConnection) and websocket.is_arriving


class PacedConnection(ServerConnection):
    """A server's connection that closes with 1008 when a message takes too long to arrive."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._arriving = False
        self._arrived = 0
        self._waited = 0.0
        self._fragmented = False
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def is_arriving(self) -> bool:
        """Whether part of a message has come."""
        return self._arriving

    def data_received(self, data: bytes) -> None:
        """Bytes from the network."""
        super().data_received(data)
        if not self._fragmented and not self._is_within_frame():
            self._arriving = False
            return
        self._arrived += len(data)
        if not self._arriving or self._arrived >= PROGRESS_BYTES:
            self._arriving, self._arrived, self._waited = True, 0, 0.0
        if self._timer is None:
            self._timer = self.loop.call_later(CHECK_S, self._check)

    def process_event(self, event: Any) -> None:
        """A frame is complete; the last of a message ends the time it had."""
        super().process_event(event)
        if isinstance(event, Frame) and event.opcode in DATA_OPCODES:
            self._fragmented = not event.fin
            if event.fin:
                self._arriving = False

    def _is_within_frame(self) -> bool:
        """Whether the parser waits for more of a frame; what it has of one is not always in the reader's buffer.

        Its innermost generator tells: `read_exact` waits for the rest of a frame, `at_eof` for a frame to begin.
        """
        step: Any = self.protocol.parser
        while step.gi_yieldfrom is not None:
            step = step.gi_yieldfrom
        return step.__name__ == "read_exact"

    def connection_lost(self, exc: Exception | None) -> None:
        """The end."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _check(self) -> None:
        self._timer = None
        if not self._arriving or self._closing is not None:
            return
        self._waited = self._waited + CHECK_S if self.transport.is_reading() else 0.0
        if self._waited > MESSAGE_S:
            reason = f"message too slow: {self._arrived} more bytes in {MESSAGE_S:g} s"
            logger.info("%s is closed: %s", self.remote_address, reason)
            self._closing = self.loop.create_task(self.close(1008, reason))
            return
        self._timer = self.loop.call_later(CHECK_S, self._check)
