"""ALOHA's joint signs and gripper units against those π0 was trained on, each mapping next to its inverse.

The state's gripper is the finger's normalized position, the actions' gripper the motor's normalized angle, so the two
have different formulas. Reference: openpi: src/openpi/policies/aloha_policy.py (`adapt_to_pi`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

WIDTH = 14
"""Six joints and a gripper per arm, left before right."""

_SIGNS = np.array([1, -1, -1, 1, 1, 1, 1] * 2, np.float64)
_GRIPPERS = [6, 13]

# Fingers of the puppet arms in metres, closed and open (openpi: examples/aloha_real/constants.py).
_FINGER_CLOSED, _FINGER_OPEN = 0.01844, 0.05800
# The gripper's linkage in metres, from Interbotix's code.
_ARM, _HORN = 0.036, 0.022
# Motor angles in radians between which π0's gripper is normalized.
_PI_LOW, _PI_HIGH = 0.5476, 1.6296
# Motor angles of the puppet arms, closed and open (openpi: examples/aloha_real/constants.py).
_MOTOR_CLOSED, _MOTOR_OPEN = -0.6213, 1.4910


def state_to_policy(state: Array) -> Array:
    """The robot's state (14,) in π0's convention."""
    converted = _SIGNS * state
    finger = state[_GRIPPERS] * (_FINGER_OPEN - _FINGER_CLOSED) + _FINGER_CLOSED
    with np.errstate(divide="ignore", over="ignore"):
        sine = (_HORN**2 + finger**2 - _ARM**2) / (2 * _HORN * finger)
    converted[_GRIPPERS] = (np.arcsin(np.clip(sine, -1.0, 1.0)) - _PI_LOW) / (_PI_HIGH - _PI_LOW)
    return converted


def state_to_robot(state: Array) -> Array:
    """The inverse of `state_to_policy` (14,), where the linkage can reach."""
    converted = _SIGNS * state
    sine = np.sin(state[_GRIPPERS] * (_PI_HIGH - _PI_LOW) + _PI_LOW)
    finger = _HORN * sine + np.sqrt(_HORN**2 * sine**2 + _ARM**2 - _HORN**2)
    converted[_GRIPPERS] = (finger - _FINGER_CLOSED) / (_FINGER_OPEN - _FINGER_CLOSED)
    return converted


def actions_to_robot(actions: Array) -> Array:
    """Actions (horizon, 14) in π0's convention as the robot takes them."""
    converted = _SIGNS * actions
    motor = actions[:, _GRIPPERS] + _PI_LOW
    converted[:, _GRIPPERS] = (motor - _MOTOR_CLOSED) / (_MOTOR_OPEN - _MOTOR_CLOSED)
    return converted


def actions_to_policy(actions: Array) -> Array:
    """The inverse of `actions_to_robot`, (horizon, 14)."""
    converted = _SIGNS * actions
    motor = actions[:, _GRIPPERS] * (_MOTOR_OPEN - _MOTOR_CLOSED) + _MOTOR_CLOSED
    converted[:, _GRIPPERS] = motor - _PI_LOW
    return converted
