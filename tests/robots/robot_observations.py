"""Observations as the robots' own programs send them, random but the same every time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def observation_of(robot: str, seed: int = 0) -> dict[str, Any]:
    """One observation of a shipped profile's robot."""
    random = np.random.default_rng(seed)
    if robot.startswith("droid"):
        return {
            "observation/exterior_image_1_left": frame(random),
            "observation/wrist_image_left": frame(random),
            "observation/joint_position": random.normal(size=7),
            "observation/gripper_position": random.random(1),
            "prompt": "put the cup away",
        }
    if robot.startswith("libero"):
        return {
            "observation/image": frame(random),
            "observation/wrist_image": frame(random),
            "observation/state": random.normal(size=8),
            "prompt": "put the cup away",
        }
    state = random.normal(size=14)
    state[[6, 13]] = random.random(2)
    return {
        "images": {
            name: frame(random).transpose(2, 0, 1) for name in ("cam_high", "cam_left_wrist", "cam_right_wrist")
        },
        "state": state,
        "prompt": "put the cup away",
    }


def frame(random: np.random.Generator) -> NDArray[np.uint8]:
    """(24, 32, 3) uint8."""
    return random.integers(0, 256, (24, 32, 3), np.uint8)
