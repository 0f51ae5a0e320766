"""What the server at the other end takes: read once from its handshake and metadata, asked before every request."""

from __future__ import annotations

import json
import logging
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, cast

from relay.client.access import shown
from relay.client.connection import Greeting
from relay.protocol import msgpack_numpy
from relay.protocol.direct_route import TICKET_KEY
from relay.protocol.errors import InvalidPayload
from relay.protocol.limits import MAX_MESSAGE_BYTES
from relay.protocol.options import CHUNKING_KEYS, OPTION_KEYS
from relay.protocol.wording import clipped, quoted
from relay.protocol.wording import shown as worded

logger = logging.getLogger("relay.client")

LONGEST_JSON: Final = 65_536
"""Characters of a text frame that may be a JSON error; parsing much more would cost time and memory for nothing."""

VLLM_PATH: Final = "/v1/realtime/robot/openpi"


class PeerKind(Enum):
    """The servers a policy may find, each with the request options that it heeds."""

    RELAY = "a relay server", frozenset(OPTION_KEYS)
    HOSTED = "a server with pi0's documented metadata", frozenset({"num_steps", "adapter_dir"})
    VLLM = "a vLLM-Omni server", frozenset({"seed", "sampling_params"})
    STOCK = "a stock OpenPI server", frozenset[str]()

    def __init__(self, title: str, options: frozenset[str]) -> None:
        self.title = title
        self.options = options


@dataclass(frozen=True, slots=True)
class Peer:
    """A server as its greeting shows it.

    Attributes:
        kind: which options it heeds, and whether it knows `reset`.
        metadata: the first frame, decoded; without the ticket for a direct route.
        image_formats: containers it decodes (`jpeg`, `webp`, ...); empty if it takes arrays only.
        max_payload: bytes it accepts in one message.
        vllm_path: replies are bare arrays and error maps.
        guides: it takes what is left of a previous chunk, or doesn't say that it takes none.
    """

    kind: PeerKind
    metadata: dict[str, Any]
    image_formats: frozenset[str]
    max_payload: int
    vllm_path: bool
    guides: bool = False

    @property
    def resets(self) -> bool:
        """Whether it answers `{"endpoint": "reset"}`; a stock server would take that for an observation."""
        return self.kind is PeerKind.RELAY or self.vllm_path

    def check_options(self, observation: Mapping[str, Any]) -> None:
        """Refuse what this server would silently ignore, apart from real-time chunking, which is done without.

        Raises:
            ValueError: naming the options.
        """
        known = self.kind.options.union(CHUNKING_KEYS)
        ignored = [name for name in OPTION_KEYS if name in observation and name not in known]
        if ignored:
            raise ValueError(
                f"{', '.join(map(repr, ignored))} would be ignored: {self.kind.title} is at the other end; "
                "leave it out, or serve the policy with relay"
            )


def read_peer(greeting: Greeting) -> Peer:
    """Tell from a greeting what the server takes.

    Raises:
        RuntimeError: the server refuses to serve, or its first frame is no metadata.
    """
    metadata = read_metadata(greeting)
    metadata.pop(TICKET_KEY, None)  # a secret, which programs might print or record with the rest
    vllm_path = on_vllm_path(greeting)
    if greeting.relay:
        kind = PeerKind.RELAY
    elif vllm_path:
        kind = PeerKind.VLLM
    elif "model" in metadata and "cameras" in metadata:
        kind = PeerKind.HOSTED
    else:
        kind = PeerKind.STOCK
    payload = _max_payload(greeting, metadata)
    return Peer(kind, metadata, _image_formats(greeting, kind), payload, vllm_path, _guides(greeting, kind))


def refusal(text: str) -> str:
    """What a text frame says: the message of a JSON error, else the text itself; of a very long one the two ends."""
    try:
        error: object = json.loads(text) if len(text) <= LONGEST_JSON else None
    except (ValueError, RecursionError):
        return clipped(text)
    return stated_error(cast("dict[str, object]", error)) if isinstance(error, dict) else clipped(text)


def stated_error(fields: Mapping[str, object]) -> str:
    """The message of an error map, under either of its two names; of a very long one the two ends."""
    for message in (fields.get("message"), fields.get("error")):
        if isinstance(message, str) and message:
            return clipped(message)
    return f"an error without a message, of the keys {', '.join(quoted(key) for key in list(fields)[:8])}"


def is_error(fields: Mapping[str, object]) -> bool:
    """Whether a map says that it is an error; `type` may hold anything, arrays too."""
    kind = fields.get("type")
    return isinstance(kind, str) and kind == "error"


def on_vllm_path(greeting: Greeting) -> bool:
    """Whether the address is that of vLLM-Omni's robot endpoint."""
    return urllib.parse.urlsplit(greeting.url).path.rstrip("/").endswith(VLLM_PATH)


def read_metadata(greeting: Greeting) -> dict[str, Any]:
    """The first frame, decoded.

    Raises:
        RuntimeError: the server refuses to serve, or it is no metadata.
    """
    frame = greeting.first_frame
    if isinstance(frame, str):
        raise RuntimeError(refusal(frame))
    try:
        metadata = msgpack_numpy.unpack(frame)
    except InvalidPayload as error:
        raise RuntimeError(f"{shown(greeting.url)} is no policy server: its first frame is not metadata") from error
    if not isinstance(metadata, dict):
        raise RuntimeError(
            f"{shown(greeting.url)} is no policy server: its first frame is a {type(metadata).__name__}, not a map"
        )
    result = cast("dict[str, Any]", metadata)
    if is_error(result):
        raise RuntimeError(stated_error(result))
    return result


def _image_formats(greeting: Greeting, kind: PeerKind) -> frozenset[str]:
    listed = greeting.headers.get("relay-codecs")
    if kind is PeerKind.RELAY and listed is not None:
        return frozenset(name.strip().lower() for name in listed.split(",")) - {""}
    if kind in (PeerKind.RELAY, PeerKind.HOSTED):
        return frozenset({"jpeg", "png", "webp"})
    return frozenset()


def _guides(greeting: Greeting, kind: PeerKind) -> bool:
    listed = greeting.headers.get("relay-options")
    if kind is not PeerKind.RELAY or listed is None:  # a policy that was still loading is not listed yet
        return kind is PeerKind.RELAY
    return {name.strip().lower() for name in listed.split(",")}.issuperset(CHUNKING_KEYS)


def _max_payload(greeting: Greeting, metadata: Mapping[str, Any]) -> int:
    stated: object = greeting.headers.get("relay-max-payload") or metadata.get("max_payload_bytes")
    if stated is None:
        return MAX_MESSAGE_BYTES
    try:
        limit = 0 if isinstance(stated, bool) else int(cast(Any, stated))
    except (TypeError, ValueError, OverflowError):
        limit = 0
    if limit <= 0:
        logger.warning(
            "%s states a payload limit of %s; using %d bytes", shown(greeting.url), worded(stated), MAX_MESSAGE_BYTES
        )
        return MAX_MESSAGE_BYTES
    return min(limit, MAX_MESSAGE_BYTES)
