"""One WebSocket to a policy server: open it, read the first frame, exchange messages, notice when the peer is gone.

Moves bytes and text. Knows no observation, no codec and no MessagePack, and does not try again: `cold_start` does.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, NoReturn, Protocol, cast

from websockets.exceptions import ConnectionClosed, InvalidStatus, InvalidURI, SecurityError
from websockets.http11 import Response
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from relay.client.access import DIRECT, Access, Proxy, address_of, explained, shown
from relay.client.cutoff import Cutoff
from relay.client.dialing import dialled
from relay.client.tls_socket import TurnTakingSocket
from relay.protocol.limits import (
    CLOSE_TIMEOUT_S,
    MAX_MESSAGE_BYTES,
    PING_INTERVAL_S,
    PING_TIMEOUT_S,
    SUBPROTOCOL,
)
from relay.protocol.wording import clipped

logger = logging.getLogger("relay.client")

HANDSHAKE_TIMEOUT_S: Final = 10.0
"""TCP, TLS and upgrade of one attempt, as every `websockets` client; waiting for the first frame has no such limit."""

WATCH_PERIOD_S: Final = 1.0
"""How often a connection looks for an overdue pong or an upload that has stopped."""

MAX_REDIRECTS: Final = 5

MAX_UNASKED: Final = 16
"""Messages that answer no request, in the life of a connection; no server has a reason to send any."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """What the server said on connecting.

    Attributes:
        url: the address really connected to, after redirects.
        relay: the server selected the `relay.v1` subprotocol.
        headers: of its handshake response, with lower-case names.
        first_frame: the metadata as it came: bytes, or the text of a refusal.
        direct: the address is the server's own, which it offered over another.
    """

    url: str
    relay: bool
    headers: Mapping[str, str] = field(repr=False)
    first_frame: bytes | str = field(repr=False)
    direct: bool = False


class Connection(Protocol):
    """What a policy needs of its transport."""

    @property
    def greeting(self) -> Greeting: ...

    @property
    def late_replies(self) -> int:
        """Replies that came after their request had timed out, and were dropped."""
        ...

    @property
    def unsent(self) -> bool:
        """Whether the last request ended before its message had gone out whole, so that nobody can have read it."""
        ...

    def request(self, message: bytes, timeout: float | None) -> bytes | str:
        """Send one message and return the reply to it, never the reply to an earlier one.

        Raises:
            TimeoutError: no reply within `timeout` seconds. The connection stays usable, unless not even the message
                could be sent: part of it is then on the wire, where nothing can follow.
            websockets.exceptions.ConnectionClosed: the connection is closed.
        """
        ...

    def close(self) -> None: ...


class WebSocketConnection:
    """A `Connection` over the network, for one thread at a time; `close` may come from any thread."""

    def __init__(self, websocket: ClientConnection, url: str, *, direct: bool = False) -> None:
        self._websocket = websocket
        self._url = url
        self._direct = direct
        # `websockets` 17 wants its connections used as context managers; 13 to 16 allow it.
        self._open = ExitStack()
        self._open.enter_context(websocket)
        self._relay = websocket.subprotocol == SUBPROTOCOL
        if self._relay:
            limit_standstill(websocket.socket)
        self._greeting: Greeting | None = None
        self._owed = 1  # replies that the server still owes us; the first frame is the first
        self._late = 0
        self._unasked = 0
        self._sending = False
        self._unsent = False
        self._send_deadline: float | None = None
        self._heard = monotonic()
        self._why_cut: Exception | None = None
        self._in_doubt = False
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="relay-watch", daemon=True).start()

    def read_greeting(self, timeout: float | None) -> None:
        """Wait for the first frame, which a server may hold back until its model is loaded.

        Raises:
            TimeoutError: not yet; call again to go on waiting.
            websockets.exceptions.ConnectionClosed: the server hung up first.
        """
        first_frame = self._receive(timeout)
        self._owed -= 1
        headers = response_headers(self._websocket.response)
        self._greeting = Greeting(self._url, self._relay, headers, first_frame, self._direct)

    @property
    def greeting(self) -> Greeting:
        assert self._greeting is not None, "read_greeting() comes first"
        return self._greeting

    @property
    def peer_address(self) -> str:
        """The IP address at the other end."""
        return str(self._websocket.socket.getpeername()[0])

    @property
    def late_replies(self) -> int:
        return self._late

    @property
    def unsent(self) -> bool:
        return self._unsent

    def request(self, message: bytes, timeout: float | None) -> bytes | str:
        self._unsent = True
        if self._in_doubt:
            self._cut(ConnectionAbortedError("an earlier call was interrupted, and its reply may be lost or half read"))
            self._raise_closed()
        self._in_doubt = True  # and so it stays if Ctrl-C, which may strike anywhere, ends this call
        try:
            reply = self._request(message, timeout)
        except (TimeoutError, ConnectionClosed):
            self._in_doubt = False
            raise
        self._in_doubt = False
        return reply

    def _request(self, message: bytes, timeout: float | None) -> bytes | str:
        deadline = None if timeout is None else monotonic() + timeout
        self._drop_unasked()
        try:
            self._send(message, deadline)
        except ConnectionClosed as error:
            if deadline is None or monotonic() < deadline:
                raise
            raise TimeoutError(
                f"the request could not be sent to {shown(self._url)} within {timeout:g} s; "
                "the connection is closed, since part of it is on the way"
            ) from error
        self._unsent = False
        while True:
            try:
                reply = self._receive(None if deadline is None else deadline - monotonic())
            except TimeoutError:
                raise TimeoutError(
                    f"no reply from {shown(self._url)} within {timeout:g} s; it is dropped if it still comes"
                ) from None
            self._owed -= 1
            if self._owed == 0:
                return reply
            self._late += 1
            said = f": {clipped(reply)}" if isinstance(reply, str) else ""
            logger.warning("dropped a reply that came after its request had timed out%s", said)

    def _drop_unasked(self) -> None:
        """Throw away what came though nothing is owed: taken for a reply, it would put every later one off by one."""
        while self._owed == 0:
            try:
                self._receive(0)
            except TimeoutError:
                return
            logger.warning("dropped a message that %s sent without being asked", shown(self._url))
            self._unasked += 1
            if self._unasked > MAX_UNASKED:
                return self._cut(unasked(self._url))

    def close(self) -> None:
        self._closed.set()
        if self._sending:
            self._cut(None)  # the closing handshake would wait behind the message
        # A server that sends pings and reads no pongs blocks the library's thread, which holds what closing waits for.
        patience = threading.Timer(2 * CLOSE_TIMEOUT_S, self._cut, (None,))
        patience.daemon = True
        patience.start()
        try:
            self._open.close()
        finally:
            patience.cancel()

    def _raise_closed(self) -> NoReturn:
        self._send(b"", None)
        raise AssertionError("nothing can be sent over a connection that was cut")

    def _send(self, message: bytes, deadline: float | None) -> None:
        self._owed += 1
        self._send_deadline = deadline
        try:
            self._sending = True
            self._websocket.send(message)
        except ConnectionClosed as error:
            raise error from (self._why_cut or error.__cause__)
        except BaseException:
            # Part of the message may be on the wire, so that nothing can follow it.
            self._cut(None)
            raise
        finally:
            self._sending = False

    def _receive(self, timeout: float | None) -> bytes | str:
        try:
            message = self._websocket.recv(None if timeout is None else max(0.0, timeout))
        except ConnectionClosed as error:
            raise error from (self._why_cut or error.__cause__)
        self._heard = monotonic()
        return message

    def _watch(self) -> None:
        """Ping the peer; cut the connection when it is silent or when an upload outlives its request's timeout.

        The library's own keepalive cannot be used: releases 13 and 14 have none, and the later ones would cut off a
        stock server, which answers no ping while it infers (openpi: src/openpi/serving/websocket_policy_server.py).
        """
        next_ping = self._heard + PING_INTERVAL_S
        asked = 0.0
        pong: threading.Event | None = None
        while not self._closed.wait(WATCH_PERIOD_S):
            now = monotonic()
            if self._sending:  # a ping would only wait behind the message
                if self._send_deadline is not None and now > self._send_deadline:
                    return self._cut(TimeoutError("a request could not be sent within its timeout"))
            elif pong is not None and not pong.is_set():
                may_be_busy = not self._relay and self._owed > 0
                if not may_be_busy and now - max(asked, self._heard) > PING_TIMEOUT_S:
                    return self._cut(TimeoutError(f"the server has answered no ping for {PING_TIMEOUT_S:g} s"))
            elif now >= next_ping:
                try:
                    pong = self._websocket.ping()
                except ConnectionClosed:
                    return None
                asked, next_ping = now, now + PING_INTERVAL_S
        return None

    def _cut(self, why: Exception | None) -> None:
        """End the TCP connection at once; whoever sends or receives gets `ConnectionClosed`, caused by `why`."""
        self._why_cut = why
        with suppress(OSError):  # already closed
            # Not the SSL socket's own method, which would take the TLS state from under the sending thread.
            socket.socket.shutdown(self._websocket.socket, socket.SHUT_RDWR)


def open_websocket(
    url: str,
    headers: Mapping[str, str],
    timeout: float | None,
    access: Access = DIRECT,
    cutoff: Cutoff | None = None,
) -> WebSocketConnection:
    """Connect once, following redirects; a redirect to another origin takes none of the caller's headers along.

    Args:
        timeout: seconds for TCP, TLS and upgrade together, redirects included. None waits for the answer to the
            upgrade as long as it takes: a proxy may hold it back until a server has started.
        cutoff: with it another thread may end this; whatever was going on then fails.

    Raises:
        websockets.exceptions.InvalidURI: not a ws:// or wss:// URL.
        websockets.exceptions.InvalidStatus: the server answered the upgrade with another HTTP status.
        ssl.SSLCertVerificationError: the server's certificate is not to be trusted.
        OSError: no connection; `TimeoutError` after `timeout` seconds, `ProxyError` if it is the proxy that fails.
    """
    cutoff = cutoff or Cutoff()
    deadline = None if timeout is None else monotonic() + timeout
    for _ in range(MAX_REDIRECTS + 1):
        try:
            return WebSocketConnection(_upgrade(url, headers, deadline, access, cutoff), url)
        except Exception as error:
            url, headers = redirected(url, headers, error)
    raise too_many_redirects(url)


def redirected(url: str, headers: Mapping[str, str], error: Exception) -> tuple[str, Mapping[str, str]]:
    """Where a failed upgrade sends the caller, and the headers to take along; raises `error` if it is no redirect."""
    target = _redirect_target(url, error)
    if target is None:
        raise error
    # To another origin `websockets` would keep all but three names, so that an X-API-Key would reach a stranger.
    return target, headers if _origin(target) == _origin(url) else {}


def unasked(url: str) -> ConnectionError:
    """Why a connection is cut whose server goes on sending what nobody waits for."""
    return ConnectionError(f"{shown(url)} has sent more than {MAX_UNASKED} messages without being asked")


def too_many_redirects(url: str) -> SecurityError:
    return SecurityError(f"more than {MAX_REDIRECTS} redirects, the last to {shown(url)}")


def upgrade_options(url: str, headers: Mapping[str, str], access: Access) -> dict[str, Any]:
    """What both of `websockets`' clients are told, besides URL, socket and time."""
    trust = {"ssl": access.tls} if access.tls is not None and address_of(url).secure else {}
    return {
        **trust,
        "subprotocols": [Subprotocol(SUBPROTOCOL)],
        "compression": None,
        "additional_headers": dict(headers),
        "ping_interval": None,
        "close_timeout": CLOSE_TIMEOUT_S,
        "max_size": MAX_MESSAGE_BYTES,
    }


def response_headers(response: Response | None) -> dict[str, str]:
    """The headers of a handshake's response, with lower-case names."""
    return {name.lower(): value for name, value in response.headers.raw_items()} if response else {}


def limit_standstill(sock: socket.socket) -> None:
    """End the connection if an upload stands still for as long as a pong may take.

    A link that dies in the middle of an upload leaves no pong to wait for. Not for a stock server: while it infers, it
    takes in no more than its socket holds.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        with suppress(OSError):  # closed already: the server had only a word to say, and the reader tells which
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * PING_TIMEOUT_S))


def _upgrade(
    url: str, headers: Mapping[str, str], deadline: float | None, access: Access, cutoff: Cutoff
) -> ClientConnection:
    address = address_of(url)
    sock = _connected_socket(address.host, address.port, deadline, access.proxy, cutoff)
    with cutoff.guarding(sock):
        return upgrade(sock, url, headers, deadline, access)


def upgrade(
    sock: socket.socket, url: str, headers: Mapping[str, str], deadline: float | None, access: Access
) -> ClientConnection:
    """TLS and the opening handshake on a socket of our own, which is closed if they fail.

    With a socket given, every release from 13 to 17 leaves environment proxies alone and follows no redirect.
    """
    address = address_of(url)
    try:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        options = upgrade_options(url, headers, access)
        if address.secure:
            options["ssl"] = options.get("ssl") or ssl.create_default_context()
            if not issubclass(options["ssl"].sslsocket_class, TurnTakingSocket):
                options["ssl"].sslsocket_class = TurnTakingSocket
        return cast("ClientConnection", connect(url, sock=sock, open_timeout=remaining(deadline), **options))
    except BaseException as error:
        sock.close()
        if isinstance(error, ssl.SSLError):
            raise explained(url, error) from error
        raise


def _connected_socket(
    host: str, port: int, deadline: float | None, proxy: Proxy | None, cutoff: Cutoff
) -> socket.socket:
    """A socket that leads to the server, directly or through the proxy."""
    until = monotonic() + HANDSHAKE_TIMEOUT_S
    if proxy is None:
        return dialled(host, port, until if deadline is None else deadline, cutoff)
    until = until if deadline is None else min(until, deadline)
    with proxy.named_in_errors():
        sock = dialled(proxy.host, proxy.port, until, cutoff)
    try:
        with cutoff.guarding(sock), proxy.named_in_errors():
            sock.sendall(proxy.request(host, port))
            answer = b""
            while proxy.awaits_more(answer):
                sock.settimeout(remaining(until))
                answer += sock.recv(1) or proxy.hung_up()
        proxy.check(answer)
        return sock
    except BaseException:
        sock.close()
        raise


def remaining(deadline: float | None) -> float | None:
    """Seconds until a deadline of `time.monotonic()`; raises `TimeoutError` when it has passed."""
    if deadline is None:
        return None
    seconds = deadline - monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out while opening the connection")
    return seconds


def _redirect_target(url: str, error: BaseException) -> str | None:
    """Where an HTTP redirect leads, or None if the error is no redirect."""
    # Release 17 wraps the status it may not follow with our socket; the others raise it as it is.
    for status in (error, error.__cause__, error.__context__):
        if isinstance(status, InvalidStatus) and status.response.status_code in (301, 302, 303, 307, 308):
            location = status.response.headers.get("Location")
            if location is None:
                return None
            target = _joined(url, location)
            if address_of(url).secure and not address_of(target).secure:
                raise SecurityError(f"refused a redirect from wss to {shown(target)}") from status
            return target
    return None


def _joined(url: str, location: str) -> str:
    try:
        scheme, colon, rest = urllib.parse.urljoin(url, location).partition(":")
    except ValueError as error:
        raise InvalidURI(location, str(error)) from None
    scheme = scheme.lower()
    return {"http": "ws", "https": "wss"}.get(scheme, scheme) + colon + rest


def _origin(url: str) -> tuple[bool, str, int]:
    address = address_of(url)
    return address.secure, address.host, address.port
