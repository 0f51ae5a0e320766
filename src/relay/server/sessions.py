"""The sessions of one connection: which ids continue and which start fresh, and what a policy remembers of each."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from relay.protocol.limits import MAX_SESSIONS_PER_CONNECTION


@dataclass(slots=True, eq=False)
class Session:
    """One episode of one robot: what all requests under one id share, from a fresh start on.

    Attributes:
        id: the caller's name for it; it means nothing outside its connection.
        episode: how many resets the connection had seen.
        fresh: none of its requests has succeeded, so the policy starts without memory.
        state: the policy's memory of it; None while it is fresh, and for policies that keep none.
        turn: held by the one request that may use the state; given in the order in which they ask for it.
        requests: how many of its requests are in flight.
    """

    id: str
    episode: int = 0
    fresh: bool = True
    state: Any = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    requests: int = 0


class SessionTable:
    """The ids of one connection that have had a successful reply, at most `limit`, the most recently used.

    An id counts as seen only after success: a refused first observation must not use up the fresh start.

    Args:
        free: called with the state of a session that is over, once none of its requests is in flight.
    """

    def __init__(self, free: Callable[[Any], None], limit: int = MAX_SESSIONS_PER_CONNECTION) -> None:
        self._free = free
        self._limit = limit
        self._seen: OrderedDict[str, Session] = OrderedDict()
        self._new: dict[str, Session] = {}  # with a first request in flight
        self._episode = 0

    def __len__(self) -> int:
        return len(self._seen)

    @contextmanager
    def request(self, session_id: str) -> Generator[Session]:
        """The session that one request belongs to; it counts as seen when the block ends without an error."""
        session = self._resume(session_id)
        session.requests += 1
        try:
            yield session
            self._mark_seen(session)
        finally:
            session.requests -= 1
            if not session.requests:
                self._settle(session)

    def clear(self) -> None:
        """End every session: the next observation of each id starts fresh, without waiting for those in flight."""
        over = list(self._seen.values())
        self._seen.clear()
        self._new.clear()
        self._episode += 1
        for session in over:
            self._settle(session)

    def _resume(self, session_id: str) -> Session:
        if session_id in self._seen:
            self._seen.move_to_end(session_id)
            return self._seen[session_id]
        return self._new.setdefault(session_id, Session(session_id, self._episode))

    def _mark_seen(self, session: Session) -> None:
        if session.episode != self._episode:  # a reset came in between
            return
        self._new.pop(session.id, None)
        self._seen[session.id] = session
        self._seen.move_to_end(session.id)
        session.fresh = False
        if len(self._seen) > self._limit:
            _, oldest = self._seen.popitem(last=False)
            self._settle(oldest)

    def _settle(self, session: Session) -> None:
        """Free the state of a session that is over, unless a request still uses it."""
        if session.requests:
            return
        if self._new.get(session.id) is session:  # none of its requests succeeded
            del self._new[session.id]
        if self._seen.get(session.id) is not session and session.state is not None:
            self._free(session.state)
            session.state = None
