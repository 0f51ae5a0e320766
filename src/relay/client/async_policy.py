"""`AsyncPolicy`: `Policy` for programs that run on an asyncio event loop."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from websockets.exceptions import ConnectionClosed

from relay.client.access import check_headers, read_access, shown
from relay.client.cold_start import Waiting
from relay.client.exchange import (
    RESET,
    Exchange,
    LastCall,
    Route,
    as_openpi_map,
    check_codec,
    check_process,
    check_reset,
    check_timeout,
)
from relay.client.reconnect import Call, Dispatch, Gaps, Reconnect, check_reconnect, check_same_policy
from relay.client.settings import direct_route_allowed
from relay.protocol.images import Codec

if TYPE_CHECKING:
    from relay.client.async_connection import AsyncWebSocketConnection
    from relay.client.async_reconnect import Bridge


class AsyncPolicy:
    """A connection to a policy server, opened by `async with` or by awaiting it.

        async with relay.AsyncPolicy("ws://gpu-box:8000") as policy:
            actions = (await policy.infer(observation))["actions"]

        policy = await relay.AsyncPolicy("ws://gpu-box:8000")  # and later: await policy.close()

    Arguments, replies and errors are those of `Policy`. Opening waits for a server that is not up yet and for a model
    that is still loading. Any number of tasks of one event loop may call `infer` at once; four requests are under way
    at most and the others wait for their turn. Frames are compressed on the event loop.

    Args:
        url: the server's address, `ws://` or `wss://`.
        codec: how frames are sent. A stock OpenPI server always gets plain arrays; `codec` is then None.
        headers: extra headers for the connection, such as a proxy's credentials. Never sent on to another origin.
        connect_timeout: seconds to wait for the server; None waits as long as it takes.
        ca_file: a PEM file with the certificates to trust instead of the system's, for a server with a private
            authority. The server's certificate is always verified; `SSL_CERT_FILE` works as everywhere in Python.
        proxy: an HTTP proxy to go through, `http://[user:password@]host:port`. None connects directly, whatever proxies
            the environment names.
        direct: take a direct route past proxies, if the server offers one (docs/direct-route.md); `WALLE_DIRECT=0` in
            the environment turns that off.
        reconnect: True connects again when the connection is lost, and then repeats a request that cannot have run;
            "always" repeats any. False raises `ConnectionClosed`. `last.reconnected` and `reconnects` tell of gaps.

    Raises:
        ValueError: `headers`, `ca_file`, `proxy` or `WALLE_DIRECT` cannot be used; `OSError` if the file cannot be
            read.
    """

    def __init__(
        self,
        url: str,
        codec: Codec = Codec.JPEG_Q90,
        headers: Mapping[str, str] | None = None,
        *,
        connect_timeout: float | None = None,
        ca_file: str | Path | None = None,
        proxy: str | None = None,
        direct: bool = False,
        reconnect: Reconnect = False,
    ) -> None:
        check_codec(codec)
        check_timeout("connect_timeout", connect_timeout)
        check_headers(headers or {})
        check_reconnect(reconnect)
        self._url = url
        self._codec = codec
        self._headers = headers or {}
        self._connect_timeout = connect_timeout
        self._access = read_access(url, ca_file, proxy, direct and direct_route_allowed())
        self._gaps = Gaps(reconnect, url, self._headers, self._access, connect_timeout) if reconnect else None
        self._open: tuple[AsyncWebSocketConnection, Exchange] | None = None
        self._opening = False
        self._process: int | None = None
        self._bridge: Bridge | None = None
        self._closed = False

    def __await__(self) -> Generator[Any, None, AsyncPolicy]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> AsyncPolicy:
        """Connect, unless that has been done; a policy that was closed stays so.

        Raises:
            websockets.exceptions.InvalidURI: the address is no WebSocket URL.
            websockets.exceptions.InvalidStatus: the server refused the connection, for example for want of a key.
            ssl.SSLCertVerificationError: the server's certificate is not to be trusted; the text says what to do.
            OSError: the proxy cannot be used.
            RuntimeError: the server serves no policy, or another task is opening this one.
            TimeoutError: no server within `connect_timeout` seconds.
        """
        check_process(self._process)
        if self._opening:
            raise RuntimeError("another task is opening this policy: open it once, then share it")
        if self._open is None:
            self._opening = True
            self._process = os.getpid()
            try:
                self._open = await self._connect()
            finally:
                self._opening = False
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def infer(self, observation: Mapping[str, Any], *, timeout: float | None = None) -> dict[str, Any]:
        """Send one observation and return the next actions, as `Policy.infer` does.

        A call that is cancelled is like one that timed out: its reply is dropped when it comes, and the connection
        stays usable.

        Raises:
            RuntimeError: the server failed the request, or the policy is not connected.
            ValueError: the observation holds an option that this server would ignore, or is too big to send.
            TimeoutError: no reply within `timeout` seconds.
            websockets.exceptions.ConnectionClosed: the connection is closed; with `reconnect`, it was lost while the
                request may have been running, or by its fault.
        """
        check_timeout("timeout", timeout)
        check_process(self._process)
        call = Call(timeout)
        while True:
            connection, exchange = await self._connected(call)
            request = exchange.encode(observation, call.began)
            dispatch = Dispatch()
            try:
                reply = await connection.request(request.message, call.remaining, dispatch)
            except BaseException as error:
                if dispatch.begun:
                    exchange.give_up(request)  # timed out or cancelled: the server goes on
                if isinstance(error, ConnectionClosed):
                    gaps = self._note_loss(error, connection)
                    gaps.check_repeatable(error, call, not dispatch.complete)
                    continue
                if isinstance(error, TimeoutError):
                    raise call.overdue(error) from error.__cause__
                raise
            if self._gaps is not None:
                self._gaps.settle()
                if exchange.closes_after(reply):
                    await connection.close()  # lest the next request is on its way when the server does
            return as_openpi_map(exchange.decode(request, reply, connection.late_replies), exchange.peer)

    async def reset(self, *, timeout: float | None = None) -> None:
        """Start the next observation fresh, as a new episode; does nothing on a server without sessions.

        Raises:
            RuntimeError: the server refused, or the policy is not connected.
            TimeoutError: no reply within `timeout` seconds.
            websockets.exceptions.ConnectionClosed: the connection is closed.
        """
        check_timeout("timeout", timeout)
        check_process(self._process)
        connection, exchange = self._opened()
        if not exchange.peer.resets or self._is_lost:
            return  # sessions end with their connection
        dispatch = Dispatch()
        try:
            reply = await connection.request(RESET, timeout, dispatch)
        except ConnectionClosed as loss:
            self._note_loss(loss, connection)
            return
        finally:
            if dispatch.begun:
                exchange.forget_sessions()  # only now: requests before this one may just have been answered
        check_reset(reply)

    def get_server_metadata(self) -> dict[str, Any]:
        """What the server sent on connecting: model, cameras, sizes. Makes no network call."""
        return dict(self._opened()[1].peer.metadata)

    @property
    def codec(self) -> Codec | None:
        """How frames are sent; None where the server takes plain arrays only."""
        return self._opened()[1].codec

    @property
    def route(self) -> Route:
        """Which way the server is reached: the address that was given ("proxied"), or one it offered ("direct")."""
        return self._opened()[1].route

    @property
    def last(self) -> LastCall | None:
        """Notes, timings and sizes of the last successful `infer`; None before the first."""
        return self._opened()[1].last

    @property
    def reconnects(self) -> int:
        """How many lost connections were made again."""
        return 0 if self._gaps is None else self._gaps.bridged

    async def close(self) -> None:
        """Close the connection; any later `infer` raises `websockets.exceptions.ConnectionClosed`."""
        self._closed = True
        if os.getpid() != self._process:
            return  # the goodbye of a fork's copy would end the connection of the process that opened it
        if self._bridge is not None:
            await self._bridge.give_up()
        if self._open is not None:
            await self._open[0].close()

    @property
    def _is_lost(self) -> bool:
        return self._gaps is not None and self._gaps.loss is not None and not self._closed

    async def _connected(self, call: Call) -> tuple[AsyncWebSocketConnection, Exchange]:
        """The open connection, made again if it was lost."""
        opened = self._opened()
        if not self._is_lost:
            return opened
        assert self._bridge is not None, "gaps have a bridge from the first connection on"
        await self._bridge.cross(call)
        return self._opened()

    def _note_loss(self, loss: ConnectionClosed, connection: AsyncWebSocketConnection) -> Gaps:
        """Begin a gap, unless another task did; raises `loss` where the connection is not to be made again."""
        if self._gaps is None or self._closed:
            raise loss
        if self._opened()[0] is connection:
            self._gaps.open(loss)
        return self._gaps

    async def _connect(self) -> tuple[AsyncWebSocketConnection, Exchange]:
        # Here, because loading asyncio takes time that most programs need not spend.
        from relay.client.async_connection import connect_when_ready
        from relay.client.async_reconnect import Bridge

        connection = await connect_when_ready(self._url, self._headers, self._connect_timeout, self._access)
        try:
            exchange = Exchange(connection.greeting, self._codec)
        except BaseException:
            await connection.close()
            raise
        if self._gaps is not None:
            self._bridge = Bridge(self._gaps, self._connect_again)
        return connection, exchange

    async def _connect_again(self, waiting: Waiting) -> None:
        from relay.client.async_connection import connect_when_ready

        assert self._gaps is not None, "only a policy that bridges gaps comes here"
        lost, before = self._opened()
        await lost.close()  # what is left of it
        connection = await connect_when_ready(self._url, self._headers, waiting.remaining, self._access, waiting)
        server = shown(connection.greeting.url)
        try:
            exchange = Exchange(connection.greeting, self._codec, before.last, again=True)
            check_same_policy(before.peer, exchange.peer, server)
        except BaseException:
            await connection.close()
            raise
        self._open = connection, exchange
        self._gaps.close(server)

    def _opened(self) -> tuple[AsyncWebSocketConnection, Exchange]:
        if self._open is None:
            raise RuntimeError("not connected: use `async with AsyncPolicy(...)` or `policy = await AsyncPolicy(...)`")
        return self._open
