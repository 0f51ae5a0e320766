"""What a session remembers between its requests, and which sessions keep their keys and values on the device.

A session is an episode, a few megabytes that say everything, and the gigabytes that are computed from it. Those of the
sessions used longest ago make room for the one that runs; they are computed again when that session's turn comes.
Used in the device thread only, but for the making of sessions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from relay.models.dreamzero.frames import RecentFrames
from relay.models.dreamzero.memory import Episode, SessionMemory


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of a session but what can be computed again; nothing of it is on the device.

    Attributes:
        episode: None before the first answer.
        recent: the newest pictures, for clients that send them one by one.
    """

    episode: Episode | None = None
    recent: RecentFrames = field(default_factory=RecentFrames)


class DreamZeroSession:
    """One robot's episode.

    Attributes:
        memory: what the network remembers.
        recent: the newest pictures.
    """

    def __init__(self) -> None:
        self.memory = SessionMemory()
        self.recent = RecentFrames()

    @property
    def nbytes(self) -> int:
        """What it holds, on the device and beside it."""
        return self.memory.nbytes + self.recent.nbytes

    @property
    def resident_bytes(self) -> int:
        """What it would give up if it were set aside; 0 if it is."""
        return self.memory.keys.nbytes if self.memory.keys else 0

    def remember(self, episode: Episode, pictures: NDArray[np.uint8]) -> None:
        """Take over what an answered request leaves behind.

        Args:
            pictures: all that came with it, (T, height, width, 3).
        """
        self.memory.episode = episode
        self.recent = self.recent.followed_by(pictures)

    def evict(self) -> Snapshot:
        """Give up the keys and values; the session goes on as if it hadn't."""
        return Snapshot(self.memory.evict(), self.recent)

    def restore(self, snapshot: Snapshot) -> None:
        """Be what `evict` returned, in this session or another."""
        self.memory.restore(snapshot.episode)
        self.recent = snapshot.recent


class Residents:
    """The sessions whose keys and values are on the device, within a limit.

    Args:
        session_bytes: what a session takes there.
        limit: most bytes that all of them may take; None for as many as the device holds.
    """

    def __init__(self, session_bytes: int, limit: int | None = None) -> None:
        self.session_bytes, self.limit = session_bytes, limit
        self._held: dict[DreamZeroSession, None] = {}  # in the order of their last use

    def __len__(self) -> int:
        return len(self._held)

    @property
    def most(self) -> int | None:
        """How many there may be; None for as many as the device holds."""
        return None if self.limit is None else self.limit // self.session_bytes

    @property
    def nbytes(self) -> int:
        """What they take on the device."""
        return sum(session.resident_bytes for session in self._held)

    def admit(self, session: DreamZeroSession) -> None:
        """Make room for a session that is about to run, which may always take what it needs."""
        self.forget(session)
        room = None if self.limit is None else self.limit - max(self.session_bytes, session.resident_bytes)
        while room is not None and self._held and self.nbytes > room:
            self._evict_oldest()
        self._held[session] = None

    def forget(self, session: DreamZeroSession) -> None:
        """The session is over."""
        self._held.pop(session, None)

    def evict_all_but(self, session: DreamZeroSession) -> int:
        """Set all others aside, and tell how many that were."""
        self.forget(session)
        count = len(self._held)
        while self._held:
            self._evict_oldest()
        self._held[session] = None
        return count

    def _evict_oldest(self) -> None:
        oldest = next(iter(self._held))
        oldest.evict()
        del self._held[oldest]
