"""How one connection is greeted, answered and refused: the wire conventions of each path, one object a connection.

A dialect turns typed values into frames. It knows no socket, no queue and no engine.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from relay.engine.base import PolicySpec
from relay.protocol.messages import Infer, encode_bare, encode_reply
from relay.protocol.msgpack_numpy import pack
from relay.server.scheduler import Answer, ServerFull
from relay.server.settings import ServerSettings
from relay.server.tracebacks import sanitized, sentence

VLLM_PATH = "/v1/realtime/robot/openpi"

STOCK_CLOSE_REASON = "Internal server error. Traceback included in previous frame."
"""As openpi: src/openpi/serving/websocket_policy_server.py."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reply:
    """One answered observation, before it is encoded.

    Attributes:
        request: what was asked.
        answer: its actions and timings.
        notes: what this session has not been told yet.
        parse_ms: unpacking and checking the request.
        infer_ms: everything between that and the actions: preparation, queue and model.
    """

    request: Infer
    answer: Answer
    notes: tuple[str, ...]
    parse_ms: float
    infer_ms: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reply to a failed request, and the code and reason to close with, or None to stay open."""

    frame: str | bytes
    close: tuple[int, str] | None


class Dialect(Protocol):
    """The conventions of one path."""

    def greeting(self, spec: PolicySpec) -> str | bytes:
        """The first frame, sent when the policy can serve."""
        ...

    def notes_travel(self, request: Infer) -> bool:
        """Whether the reply to this request can carry notes."""
        ...

    def actions(self, reply: Reply, prev_total_ms: float | None) -> str | bytes:
        """The reply to an observation.

        `prev_total_ms` is the connection's previous reply, from the arrival of its request until it was sent; None
        before there is one.
        """
        ...

    def reset_done(self) -> str | bytes:
        """The reply to `reset`."""
        ...

    def refusal(self, error: Exception, error_id: str) -> Refusal:
        """The reply to a request that failed."""
        ...


def serves(path: str) -> bool:
    """Whether a WebSocket may be opened at this path; what is reserved under `/v1/` is not served."""
    path = _bare(path)
    return not (path == "/v1" or path.startswith("/v1/") or path.endswith(VLLM_PATH))


def is_health_check(path: str) -> bool:
    """Whether a plain GET of this path asks for the server's health."""
    return _bare(path) == "/healthz"


def dialect_for(path: str, settings: ServerSettings, relay_client: bool) -> Dialect:
    """The dialect of a served path. Every path that is not reserved is OpenPI's, whose own server ignores the path."""
    del path  # one dialect so far
    return OpenPIDialect(settings.tracebacks, relay_client)


class OpenPIDialect:
    """Maps with timings, tracebacks as text, a failure ends the connection.

    As openpi: src/openpi/serving/websocket_policy_server.py. A message that names its `endpoint` comes from a RoboArena
    client (dreamzero: eval_utils/policy_client.py) and is answered with the bare actions.

    Args:
        tracebacks: whether a failure's text holds a traceback, or the sentence and the error id only.
        relay_client: the client selected the `relay.v1` subprotocol, so its replies hold timings per stage.
    """

    def __init__(self, tracebacks: bool, relay_client: bool) -> None:
        self._tracebacks = tracebacks
        self._relay_client = relay_client

    def greeting(self, spec: PolicySpec) -> bytes:
        """The policy's metadata: six standard keys, then the checkpoint's own."""
        standard = {
            "model": spec.model,
            "cameras": list(spec.cameras),
            "state_dim": spec.state_dim,
            "action_horizon": spec.action_horizon,
            "action_dim": spec.action_dim,
            "num_steps": spec.num_steps,
        }
        return pack(standard | dict(spec.metadata))

    def notes_travel(self, request: Infer) -> bool:
        """RoboArena's bare actions carry none."""
        return not request.endpoint_named

    def actions(self, reply: Reply, prev_total_ms: float | None) -> bytes:
        """A map of actions and timings in milliseconds, or the bare actions for RoboArena.

        `server_timing` splits what `parse_ms` and `infer_ms` sum up: `infer_ms` is `prepare_ms`, `queue_ms`, `model_ms`
        and the hand-over between threads. `encode_ms` is the encoding of the actions, the part whose size the policy
        decides, measured before the map is packed.
        """
        answer = reply.answer
        if reply.request.endpoint_named:
            if reply.notes:
                logger.info("notes that a bare reply cannot carry: %s", "; ".join(reply.notes))
            return encode_bare(answer.actions)
        server_timing = {"infer_ms": reply.infer_ms, "parse_ms": reply.parse_ms}
        if prev_total_ms is not None:
            server_timing["prev_total_ms"] = prev_total_ms
        if self._relay_client:
            server_timing["prepare_ms"] = answer.prepare_ms
            server_timing["queue_ms"] = answer.queue_ms
            server_timing["model_ms"] = answer.model_ms
            started = perf_counter()
            encode_bare(answer.actions)
            server_timing["encode_ms"] = (perf_counter() - started) * 1e3
        policy_timing = {"infer_ms": answer.queue_ms + answer.model_ms}
        return encode_reply(answer.actions, policy_timing, server_timing, reply.notes)

    def reset_done(self) -> str:
        """RoboArena's words, as text."""
        return "reset successful"

    def refusal(self, error: Exception, error_id: str) -> Refusal:
        """Text that ends in one sentence and the error id, then a close."""
        close = (1013, "server is full") if isinstance(error, ServerFull) else (1011, STOCK_CLOSE_REASON)
        if self._tracebacks:
            return Refusal(sanitized(error, error_id), close)
        return Refusal(f"{sentence(error)} [error {error_id}]", close)


def _bare(path: str) -> str:
    """The path without its query string and trailing slashes."""
    return path.partition("?")[0].rstrip("/")
