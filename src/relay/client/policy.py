"""`Policy`: send what the robot sees, get the next actions back, on the interface of OpenPI's client."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from time import perf_counter
from types import TracebackType
from typing import Any, cast

import numpy as np

from relay.client.cold_start import connect_when_ready
from relay.client.connection import Connection, shown
from relay.client.peer import Peer, PeerKind, read_peer, refusal
from relay.protocol import msgpack_numpy
from relay.protocol.errors import InvalidPayload, ObservationError
from relay.protocol.images import Codec, decode_images, encode_images
from relay.protocol.limits import MAX_SESSIONS_PER_CONNECTION
from relay.protocol.options import take_session_id

logger = logging.getLogger("relay.client")


@dataclass(frozen=True, slots=True)
class LastCall:
    """What is worth knowing about the last successful `infer`, beside its actions.

    Attributes:
        notes: the server's remarks, such as a truncated prompt.
        session_fresh: the server started the session anew with this observation; None if it keeps no sessions.
        age_ms: how old the observation was when its actions came back, from the call to the return.
        encode_ms: compressing the frames and packing the message.
        round_trip_ms: from the first byte sent to the reply received.
        decode_ms: unpacking the reply.
        bytes_sent, bytes_received: sizes of the two messages.
        late_replies: replies dropped since connecting because their request had timed out.
    """

    notes: tuple[str, ...]
    session_fresh: bool | None
    age_ms: float
    encode_ms: float
    round_trip_ms: float
    decode_ms: float
    bytes_sent: int
    bytes_received: int
    late_replies: int


class Policy:
    """A connection to a policy server; works like OpenPI's `WebsocketClientPolicy`.

    The constructor waits for a server that is not up yet and for a model that is still loading, and logs what it
    waits for. One thread at a time may use a policy; `close` may come from any thread.

    Args:
        url: the server's address, `ws://` or `wss://`.
        codec: how frames are sent. A stock OpenPI server always gets plain arrays; `codec` is then None.
        headers: extra headers for the connection, such as a proxy's credentials. Never sent on to another origin.
        connect_timeout: seconds to wait for the server; None waits as long as it takes.

    Raises:
        websockets.exceptions.InvalidURI: `url` is no WebSocket URL.
        websockets.exceptions.InvalidStatus: the server refused the connection, for example for want of a key.
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
    ) -> None:
        _check_codec(codec)
        _check_timeout("connect_timeout", connect_timeout)
        self._connection: Connection = connect_when_ready(url, headers or {}, connect_timeout)
        try:
            self._peer = read_peer(self._connection.greeting)
        except BaseException:
            self._connection.close()
            raise
        self._codec = _codec_for(self._peer, codec, self._connection.greeting.url)
        self._sessions: dict[str, None] = {}  # ids that the server knows, the least recently used first
        self._last: LastCall | None = None
        self._in_use = threading.Lock()

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
            TimeoutError: no reply in time. The reply is dropped when it comes; the connection stays usable.
            websockets.exceptions.ConnectionClosed: the connection is closed.
        """
        _check_timeout("timeout", timeout)
        with self._one_caller():
            started = perf_counter()
            message = self._encode(observation)
            encoded = perf_counter()
            session = _session_name(observation)
            try:
                reply = self._connection.request(message, timeout)
            except TimeoutError:
                self._remember(session)  # the server goes on and will have seen it
                raise
            received = perf_counter()
            result = self._read_actions(reply)
            finished = perf_counter()
            self._last = LastCall(
                notes=_notes(result),
                session_fresh=None if self._peer.kind is PeerKind.STOCK else session not in self._sessions,
                age_ms=1000 * (finished - started),
                encode_ms=1000 * (encoded - started),
                round_trip_ms=1000 * (received - encoded),
                decode_ms=1000 * (finished - received),
                bytes_sent=len(message),
                bytes_received=len(reply),
                late_replies=self._connection.late_replies,
            )
            self._remember(session)
            return result

    def reset(self, *, timeout: float | None = None) -> None:
        """Start the next observation fresh, as a new episode; does nothing on a server without sessions.

        Raises:
            RuntimeError: the server refused.
            TimeoutError: no reply within `timeout` seconds.
            websockets.exceptions.ConnectionClosed: the connection is closed.
        """
        _check_timeout("timeout", timeout)
        with self._one_caller():
            self._sessions.clear()
            if not self._peer.resets:
                return
            reply = self._connection.request(msgpack_numpy.pack({"endpoint": "reset"}), timeout)
            if reply != "reset successful" and _read_map(reply).get("status") != "reset successful":
                raise RuntimeError("the server did not confirm the reset")

    def get_server_metadata(self) -> dict[str, Any]:
        """What the server sent on connecting: model, cameras, sizes. Makes no network call."""
        return dict(self._peer.metadata)

    @property
    def codec(self) -> Codec | None:
        """How frames are sent; None where the server takes plain arrays only."""
        return self._codec

    @property
    def last(self) -> LastCall | None:
        """Notes, timings and sizes of the last successful `infer`; None before the first."""
        return self._last

    def close(self) -> None:
        """Close the connection; any later `infer` raises `websockets.exceptions.ConnectionClosed`."""
        self._connection.close()

    def __enter__(self) -> Policy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _one_caller(self) -> Generator[None]:
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(
                "this Policy is busy in another thread: a Policy serves one thread at a time, "
                "so give each thread its own or take turns under a lock"
            )
        try:
            yield
        finally:
            self._in_use.release()

    def _encode(self, observation: Mapping[str, Any]) -> bytes:
        self._peer.check_options(observation)
        if self._codec is None:
            message = msgpack_numpy.pack(decode_images(observation))
        else:
            message = msgpack_numpy.pack(encode_images(observation, self._codec))
        if len(message) > self._peer.max_payload:
            raise ValueError(
                f"the observation has {len(message):,} bytes; this server takes at most {self._peer.max_payload:,}: "
                "send smaller or compressed frames"
            )
        return message

    def _read_actions(self, reply: bytes | str) -> dict[str, Any]:
        """The three shapes of a reply as one: a map with `actions`."""
        result = _read_map(reply)
        if self._peer.vllm_path and "actions" not in result:
            return {"actions": result}  # named groups
        return result

    def _remember(self, session: str) -> None:
        self._sessions.pop(session, None)
        self._sessions[session] = None
        if len(self._sessions) > MAX_SESSIONS_PER_CONNECTION:
            del self._sessions[next(iter(self._sessions))]


def _check_codec(codec: object) -> None:
    if isinstance(codec, Codec):
        return
    near = get_close_matches(str(codec).upper().removeprefix("CODEC."), Codec.__members__, n=1, cutoff=0.4)
    hint = f"; did you mean Codec.{near[0]}?" if near else ""
    raise TypeError(f"codec must be a relay.Codec, got {codec!r}{hint}")


def _check_timeout(name: str, timeout: float | None) -> None:
    if timeout is not None and not timeout > 0:
        raise ValueError(f"{name} must be a positive number of seconds or None, got {timeout!r}")


def _codec_for(peer: Peer, codec: Codec, url: str) -> Codec | None:
    """The codec to use with this server, or None for plain arrays."""
    if not peer.image_formats:
        logger.warning("%s is %s: frames are sent as arrays", shown(url), peer.kind.title)
        return None
    if codec is Codec.RAW:
        return codec
    container = "webp" if codec is Codec.LOSSLESS else "jpeg"
    if container in peer.image_formats:
        return codec
    logger.warning("%s does not take Codec.%s: frames are sent as arrays", shown(url), codec.name)
    return None


def _read_map(reply: bytes | str) -> dict[str, Any]:
    """A reply as a map, a bare array under `actions`; both forms of an error raise."""
    if isinstance(reply, str):
        raise RuntimeError(refusal(reply))
    try:
        value: object = msgpack_numpy.unpack(reply)
    except InvalidPayload as error:
        raise RuntimeError(f"the server's reply cannot be decoded: {error}") from error
    if isinstance(value, np.ndarray):
        return {"actions": value}
    if not isinstance(value, dict):
        raise RuntimeError(f"the server answered with a {type(value).__name__}; expected a map or an array")
    result = cast("dict[str, Any]", value)
    if result.get("type") == "error" and "actions" not in result:
        raise RuntimeError(str(result.get("message") or result.get("error") or result))
    return result


def _session_name(observation: Mapping[str, Any]) -> str:
    try:
        return take_session_id({"session_id": observation.get("session_id")})
    except ObservationError:
        return ""  # the server refuses it too, and says why


def _notes(result: Mapping[str, Any]) -> tuple[str, ...]:
    notes: object = result.get("notes", ())
    return tuple(map(str, cast("list[object]", notes))) if isinstance(notes, list) else ()
