"""What was said already on one connection, so that it is said once: notes per session, ignored keys per connection."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from difflib import get_close_matches
from functools import lru_cache

from relay.engine.base import Note
from relay.protocol.limits import MAX_SESSIONS_PER_CONNECTION
from relay.protocol.options import OPTION_KEYS
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


def misspelt_options(ignored: Sequence[str]) -> tuple[Note, ...]:
    """A note for each key that no policy knows and that is nearly an option, which would otherwise never be missed."""
    return tuple(
        Note(f"{key!r} is not known; did you mean {meant!r}?") for key in ignored if (meant := _meant(key)) is not None
    )


_SPELLINGS = {
    **{option: option for option in OPTION_KEYS if len(option) > len("seed")},  # a robot may well have a speed
    "adapter": "adapter_dir",
    "deadline": "deadline_ms",
    "steps": "num_steps",
}
"""What a key is compared with, and the option that is meant by it."""

_NEAR = 0.8
_LONGEST = 32


@lru_cache(maxsize=256)
def _meant(key: str) -> str | None:
    if len(key) > _LONGEST or key in OPTION_KEYS:
        return None
    near = get_close_matches(key.lower(), _SPELLINGS, n=1, cutoff=_NEAR)
    return _SPELLINGS[near[0]] if near else None
