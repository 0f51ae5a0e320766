"""A robot as data: what it sends, what it takes, and the two mappings between its units and the policy's.

`read` is the way in, `to_robot` the way out. Normalization lies between them and is not known here, nor are files,
models and sockets. Order as in openpi's `create_trained_policy`: the robot's inputs, normalization, the model, its
inverse, the state added on relative dimensions, the robot's outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from relay.protocol.errors import ObservationError
from relay.protocol.numbers import as_numbers
from relay.protocol.wording import quoted, shown
from relay.robots import aloha
from relay.robots.frames import FORMS, Frame, expected, read_frame
from relay.robots.gripper import Gripper
from relay.robots.keys import MODEL_KEYS, PROMPT_KEYS, RESERVED_KEYS, flattened, is_camera, one_of

Kind = Literal["position", "velocity", "relative", "relative_to_observation", "effort", "unknown"]

KINDS: Mapping[Kind, str] = {
    "position": "absolute target",
    "velocity": "speed to move at during the step",
    "relative": "offset from where the robot is when the step begins",
    "relative_to_observation": "offset from where the robot was in the observation",
    "effort": "force or torque",
    "unknown": "not known",
}
"""What an action tells the robot to do."""


class ProfileError(ValueError):
    """A robot profile that cannot be used as it stands; the text names the place and what was expected."""


@dataclass(frozen=True, slots=True)
class Camera:
    """One of the policy's cameras and the robot's keys for it; any one of the keys may come.

    A key `images/top` is the key `top` in the map `images`, or a flat key with that name.
    """

    name: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StatePart:
    """One key of the state: its dimensions' names and units, in order. Any one of `keys` may come."""

    keys: tuple[str, ...]
    names: tuple[str, ...]
    units: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ActionDimension:
    """One number of an action, as the robot takes it.

    Attributes:
        unit: of the number times `scale`, such as `rad/s`.
        scale: what the robot's own controller multiplies it by.
        relative: the policy gives it as an offset from the state's dimension of the same index, which is added.
        limits: least and most that the robot takes; told to clients, never applied.
    """

    name: str
    unit: str = "unknown"
    kind: Kind = "unknown"
    scale: float = 1.0
    relative: bool = False
    limits: tuple[float, float] | None = None
    gripper: Gripper | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """One observation in the policy's terms.

    Attributes:
        frames: by the policy's camera name, in the profile's order; cameras that did not come are left out.
        keys: by the same names, the key that each frame came under, for error messages.
        state: (state_dim,) in policy units, before normalization.
        ignored: top-level keys that mean nothing to the profile, in whole or in part; the prompt's are left out.
    """

    frames: Mapping[str, Frame]
    keys: Mapping[str, str]
    state: NDArray[np.float64]
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RobotProfile:
    """What a robot sends and takes.

    Attributes:
        cameras: the policy's cameras, each with the robot's keys.
        state: concatenated in this order.
        actions: the robot's dimensions; the model's others are cut off.
        control_hz: actions executed per second; None if unknown.
        ignored_cameras: keys of frames that the robot may send and the policy has no use for.
        frames: forms of a frame taken besides (H, W, 3) uint8, of `FORMS`.
        conversion: a fixed mapping of joint signs and gripper units.
        statistics: file with normalization statistics, for whoever loads the checkpoint.
        normalization: kind that the checkpoint was trained with, where it is not the family's usual one.

    Raises:
        ProfileError: the parts contradict each other.
    """

    name: str
    cameras: tuple[Camera, ...]
    state: tuple[StatePart, ...]
    actions: tuple[ActionDimension, ...]
    control_hz: float | None = None
    ignored_cameras: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    conversion: Literal["aloha"] | None = None
    statistics: Path | None = None
    normalization: Literal["z_score", "quantile"] | None = None
    _known: frozenset[str] = field(init=False, repr=False, compare=False)
    _own: frozenset[str] = field(init=False, repr=False, compare=False)
    _foreign: frozenset[str] = field(init=False, repr=False, compare=False)
    _relative: NDArray[np.intp] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known = frozenset([*self.camera_keys, *self.ignored_cameras, *self.state_keys])
        object.__setattr__(self, "_known", known)
        object.__setattr__(self, "_own", known - MODEL_KEYS)
        object.__setattr__(self, "_foreign", MODEL_KEYS.difference(key.partition("/")[0] for key in known))
        relative = [index for index, action in enumerate(self.actions) if action.relative]
        object.__setattr__(self, "_relative", np.array(relative, np.intp))
        _check(self)

    @property
    def state_dim(self) -> int:
        """Width of the state."""
        return sum(len(part.names) for part in self.state)

    @property
    def action_dim(self) -> int:
        """Width of the robot's actions."""
        return len(self.actions)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state's dimensions, in order."""
        return tuple(name for part in self.state for name in part.names)

    @property
    def camera_keys(self) -> tuple[str, ...]:
        """Every key that a camera's frame may come under."""
        return tuple(key for camera in self.cameras for key in camera.keys)

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Every key that a part of the state may come under."""
        return tuple(key for part in self.state for key in part.keys)

    def is_its(self, observation: Mapping[str, Any]) -> bool:
        """Whether `read` is the one to ask: the robot's keys came, or no `image` as model format has it.

        Always so if the robot has a key `image` itself: the two could not be told apart.
        """
        in_model_format = "image" in observation and "image" in self._foreign
        return not in_model_format or any(key in self._own for key in flattened(observation))

    def read(self, observation: Mapping[str, Any]) -> Reading:
        """An observation in robot units as frames and state in policy units; `to_robot` is the way back.

        Frames are not copied unless they are float. Lists and every kind of number are taken for the state, leading
        axes of 1 are taken off, scalars are one value.

        Raises:
            ObservationError: naming the key, what came and what is expected.
        """
        came = flattened(observation)
        self._refuse_two_formats(observation, came)
        self._refuse_unknown_cameras(came)
        keys = {camera.name: key for camera in self.cameras if (key := one_of(camera.keys, came)) is not None}
        if not keys:
            raise ObservationError(f"no camera; send at least one of {', '.join(self.camera_keys)}")
        frames = {name: read_frame(came[key], key, self.frames) for name, key in keys.items()}
        state = np.concatenate([self._read_part(part, came) for part in self.state])  # (state_dim,)
        if self.conversion == "aloha":
            state = aloha.state_to_policy(state)
        return Reading(frames, keys, state, self._ignored(observation))

    def to_robot(self, actions: NDArray[Any], state: NDArray[Any]) -> NDArray[np.float32]:
        """Actions of the policy, un-normalized, as the robot takes them; `from_robot` is the inverse.

        Args:
            actions: (horizon, at least action_dim) in policy units; further dimensions are cut off.
            state: that of the same observation, as `read` gave it.

        Returns:
            (horizon, action_dim) in robot units.
        """
        if actions.ndim != 2 or actions.shape[1] < self.action_dim:
            raise ValueError(f"{self.name} takes {self.action_dim} action dimensions, got actions {actions.shape}")
        values = actions[:, : self.action_dim].astype(np.float64)  # (horizon, action_dim)
        values[:, self._relative] += state[self._relative]
        if self.conversion == "aloha":
            values = aloha.actions_to_robot(values)
        return values.astype(np.float32)

    def from_robot(self, actions: NDArray[Any], state: NDArray[Any]) -> NDArray[np.float64]:
        """Actions (n, action_dim) in robot units as the policy would give them from `state`."""
        values = np.array(actions, np.float64)  # (n, action_dim)
        if self.conversion == "aloha":
            values = aloha.actions_to_policy(values)
        values[:, self._relative] -= state[self._relative]
        return values

    def contract(self) -> dict[str, Any]:
        """Everything a client needs to drive this robot, for the metadata: plain maps, lists, text and numbers."""
        told: dict[str, Any] = {
            "name": self.name,
            "cameras": [camera.keys[0] for camera in self.cameras],
            "frames": expected(self.frames),
            "state": [
                {"name": name, "unit": unit, "key": part.keys[0]}
                for part in self.state
                for name, unit in zip(part.names, part.units, strict=True)
            ],
            "actions": [_told(action) for action in self.actions],
            "kinds": {action.kind: KINDS[action.kind] for action in self.actions},
            "gripper": [
                {"index": index, "closed_at": action.gripper.closed_at, "open_at": action.gripper.open_at}
                for index, action in enumerate(self.actions)
                if action.gripper is not None
            ],
        }
        if self.control_hz is not None:
            told["control_hz"] = self.control_hz
        return told

    def _refuse_two_formats(self, observation: Mapping[str, Any], came: Mapping[str, Any]) -> None:
        own = next((key for key in came if key in self._own), None)
        foreign = next((key for key in observation if key in self._foreign), None)
        if own is not None and foreign is not None:
            raise ObservationError(f"{foreign!r} beside {own!r}: send the robot's keys or model format, not both")

    def _refuse_unknown_cameras(self, came: Mapping[str, Any]) -> None:
        for key, value in came.items():
            ours = "image" not in self._foreign and key.startswith("image/")
            if key not in self._known and (ours or is_camera(key, value)):
                near = get_close_matches(key, self.camera_keys, n=1)
                hint = f", did you mean {near[0]!r}?" if near else ""
                raise ObservationError(
                    f"{quoted(key)} is not a camera of {self.name}{hint}; it has {', '.join(self.camera_keys)}"
                    + ("; model format is not taken, since 'image' is the robot's own key" if ours else "")
                )

    def _read_part(self, part: StatePart, came: Mapping[str, Any]) -> NDArray[np.float64]:
        """One key's values, (n,)."""
        count = len(part.names)
        key = one_of(part.keys, came)
        if key is None:
            raise ObservationError(self._missing(part, came))
        values = as_numbers(came[key])
        if values is None or values.dtype.kind == "b":
            raise ObservationError(f"{quoted(key)}: expected {_numbers(count)}, got {shown(came[key])}")
        if values.size != count or any(axis != 1 for axis in values.shape[:-1]):
            what = f"{len(values)} values" if values.ndim == 1 else f"shape {values.shape}"
            raise ObservationError(f"{quoted(key)} has {what}; {self.name} expects {count}: {', '.join(part.names)}")
        values = values.reshape(count).astype(np.float64)
        if not np.isfinite(values).all():
            where = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ObservationError(f"{quoted(key)}[{where}] is {values[where]}; every value must be finite")
        return values

    def _missing(self, part: StatePart, came: Mapping[str, Any]) -> str:
        wanted = part.keys[0]
        others = [key for key in came if key not in self._known and key not in PROMPT_KEYS][:_COMPARED]
        near = get_close_matches(wanted, others, n=1)
        hint = f"; {quoted(near[0])} is not a key of {self.name}, did you mean {wanted!r}?" if near else ""
        return f"{wanted!r} is missing{hint}; it has {_numbers(len(part.names))}: {', '.join(part.names)}"

    def _ignored(self, observation: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(
            key
            for key, value in observation.items()
            if key not in PROMPT_KEYS
            and key not in self._known
            and not (isinstance(value, Mapping) and all(f"{key}/{inner}" in self._known for inner in value))
        )


_COMPARED = 64
"""Keys among which the nearest to a missing one is looked for; each comparison takes time."""


def _check(profile: RobotProfile) -> None:
    """Refuse what contradicts itself."""
    if not profile.cameras:
        raise ProfileError("cameras: a profile needs at least one")
    if not profile.state:
        raise ProfileError("state: a profile needs at least one part")
    if not profile.actions:
        raise ProfileError("actions: a profile needs at least one dimension")
    for place, names in {
        "cameras": [camera.name for camera in profile.cameras],
        "cameras, ignored_cameras and state": [
            *profile.camera_keys,
            *profile.ignored_cameras,
            *profile.state_keys,
        ],
        "state": profile.state_names,
        "actions": [action.name for action in profile.actions],
    }.items():
        twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
        if twice is not None:
            raise ProfileError(f"{place}: {twice!r} stands there twice")
    for key in (*profile.camera_keys, *profile.ignored_cameras, *profile.state_keys):
        if key.partition("/")[0] in RESERVED_KEYS:
            raise ProfileError(f"the key {key!r} is taken: it is no robot's but one of every request; name another")
    for form in profile.frames:
        if form not in FORMS:
            raise ProfileError(f"frames: {form!r} is not a form of frames; known are {', '.join(FORMS)}")
    for index, action in enumerate(profile.actions):
        if action.relative and index >= profile.state_dim:
            raise ProfileError(
                f"relative: {action.name!r} is action {index}, and the state has no dimension {index} to add"
            )
        if action.relative and action.name in profile.state_names and action.name != profile.state_names[index]:
            raise ProfileError(
                f"relative: {action.name!r} is action {index}, and the state's dimension {index}, which would be "
                f"added, is {profile.state_names[index]!r}; give state and actions the same order, or other names"
            )
        if action.limits is not None and not action.limits[0] < action.limits[1]:
            raise ProfileError(f"actions: the limits of {action.name!r} are {list(action.limits)}, expected less, more")
    widths = {"state": profile.state_dim, "actions": profile.action_dim}
    for place, width in widths.items():
        if profile.conversion == "aloha" and width != aloha.WIDTH:
            raise ProfileError(f"{place}: conversion 'aloha' takes {aloha.WIDTH} dimensions, the profile has {width}")


def _told(action: ActionDimension) -> dict[str, Any]:
    told: dict[str, Any] = {"name": action.name, "unit": action.unit, "kind": action.kind}
    if action.scale != 1:
        told["scale"] = action.scale
    if action.limits is not None:
        told["limits"] = list(action.limits)
    return told


def _numbers(count: int) -> str:
    return "one number" if count == 1 else f"{count} numbers"
