"""How one connection is greeted, answered and refused: the wire conventions of each path, one object a connection.

A dialect turns typed values into frames. It knows no socket, no queue and no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from types import MappingProxyType
from typing import Any, Protocol

from relay.engine.base import PolicySpec
from relay.protocol.direct_route import INSTANCE_KEY
from relay.protocol.errors import InvalidPayload, ObservationError
from relay.protocol.limits import MAX_MESSAGE_BYTES
from relay.protocol.messages import Infer, encode_bare, encode_reply
from relay.protocol.msgpack_numpy import pack
from relay.server.scheduler import Answer, ServerFull
from relay.server.settings import ServerSettings
from relay.server.tracebacks import sanitized, sentence

VLLM_PATH = "/v1/realtime/robot/openpi"
"""As vllm-omni: docs/serving/openpi_api.md; with or without a prefix, such as a model's name."""

STOCK_CLOSE_REASON = "Internal server error. Traceback included in previous frame."
"""As openpi: src/openpi/serving/websocket_policy_server.py."""

NO_POLICY = '{"type":"error","error":"Robot policy not available","code":"unsupported"}'
"""The first and only frame of a process that serves no policy.

As vllm-omni: vllm_omni/entrypoints/openpi/connection.py."""

NOTHING: Mapping[str, str] = MappingProxyType({})

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

    @property
    def name(self) -> str:
        """What its requests are counted under."""
        ...

    @property
    def idle_timeout(self) -> float:
        """Seconds after which a client that sends nothing is closed, though no answer is owed to it; 0 for never."""
        ...

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
    """Whether a WebSocket may be opened at this path; of what begins with `/v1/` only vLLM-Omni's robot endpoint is."""
    path = bare_path(path)
    return path.endswith(VLLM_PATH) or not (path == "/v1" or path.startswith("/v1/"))


def is_health_check(path: str) -> bool:
    """Whether a plain GET of this path asks for the server's health."""
    return bare_path(path) == "/healthz"


def is_metrics(path: str) -> bool:
    """Whether a plain GET of this path asks for the server's metrics."""
    return bare_path(path) == "/metrics"


def is_vllm(path: str) -> bool:
    """Whether a served path is vLLM-Omni's endpoint."""
    return bare_path(path).endswith(VLLM_PATH)


def dialect_for(
    path: str, settings: ServerSettings, *, relay_client: bool, instance_id: str, direct: Mapping[str, str] = NOTHING
) -> Dialect:
    """The dialect of a served path: vLLM-Omni's for its endpoint, OpenPI's for all others, whose own server takes any.

    Args:
        relay_client: the client selected the `relay.v1` subprotocol.
        instance_id: which process answers, for clients that may meet several behind one address.
        direct: what this client is told of the direct route; OpenPI's read it in the upgrade's response.
    """
    if is_vllm(path):
        return VllmDialect(settings, instance_id, direct)
    return OpenPIDialect(settings, relay_client)


class OpenPIDialect:
    """Maps with timings, tracebacks as text, a failure ends the connection.

    As openpi: src/openpi/serving/websocket_policy_server.py. A message that names its `endpoint` comes from a RoboArena
    client (dreamzero: eval_utils/policy_client.py) and is answered with the bare actions.

    Args:
        settings: the greeting's form, and whether a failure's text holds a traceback or sentence and error id only, as
            it always does where tenants share the server.
        relay_client: the client selected the `relay.v1` subprotocol, so its replies hold timings per stage.
    """

    name = "openpi"
    idle_timeout = 0.0

    def __init__(self, settings: ServerSettings, relay_client: bool) -> None:
        self._handshake = settings.handshake
        self._settings = settings
        self._relay_client = relay_client

    def greeting(self, spec: PolicySpec) -> bytes:
        """The policy's metadata: six standard keys, then the checkpoint's own; or RoboArena's keys alone."""
        if self._handshake == "roboarena":
            return pack(_roboarena_handshake(spec))
        standard = {
            "model": spec.model,
            "cameras": list(spec.cameras),
            "state_dim": spec.state_dim,
            "action_horizon": spec.action_horizon,
            "action_dim": spec.action_dim,
            "num_steps": spec.num_steps,
        }
        return pack(_told(standard, spec) | dict(spec.metadata))

    def notes_travel(self, request: Infer) -> bool:
        """RoboArena's bare actions carry none."""
        return not request.endpoint_named

    def actions(self, reply: Reply, prev_total_ms: float | None) -> bytes:
        """A map of actions and timings in milliseconds, or the bare actions for RoboArena.

        `server_timing` splits what `parse_ms` and `infer_ms` sum up: `infer_ms` is `prepare_ms`, `queue_ms`,
        `model_ms`, the hand-over between threads and, if the policy remembers, what it still had to do for the session.
        `encode_ms` is the encoding of the actions, the part whose size the policy decides, not of the map around them.
        """
        answer = reply.answer
        if reply.request.endpoint_named:
            return _bare_actions(reply)
        started = perf_counter()
        actions = encode_bare(answer.actions)
        encode_ms = (perf_counter() - started) * 1e3
        server_timing = {"infer_ms": reply.infer_ms, "parse_ms": reply.parse_ms}
        if prev_total_ms is not None:
            server_timing["prev_total_ms"] = prev_total_ms
        if self._relay_client:
            server_timing["prepare_ms"] = answer.prepare_ms
            server_timing["queue_ms"] = answer.queue_ms
            server_timing["model_ms"] = answer.model_ms
            server_timing["encode_ms"] = encode_ms
        policy_timing = {"infer_ms": answer.queue_ms + answer.model_ms}
        return encode_reply(actions, policy_timing, server_timing, reply.notes)

    def reset_done(self) -> str:
        """RoboArena's words, as text."""
        return "reset successful"

    def refusal(self, error: Exception, error_id: str) -> Refusal:
        """Text that ends in one sentence and the error id, then a close."""
        close = (1013, "server is full") if isinstance(error, ServerFull) else (1011, STOCK_CLOSE_REASON)
        if self._settings.tracebacks and not self._settings.several_tenants:
            return Refusal(sanitized(error, error_id), close)
        return Refusal(f"{sentence(error)} [error {error_id}]", close)


class VllmDialect:
    """Bare actions, failures as maps in one sentence; the connection stays open. Nothing tells of the server's insides.

    As vllm-omni: vllm_omni/entrypoints/openpi/connection.py and docs/serving/openpi_api.md, except that a text or empty
    frame is answered too: there it is dropped, and its sender waits for ever.

    Args:
        settings: how long a client may be quiet.
        instance_id: which process answers.
        direct: what the client is told of the direct route.
    """

    name = "vllm"

    def __init__(self, settings: ServerSettings, instance_id: str, direct: Mapping[str, str] = NOTHING) -> None:
        self.idle_timeout = settings.idle_timeout
        self._told = {INSTANCE_KEY: instance_id, "max_payload_bytes": MAX_MESSAGE_BYTES, **direct}

    def greeting(self, spec: PolicySpec) -> bytes:
        """`policy_server_config` as the policy's family states it, and what every server of ours tells about itself."""
        config = dict(spec.handshake) or {
            **_roboarena_handshake(spec),
            **_told({"action_horizon": spec.action_horizon, "action_dim": spec.action_dim}, spec),
        }
        return pack({**config, **self._told})

    def notes_travel(self, request: Infer) -> bool:
        """Clients read any further key of a reply as an action group."""
        return False

    def actions(self, reply: Reply, prev_total_ms: float | None) -> bytes:
        """One array, or a map of action groups, and nothing else."""
        return _bare_actions(reply)

    def reset_done(self) -> bytes:
        """The status map."""
        return pack({"status": "reset successful"})

    def refusal(self, error: Exception, error_id: str) -> Refusal:
        """A map of one sentence; the error id stays in the log."""
        if isinstance(error, InvalidPayload):
            message = "Invalid request payload"
        elif isinstance(error, (ObservationError, ServerFull)):
            message = sentence(error)
        else:
            message = "Internal inference error"
        return Refusal(pack({"type": "error", "message": message}), close=None)


def _told(values: dict[str, Any], spec: PolicySpec) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in spec.untold}


def _roboarena_handshake(spec: PolicySpec) -> dict[str, Any]:
    """RoboArena's six keys with its own defaults; its client refuses a greeting that has any other.

    As roboarena: roboarena/policy_server.py (`PolicyServerConfig`).
    """
    defaults: dict[str, Any] = {
        "image_resolution": list(spec.image_resolution),
        "n_external_cameras": 1,
        "needs_wrist_camera": True,
        "needs_stereo_camera": False,
        "needs_session_id": False,
        "action_space": "joint_position",
    }
    return {key: spec.handshake.get(key, default) for key, default in defaults.items()}


def _bare_actions(reply: Reply) -> bytes:
    if reply.notes:
        logger.info("notes that a bare reply cannot carry: %s", "; ".join(reply.notes))
    return encode_bare(reply.answer.actions)


def bare_path(path: str) -> str:
    """The path without its query string and trailing slashes."""
    return path.partition("?")[0].rstrip("/")
