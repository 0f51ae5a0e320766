"""The sessions of one connection: which ids continue and which start fresh. Keeps no model state."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from relay.protocol.limits import MAX_SESSIONS_PER_CONNECTION


@dataclass(frozen=True, slots=True)
class Session:
    """One episode of one robot, as one request found it.

    Attributes:
        id: the caller's name for it; it means nothing outside its connection.
        fresh: none of its requests had succeeded, so the policy starts without memory.
        episode: how many resets the connection had seen.
    """

    id: str
    fresh: bool
    episode: int


class SessionTable:
    """The ids of one connection that have had a successful reply, at most `limit`, the most recently used.

    An id counts as seen only after success: a refused first observation must not use up the fresh start.
    """

    def __init__(self, limit: int = MAX_SESSIONS_PER_CONNECTION) -> None:
        self._limit = limit
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._episode = 0

    def __len__(self) -> int:
        return len(self._seen)

    def resume(self, session_id: str) -> Session:
        """The session that a request of this id belongs to."""
        fresh = session_id not in self._seen
        if not fresh:
            self._seen.move_to_end(session_id)
        return Session(session_id, fresh, self._episode)

    def mark_seen(self, session: Session) -> None:
        """Note that a request of this session succeeded; without effect if a reset came in between."""
        if session.episode != self._episode:
            return
        self._seen[session.id] = None
        self._seen.move_to_end(session.id)
        if len(self._seen) > self._limit:
            self._seen.popitem(last=False)

    def clear(self) -> None:
        """Forget every session: the next observation of each id starts fresh."""
        self._seen.clear()
        self._episode += 1
