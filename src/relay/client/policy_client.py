"""`PolicyClient`: a model by its name, actions as plain arrays, on the interface of vLLM-Omni's robot endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relay.client.access import check_headers, read_access
from relay.client.cold_start import connect_once
from relay.client.conversation import Conversation
from relay.client.exchange import LastCall, Route, check_codec, check_timeout, error_text
from relay.client.reconnect import Gaps, Reconnect, check_reconnect
from relay.client.settings import direct_route_allowed, policy_url
from relay.protocol.images import Codec


class PolicyClient:
    """A connection to the server for a model; the environment, or a `.env` file, says where that is.

    `WALLE_URL` is the server's address, in which `{model}` stands for the model id. The constructor does not try
    again if the server cannot be reached, but waits for one that is still loading its model. One thread at a time may
    use a client; `close` may come from any thread.

    Args:
        model: the model id, such as "pi05", "pi0" or "groot".
        codec: how frames are sent. A vLLM-Omni server always gets plain arrays; `codec` is then None.
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
        KeyError: `WALLE_URL` is not set.
        ValueError: `headers`, `ca_file`, `proxy` or `WALLE_DIRECT` cannot be used; `OSError` if the file cannot be
            read.
        websockets.exceptions.InvalidURI: `WALLE_URL` is no WebSocket URL.
        websockets.exceptions.InvalidStatus: the server refused the connection, for example for want of a key.
        ssl.SSLCertVerificationError: the server's certificate is not to be trusted; the text says what to do.
        OSError: the server, or the proxy, cannot be reached; `TimeoutError` after `connect_timeout` seconds.
        websockets.exceptions.ConnectionClosed: the server hung up before it was ready.
        RuntimeError: the server serves no policy.
    """

    def __init__(
        self,
        model: str,
        *,
        codec: Codec = Codec.RAW,
        headers: Mapping[str, str] | None = None,
        connect_timeout: float | None = None,
        ca_file: str | Path | None = None,
        proxy: str | None = None,
        direct: bool = True,
        reconnect: Reconnect = False,
    ) -> None:
        check_codec(codec)
        check_timeout("connect_timeout", connect_timeout)
        check_headers(headers or {})
        check_reconnect(reconnect)
        url = policy_url(model)
        access = read_access(url, ca_file, proxy, direct and direct_route_allowed())
        gaps = Gaps(reconnect, url, headers or {}, access, connect_timeout) if reconnect else None
        self._conversation = Conversation(connect_once(url, headers or {}, connect_timeout, access), codec, gaps)

    def infer(
        self, observation: Mapping[str, Any], *, timeout: float | None = None
    ) -> NDArray[np.float32] | dict[str, Any]:
        """Send one observation and return the next actions, or the server's reason for refusing it.

        Args:
            observation: camera frames `(H, W, 3)` uint8 RGB or JPEG bytes, state, prompt and request options, by the
                policy's keys. `session_id` names the session it belongs to, "default" without one.
            timeout: seconds to wait for the reply; None waits as long as the connection lives.

        Returns:
            Actions, float32 `(action_horizon, action_dim)`, or a dict of them by action group, float32
            `(1, action_horizon, k)` each: read-only views of the received bytes, `.copy()` one to modify it.
            If the server rejects the observation, `{"type": "error", "message": str}`; look for it before executing
            anything. The connection stays open.

        Raises:
            RuntimeError: the server answered with text, or with what is neither actions nor an error.
            ValueError: the observation holds an option that this server would ignore, or is too big to send.
            TimeoutError: no reply in time. The reply is dropped when it comes; the connection stays usable, unless not
                even the observation could be sent: later calls then raise `ConnectionClosed`.
            websockets.exceptions.ConnectionClosed: the connection is closed, by `close` or for having been idle; with
                `reconnect`, it was lost while the request may have been running, or by its fault.
        """
        answer = self._conversation.infer(observation, timeout)
        if isinstance(answer, np.ndarray):
            return answer
        message = error_text(answer)
        if message is not None:
            return {**answer, "message": message}
        return answer.get("actions", answer)  # an OpenPI server's map has the actions among its timings

    def reset(self, *, timeout: float | None = None) -> None:
        """Forget every session of this connection: the next observation of each starts fresh, as a new episode.

        Raises:
            RuntimeError: the server refused.
            TimeoutError: no reply within `timeout` seconds.
            websockets.exceptions.ConnectionClosed: the connection is closed.
        """
        self._conversation.reset(timeout)

    def get_server_metadata(self) -> dict[str, Any]:
        """What the server sent on connecting: action horizon, image size, whether it needs session ids. No network."""
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
        """Timings and sizes of the last `infer` that returned actions; None before the first."""
        return self._conversation.exchange.last

    @property
    def reconnects(self) -> int:
        """How many lost connections were made again."""
        return self._conversation.reconnects

    def close(self) -> None:
        """Close the connection; any later call raises `websockets.exceptions.ConnectionClosed`."""
        self._conversation.close()

    def __enter__(self) -> PolicyClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
