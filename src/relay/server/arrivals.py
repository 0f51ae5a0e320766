"""A connection whose messages have to arrive at some pace, and whose frames have to carry something.

One that trickles in holds memory and never gets anywhere. A message has 30 s, and a larger one 30 s for every MiB. So a
byte a second is cut off after half a minute, and a peer that falls silent in the middle likewise, while 64 MiB over a
bad radio link of 0.5 Mbit/s are taken. Time in which the server itself does not read, for it has enough from this
client, does not count.

Pings cost their sender little and the server an answer each, for which everyone else waits: a flood of them is cut off,
and so is a message in very many pieces.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.frames import DATA_OPCODES, Frame, Opcode

MESSAGE_S = 30.0
"""From the first byte of a message to its last, or to the next full MiB."""

PROGRESS_BYTES = 1024 * 1024
"""What starts the time anew within a message."""

CHECK_S = 5.0
"""How often a message on its way is looked at. Time is counted in such looks: if the event loop stands still, what has
come meanwhile is read before the next one."""

CONTROLS_PER_S = 100
"""Pings and pongs that a peer may send in the long run, as long as it takes in what it is sent; clients need three a
minute."""

CONTROLS_AT_ONCE = 256
"""And how many may come together, as they do when the server had stopped reading for a while."""

MAX_FRAGMENTS = 4096
"""Pieces of one message; newer releases of `websockets` have the same bound, older ones none."""

SLICE_BYTES = 16 * 1024
"""What is looked at in one go, besides the frame that is on its way. 256 KiB of bare frames, as they come from the
socket, would take half a second."""

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
        self._fragments = 0
        self._controls = float(CONTROLS_AT_ONCE)
        self._last_control = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def is_arriving(self) -> bool:
        """Whether part of a message has come."""
        return self._arriving

    def data_received(self, data: bytes) -> None:
        """Bytes from the network."""
        rest = memoryview(data)
        while rest:
            end = max(SLICE_BYTES, self._lacking)
            super().data_received(rest[:end])  # pyright: ignore[reportArgumentType]
            if self.transport.is_closing():
                return
            rest = rest[end:]
        if not self._fragments and not self._is_within_frame():
            self._arriving = False
            return
        self._arrived += len(data)
        if not self._arriving or self._arrived >= PROGRESS_BYTES:
            self._arriving, self._arrived, self._waited = True, 0, 0.0
        if self._timer is None:
            self._timer = self.loop.call_later(CHECK_S, self._check)

    def send_data(self) -> None:
        """Write what is to be sent, all pongs in one piece: to a peer that is gone, asyncio logs each attempt."""
        pieces = self.protocol.writes
        if len(pieces) > 1:
            self.protocol.writes = [b"".join(pieces), *(piece for piece in pieces[-1:] if not piece)]
        super().send_data()

    def process_event(self, event: Any) -> None:
        """A frame is complete; the last of a message ends the time it had."""
        super().process_event(event)
        if not isinstance(event, Frame):
            return
        if event.opcode in DATA_OPCODES:
            self._fragments = 0 if event.fin else self._fragments + 1
            if event.fin:
                self._arriving = False
            elif self._fragments == MAX_FRAGMENTS:
                self._drop(f"a message of more than {MAX_FRAGMENTS} fragments")
        elif event.opcode is not Opcode.CLOSE and not self.transport.is_closing():
            self._count_control()

    def _count_control(self) -> None:
        """Take one from what the peer may send; that grows while it takes in what it is sent, the pongs included."""
        now = self.loop.time()
        if not self.transport.get_write_buffer_size():
            self._controls = min(CONTROLS_AT_ONCE, self._controls + (now - self._last_control) * CONTROLS_PER_S)
        self._last_control = now
        self._controls -= 1
        if self._controls < 0:
            self._drop(f"more than {CONTROLS_PER_S} pings and pongs a second")

    def _is_within_frame(self) -> bool:
        """Whether the parser waits for more of a frame; what it has of one is not always in the reader's buffer."""
        return self._parsing().__name__ == "read_exact"

    @property
    def _lacking(self) -> int:
        """Bytes of the frame on its way that have not come yet, as far as it has told its length; 0 without one."""
        step = self._parsing()
        if step.__name__ != "read_exact":
            return 0
        return step.gi_frame.f_locals["n"] - len(self.protocol.reader.buffer)

    def _parsing(self) -> Any:
        """The parser's innermost generator: `read_exact` waits for the rest of a frame, `at_eof` for one to begin."""
        step: Any = self.protocol.parser
        while step.gi_yieldfrom is not None:
            step = step.gi_yieldfrom
        return step

    def _drop(self, why: str) -> None:
        logger.info("%s is dropped: %s", self.remote_address, why)
        self.transport.abort()

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
