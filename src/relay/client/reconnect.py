"""What becomes of a lost connection: it is made again, and requests are repeated as far as that is asked for.

Decides and counts for all clients; makes the blocking ones' connections again. Knows neither observations nor bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Final, Literal, TypeAlias, cast

from websockets.exceptions import ConnectionClosed

from relay.client.access import Access
from relay.client.cold_start import Waiting, connect_when_ready
from relay.client.connection import Connection
from relay.client.peer import Peer
from relay.protocol import msgpack_numpy
from relay.protocol.wording import clipped
from relay.protocol.wording import shown as worded

logger = logging.getLogger("relay.client")

Reconnect: TypeAlias = bool | Literal["always"]
"""False raises `ConnectionClosed`. True connects again and repeats requests that have not run; "always" repeats all."""

MOST_LOSSES: Final = 5
"""How many connections one request may lose: one that ends each of them fares no better on the next."""

POLICY_KEYS: Final = (
    "model",
    "cameras",
    "state_dim",
    "action_horizon",
    "action_dim",
    "action_keys",
    "action_space",
    "embodiment_tag",
    "image_resolution",
    "needs_session_id",
    "robot",
)
"""What of the metadata a running program relies on: actions of another policy would fit in shape at best."""

_NOT_TAKEN: Final = frozenset({1000, 1012, 1013})
"""Closed for want of messages, for a restart, or for being full: servers answer first what they have taken."""

_OBJECTIONS: Final = frozenset({1002, 1003, 1007, 1008, 1009, 1010})
"""Closed for what was sent, which would be sent again."""


@dataclass(slots=True)
class Dispatch:
    """How far a message has got.

    Attributes:
        begun: part of it may be on the wire.
        complete: all of it may be; if not, nobody can have read it.
    """

    begun: bool = False
    complete: bool = False


class Call:
    """The time of one call, over all connections that it takes."""

    def __init__(self, timeout: float | None) -> None:
        self.losses = 0
        self._began = perf_counter()
        self._timeout = timeout
        self._deadline = None if timeout is None else monotonic() + timeout
        self._crossed = False

    @property
    def remaining(self) -> float | None:
        """Seconds left, never less than a millisecond; before any gap all that the caller gave."""
        if self._deadline is None or not self._crossed:
            return self._timeout
        return max(0.001, self._deadline - monotonic())

    @property
    def began(self) -> float | None:
        """When the observation was given, by `time.perf_counter()`; None if that was just now."""
        return self._began if self._crossed else None

    def cross_gap(self) -> None:
        """From now on the time counts that connecting takes."""
        self._crossed = True

    def overdue(self, error: TimeoutError) -> TimeoutError:
        """What to raise when the time is over: the error itself, or one that tells the whole story."""
        if not self._crossed or self._timeout is None:
            return error
        return TimeoutError(f"no reply within {self._timeout:g} s, connecting again included: {error}")


class Gaps:
    """The gaps in a client's connection: whether to bridge them, how long to wait, and how many there were.

    Args:
        reconnect: True, or "always" to repeat also requests that may have run.
        url, headers, access: the way to the server, from its beginning.
        connect_timeout: seconds for connecting in each call; None for as long as it takes.
    """

    def __init__(
        self,
        reconnect: Reconnect,
        url: str,
        headers: Mapping[str, str],
        access: Access,
        connect_timeout: float | None,
    ) -> None:
        self.url: Final = url
        self.headers: Final = headers
        self.access: Final = access
        self.connect_timeout: Final = connect_timeout
        self.bridged = 0
        self.loss: ConnectionClosed | None = None
        self._always = reconnect == "always"
        self._waiting: Waiting | None = None
        self._began = 0.0

    @property
    def waiting(self) -> Waiting:
        """The patience of this gap, and of those that followed one another without a reply in between."""
        if self._waiting is None:
            self._waiting = Waiting(self.url, None, self.access, again=True)
        return self._waiting

    def open(self, loss: ConnectionClosed) -> None:
        """Note that the connection is lost."""
        if self.loss is None:
            self.loss, self._began = loss, monotonic()
            if self._waiting is not None:
                self._waiting.hold_off()

    def close(self, server: str) -> None:
        """Note, count and log that there is a connection again."""
        assert self.loss is not None, "open() comes first"
        self.bridged += 1
        seconds = monotonic() - self._began
        logger.warning("connected to %s again after %.1f s: %s; sessions start fresh", server, seconds, self.loss)
        self.loss = None

    def settle(self) -> None:
        """Note that a reply came: the next gap begins with no delay."""
        self._waiting = None

    def check_repeatable(self, loss: ConnectionClosed, call: Call, unsent: bool) -> None:
        """Raise `loss` if the request that met it is not to be sent again.

        Args:
            unsent: the message had not gone out whole, so that it cannot have been read.
        """
        call.losses += 1
        code = None if loss.rcvd is None else loss.rcvd.code
        if code in _OBJECTIONS:  # unless to an earlier request, of which the connection was closed already
            repeatable = unsent and call.losses == 1
        else:
            not_taken = code in _NOT_TAKEN and loss.rcvd_then_sent is not False
            repeatable = unsent or not_taken or self._always
        if not repeatable or call.losses > MOST_LOSSES:
            raise loss

    def lost_time(self, call: Call, error: TimeoutError) -> TimeoutError:
        """What to raise when there is no connection in time."""
        return call.overdue(TimeoutError(f"{error}; the connection was lost: {self.loss}"))

    def round_seconds(self, call: Call) -> float | None:
        """How long a call may take to connect again."""
        limits = [limit for limit in (self.connect_timeout, call.remaining) if limit is not None]
        return min(limits, default=None)


def bridge(gaps: Gaps, call: Call) -> Connection:
    """Make a blocking client's connection again, and wait for that as long as the call may take.

    Raises:
        TimeoutError: there was not enough time.
        websockets.exceptions.ConnectionClosed: the client was closed meanwhile.
        websockets.exceptions.InvalidStatus, OSError and others: what waiting does not cure.
    """
    assert gaps.loss is not None, "nothing is lost"
    call.cross_gap()
    waiting = gaps.waiting
    waiting.renew(gaps.round_seconds(call))
    try:
        waiting.sleep(waiting.pause)
        waiting.check_due()
        return connect_when_ready(gaps.url, gaps.headers, waiting.remaining, gaps.access, waiting)
    except Exception as error:
        if waiting.abandoned:
            raise gaps.loss from None
        if isinstance(error, TimeoutError):
            raise gaps.lost_time(call, error) from error
        raise


def check_same_policy(before: Peer, after: Peer, server: str) -> None:
    """Refuse a server that has another policy than it had.

    Raises:
        RuntimeError: naming what differs.
    """
    for key in POLICY_KEYS:
        was, now = before.metadata.get(key), after.metadata.get(key)
        if msgpack_numpy.pack({"": was}) != msgpack_numpy.pack({"": now}):
            raise RuntimeError(
                f"{server} has another policy since the connection was lost: {key} was {_told(was)}, now it is "
                f"{_told(now)}; if that is meant, open a new client"
            )


def _told(value: object) -> str:
    return clipped(ascii(cast(object, value)), 200) if isinstance(value, (list, dict)) else worded(value)


def check_reconnect(reconnect: object) -> None:
    """Raise `ValueError` for what is neither of the three."""
    if not isinstance(reconnect, bool) and reconnect != "always":
        raise ValueError(f"reconnect must be True, False or 'always', got {reconnect!r}")
