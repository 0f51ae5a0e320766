"""`Policy`: send what the robot sees, get the next actions back, on the interface of OpenPI's client."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from relay.client.access import check_headers, read_access
from relay.client.cold_start import connect_when_ready
from relay.client.conversation import Conversation
from relay.client.exchange import LastCall, Route, as_openpi_map, check_codec, check_timeout
from relay.client.reconnect import Gaps, Reconnect, check_reconnect
from relay.client.settings import direct_route_allowed
from relay.protocol.images import Codec


class Policy:
    """A connection to a policy server; works like OpenPI's `WebsocketClientPolicy`.

    The constructor waits for a server that is not up yet and for a model that is still loading, and logs what it
    waits for. One thread at a time may use a policy; `close` may come from any thread.

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
        websockets.exceptions.InvalidURI: `url` is no WebSocket URL.
        websockets.exceptions.InvalidStatus: the server refused the connection, for example for want of a key.
        ssl.SSLCertVerificationError: the server's certificate is not to be trusted; the text says what to do.
        OSError: the proxy cannot be used.
        RuntimeError: the server serves no policy.
        TimeoutError: no server within `connect_timeout` seconds.
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
        access = read_access(url, ca_file, proxy, direct and direct_route_allowed())
        gaps = Gaps(reconnect, url, headers or {}, access, connect_timeout) if reconnect else None
        self._conversation = Conversation(connect_when_ready(url, headers or {}, connect_timeout, access), codec, gaps)

    def infer(self, observation: Mapping[str, Any], *, timeout: float | None = None) -> dict[str, Any]:
        """Send one observation and return the next actions.

        Args:
            observation: camera frames `(H, W, 3)` uint8 RGB or JPEG bytes, state and prompt, by the policy's keys.
            timeout: seconds to wait for the reply; None waits as long as the connection lives.

        Returns:
            `actions`, float32 `(action_horizon, action_dim)` or named groups of arrays, with the server's timings.
            Arrays are read-only views of the received bytes; `.copy()` one to modify it.

        Raises:
            RuntimeError: the server failed the request; the text is the server's. An OpenPI server then closes the
                connection.
            ValueError: the observation holds an option that this server would ignore, or is too big to send.
            TimeoutError: no reply in time. The reply is dropped when it comes; the connection stays usable, unless not
                even the observation could be sent: later calls then raise `ConnectionClosed`.
            websockets.exceptions.ConnectionClosed: the connection is closed; with `reconnect`, it was lost while the
                request may have been running, or by its fault.
        """
        answer = self._conversation.infer(observation, timeout)
        return as_openpi_map(answer, self._conversation.exchange.peer)

    def reset(self, *, timeout: float | None = None) -> None:
        """Start the next observation fresh, as a new episode; does nothing on a server without sessions.

        Raises:
            RuntimeError: the server refused.
            TimeoutError: no reply within `timeout` seconds.
            websockets.exceptions.ConnectionClosed: the connection is closed.
        """
        self._conversation.reset(timeout)

    def get_server_metadata(self) -> dict[str, Any]:
        """What the server sent on connecting: model, cameras, sizes. Makes no network call."""
        return dict(self._conversation.exchange.peer.metadata)

    @property
    def codec(self) -> Codec | None:
        """How frames are sent; None where the server takes plain arrays only."""
        return self._conversation.exchange.codec

    @property
    def route(self) -> Route:
        """Which way the server is reached: the address that was given ("proxied"), or one it offered ("direct")."""
        return self._conversation.exchange.route

    @property
    def last(self) -> LastCall | None:
        """Notes, timings and sizes of the last successful `infer`; None before the first."""
        return self._conversation.exchange.last

    @property
    def reconnects(self) -> int:
        """How many lost connections were made again."""
        return self._conversation.reconnects

    def close(self) -> None:
        """Close the connection; any later `infer` raises `websockets.exceptions.ConnectionClosed`."""
        self._conversation.close()

    def __enter__(self) -> Policy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
