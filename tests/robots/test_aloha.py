"""ALOHA's conversion against openpi's formulas, and each mapping against its inverse."""

from __future__ import annotations

import numpy as np
import pytest
from reference import aloha_actions, aloha_state

from relay.robots import aloha


@pytest.fixture
def state() -> np.ndarray:
    state = np.random.default_rng(1).normal(size=14)
    state[[6, 13]] = [0.2, 0.9]
    return state


def test_a_state_is_converted_as_openpi_does(state: np.ndarray) -> None:
    assert aloha.state_to_policy(state) == pytest.approx(aloha_state(state), abs=1e-12)


def test_known_gripper_positions_have_their_known_angles() -> None:
    state = np.zeros(14)
    state[[6, 13]] = [1.0, 0.0]  # open: the linkage is stretched, so its angle is pi / 2
    closed = (0.022**2 + 0.01844**2 - 0.036**2) / (2 * 0.022 * 0.01844)
    expected = (np.array([np.pi / 2, np.arcsin(closed)]) - 0.5476) / 1.082
    assert aloha.state_to_policy(state)[[6, 13]] == pytest.approx(expected, abs=1e-6)


def test_actions_are_converted_as_openpi_does(state: np.ndarray) -> None:
    actions = np.stack([state, -2 * state])
    assert aloha.actions_to_robot(actions) == pytest.approx(np.array([aloha_actions(row) for row in actions]))


def test_state_mappings_invert_each_other(state: np.ndarray) -> None:
    assert aloha.state_to_robot(aloha.state_to_policy(state)) == pytest.approx(state, abs=1e-9)


def test_action_mappings_invert_each_other(state: np.ndarray) -> None:
    actions = np.stack([state, -2 * state])
    assert aloha.actions_to_policy(aloha.actions_to_robot(actions)) == pytest.approx(actions, abs=1e-12)


@pytest.mark.parametrize("beyond", [1.2, 0.01844 / (0.05800 - 0.01844), 1e300])
def test_a_gripper_beyond_the_linkage_stays_finite(state: np.ndarray, beyond: float) -> None:
    state[[6, 13]] = [beyond, -beyond]
    assert np.isfinite(aloha.state_to_policy(state)).all()


def test_a_conversion_leaves_its_input_as_it_was(state: np.ndarray) -> None:
    before = state.copy()
    aloha.state_to_policy(state)
    aloha.actions_to_robot(state[None])
    assert (state == before).all()
