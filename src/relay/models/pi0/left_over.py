"""What is left of a request's previous chunk, checked and brought into the network's units. CPU only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from relay.engine.chunking import Chunking
from relay.models.pi0.config import Pi0Config
from relay.models.pi0.guidance import LeftOver
from relay.models.pi0.units import RobotUnits
from relay.protocol.errors import ObservationError
from relay.protocol.messages import Options

LARGEST = 1e6
"""Largest magnitude of a left-over in the network's units, where actions are about 1."""


def read_left_over(
    options: Options,
    config: Pi0Config,
    chunking: Chunking,
    robot: RobotUnits | None,
    robot_state: NDArray[np.float64] | None,
) -> LeftOver | None:
    """What a request's options leave of the previous chunk; None if it brings nothing.

    Args:
        robot, robot_state: of an observation in a robot's units: its left-over is in them too, and relative dimensions
            become offsets from this observation's state. Without them it is in the network's units as it came.

    Raises:
        ObservationError: naming the option, what came and what is expected.
    """
    if options.prev_actions is None or options.inference_delay is None or options.execution_horizon is None:
        return None
    given, delay, guided = options.prev_actions, options.inference_delay, options.execution_horizon
    rows, columns = given.shape
    horizon = config.action_horizon
    if rows > horizon:
        raise ObservationError(
            f"prev_actions has {rows} rows; a chunk of this policy has {horizon}, so no more are left"
        )
    if guided > horizon:
        raise ObservationError(f"execution_horizon is {guided}; a chunk of this policy has {horizon} steps")
    if delay > guided:
        raise ObservationError(
            f"inference_delay is {delay}, more than the execution_horizon of {guided}; steps that will have been "
            "executed are the first of those that guide"
        )
    if robot is not None and robot_state is not None:
        width = robot.profile.action_dim
        if columns != width:
            raise ObservationError(f"prev_actions has {columns} columns; actions of {robot.profile.name} have {width}")
        given = robot.from_robot(given, robot_state)  # (rows, width)
    elif not 1 <= columns <= config.action_dim:
        raise ObservationError(
            f"prev_actions has {columns} columns; this policy's actions have {config.action_dim}, fewer are filled up "
            "with zeros"
        )
    if not (magnitude := np.abs(given)).max() <= LARGEST:
        row, column = np.argwhere(magnitude == magnitude.max())[0].tolist()
        raise ObservationError(
            f"prev_actions[{row}, {column}] is {options.prev_actions[row, column]:g}, which is {given[row, column]:g} "
            "in the network's units; expected actions of a chunk that this policy gave"
        )
    actions = np.zeros((horizon, config.action_dim), np.float32)
    actions[:rows, : given.shape[1]] = given
    return LeftOver(actions, chunking.weights(delay, min(guided, rows), horizon), chunking)
