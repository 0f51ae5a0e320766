"""Finds peers that are gone without a word, and peers that do not read; never cuts one that is merely kept waiting."""

from __future__ import annotations

import asyncio
import logging
import select
import sys

from websockets.asyncio.server import ServerConnection

from relay.protocol.limits import PING_INTERVAL_S, PING_TIMEOUT_S
from relay.server.arrivals import is_arriving

SEND_TIMEOUT_S = 10.0
"""A peer that takes no bytes for this long is dropped; replies are small, so a live one needs a round trip."""

CHECK_S = 5.0
"""How often an unanswered ping is looked at."""

GONE_CHECK_S = 0.8
"""How often a connection that is not read is asked whether it still stands."""

logger = logging.getLogger(__name__)


async def keep_alive(
    websocket: ServerConnection, interval: float = PING_INTERVAL_S, timeout: float = PING_TIMEOUT_S
) -> None:
    """Ping the peer for ever; return after dropping one that left a ping unanswered for `timeout` seconds of reading.

    The library's own keepalive cannot be used: it also counts the time in which this server has stopped reading from a
    connection with too many requests outstanding, where the pong stands unread behind the requests. Nor can a pong come
    in the middle of a large message, which has a time limit of its own.
    """
    check = min(CHECK_S, timeout)
    while True:
        await asyncio.sleep(interval)
        pong = asyncio.ensure_future(await websocket.ping())
        unanswered = 0.0
        while unanswered < timeout:
            answered, _ = await asyncio.wait({pong}, timeout=check)
            if answered:
                break
            may_answer = websocket.transport.is_reading() and not is_arriving(websocket)
            unanswered = unanswered + check if may_answer else 0.0
        else:
            logger.info("%s left a ping unanswered for %g s and is dropped", websocket.remote_address, timeout)
            websocket.transport.abort()
            return


async def drop_when_gone(websocket: ServerConnection) -> None:
    """Drop a peer that closes or loses its connection while this server does not read from it, and so is not told.

    What stands unread in the socket does not hide that. Windows cannot be asked; there the next reply finds out.
    """
    if sys.platform == "win32":
        return
    transport = websocket.transport
    while True:
        await asyncio.sleep(GONE_CHECK_S)
        if transport.is_closing():
            return
        if not transport.is_reading() and _has_left(transport):
            logger.info("%s left while its requests were waiting", websocket.remote_address)
            transport.abort()
            return


def _has_left(transport: asyncio.Transport) -> bool:
    poll = select.poll()  # tells errors and full ends unasked; that the peer has closed its side, only Linux tells
    poll.register(transport.get_extra_info("socket"), getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(0))


async def send_promptly(websocket: ServerConnection, frame: str | bytes, timeout: float = SEND_TIMEOUT_S) -> None:
    """Send one message; a peer that does not take it in time is dropped, which ends the connection for its reader too.

    Raises:
        websockets.exceptions.ConnectionClosed: the peer is gone.
    """
    timer = asyncio.get_running_loop().call_later(timeout, websocket.transport.abort)
    try:
        await websocket.send(frame)
    finally:
        timer.cancel()
