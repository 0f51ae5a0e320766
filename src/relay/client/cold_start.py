"""Connecting to a policy server that may still be starting: which failures pass, how long to wait, what to log."""

from __future__ import annotations

import logging
import random
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Final

from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus

from relay.client.access import DIRECT, Access, ProxyError
from relay.client.connection import HANDSHAKE_TIMEOUT_S, WebSocketConnection, open_websocket
from relay.client.cutoff import Cutoff
from relay.client.direct_route import moved

logger = logging.getLogger("relay.client")

FIRST_DELAY_S: Final = 0.25
LONGEST_DELAY_S: Final = 5.0
PATIENCE_S: Final = 10.0
"""An open connection without metadata is worth a log line after this time."""

TELLING_ATTEMPT_S: Final = 0.1
"""A last attempt that had less time than this fails for want of time, which says nothing about the server."""

_PASSING_STATUS: Final = frozenset({429, 502, 503, 504})
_PASSING_STATUS_AGAIN: Final = _PASSING_STATUS | {404, 500}
"""What fronts answer while what is behind them starts anew; of an address that never served, 404 is a wrong path."""

_PASSING_CLOSE: Final = frozenset({1012, 1013})  # server restarting, server full


def connect_when_ready(
    url: str,
    headers: Mapping[str, str],
    timeout: float | None,
    access: Access = DIRECT,
    waiting: Waiting | None = None,
) -> WebSocketConnection:
    """Connect and read the metadata frame, trying again for as long as the server may just be starting.

    If the server then offers a direct route, and `access` wants it, the connection is one over that.
    Every change of the reason for waiting is logged once.

    Args:
        timeout: seconds to wait in all; None waits as long as the server takes.
        waiting: a patience that has begun already, and has the timeout; None begins one.

    Raises:
        TimeoutError: naming the last reason, after `timeout` seconds.
        websockets.exceptions.InvalidStatus, OSError and others: what waiting does not cure.
        Abandoned: somebody gave up the `waiting` meanwhile.
    """
    waiting = waiting or Waiting(url, timeout, access)
    while True:
        try:
            return moved(_attempt(url, headers, waiting, access), access, waiting.remaining)
        except Exception as error:
            delay = waiting.delay_after(error)
        waiting.sleep(delay)


def connect_once(
    url: str, headers: Mapping[str, str], timeout: float | None, access: Access = DIRECT
) -> WebSocketConnection:
    """Connect and read the metadata frame, without trying again; one log line says so if that takes long.

    If the server then offers a direct route, and `access` wants it, the connection is one over that.

    Args:
        timeout: seconds to wait in all; None waits for the server's answer as long as it takes, and 10 s for TCP.

    Raises:
        websockets.exceptions.InvalidStatus: the server answered with another HTTP status.
        OSError: naming the address, if the server cannot be reached or does not speak WebSocket; `TimeoutError` if it
            did not answer in time.
        websockets.exceptions.ConnectionClosed: the server hung up before its metadata.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    reminder = threading.Timer(PATIENCE_S, logger.warning, ("waiting for %s to be ready", access.name(url)))
    reminder.daemon = True
    reminder.start()
    try:
        connection = _open_once(url, headers, timeout, access)
        try:
            connection.read_greeting(_remaining(deadline))
        except BaseException:
            connection.close()
            raise
        return moved(connection, access, _remaining(deadline))
    except ProxyError:
        raise
    except TimeoutError as error:
        seconds = HANDSHAKE_TIMEOUT_S if timeout is None else timeout
        raise TimeoutError(f"no answer from {access.name(url)} within {seconds:g} s") from error
    finally:
        reminder.cancel()


def _open_once(url: str, headers: Mapping[str, str], timeout: float | None, access: Access) -> WebSocketConnection:
    """`open_websocket`, whose errors then name the address and are `OSError` if the server cannot be reached."""
    try:
        return open_websocket(url, headers, timeout, access)
    except (TimeoutError, ProxyError, ssl.SSLError):
        raise
    except (InvalidMessage, EOFError, ConnectionClosed) as error:
        hint = "" if url.startswith("wss:") else "; with TLS: wss://"
        raise ConnectionError(f"{access.name(url)} did not answer as a WebSocket server does: {error}{hint}") from error
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror or error}: {access.name(url)}") from error


class Waiting:
    """How long to wait for the server at `url`, what for, and what to say about it.

    Args:
        timeout: seconds in all; None for as long as it takes.
        again: there was a connection before, so that a few more failures are worth waiting for.

    Attributes:
        cutoff: ends the attempt that is under way when the waiting is abandoned.
    """

    def __init__(self, url: str, timeout: float | None, access: Access = DIRECT, *, again: bool = False) -> None:
        self._server = access.name(url)
        self._again = again
        self._delays = _delays()
        self._due = 0.0
        self._reported: str | None = None
        self._allowed = 0.0
        self.cutoff = Cutoff()
        self._attempted: WebSocketConnection | None = None
        self.renew(timeout)

    def renew(self, timeout: float | None) -> None:
        """Begin another round of so many seconds; the back-off and what was reported go on."""
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout

    @property
    def remaining(self) -> float | None:
        """Seconds left in all, never less than a millisecond; None without a limit."""
        return _remaining(self._deadline)

    def hold_off(self) -> None:
        """Put the next attempt off, as after one that failed."""
        self._due = time.monotonic() + next(self._delays)

    @property
    def pause(self) -> float:
        """Seconds until the next attempt is due, or until the time is over."""
        pause = max(0.0, self._due - time.monotonic())
        return pause if self.remaining is None else min(pause, self.remaining)

    def check_due(self) -> None:
        """Raise `TimeoutError` if the time is over before the next attempt is due."""
        if self._deadline is not None and self._due > self._deadline:
            raise self.out_of_time()

    def sleep(self, seconds: float) -> None:
        """Wait; raise `Abandoned` if that is in vain."""
        self.cutoff.sleep(seconds)

    def watch(self, connection: WebSocketConnection) -> None:
        """Have `abandon` close a connection that has yet to greet."""
        self._attempted = connection
        if self.cutoff.is_cut:
            connection.close()

    @property
    def abandoned(self) -> bool:
        """Whether it was ended."""
        return self.cutoff.is_cut

    def abandon(self) -> None:
        """End the waiting, from any thread."""
        self.cutoff.cut()
        if self._attempted is not None:
            self._attempted.close()

    def begin_attempt(self) -> float:
        """Seconds for the handshake of the attempt that begins now."""
        self._allowed = min(HANDSHAKE_TIMEOUT_S, self.remaining or HANDSHAKE_TIMEOUT_S)
        return self._allowed

    @property
    def patience(self) -> float:
        """Seconds to wait for the metadata before saying so."""
        remaining = self.remaining
        return PATIENCE_S if remaining is None else min(PATIENCE_S, remaining)

    def delay_after(self, error: Exception) -> float:
        """Seconds until the next attempt after one that failed with `error`.

        Raises:
            Abandoned: the attempt failed because it was ended.
            TimeoutError: naming the reason, if no time is left for another attempt.
            Exception: `error` itself, if waiting does not cure it.
        """
        self.cutoff.check()
        reason = _passing_reason(error, self._again)
        if reason is None:
            raise error
        delay = next(self._delays)
        self._due = time.monotonic() + delay
        if self._deadline is not None and time.monotonic() + delay >= self._deadline:
            if self._allowed < TELLING_ATTEMPT_S and self._reported is not None:
                reason = self._reported
            raise self.out_of_time(reason) from error
        if reason != self._reported:
            logger.warning("waiting for a policy server at %s: %s", self._server, reason)
            self._reported = reason
        return delay

    def out_of_time(self, reason: str | None = None) -> TimeoutError:
        """What to raise when the time is over; without a reason, with the one that was last reported."""
        reason = reason or self._reported or "no answer"
        if self._timeout is None:
            return TimeoutError(f"no policy server at {self._server} in time: {reason}")
        return TimeoutError(f"no policy server at {self._server} within {round(self._timeout, 2):g} s: {reason}")

    def say_connected(self) -> None:
        """Log that the metadata is waited for."""
        logger.warning("connected to %s; waiting for its policy to be ready", self._server)


def _attempt(url: str, headers: Mapping[str, str], waiting: Waiting, access: Access) -> WebSocketConnection:
    connection = open_websocket(url, headers, waiting.begin_attempt(), access, waiting.cutoff)
    try:
        waiting.watch(connection)
        try:
            connection.read_greeting(waiting.patience)
        except TimeoutError:
            waiting.say_connected()
            connection.read_greeting(waiting.remaining)
    except BaseException:
        connection.close()
        raise
    return connection


def _remaining(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.001, deadline - time.monotonic())


def _delays() -> Iterator[float]:
    """Doubling from 0.25 s to 5 s, each shortened at random so that a fleet does not return in step."""
    delay = FIRST_DELAY_S
    while True:
        yield delay * random.uniform(0.5, 1.0)
        delay = min(LONGEST_DELAY_S, 2 * delay)


def _passing_reason(error: Exception, again: bool = False) -> str | None:
    """Why waiting may cure this failure, or None if it will not; `again` if the server was there before."""
    match error:
        case InvalidStatus():
            status = error.response.status_code
            return f"HTTP {status}" if status in (_PASSING_STATUS_AGAIN if again else _PASSING_STATUS) else None
        case ConnectionClosed():
            close = error.rcvd
            if close is None:
                return "the connection was lost"
            return f"closed with {close.code} {close.reason}".rstrip() if close.code in _PASSING_CLOSE else None
        case InvalidMessage() if isinstance(error.__cause__, EOFError):
            return "the connection was closed during the handshake; with TLS: wss://"
        case EOFError():  # how websockets 13 says the same
            return "the connection was closed during the handshake; with TLS: wss://"
        case ssl.SSLEOFError() | ssl.SSLZeroReturnError():
            return "the connection was closed during the TLS handshake; without TLS: ws://"
        case ProxyError() if again and (error.errno is not None or isinstance(error, TimeoutError)):
            return str(error)  # out of reach, as the server behind it may be
        case ssl.SSLError() | ProxyError():  # a certificate or a protocol that does not fit, the proxy asked for
            return None
        case TimeoutError():
            return "no answer"
        case OSError():
            return error.strerror or str(error)
        case _:
            return None
