"""The scripted expert: what a robot that knows where everything is would do next. Knows no pictures.

It is a function of the present state alone, so it can label any state, including those reached by mistakes.
"""

from __future__ import annotations

import math

from relay.demo.tabletop import Command, Tabletop, joints_for

REACH_SPEED_M = 0.016  # along the table, per step
LIFT_SPEED_M = 0.018  # up and down, per step
REST_POSITION_M = (0.30, 0.0, 0.15)
FUNNEL_SLOPE = 3.0  # metres of height kept per metre of distance to the target
FUNNEL_TOP_M = 0.09


def expert_command(table: Tabletop) -> Command:
    """The next command: approach the cube, close, carry it to the plate, open, retreat."""
    x, y, z = table.tool
    (target_x, target_y, target_z), opening = _target(table)
    dx, dy, dz = target_x - x, target_y - y, target_z - z

    speed = REACH_SPEED_M
    if dz > 0.02:  # rise first, sweep later: a carried cube must not knock others over
        speed *= min(1.0, max(0.12, 1 - (dz - 0.02) / 0.06))
    distance = math.hypot(dx, dy)
    share = min(1.0, speed / distance) if distance > 1e-9 else 1.0
    dz = min(LIFT_SPEED_M, max(-LIFT_SPEED_M, dz))
    return (*joints_for((x + dx * share, y + dy * share, z + dz)), opening)


def _target(table: Tabletop) -> tuple[tuple[float, float, float], float]:
    """Where the tool should go, and the gripper opening to have there."""
    x, y, z = table.tool
    if table.succeeded:
        return REST_POSITION_M, 1.0
    if table.held is not None and table.held != table.cube:  # the wrong one: put it down here
        return (x, y, 0.02), 1.0
    if table.held is not None:
        plate_x, plate_y = table.plates[table.plate]
        distance = math.hypot(plate_x - x, plate_y - y)
        release = distance < 0.014 and z < 0.045
        return (plate_x, plate_y, 0.03 + _funnel(distance - 0.012)), 1.0 if release else 0.0
    cube_x, cube_y, _ = table.cubes[table.cube]
    distance = math.hypot(cube_x - x, cube_y - y)
    close = distance < 0.012 and z < 0.038
    return (cube_x, cube_y, 0.022 + _funnel(distance - 0.008)), 0.0 if close else 1.0


def _funnel(distance: float) -> float:
    """Height above the target: high while far away, so that the gripper comes down on it from above."""
    return min(FUNNEL_TOP_M, max(0.0, distance * FUNNEL_SLOPE))
