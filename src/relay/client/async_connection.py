"""The asyncio twin of `connection` and `cold_start`: the same rules, over `websockets`' asyncio client.

Its own module, so that programs that never ask for it never load asyncio.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from time import monotonic
from typing import Final, NoReturn, TypeVar

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from relay.client.access import DIRECT, Access, Proxy, address_of, explained, shown
from relay.client.cold_start import Waiting
from relay.client.connection import (
    HANDSHAKE_TIMEOUT_S,
    MAX_REDIRECTS,
    MAX_UNASKED,
    WATCH_PERIOD_S,
    Greeting,
    limit_standstill,
    redirected,
    remaining,
    response_headers,
    too_many_redirects,
    unasked,
    upgrade_options,
)
from relay.client.reconnect import Dispatch
from relay.protocol.limits import MAX_OUTSTANDING_REQUESTS, PING_INTERVAL_S, PING_TIMEOUT_S, SUBPROTOCOL
from relay.protocol.wording import clipped

logger = logging.getLogger("relay.client")

MAX_UNREAD_PONG_BYTES: Final = 1024 * 1024

T = TypeVar("T")


async def connect_when_ready(
    url: str,
    headers: Mapping[str, str],
    timeout: float | None,
    access: Access = DIRECT,
    waiting: Waiting | None = None,
) -> AsyncWebSocketConnection:
    """Connect and read the metadata frame, trying again for as long as the server may just be starting.

    If the server then offers a direct route, and `access` wants it, the connection is one over that.

    Raises:
        TimeoutError: naming the last reason, after `timeout` seconds.
        websockets.exceptions.InvalidStatus, OSError and others: what waiting does not cure.
    """
    from relay.client.async_direct_route import moved  # which opens connections of the class below

    waiting = waiting or Waiting(url, timeout, access)
    while True:
        try:
            return await moved(await _attempt(url, headers, waiting, access), access, waiting.remaining)
        except Exception as error:
            delay = waiting.delay_after(error)
        await asyncio.sleep(delay)


class AsyncWebSocketConnection:
    """A connection for any number of tasks of one event loop: servers answer in the order of the requests."""

    def __init__(self, websocket: ClientConnection, url: str, *, direct: bool = False) -> None:
        self._websocket = websocket
        self._url = url
        self._direct = direct
        self._relay = websocket.subprotocol == SUBPROTOCOL
        if self._relay:
            limit_standstill(websocket.transport.get_extra_info("socket"))
        self._greeting: Greeting | None = None
        # Whoever waits for a reply, in the order of the requests; None says that none will come. A cancelled one stays
        # until its reply is there, and is then dropped with it.
        self._replies: deque[asyncio.Future[bytes | str | None]] = deque()
        self._slots = asyncio.Semaphore(MAX_OUTSTANDING_REQUESTS)  # beyond these, our server stops reading
        self._sending: set[asyncio.Task[None]] = set()
        self._late = 0
        self._unasked = 0
        self._lost = False
        self._heard = monotonic()
        self._why_cut: Exception | None = None
        self._reading: asyncio.Task[None] | None = None
        self._sending_bytes = 0
        self._watching = asyncio.create_task(self._watch())
        self._guarding = asyncio.create_task(self._bound_pongs())

    async def read_greeting(self, timeout: float | None) -> None:
        """Wait for the first frame, which a server may hold back until its model is loaded.

        Raises:
            TimeoutError: not yet; call again to go on waiting.
            websockets.exceptions.ConnectionClosed: the server hung up first.
        """
        first_frame = await within(timeout, self._receive())
        headers = response_headers(self._websocket.response)
        self._greeting = Greeting(self._url, self._relay, headers, first_frame, self._direct)
        self._reading = asyncio.create_task(self._read_replies())

    @property
    def greeting(self) -> Greeting:
        assert self._greeting is not None, "read_greeting() comes first"
        return self._greeting

    @property
    def peer_address(self) -> str:
        """The IP address at the other end."""
        return str(self._websocket.transport.get_extra_info("peername")[0])

    @property
    def late_replies(self) -> int:
        """Replies that came when nobody waited for them any more, and were dropped."""
        return self._late

    async def request(self, message: bytes, timeout: float | None, dispatch: Dispatch) -> bytes | str:
        """Send one message and return the reply to it; may be cancelled like anything else.

        `dispatch` tells how far the message has got, whatever then becomes of the call.

        Raises:
            TimeoutError: no reply within `timeout` seconds; the connection stays usable.
            websockets.exceptions.ConnectionClosed: the connection is closed.
        """
        try:
            return await within(timeout, self._request(message, dispatch))
        except TimeoutError:
            raise TimeoutError(
                f"no reply from {shown(self._url)} within {timeout:g} s; it is dropped if it still comes"
            ) from None

    async def close(self) -> None:
        """Close the connection; whoever waits for a reply gets `ConnectionClosed`."""
        self._watching.cancel()
        if self._sending:
            self._cut(None)  # the closing handshake would wait behind the messages
        try:
            await self._websocket.close()
        except asyncio.CancelledError:
            self._cut(None)  # the program ends: nobody would be left to close the socket
            raise
        finally:
            self._guarding.cancel()
        if self._reading is not None:
            await asyncio.wait((self._reading,))

    async def _request(self, message: bytes, dispatch: Dispatch) -> bytes | str:
        await self._slots.acquire()  # given back when the reply comes, whether or not somebody still waits for it
        if self._lost:
            self._slots.release()
            await self._raise_closed()
        reply: asyncio.Future[bytes | str | None] = asyncio.get_running_loop().create_future()
        self._replies.append(reply)
        # A task of its own goes on sending when this one is cancelled: part of the message may be on the wire.
        sending = asyncio.create_task(self._send(message, dispatch))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        dispatch.begun = True
        answer = await reply
        if answer is None:
            await asyncio.wait({sending})  # only then is it known whether it went out
            await self._raise_closed()
        return answer

    async def _send(self, message: bytes, dispatch: Dispatch) -> None:
        self._sending_bytes += len(message)
        try:
            with suppress(ConnectionClosed):  # `_read_replies` tells whoever waits
                await self._websocket.send(message)
                dispatch.complete = True
        finally:
            self._sending_bytes -= len(message)

    async def _read_replies(self) -> None:
        try:
            while True:
                message = await self._receive()
                if self._unasked > MAX_UNASKED:  # cut off; this was on its way already
                    continue
                if not self._replies:
                    logger.warning("dropped a message that answers no request")
                    self._unasked += 1
                    if self._unasked > MAX_UNASKED:
                        self._cut(unasked(self._url))
                    continue
                self._slots.release()
                reply = self._replies.popleft()
                if not reply.done():
                    reply.set_result(message)
                    continue
                self._late += 1
                said = f": {clipped(message)}" if isinstance(message, str) else ""
                logger.warning("dropped a reply that came after its request had been given up%s", said)
        except (ConnectionClosed, AssertionError):
            pass  # the second is the library's own, where it cut off a message of too many fragments
        finally:
            self._lost = True
            for reply in self._replies:
                self._slots.release()
                if not reply.done():
                    reply.set_result(None)

    async def _receive(self) -> bytes | str:
        try:
            message = await self._websocket.recv()
        except ConnectionClosed as error:
            raise error from (self._why_cut or error.__cause__)
        self._heard = monotonic()
        return message

    async def _raise_closed(self) -> NoReturn:
        await self._websocket.wait_closed()
        error = self._websocket.protocol.close_exc
        raise error from (self._why_cut or error.__cause__)

    async def _watch(self) -> None:
        """Ping the peer and cut the connection when it is silent; `WebSocketConnection` says why not the library."""
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            try:
                pong = asyncio.ensure_future(await self._websocket.ping())  # waits behind a message that is being sent
            except ConnectionClosed:
                return
            pong.add_done_callback(_retrieve)
            asked = monotonic()
            while not pong.done():
                await asyncio.wait((pong,), timeout=WATCH_PERIOD_S)
                may_be_busy = not self._relay and (self._greeting is None or bool(self._replies))
                silent = monotonic() - max(asked, self._heard) > PING_TIMEOUT_S
                if silent and not may_be_busy and not pong.done():
                    return self._cut(TimeoutError(f"the server has answered no ping for {PING_TIMEOUT_S:g} s"))

    async def _bound_pongs(self) -> None:
        """Cut off a server that pings without end and reads no pongs: `websockets` would keep them all in memory."""
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            if self._websocket.transport.get_write_buffer_size() > self._sending_bytes + MAX_UNREAD_PONG_BYTES:
                return self._cut(ConnectionError(f"{shown(self._url)} sends pings and does not read the answers"))

    def _cut(self, why: Exception | None) -> None:
        """End the TCP connection at once; whoever waits gets `ConnectionClosed`, caused by `why`."""
        self._why_cut = why
        self._websocket.transport.abort()


async def open_websocket(
    url: str, headers: Mapping[str, str], timeout: float, access: Access = DIRECT
) -> AsyncWebSocketConnection:
    """Connect once, following redirects as the blocking client does.

    Raises:
        websockets.exceptions.InvalidURI: not a ws:// or wss:// URL.
        websockets.exceptions.InvalidStatus: the server answered the upgrade with another HTTP status.
        ssl.SSLCertVerificationError: the server's certificate is not to be trusted.
        OSError: no connection; `TimeoutError` after `timeout` seconds for TCP, TLS and upgrade, redirects included;
            `ProxyError` if it is the proxy that fails.
    """
    deadline = monotonic() + timeout
    for _ in range(MAX_REDIRECTS + 1):
        try:
            return AsyncWebSocketConnection(await _upgrade(url, headers, deadline, access), url)
        except Exception as error:
            url, headers = redirected(url, headers, error)
    raise too_many_redirects(url)


async def _attempt(url: str, headers: Mapping[str, str], waiting: Waiting, access: Access) -> AsyncWebSocketConnection:
    connection = await open_websocket(url, headers, waiting.begin_attempt(), access)
    try:
        try:
            await connection.read_greeting(waiting.patience)
        except TimeoutError:
            waiting.say_connected()
            await connection.read_greeting(waiting.remaining)
    except BaseException:
        await connection.close()
        raise
    return connection


async def _upgrade(url: str, headers: Mapping[str, str], deadline: float, access: Access) -> ClientConnection:
    address = address_of(url)
    if access.proxy is None:
        sock = await within(remaining(deadline), connected_socket(address.host, address.port))
    else:
        sock = await _tunnelled_socket(address.host, address.port, deadline, access.proxy)
    return await upgrade(sock, url, headers, deadline, access)


async def upgrade(
    sock: socket.socket, url: str, headers: Mapping[str, str], deadline: float, access: Access
) -> ClientConnection:
    """TLS and the opening handshake on a socket of our own, closed if they fail; as `connection.upgrade`."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return await connect(url, sock=sock, open_timeout=remaining(deadline), **upgrade_options(url, headers, access))
    except BaseException as error:
        sock.close()
        if isinstance(error, ConnectionResetError) and error.errno is None:  # asyncio's word for an end within TLS
            error = ssl.SSLEOFError(ssl.SSL_ERROR_EOF, "EOF occurred in violation of protocol")
        if isinstance(error, ssl.SSLError):
            raise explained(url, error) from error
        if isinstance(error, asyncio.TimeoutError):  # a class of its own until Python 3.11
            raise TimeoutError("timed out") from error
        raise


async def _tunnelled_socket(host: str, port: int, deadline: float, proxy: Proxy) -> socket.socket:
    """A socket that leads to the server through the proxy."""
    until = min(deadline, monotonic() + HANDSHAKE_TIMEOUT_S)
    with proxy.named_in_errors():
        sock = await within(remaining(until), connected_socket(proxy.host, proxy.port))
    try:
        with proxy.named_in_errors():
            answer = await within(remaining(until), _answer_of(proxy, sock, host, port))
        proxy.check(answer)
        return sock
    except BaseException:
        sock.close()
        raise


async def _answer_of(proxy: Proxy, sock: socket.socket, host: str, port: int) -> bytes:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, proxy.request(host, port))
    answer = b""
    while proxy.awaits_more(answer):
        answer += await loop.sock_recv(sock, 1) or proxy.hung_up()
    return answer


async def connected_socket(host: str, port: int) -> socket.socket:
    """`socket.create_connection` without blocking: the first of the host's addresses that answers."""
    loop = asyncio.get_running_loop()
    failure = OSError(f"no address for {host}")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            return sock
        except OSError as error:
            sock.close()
            failure = OSError(error.errno, os.strerror(error.errno or 0))  # asyncio's text tells the address alone
        except BaseException:
            sock.close()
            raise
    raise failure


async def within(timeout: float | None, work: Awaitable[T]) -> T:
    """`asyncio.wait_for` that raises Python's own `TimeoutError` in every release."""
    try:
        return await asyncio.wait_for(work, timeout)
    except asyncio.TimeoutError as error:  # a class of its own until Python 3.11
        raise TimeoutError("timed out") from error


def _retrieve(pong: asyncio.Future[float]) -> None:
    """Take the exception of a ping that ended with its connection, which asyncio would log otherwise."""
    if not pong.cancelled():
        pong.exception()
