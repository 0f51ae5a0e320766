"""A robot's own observations into model format and the network's actions back into the robot's units.

Model format means openpi's camera keys, a normalized state, actions as the network gives them. Both directions of each
step stand in one file: a robot's keys and conversions in its profile (`relay/robots`), the statistics in
`engine/normalization.py`, and here their order, which is the reference's: convert, normalize, network, unnormalize, add
the state, convert back (openpi: src/openpi/policies/policy_config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relay.engine.base import Note
from relay.engine.normalization import Normalization
from relay.protocol.errors import ObservationError
from relay.protocol.messages import Observation
from relay.robots.keys import PROMPT_KEYS
from relay.robots.profile import RobotProfile

_VLLM_CAMERA = "observation.images."
"""Prefix of flat camera keys; a map `images` is the other spelling (vllm-omni: docs/serving/openpi_api.md)."""


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """An observation in model format.

    Attributes:
        observation: by the network's keys; without `state` where `state` below holds it.
        state: (state_dim,) float64, normalized, where it came in a robot's units; else None.
        robot_state: (state_dim,) the same before normalization, which relative actions start from; else None.
        slots: by camera, what messages call its frame.
        notes: what the caller should know.
        ignored: keys that mean nothing to the robot's profile.
    """

    observation: Observation
    state: NDArray[np.float64] | None = None
    robot_state: NDArray[np.float64] | None = None
    slots: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RobotUnits:
    """One robot's keys and units for one checkpoint's statistics."""

    profile: RobotProfile
    normalization: Normalization

    def to_model(self, observation: Observation) -> ModelFormat:
        """Raises `ObservationError` for what is not this robot's observation."""
        reading = self.profile.read(observation)
        rest = {key: value for key, value in observation.items() if key in PROMPT_KEYS}
        outside = self.normalization.outside(reading.state, self.profile.state_names)
        return ModelFormat(
            {"image": reading.frames, **rest},
            state=self.normalization.normalize_state(reading.state),
            robot_state=reading.state,
            slots={camera: repr(key) for camera, key in reading.keys.items()},
            notes=(Note(outside, about="state outside the trained range"),) if outside else (),
            ignored=reading.ignored,
        )

    def to_robot(self, actions: NDArray[np.float32], robot_state: NDArray[np.float64]) -> NDArray[np.float32]:
        """The network's actions (horizon, action_dim) as this robot takes them, (horizon, its own width).

        Args:
            robot_state: of the observation that the actions answer.
        """
        return self.profile.to_robot(self.normalization.unnormalize_actions(actions), robot_state)

    def from_robot(self, actions: NDArray[np.float32], robot_state: NDArray[np.float64]) -> NDArray[np.float64]:
        """Actions (n, the robot's width) as the network would give them from this state; `to_robot` is the inverse."""
        return self.normalization.normalize_actions(self.profile.from_robot(actions, robot_state))

    @property
    def contract(self) -> dict[str, Any]:
        """What a client has to know about keys and units: the metadata's `robot`."""
        return {**self.profile.contract(), "normalization": self.normalization.kind}

    @property
    def action_space(self) -> str:
        """RoboArena's word for what the arm's actions are (roboarena: roboarena/policy_server.py).

        An offset per step is what DROID calls a velocity.
        """
        kinds = {action.kind for action in self.profile.actions if action.gripper is None}
        if kinds == {"velocity"}:
            return "joint_velocity"
        return "cartesian_velocity" if kinds == {"relative"} else "joint_position"


def to_model_format(observation: Observation, robot: RobotUnits | None, *, model_units: bool) -> ModelFormat:
    """Tell by its keys which format an observation has, and translate it.

    Args:
        robot: what the keys of a robot's own mean; None if the server was told none.
        model_units: without a robot, whether vLLM-Omni's keys may be taken for the same values under other names. Not
            so if the checkpoint has statistics: its clients send robot units then.

    Raises:
        ObservationError: a robot's keys where no profile says what they mean, or keys of two formats.
    """
    if robot is not None and robot.profile.is_its(observation):
        return robot.to_model(observation)
    if "image" in observation:
        return ModelFormat(observation)
    theirs = next((key for key in observation if key == "images" or key.startswith(_ROBOT_KEYS)), None)
    if theirs is None:
        return ModelFormat(observation)
    if model_units and not theirs.startswith("observation/"):
        return ModelFormat(_from_vllm(observation))
    raise ObservationError(
        f"{theirs!r} is a key of a robot in its own units, and this server has no profile to read it by; "
        "start it with --robot NAME, or send 'image' and a normalized 'state'"
    )


def _from_vllm(observation: Observation) -> Observation:
    """vLLM-Omni's spelling of the same keys, for a checkpoint whose units are the network's own."""
    frames: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in observation.items():
        if key.startswith(_VLLM_CAMERA):
            frames[key.removeprefix(_VLLM_CAMERA)] = value
        elif key == "images":
            if not isinstance(value, Mapping):
                raise ObservationError(f"images: expected a map of camera name to frame, got {type(value).__name__}")
            frames.update(value)
        else:
            rest["state" if key == "observation.state" else key] = value
    return {"image": frames, **rest}


_ROBOT_KEYS = ("observation/", _VLLM_CAMERA)
