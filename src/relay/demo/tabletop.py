"""The built-in robot and its table: a small arm, three cubes, two plates. Knows no pictures and no policy.

Lengths are metres, angles radians, times steps of 0.1 s. The world's origin is on the table below the robot's
base; x points away from the robot, y to its left, z up. Everything random comes from the generator given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TypeAlias

import numpy as np

Point: TypeAlias = "tuple[float, float, float]"
"""A place x, y, z in metres."""

Joints: TypeAlias = "tuple[float, float, float]"
"""Base yaw, shoulder and elbow in radians; the wrist keeps the gripper vertical by itself."""

Command: TypeAlias = "tuple[float, float, float, float]"
"""What one step is told: three joint targets in radians and the gripper opening, 0 closed to 1 open."""

CONTROL_HZ = 10.0
MAX_STEPS = 120  # 12 s an episode

ROBOTS = ("front", "cross")
"""Robots, alike but for where their base camera stands: in front of the arm, or across the table, behind it."""

CUBES = ("red", "green", "blue")
PLATES = ("yellow", "purple")

LINK_M = 0.28  # upper arm and forearm alike
SHOULDER_HEIGHT_M = 0.12
TOOL_LENGTH_M = 0.08  # from the wrist down to the point between the fingertips
CUBE_HALF_M = 0.022
PLATE_RADIUS_M = 0.05
TABLE_X_M = (0.20, 0.42)  # where objects are put
TABLE_Y_M = (-0.19, 0.19)
OBJECT_GAP_M = 0.012

LOWEST_TOOL_M = 0.012  # the table stops the fingertips here
MAX_JOINT_STEP_RAD = 0.2
MAX_GRIPPER_STEP = 0.5
SHOULDER_RANGE_RAD = (-0.6, 2.4)
ELBOW_RANGE_RAD = (-2.9, -0.05)

GRASP_RADIUS_M = 0.026
GRASP_BELOW_M = 0.045
CLOSED_BELOW = 0.5  # an opening below this holds
HELD_CUBE_DROP_M = 0.02  # a held cube's underside hangs this far below the tool point
SUCCESS_RADIUS_M = 0.045


class Tabletop:
    """One robot at its table, with a task; the same generator state gives the same episode to the bit.

    Args:
        rng: everything random is drawn from it.
        robot: one of `ROBOTS`; scenes, tasks and movements don't depend on it.

    Raises:
        ValueError: for another robot; the message holds the nearest.

    Attributes:
        plates: centre (x, y) of each plate, by colour.
        cubes: x, y and underside height of each cube, by colour.
        cube, plate: the colours that the task names.
        joints: present joint angles.
        opening: gripper opening, 0 closed to 1 open.
        held: colour of the cube in the gripper, or None.
        steps: steps taken since the reset.
    """

    __slots__ = ("_rng", "cube", "cubes", "held", "joints", "opening", "plate", "plates", "robot", "steps")

    def __init__(self, rng: np.random.Generator, robot: str = ROBOTS[0]) -> None:
        self._rng = rng
        self.robot = known_robot(robot)
        self.reset()

    def reset(self) -> None:
        """Lay out a new scene, choose a task and a starting pose."""
        rng = self._rng
        places = _scatter(rng)
        self.plates: dict[str, tuple[float, float]] = dict(zip(PLATES, places[:2], strict=True))
        self.cubes: dict[str, Point] = {c: (x, y, 0.0) for c, (x, y) in zip(CUBES, places[2:], strict=True)}
        self.cube = CUBES[rng.integers(len(CUBES))]
        self.plate = PLATES[rng.integers(len(PLATES))]
        self.joints = joints_for((rng.uniform(0.24, 0.36), rng.uniform(-0.1, 0.1), rng.uniform(0.12, 0.17)))
        self.opening = 1.0
        self.held: str | None = None
        self.steps = 0

    def copy(self) -> Tabletop:
        """An independent table in the same state, to try out what would happen."""
        other = object.__new__(Tabletop)
        for name in Tabletop.__slots__:
            setattr(other, name, getattr(self, name))
        other.cubes = dict(self.cubes)
        return other

    def step(self, command: Command) -> None:
        """Let 0.1 s pass: move towards the command as far as speed and limits allow, then grasp, carry or drop."""
        self.steps += 1
        yaw, shoulder, elbow = (
            present + _clip(float(target) - present, -MAX_JOINT_STEP_RAD, MAX_JOINT_STEP_RAD)
            for present, target in zip(self.joints, command[:3], strict=True)
        )
        self.joints = (yaw, _clip(shoulder, *SHOULDER_RANGE_RAD), _clip(elbow, *ELBOW_RANGE_RAD))
        x, y, z = self.tool
        if z < LOWEST_TOOL_M:
            self.joints = joints_for((x, y, LOWEST_TOOL_M))
            x, y, z = self.tool
        target_opening = _clip(float(command[3]), 0.0, 1.0)
        self.opening += _clip(target_opening - self.opening, -MAX_GRIPPER_STEP, MAX_GRIPPER_STEP)
        self._grasp_or_drop(x, y, z)

    @property
    def tool(self) -> Point:
        """The point between the fingertips."""
        return tool_position(self.joints)

    @property
    def succeeded(self) -> bool:
        """Whether the named cube lies, released, on the named plate and the gripper is empty."""
        return self.held is None and self.target_distance() < SUCCESS_RADIUS_M

    def target_distance(self) -> float:
        """Distance along the table from the named cube to the named plate's centre, in metres."""
        cube, plate = self.cubes[self.cube], self.plates[self.plate]
        return math.hypot(cube[0] - plate[0], cube[1] - plate[1])

    def _grasp_or_drop(self, x: float, y: float, z: float) -> None:
        closed = self.opening < CLOSED_BELOW
        if self.held is None and closed and z < GRASP_BELOW_M:
            for colour, (cube_x, cube_y, height) in self.cubes.items():
                if math.hypot(cube_x - x, cube_y - y) < GRASP_RADIUS_M and height < 0.01:
                    self.held = colour
        if self.held is None:
            return
        if closed:
            self.cubes[self.held] = (x, y, max(0.0, z - HELD_CUBE_DROP_M))
        else:
            cube_x, cube_y, _ = self.cubes[self.held]
            self.cubes[self.held] = (cube_x, cube_y, 0.0)
            self.held = None


def known_robot(name: str) -> str:
    """The name, if it is one of `ROBOTS`.

    Raises:
        ValueError: if it isn't; the message holds the nearest.
    """
    if name not in ROBOTS:
        nearest = get_close_matches(name, ROBOTS, n=1, cutoff=0.0)[0]
        raise ValueError(f"robot {name!r} is not known; the nearest is {nearest!r}, known are {', '.join(ROBOTS)}")
    return name


def tool_position(joints: Sequence[float]) -> Point:
    """Forward kinematics: where the point between the fingertips is, for three joint angles."""
    yaw, shoulder, elbow = joints
    reach = LINK_M * math.cos(shoulder) + LINK_M * math.cos(shoulder + elbow)
    height = SHOULDER_HEIGHT_M + LINK_M * math.sin(shoulder) + LINK_M * math.sin(shoulder + elbow) - TOOL_LENGTH_M
    return reach * math.cos(yaw), reach * math.sin(yaw), height


def joints_for(position: Sequence[float]) -> Joints:
    """Inverse kinematics in closed form, elbow up; a place out of reach gives the stretched or folded arm."""
    x, y, z = position
    reach = math.hypot(x, y)
    height = z + TOOL_LENGTH_M - SHOULDER_HEIGHT_M  # of the wrist above the shoulder
    cosine = (reach * reach + height * height - LINK_M * LINK_M - LINK_M * LINK_M) / (2 * LINK_M * LINK_M)
    elbow = -math.acos(_clip(cosine, -1.0, 1.0))
    shoulder = math.atan2(height, reach) - math.atan2(LINK_M * math.sin(elbow), LINK_M + LINK_M * math.cos(elbow))
    return math.atan2(y, x), shoulder, elbow


def _scatter(rng: np.random.Generator) -> list[tuple[float, float]]:
    """Five places that do not touch: two for plates, three for cubes."""
    placed: list[tuple[float, float, float]] = []
    while len(placed) < len(PLATES) + len(CUBES):
        x, y = rng.uniform(*TABLE_X_M), rng.uniform(*TABLE_Y_M)
        radius = PLATE_RADIUS_M if len(placed) < len(PLATES) else CUBE_HALF_M * 1.5
        if all(math.hypot(x - px, y - py) > radius + pr + OBJECT_GAP_M for px, py, pr in placed):
            placed.append((x, y, radius))
        elif rng.random() < 0.01:  # a layout that leaves no room is given up
            placed = []
    return [(x, y) for x, y, _ in placed]


def _clip(value: float, low: float, high: float) -> float:
    return min(high, max(low, value))
