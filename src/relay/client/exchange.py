"""What a policy says to its server and what it makes of the answers: everything but the sending.

Shared by every client, blocking or not; knows no socket, no thread and no event loop.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from time import perf_counter
from typing import Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from relay.client.access import shown
from relay.client.connection import Greeting
from relay.client.peer import Peer, PeerKind, is_error, read_peer, refusal, stated_error
from relay.protocol import msgpack_numpy
from relay.protocol.errors import InvalidPayload, ObservationError
from relay.protocol.images import Codec, decode_images, encode_images
from relay.protocol.kept_memory import keep_freed_memory
from relay.protocol.limits import MAX_SESSIONS_PER_CONNECTION
from relay.protocol.options import CHUNKING_KEYS, take_session_id
from relay.protocol.wording import clipped
from relay.protocol.wording import shown as worded
from relay.side_by_side import side_by_side

logger = logging.getLogger("relay.client")

_LONGEST_TIMEOUT_S: Final = 1e8  # what a lock can wait for on every platform, about three years

MAX_NOTES: Final = 32
LONGEST_NOTE: Final = 2_048
"""What is kept of a server's notes on one reply; ours sends a few sentences."""

Route = Literal["proxied", "direct"]
"""Over the address that was given, whatever stands there, or over the server's own, which it offered."""

RESET: Final = msgpack_numpy.pack({"endpoint": "reset"})


@dataclass(frozen=True, slots=True)
class LastCall:
    """What is worth knowing about the last successful `infer`, beside its actions.

    Attributes:
        notes: the server's remarks, such as a truncated prompt, and this client's.
        session_fresh: the server started the session anew with this observation; None if it keeps no sessions.
        age_ms: how old the observation was when its actions came back, from the call to the return.
        encode_ms: compressing the frames and packing the message.
        round_trip_ms: from the first byte sent to the reply received.
        decode_ms: unpacking the reply.
        bytes_sent, bytes_received: sizes of the two messages.
        late_replies: replies dropped since connecting because their request had timed out.
        reconnected: the first since the connection was made again.
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
    reconnected: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One observation on its way: its message and session, when it was given and encoded, what to tell of it."""

    message: bytes
    session: str
    given: float
    begun: float
    encoded: float
    notes: tuple[str, ...] = ()


class Exchange:
    """One connection's requests and replies, with the sessions that the server knows.

    Args:
        last: what the client knows of its last call, over a connection that was lost.
        again: the connection takes the place of a lost one.

    Raises:
        RuntimeError: the greeting shows that the server serves no policy.
    """

    def __init__(self, greeting: Greeting, codec: Codec, last: LastCall | None = None, *, again: bool = False) -> None:
        keep_freed_memory()
        self.peer: Final = read_peer(greeting)
        self.codec: Final = _codec_for(self.peer, codec, greeting.url)
        self.route: Final[Route] = "direct" if greeting.direct else "proxied"
        self.last = last
        self._again = again
        self._url = shown(greeting.url)
        self._told_unguided = False
        self._sessions: dict[str, None] = {}  # ids that the server knows, the least recently used first

    def encode(self, observation: Mapping[str, Any], given: float | None = None) -> Request:
        """Make a message of an observation, which came just now, or at `given`, a `time.perf_counter()`.

        Raises:
            ValueError: it holds an option that this server would ignore, or is too big to send.
        """
        begun = perf_counter()
        self.peer.check_options(observation)
        observation, notes = self._without_guidance(observation)
        if self.codec is None:
            images = decode_images(observation, side_by_side)
        else:
            images = encode_images(observation, self.codec, side_by_side)
        message = msgpack_numpy.pack(images)
        if len(message) > self.peer.max_payload:
            raise ValueError(
                f"the observation has {len(message):,} bytes; this server takes at most {self.peer.max_payload:,}: "
                "send smaller or compressed frames"
            )
        given = begun if given is None else given
        return Request(message, _session_name(observation), given, begun, perf_counter(), notes)

    def give_up(self, request: Request) -> None:
        """Note that nobody waits for the reply any more; the server goes on and will have seen the session."""
        self._remember(request.session)

    def decode(self, request: Request, reply: bytes | str, late_replies: int) -> NDArray[Any] | dict[str, Any]:
        """The reply to a request, an error map included; only actions count as `last`.

        Raises:
            RuntimeError: the reply is text, which is how an OpenPI server fails a request, or cannot be decoded.
        """
        received = perf_counter()
        value = _unpacked(reply)
        if error_text(value) is not None:
            return value
        finished = perf_counter()
        known = request.session in self._sessions
        self.last = LastCall(
            notes=(*request.notes, *_notes(value)),
            session_fresh=None if self.peer.kind is PeerKind.STOCK else not known,
            age_ms=1000 * (finished - request.given),
            encode_ms=1000 * (request.encoded - request.begun),
            round_trip_ms=1000 * (received - request.encoded),
            decode_ms=1000 * (finished - received),
            bytes_sent=len(request.message),
            bytes_received=len(reply),
            late_replies=late_replies,
            reconnected=self._again,
        )
        self._again = False
        self._remember(request.session)
        return value

    def closes_after(self, reply: bytes | str) -> bool:
        """Whether the server closes the connection after this reply, as OpenPI's do after a failure."""
        return isinstance(reply, str) and not self.peer.vllm_path

    def forget_sessions(self) -> None:
        """Take every session for unseen, as the server does at a reset."""
        self._sessions.clear()

    def _without_guidance(self, observation: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """The observation as this server can take it, and once per connection what that leaves out."""
        if self.peer.guides or not any(key in observation for key in CHUNKING_KEYS):
            return observation, ()
        rest = {key: value for key, value in observation.items() if key not in CHUNKING_KEYS}
        if self._told_unguided:
            return rest, ()
        self._told_unguided = True
        note = f"{', '.join(CHUNKING_KEYS)} are not sent: real-time chunking is nothing that this server knows"
        logger.warning("%s is %s: %s", self._url, self.peer.kind.title, note)
        return rest, (note,)

    def _remember(self, session: str) -> None:
        self._sessions.pop(session, None)
        self._sessions[session] = None
        if len(self._sessions) > MAX_SESSIONS_PER_CONNECTION:
            del self._sessions[next(iter(self._sessions))]


def as_openpi_map(value: NDArray[Any] | dict[str, Any], peer: Peer) -> dict[str, Any]:
    """The three shapes of a reply as one: a map with `actions`.

    Raises:
        RuntimeError: with the server's message, for an error map.
    """
    if isinstance(value, np.ndarray):
        return {"actions": value}
    message = error_text(value)
    if message is not None:
        raise RuntimeError(message)
    if peer.vllm_path and "actions" not in value:
        return {"actions": value}  # named groups
    return value


def error_text(value: NDArray[Any] | dict[str, Any]) -> str | None:
    """The message of an error map; None if the reply is none."""
    return stated_error(value) if isinstance(value, dict) and is_error(value) and "actions" not in value else None


def check_reset(reply: bytes | str) -> None:
    """Accept the two forms in which servers confirm a reset.

    Raises:
        RuntimeError: the server refused, or answered with something else.
    """
    if reply == "reset successful":
        return
    value = _unpacked(reply)
    message = error_text(value)
    if message is not None:
        raise RuntimeError(message)
    status: object = value.get("status") if isinstance(value, dict) else None
    if not isinstance(status, str) or status != "reset successful":
        raise RuntimeError("the server did not confirm the reset")


def check_process(opened_in: int | None) -> None:
    """Raise `RuntimeError` in a fork of the process that opened the policy: the two would read each other's actions."""
    if opened_in not in (None, os.getpid()):
        raise RuntimeError("this policy was opened before a fork: open one of its own in each process")


def check_codec(codec: object) -> None:
    """Raise `TypeError` with the nearest name for what is no `Codec`."""
    if isinstance(codec, Codec):
        return
    near = get_close_matches(str(codec).upper().removeprefix("CODEC."), Codec.__members__, n=1, cutoff=0.4)
    hint = f"; did you mean Codec.{near[0]}?" if near else ""
    raise TypeError(f"codec must be a relay.Codec, got {codec!r}{hint}")


def check_timeout(name: str, timeout: float | None) -> None:
    """Raise `ValueError` for a timeout that is neither None nor a positive, finite number."""
    if timeout is not None and not 0 < timeout < _LONGEST_TIMEOUT_S:
        raise ValueError(f"{name} must be a positive number of seconds or None, got {timeout!r}")


def _codec_for(peer: Peer, codec: Codec, url: str) -> Codec | None:
    """The codec to use with this server, or None for plain arrays."""
    if not peer.image_formats:
        if codec is not Codec.RAW:
            logger.warning("%s is %s: frames are sent as arrays", shown(url), peer.kind.title)
        return None
    if codec is Codec.RAW:
        return codec
    container = "webp" if codec is Codec.LOSSLESS else "jpeg"
    if container in peer.image_formats:
        return codec
    logger.warning("%s does not take Codec.%s: frames are sent as arrays", shown(url), codec.name)
    return None


def _unpacked(reply: bytes | str) -> NDArray[Any] | dict[str, Any]:
    if isinstance(reply, str):
        raise RuntimeError(refusal(reply))
    try:
        value: object = msgpack_numpy.unpack(reply)
    except InvalidPayload as error:
        raise RuntimeError(f"the server's reply cannot be decoded: {error}") from error
    if isinstance(value, np.ndarray):
        return cast("NDArray[Any]", value)
    if not isinstance(value, dict):
        raise RuntimeError(f"the server answered with a {type(value).__name__}; expected a map or an array")
    return cast("dict[str, Any]", value)


def _session_name(observation: Mapping[str, Any]) -> str:
    try:
        return take_session_id({"session_id": observation.get("session_id")})
    except ObservationError:
        return ""  # the server refuses it too, and says why


def _notes(value: NDArray[Any] | dict[str, Any]) -> tuple[str, ...]:
    notes: object = value.get("notes", ()) if isinstance(value, dict) else ()
    if not isinstance(notes, list):
        return ()
    given = cast("list[object]", notes)
    kept = [clipped(note, LONGEST_NOTE) if isinstance(note, str) else worded(note) for note in given[:MAX_NOTES]]
    return (*kept, f"{len(given) - MAX_NOTES} further notes left out") if len(given) > MAX_NOTES else tuple(kept)
