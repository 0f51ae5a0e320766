"""Robot units and model units: each mapping undoes the other, and the formula is openpi's."""

import numpy as np
import pytest

from relay.demo import robot
from relay.demo.drawing import render_all
from relay.demo.expert import expert_command
from relay.demo.samples import expert_chunk
from relay.demo.tabletop import LOWEST_TOOL_M, Tabletop, tool_position


@pytest.fixture
def table() -> Tabletop:
    return Tabletop(np.random.default_rng(5))


def test_state_mappings_invert_each_other(table: Tabletop) -> None:
    state = robot.robot_state(table)
    assert robot.state_from_model(robot.state_to_model(state)) == pytest.approx(state, abs=1e-6)


def test_action_mappings_invert_each_other() -> None:
    actions = np.random.default_rng(0).normal(0, 0.1, (16, 4)).astype(np.float32)
    assert robot.actions_from_model(robot.actions_to_model(actions)) == pytest.approx(actions, abs=1e-6)


def test_state_is_scaled_with_the_quantile_formula() -> None:
    low, high = [0.1, -0.28, 0.0, 0.0], [0.52, 0.28, 0.22, 1.0]
    assert robot.state_to_model(low) == pytest.approx(np.full(4, -1), abs=1e-6)
    assert robot.state_to_model(high) == pytest.approx(np.full(4, 1), abs=1e-4)


def test_eight_centimetres_are_one_unit_and_an_open_gripper_is_one() -> None:
    assert robot.actions_to_model([0.08, 0.0, -0.08, 1.0]) == pytest.approx([1, 0, -1, 1], abs=1e-4)
    assert robot.actions_to_model([0.0, 0.0, 0.0, 0.0]) == pytest.approx([0, 0, 0, -1], abs=1e-4)


def test_a_chunk_of_commands_survives_the_way_to_the_model_and_back(table: Tabletop) -> None:
    start, commands = table.tool, []
    for _ in range(16):
        commands.append(expert_command(table))
        table.step(commands[-1])
    restored = robot.chunk_to_commands(robot.commands_to_chunk(commands, start), start)
    assert np.array(restored) == pytest.approx(np.array(commands), abs=1e-5)


def test_executing_the_expert_chunk_is_executing_the_expert(table: Tabletop) -> None:
    by_chunk = table.copy()
    for command in robot.chunk_to_commands(expert_chunk(table), table.tool):
        by_chunk.step(command)
        table.step(expert_command(table))
    assert by_chunk.tool == pytest.approx(table.tool, abs=1e-5)


def test_commands_never_go_into_the_table(table: Tabletop) -> None:
    deep = robot.actions_to_model([0.0, 0.0, -1.0, 0.0])[None]
    (command,) = robot.chunk_to_commands(deep, table.tool)
    assert tool_position(command[:3])[2] == pytest.approx(LOWEST_TOOL_M)


def test_the_observation_has_the_form_that_policies_take(table: Tabletop) -> None:
    frames = render_all(table)
    observation = robot.observation(frames, robot.robot_state(table), "put the red cube on the yellow plate")
    assert list(observation["image"]) == ["base_0_rgb", "left_wrist_0_rgb"]
    assert np.array_equal(observation["image"]["left_wrist_0_rgb"], frames[1])
    assert observation["state"].shape == (4,)
    assert observation["state"].dtype == np.float32
    assert observation["prompt"] == "put the red cube on the yellow plate"


def test_there_are_six_prompts() -> None:
    assert len(set(robot.PROMPTS)) == 6
    assert robot.task_prompt("blue", "purple") in robot.PROMPTS
