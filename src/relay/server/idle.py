"""Ends connections whose client has gone quiet, where the protocol asks for it; waiting for an answer is not quiet."""

from __future__ import annotations

import asyncio
import logging
from time import perf_counter

from websockets.asyncio.server import ServerConnection

from relay.server.arrivals import is_arriving

UPLOAD_CHECK_S = 1.0
"""How often a message that is still arriving is looked at when the time is over."""

logger = logging.getLogger(__name__)


class QuietTime:
    """How long one connection has owed its client nothing. In the beginning it owes the greeting."""

    def __init__(self) -> None:
        self._owed = 1
        self._since = 0.0

    @property
    def seconds(self) -> float:
        """Time since the last answer went out; 0 while one is owed."""
        return 0.0 if self._owed else perf_counter() - self._since

    def owe(self) -> None:
        """A message came and will be answered."""
        self._owed += 1

    def settle(self) -> None:
        """One answer went out."""
        self._owed -= 1
        self._since = perf_counter()


async def close_when_idle(websocket: ServerConnection, quiet: QuietTime, limit: float) -> None:
    """Close with 1000 once nothing was owed and no message came for `limit` seconds; pings are no messages.

    A message counts when it is complete, but nobody is cut off while sending one: large frames on a slow link take
    longer than any sensible limit.
    """
    while True:
        left = limit - quiet.seconds
        if left <= 0 and not is_arriving(websocket):
            break
        await asyncio.sleep(left if left > 0 else min(UPLOAD_CHECK_S, limit))
    logger.info("%s sent no message for %g s and is closed", websocket.remote_address, limit)
    await websocket.close(1000, f"idle timeout: no message for {limit:g} s")
