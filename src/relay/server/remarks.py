"""What was said already on one connection, so that it is said once: notes per session, ignored keys per connection."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence

from relay.engine.base import Note
from relay.protocol.limits import MAX_SESSIONS_PER_CONNECTION
from relay.server.sessions import Session

MAX_REMARKS = 64
"""Different notes of one session, and ignored keys of one connection, that are kept apart; later ones are dropped."""

logger = logging.getLogger(__name__)


class Remarks:
    """The memory of one connection for what its client was told."""

    def __init__(self) -> None:
        self._told: OrderedDict[tuple[str, int], set[str]] = OrderedDict()
        self._ignored: set[str] = set()

    def fresh(self, session: Session, notes: Sequence[Note]) -> tuple[str, ...]:
        """The notes this session has not been told yet."""
        if not notes:
            return ()
        told = self._told.setdefault((session.id, session.episode), set())
        self._told.move_to_end((session.id, session.episode))
        if len(self._told) > MAX_SESSIONS_PER_CONNECTION:
            self._told.popitem(last=False)
        fresh: dict[str, str] = {}
        for note in notes:
            about = note.about or note.text
            if about not in told and len(told) + len(fresh) < MAX_REMARKS:
                fresh.setdefault(about, note.text)
        told.update(fresh)
        return tuple(fresh.values())

    def log_ignored(self, keys: Sequence[str], peer: str) -> None:
        """One line for keys that the policy does not know."""
        fresh = [key for key in keys if key not in self._ignored][: MAX_REMARKS - len(self._ignored)]
        if fresh:
            self._ignored.update(fresh)
            shown = ", ".join(repr(key[:64]) for key in fresh)
            logger.info("%s sends keys that this policy ignores: %s", peer, shown)
