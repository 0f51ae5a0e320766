"""Between the built-in robot and the policy: the worked example for an adapter of your own robot.

A policy sees and answers in the units it was trained on. A robot has its own. Everything between the two stands
here, each mapping next to its inverse:

* state: tool x, y, z in metres and the gripper opening, 0 closed to 1 open;
* actions: for each step the tool's displacement from where it was when the observation was made, in metres, and the
  gripper opening to have there; the inverse kinematics turns them into joint targets;
* both are scaled to about [-1, 1] by the quantiles in `weights/norm_stats.json`, a file in openpi's format.

It knows neither the simulation's physics nor the network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from relay.demo.drawing import CAMERAS
from relay.demo.tabletop import (
    CUBES,
    LOWEST_TOOL_M,
    PLATES,
    Command,
    Point,
    Tabletop,
    joints_for,
    tool_position,
)

Array = NDArray[np.float32]

# `drawing.CAMERAS` has no `right_wrist_0_rgb`: the policy masks cameras that are absent.

ACTION_HORIZON = 16
ACTION_DIM = 4


def task_prompt(cube: str, plate: str) -> str:
    """The task in words, such as "put the red cube on the yellow plate"."""
    return f"put the {cube} cube on the {plate} plate"


PROMPTS = tuple(task_prompt(cube, plate) for cube in CUBES for plate in PLATES)


def observation(frames: NDArray[np.uint8], state: Array, prompt: str) -> dict[str, Any]:
    """What `relay.Policy.infer` takes, from what the robot has.

    Args:
        frames: pictures uint8 (2, H, W, 3) in the order of `drawing.CAMERAS`.
        state: robot units, float32 (4,); see `robot_state`.
        prompt: the task in words.
    """
    return {
        "image": dict(zip(CAMERAS, frames, strict=True)),
        "state": state_to_model(state),
        "prompt": prompt,
    }


def robot_state(table: Tabletop) -> Array:
    """The state in robot units, float32 (4,): tool x, y, z in metres and gripper opening."""
    return np.array([*table.tool, table.opening], np.float32)


def state_to_model(state: ArrayLike) -> Array:
    """Robot units to model units, (..., 4)."""
    return norm_stats().state.to_model(state)


def state_from_model(state: ArrayLike) -> Array:
    """Model units to robot units, (..., 4): the inverse of `state_to_model`."""
    return norm_stats().state.from_model(state)


def actions_to_model(actions: ArrayLike) -> Array:
    """Displacements in metres and gripper openings to model units, (..., 4)."""
    return norm_stats().actions.to_model(actions)


def actions_from_model(actions: ArrayLike) -> Array:
    """Model units to displacements in metres and gripper openings: the inverse of `actions_to_model`."""
    return norm_stats().actions.from_model(actions)


def chunk_to_commands(actions: ArrayLike, start: Point) -> list[Command]:
    """Joint and gripper targets, one a step, for a chunk in model units (n, 4).

    Args:
        actions: what the policy answered.
        start: where the tool was when the observation was made; displacements count from there.
    """
    commands: list[Command] = []
    for dx, dy, dz, opening in actions_from_model(actions).tolist():
        height = max(LOWEST_TOOL_M, start[2] + dz)
        commands.append((*joints_for((start[0] + dx, start[1] + dy, height)), opening))
    return commands


def commands_to_chunk(commands: Sequence[Command], start: Point) -> Array:
    """The chunk in model units (n, 4) that asks for these commands: the inverse of `chunk_to_commands`."""
    targets = [(*tool_position(command[:3]), command[3]) for command in commands]
    return actions_to_model(np.array(targets) - (*start, 0.0))


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The 1 % and 99 % quantiles that scale robot units to about [-1, 1], float64 (4,) each.

    The formula is openpi's (`src/openpi/transforms.py`: `Normalize`, `Unnormalize` with quantiles).
    """

    q01: NDArray[np.float64]
    q99: NDArray[np.float64]

    def to_model(self, values: ArrayLike) -> Array:
        scaled = (np.asarray(values, np.float64) - self.q01) / (self.q99 - self.q01 + 1e-6) * 2.0 - 1.0
        return scaled.astype(np.float32)

    def from_model(self, values: ArrayLike) -> Array:
        restored = (np.asarray(values, np.float64) + 1.0) / 2.0 * (self.q99 - self.q01 + 1e-6) + self.q01
        return restored.astype(np.float32)


@dataclass(frozen=True, slots=True)
class NormStats:
    """The statistics that go with the demo's weights."""

    state: Quantiles
    actions: Quantiles


@cache
def norm_stats() -> NormStats:
    """The shipped statistics, read once."""
    text = files("relay.demo").joinpath("weights").joinpath("norm_stats.json").read_text("utf-8")
    stats = json.loads(text)["norm_stats"]
    state, actions = (
        Quantiles(np.array(stats[key]["q01"]), np.array(stats[key]["q99"])) for key in ("state", "actions")
    )
    return NormStats(state, actions)
