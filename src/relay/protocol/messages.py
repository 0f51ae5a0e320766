"""Typed requests and replies: what a decoded message means, whatever path it came by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Observation: TypeAlias = Mapping[str, Any]
"""What the robot sees, by the model's or the robot's own keys, transport keys removed.

Image slots hold uint8 arrays `(H, W, 3)` or `(T, H, W, 3)`, complete JPEG/PNG/WebP files as `bytes`, or lists of those.
"""

Actions: TypeAlias = "NDArray[np.float32] | Mapping[str, NDArray[np.float32]]"
"""One array `(horizon, dim)` or named groups of arrays, float32."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a request asks for besides the observation; validated once, when the message is decoded.

    Attributes:
        num_steps: denoising steps; None means the engine's default.
        seed: starting-noise seed in [-2^63, 2^64); None draws a fresh one.
        noise: starting noise float32 in the model's own shape `(horizon, action_dim)`; never together with `seed`.
        adapter: name of a LoRA adapter the server holds.
        deadline_ms: how long the reply is still useful, counted from the arrival of the request.
        prev_actions, inference_delay, execution_horizon: real-time chunking; all three or none.
        executed_actions: float32 `(n, action_dim)` really executed since the last observation.
    """

    num_steps: int | None = None
    seed: int | None = None
    noise: NDArray[np.float32] | None = None
    adapter: str | None = None
    deadline_ms: float | None = None
    prev_actions: NDArray[np.float32] | None = None
    inference_delay: int | None = None
    execution_horizon: int | None = None
    executed_actions: NDArray[np.float32] | None = None


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
