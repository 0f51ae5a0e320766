"""What openpi's robot transforms compute, worked out one number at a time from their formulas: what tests compare with.

Imports nothing of relay. Formulas: openpi src/openpi/transforms.py (Normalize, Unnormalize, AbsoluteActions),
src/openpi/policies/{droid,libero,aloha}_policy.py, src/openpi/training/config.py (the masks of offsets).

Statistics are `{"state": {...}, "actions": {...}}` of lists `mean`, `std`, `q01`, `q99`, as in `norm_stats.json`; a
kind is `z_score` or `quantile`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import asin
from typing import Any

import numpy as np
from numpy.typing import NDArray

ACTION_DIMS = {"droid": 8, "droid-jointpos": 8, "aloha": 14, "aloha-sim": 14, "libero": 7, "libero-delta": 7}
OFFSET_DIMS = {
    "droid": (),
    "droid-jointpos": (0, 1, 2, 3, 4, 5, 6),
    "aloha": (0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12),
    "aloha-sim": (),
    "libero": (),
    "libero-delta": (0, 1, 2, 3, 4, 5),
}
FLIPPED = (1, 2, 8, 9)
GRIPPERS = (6, 13)


def expected_robot_actions(
    robot: str, observation: Mapping[str, Any], model_actions: NDArray[Any], statistics: Mapping[str, Any], kind: str
) -> NDArray[np.float32]:
    """The chunk in robot units (horizon, robot's dims) for one in model units (horizon, model's dims)."""
    state = expected_policy_state(robot, observation)
    rows: list[list[float]] = []
    for row in np.asarray(model_actions, np.float64).tolist():
        values = [
            unnormalized(value, index, statistics["actions"], kind)
            for index, value in enumerate(row[: ACTION_DIMS[robot]])
        ]
        for index in OFFSET_DIMS[robot]:
            values[index] += state[index]
        rows.append(aloha_actions(values) if robot.startswith("aloha") else values)
    return np.array(rows, np.float32)


def expected_model_state(
    robot: str, observation: Mapping[str, Any], statistics: Mapping[str, Any], kind: str
) -> NDArray[np.float64]:
    """The normalized state (robot's dims), before padding."""
    state = expected_policy_state(robot, observation)
    return np.array([normalized(value, index, statistics["state"], kind) for index, value in enumerate(state)])


def expected_policy_state(robot: str, observation: Mapping[str, Any]) -> list[float]:
    """The state that statistics are made of."""
    if robot.startswith("droid"):
        gripper = observation["observation/gripper_position"]
        return [*_floats(observation["observation/joint_position"]), *_floats(np.atleast_1d(gripper))]
    if robot.startswith("libero"):
        return _floats(observation["observation/state"])
    return aloha_state(_floats(observation["state"]))


def expected_frame(frame: NDArray[Any]) -> NDArray[np.uint8]:
    """A frame as (H, W, 3) uint8."""
    if frame.dtype.kind == "f":
        frame = (255 * frame).astype(np.uint8)
    return np.moveaxis(frame, 0, -1) if frame.shape[0] == 3 else frame


def normalized(value: float, index: int, statistics: Mapping[str, Sequence[float]], kind: str) -> float:
    """One dimension on its way into the model."""
    if kind == "z_score":
        return (value - statistics["mean"][index]) / (statistics["std"][index] + 1e-6)
    low, high = statistics["q01"][index], statistics["q99"][index]
    return (value - low) / (high - low + 1e-6) * 2 - 1


def unnormalized(value: float, index: int, statistics: Mapping[str, Sequence[float]], kind: str) -> float:
    """One dimension on its way out of the model; those beyond the statistics stay."""
    if kind == "z_score":
        mean, std = statistics["mean"], statistics["std"]
        return value * (std[index] + 1e-6) + mean[index] if index < len(mean) else value * (1 + 1e-6)
    q01, q99 = statistics["q01"], statistics["q99"]
    return (value + 1) / 2 * (q99[index] - q01[index] + 1e-6) + q01[index] if index < len(q01) else value


def aloha_state(state: Sequence[float]) -> list[float]:
    """`adapt_to_pi` on a state of 14."""
    values = [-value if index in FLIPPED else value for index, value in enumerate(state)]
    for index in GRIPPERS:
        finger = state[index] * (0.05800 - 0.01844) + 0.01844
        sine = (0.022**2 + finger**2 - 0.036**2) / (2 * 0.022 * finger)
        values[index] = (asin(min(1.0, max(-1.0, sine))) - 0.5476) / (1.6296 - 0.5476)
    return values


def aloha_actions(actions: Sequence[float]) -> list[float]:
    """`adapt_to_pi` on one action of 14, on its way out."""
    values = [-value if index in FLIPPED else value for index, value in enumerate(actions)]
    for index in GRIPPERS:
        values[index] = (actions[index] + 0.5476 + 0.6213) / (1.4910 + 0.6213)
    return values


def _floats(values: Any) -> list[float]:
    return [float(value) for value in np.asarray(values, np.float64)]
