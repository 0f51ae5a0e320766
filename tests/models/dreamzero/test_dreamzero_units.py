"""State in and actions out, against the formulas written out number by number."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dreamzero_recipes import droid
from numpy.typing import NDArray

from relay.models.dreamzero.recipe import Part, Recipe
from relay.models.dreamzero.units import outside, to_network, to_robot

State = dict[str, NDArray[np.float64]]


def a_state() -> State:
    return {"joint_position": np.array([0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7]), "gripper_position": np.array([0.25])}


def some_actions(recipe: Recipe) -> NDArray[np.float32]:
    random = np.random.default_rng(0)
    return random.uniform(-1.5, 1.5, (recipe.horizon, recipe.action_width)).astype(np.float32)


def test_the_state_is_scaled_by_its_percentiles_and_padded_with_zeros() -> None:
    recipe, state = droid(), a_state()
    scaled = to_network(state, recipe)
    joints = recipe.state[0]
    for index in range(7):
        low, high = float(joints.low[index]), float(joints.high[index])
        expected = 2 * (state["joint_position"][index] - low) / (high - low) - 1
        assert scaled[index] == np.float32(expected)
    assert scaled[7] == np.float32(-0.5)
    assert scaled.shape == (64,)
    assert scaled.dtype == np.float32
    assert not scaled[8:].any()


def test_the_state_is_clipped() -> None:
    scaled = to_network({"joint_position": np.full(7, 50.0), "gripper_position": np.array([-3.0])}, droid())
    assert scaled[:8].tolist() == [1] * 7 + [-1]


def test_what_never_changed_in_training_stays_as_it_is_and_is_clipped() -> None:
    still = Part("gripper_position", np.array([0.3]), np.array([0.3]))
    recipe = replace(droid(), state=(droid().state[0], still))
    state = a_state()
    assert to_network(state, recipe)[7] == np.float32(0.25)
    assert to_network({**state, "gripper_position": np.array([5.0])}, recipe)[7] == 1


def test_actions_are_scaled_back_without_a_clip_and_joints_begin_at_the_states_own() -> None:
    recipe, state = droid(), a_state()
    actions = some_actions(recipe)
    chunk = to_robot(actions, state, recipe)
    assert chunk.shape == (24, 8)
    assert chunk.dtype == np.float32
    for step in range(24):
        for index in range(8):
            part, column = (recipe.actions[0], index) if index < 7 else (recipe.actions[1], 0)
            low, high = float(part.low[column]), float(part.high[column])
            expected = (float(actions[step, index]) + 1) / 2 * (high - low) + low
            if index < 7:
                expected += float(state["joint_position"][index])
            assert chunk[step, index] == np.float32(expected)
    assert np.abs(actions[:, :8]).max() > 1


def test_absolute_joints_do_not_see_the_state() -> None:
    recipe = replace(droid(), actions=tuple(replace(part, relative=False) for part in droid().actions))
    actions = some_actions(recipe)
    other = {key: values + 1 for key, values in a_state().items()}
    assert (to_robot(actions, a_state(), recipe) == to_robot(actions, other, recipe)).all()


def test_statistics_by_step_scale_each_step_by_its_own() -> None:
    low = -np.arange(1, 25)[:, None] * np.ones((24, 7))
    high = np.arange(1, 25)[:, None] * np.full((24, 7), 3.0)
    joints = Part("joint_position", low, high, relative=True)
    recipe = replace(droid(), actions=(joints, droid().actions[1]))
    actions, state = some_actions(recipe), a_state()
    chunk = to_robot(actions, state, recipe)
    for step in range(24):
        size = step + 1
        expected = (actions[step, :7].astype(np.float64) + 1) / 2 * (3 * size + size) - size + state["joint_position"]
        assert np.array_equal(chunk[step, :7], expected.astype(np.float32))


def test_a_state_in_degrees_is_told() -> None:
    state = {**a_state(), "joint_position": np.array([0, 0, 0, 90.0, 0, 10, 0])}
    (note,) = outside(state, droid())
    assert note.text.startswith("joint_position[3] is 90, far outside -2.3 to 2.1")


@pytest.mark.parametrize("value", [-3.9, 3.9])
def test_a_state_near_the_training_data_is_not_worth_a_remark(value: float) -> None:
    state = {**a_state(), "joint_position": np.array([0, 0, 0, value, 0, 0, 0])}
    assert outside(state, droid()) == ()
