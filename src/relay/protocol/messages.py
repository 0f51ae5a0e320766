"""Typed requests and replies: what a decoded message means, whatever path it came by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from relay.protocol.errors import InvalidPayload, ObservationError
from relay.protocol.msgpack_numpy import pack, unpack
from relay.protocol.options import Options, take_options, take_session_id
from relay.protocol.wording import as_text, key_path, quoted, shown

Observation: TypeAlias = Mapping[str, Any]
"""What the robot sees, by the model's or the robot's own keys, transport keys removed.

Image slots hold uint8 arrays `(H, W, 3)` or `(T, H, W, 3)`, complete JPEG/PNG/WebP files as `bytes`, or lists of those.
"""

Actions: TypeAlias = "NDArray[np.float32] | Mapping[str, NDArray[np.float32]]"
"""One array `(horizon, dim)` or named groups of arrays, float32."""


@dataclass(frozen=True, slots=True)
class Infer:
    """One observation to answer with one action chunk."""

    observation: Observation
    options: Options = field(default_factory=Options)
    session_id: str = "default"
    endpoint_named: bool = False
    """The message carried `endpoint`: on the OpenPI path that selects RoboArena's bare reply."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget every session of the connection."""


def decode_request(data: bytes | str) -> Infer | Reset:
    """Read one message of a client; the transport keys are checked here and leave the observation.

    Raises:
        InvalidPayload: for a text or empty frame, undecodable bytes, a value that is no map, an unknown `endpoint`.
        ObservationError: for a transport key whose value is not acceptable; the sentence names the key.
    """
    if isinstance(data, str):
        raise InvalidPayload("text frame; a request is one binary MessagePack message")
    if not data:
        raise InvalidPayload("empty frame; a request is one binary MessagePack message")
    value = unpack(data)
    if not isinstance(value, dict):
        raise InvalidPayload(f"the message is {shown(value)}; a request is a map")
    observation = _with_text_keys(cast("dict[str | bytes, Any]", value), ())
    endpoint_named = "endpoint" in observation
    endpoint = as_text(observation.pop("endpoint", "infer"))
    if not isinstance(endpoint, str) or endpoint not in ("infer", "reset"):
        raise InvalidPayload(f"endpoint is {shown(endpoint)}; expected 'infer' or 'reset'")
    if endpoint == "reset":
        return Reset()
    session_id = take_session_id(observation)
    options = take_options(observation)
    return Infer(observation, options, session_id, endpoint_named)


def encode_reply(
    actions: bytes,
    policy_timing: Mapping[str, float],
    server_timing: Mapping[str, float],
    notes: Sequence[str] = (),
) -> bytes:
    """The OpenPI reply map around actions that `encode_bare` has encoded; timings are in milliseconds.

    `notes` is there only when it has entries. `actions` is the only array: openpi's ActionChunkBroker slices every one
    along axis 0 (openpi: packages/openpi-client/src/openpi_client/action_chunk_broker.py).
    """
    rest: dict[str, Any] = {
        "policy_timing": {key: float(value) for key, value in policy_timing.items()},
        "server_timing": {key: float(value) for key, value in server_timing.items()},
    }
    if notes:
        rest["notes"] = [str(note) for note in notes]
    fields = pack(rest)
    # A map of up to 14 fields begins with one byte that counts them, so that one more can be put before them.
    return b"".join((bytes([fields[0] + 1]), _ACTIONS, actions, fields[1:]))


_ACTIONS: Final = pack("actions")


def encode_bare(actions: Actions) -> bytes:
    """The RoboArena and vLLM-Omni reply: one array, or a map of arrays, and nothing else."""
    return pack(_float32(actions))


def _float32(actions: Actions) -> NDArray[np.float32] | dict[str, NDArray[np.float32]]:
    if isinstance(actions, Mapping):
        return {str(group): np.ascontiguousarray(part, dtype="<f4") for group, part in actions.items()}
    return np.ascontiguousarray(actions, dtype="<f4")


def _with_text_keys(fields: dict[str | bytes, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The map with text keys, also in the maps inside it; a map that has no others is changed in place."""
    only_text = True
    for key, value in fields.items():
        if type(key) is not str:
            only_text = False
            break
        if type(value) is dict and value:
            fields[key] = _with_text_keys(cast("dict[str | bytes, Any]", value), (*path, key))
    return cast("dict[str, Any]", fields) if only_text else _converted(fields, path)


def _converted(fields: dict[str | bytes, Any], path: tuple[str, ...]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in fields.items():
        name = key
        if isinstance(name, bytes):
            try:
                name = name.decode()
            except UnicodeDecodeError:
                raise InvalidPayload(f"key {quoted(name)} is not UTF-8") from None
        if name in result:
            raise ObservationError(f"{key_path((*path, name))} is given twice, as text and as bytes")
        if type(value) is dict and value:
            value = _with_text_keys(cast("dict[str | bytes, Any]", value), (*path, name))
        result[name] = value
    return result
