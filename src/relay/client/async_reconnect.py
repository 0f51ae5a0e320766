"""The asyncio twin of `reconnect.bridge`: one task connects again, however many wait for it.

Its own module, so that programs that never ask for it never load asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from relay.client.cold_start import Waiting
from relay.client.reconnect import Call, Gaps

Connect = Callable[[Waiting], Awaitable[None]]
"""Connects and puts the new connection in the lost one's place."""


class Bridge:
    """The task that makes a lost connection again, if one is under way."""

    def __init__(self, gaps: Gaps, connect: Connect) -> None:
        self._gaps = gaps
        self._connect = connect
        self._building: asyncio.Task[None] | None = None

    async def cross(self, call: Call) -> None:
        """Return when there is a connection again; a caller that gives up before leaves the others waiting.

        Raises:
            TimeoutError: there was not enough time.
            websockets.exceptions.ConnectionClosed: the client was closed meanwhile.
            websockets.exceptions.InvalidStatus, OSError and others: what waiting does not cure.
        """
        loss = self._gaps.loss
        assert loss is not None, "nothing is lost"
        call.cross_gap()
        if self._building is None:
            self._building = asyncio.create_task(self._build())
            self._building.add_done_callback(self._built)
        building = self._building
        done, _ = await asyncio.wait({building}, timeout=call.remaining)
        if not done:
            raise self._gaps.lost_time(call, self._gaps.waiting.out_of_time())
        if building.cancelled():
            raise loss
        error = building.exception()
        if isinstance(error, TimeoutError):
            raise self._gaps.lost_time(call, error) from error
        if error is not None:
            raise error

    async def give_up(self) -> None:
        """Stop connecting; whoever waits gets `ConnectionClosed`."""
        if self._building is not None:
            self._building.cancel()
            await asyncio.wait({self._building})

    async def _build(self) -> None:
        waiting = self._gaps.waiting
        waiting.renew(self._gaps.connect_timeout)
        await asyncio.sleep(waiting.pause)
        waiting.check_due()
        await self._connect(waiting)

    def _built(self, building: asyncio.Task[None]) -> None:
        self._building = None
        if not building.cancelled():
            building.exception()  # whoever waits raises it; nobody may
