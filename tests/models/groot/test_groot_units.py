"""Both directions of a robot's units, against formulas written out step by step and value by value."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from groot_folders import DROID, IDS, LIBERO, WIDTHS, processor_kwargs, statistics_of
from numpy.typing import NDArray

from relay.models.groot.poses import compose
from relay.models.groot.recipe import ActionGroup, Recipe, StatePart, read_recipe
from relay.models.groot.units import encode, scale_back, to_network, to_robot_units


def recipe_of(tag: str, **changes: Any) -> Recipe:
    sizes = {key: WIDTHS[key] for key in ("max_state_dim", "max_action_dim", "action_horizon")}
    processor = {**processor_kwargs([tag]), **changes}
    return read_recipe(processor, {tag: statistics_of(tag)}, IDS, tag, **sizes)


def rotation(seed: int) -> NDArray[np.float64]:
    turned, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((3, 3)))
    return turned * np.sign(np.linalg.det(turned))


def droid_state(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    pose = np.concatenate([random.uniform(-0.5, 0.5, 3), rotation(seed)[0], rotation(seed)[1]])
    return {
        "eef_9d": pose[None].astype(np.float32),
        "gripper_position": np.array([[0.3]], np.float32),
        "joint_position": random.uniform(-1, 1, (1, 7)).astype(np.float32),
    }


def pose_matrix(pose: NDArray[Any]) -> NDArray[np.float64]:
    """4x4 from a position and two rows of a rotation, made orthonormal one after the other."""
    x, y = [float(v) for v in pose[3:6]], [float(v) for v in pose[6:9]]
    length = math.sqrt(sum(v * v for v in x))
    x = [v / length for v in x]
    along = sum(a * b for a, b in zip(x, y, strict=True))
    y = [b - along * a for a, b in zip(x, y, strict=True)]
    length = math.sqrt(sum(v * v for v in y))
    y = [v / length for v in y]
    z = [x[1] * y[2] - x[2] * y[1], x[2] * y[0] - x[0] * y[2], x[0] * y[1] - x[1] * y[0]]
    result = np.eye(4)
    result[:3, :3], result[:3, 3] = [x, y, z], pose[:3]
    return result


def test_droids_actions_are_absolute_poses_grippers_and_joints() -> None:
    recipe, state, numbers = recipe_of(DROID), droid_state(), statistics_of(DROID)
    network = np.random.default_rng(1).uniform(-1.3, 1.3, (40, 20)).astype(np.float32)
    groups = to_robot_units(network, state, recipe)
    assert list(groups) == ["eef_9d", "gripper_position", "joint_position"]
    for step in range(40):
        cut = [min(1.0, max(-1.0, float(value))) for value in network[step]]

        def back(column: int, low: list[Any], high: list[Any], cut: list[float] = cut, first: int = 0) -> float:
            share = (cut[column] + 1) / 2
            return low[column - first] + share * (high[column - first] - low[column - first])

        poses, joints = numbers["relative_action"]["eef_9d"], numbers["relative_action"]["joint_position"]
        offset = np.array([back(column, poses["min"][step], poses["max"][step]) for column in range(9)])
        pose = pose_matrix(state["eef_9d"][0]) @ pose_matrix(offset)
        expected = np.concatenate([pose[:3, 3], pose[0, :3], pose[1, :3]])
        assert np.allclose(groups["eef_9d"][step], expected, atol=2e-6)
        gripper = numbers["action"]["gripper_position"]
        assert groups["gripper_position"][step, 0] == pytest.approx(back(9, gripper["q01"], gripper["q99"], first=9))
        for joint in range(7):
            moved = back(10 + joint, joints["min"][step], joints["max"][step], first=10)
            expected_joint = float(state["joint_position"][0, joint]) + moved
            assert groups["joint_position"][step, joint] == pytest.approx(expected_joint, abs=2e-6)


def test_liberos_actions_have_their_own_horizon_and_one_group_for_each_number() -> None:
    recipe, numbers = recipe_of(LIBERO), statistics_of(LIBERO)
    network = np.random.default_rng(2).uniform(-1, 1, (40, 20)).astype(np.float32)
    groups = to_robot_units(network, {}, recipe)
    assert {key: values.shape for key, values in groups.items()} == dict.fromkeys(numbers["action"], (16, 1))
    for column, (key, entry) in enumerate(numbers["action"].items()):
        low, high = entry["q01"][0], entry["q99"][0]
        for step in range(16):
            expected = low + (float(network[step, column]) + 1) / 2 * (high - low)
            assert groups[key][step, 0] == pytest.approx(expected, abs=1e-6)
        assert groups[key].dtype == np.float32


def test_relative_actions_start_from_the_last_of_several_states() -> None:
    recipe = replace(recipe_of(DROID), state_steps=2)
    old, new = droid_state(3), droid_state(4)
    both = {key: np.concatenate([old[key], new[key]]) for key in new}
    network = np.zeros((40, 20), np.float32)
    for key, values in to_robot_units(network, both, recipe).items():
        assert np.array_equal(values, to_robot_units(network, new, recipe)[key])


def test_relative_actions_may_start_from_another_key() -> None:
    group = ActionGroup("arm", 2, "min_max", -np.ones(2), np.ones(2), "joints", "measured")
    recipe = replace(recipe_of(DROID), actions=(group,), horizon=1)
    state = {"measured": np.array([[10.0, 20.0]], np.float32)}
    assert to_robot_units(np.full((40, 20), 0.5, np.float32), state, recipe)["arm"].tolist() == [[10.5, 20.5]]


def test_the_state_is_scaled_part_by_part_and_padded() -> None:
    recipe, numbers, state = recipe_of(LIBERO), statistics_of(LIBERO), {}
    for index, part in enumerate(recipe.state):
        state[part.key] = np.full((1, part.width), 0.1 * index - 0.3, np.float32)
    scaled = to_network(state, recipe)
    assert scaled.dtype == np.float32
    assert scaled.shape == (20,)
    place = 0
    for part in recipe.state:
        for column in range(part.width):
            low, high = (numbers["state"][part.key][name][column] for name in ("q01", "q99"))
            share = (float(state[part.key][0, column]) - low) / (high - low)
            assert scaled[place] == pytest.approx(max(-1.0, min(1.0, 2 * share - 1)), abs=1e-6)
            place += 1
    assert place == 8
    assert not scaled[8:].any()


def test_several_states_follow_each_other_oldest_first() -> None:
    recipe = replace(recipe_of(DROID), state_steps=2)
    old, new = droid_state(5), droid_state(6)
    both = {key: np.concatenate([old[key], new[key]]) for key in new}
    one = recipe_of(DROID)
    assert np.array_equal(to_network(both, recipe), np.concatenate([to_network(old, one), to_network(new, one)]))


def test_a_network_without_a_state_gets_zeros() -> None:
    assert not to_network(droid_state(), recipe_of(DROID, exclude_state=True)).any()


VALUES = np.array([0.5, -3.0, 2.0])


def test_angles_become_all_sines_then_all_cosines() -> None:
    part = StatePart("q", 3, "sin_cos", np.zeros(3), np.zeros(3))
    expected = [math.sin(v) for v in VALUES] + [math.cos(v) for v in VALUES]
    assert encode(VALUES, part, clip=True).tolist() == pytest.approx(expected)


def test_mean_and_deviation_never_cut_and_leave_what_has_no_deviation() -> None:
    part = StatePart("q", 3, "mean_std", np.array([0.5, 1.0, 7.0]), np.array([2.0, 0.1, 0.0]))
    assert encode(VALUES, part, clip=True).tolist() == pytest.approx([0.0, -40.0, 2.0])


@pytest.mark.parametrize(("clip", "second"), [(True, -1.0), (False, -2.0)])
def test_ranges_cut_only_where_the_checkpoint_does_and_make_constants_zero(clip: bool, second: float) -> None:
    part = StatePart("q", 3, "min_max", np.array([0.0, -2.0, 5.0]), np.array([1.0, 0.0, 5.0 + 1e-9]))
    assert encode(VALUES, part, clip=clip).tolist() == pytest.approx([0.0, second, 0.0])


def test_actions_by_mean_and_deviation_are_not_cut_and_keep_what_has_no_deviation() -> None:
    group = ActionGroup("a", 2, "mean_std", np.array([1.0, 5.0]), np.array([0.5, 0.0]))
    assert scale_back(np.array([[4.0, 0.25]]), group).tolist() == [[3.0, 0.25]]


def test_actions_by_range_are_cut_first() -> None:
    group = ActionGroup("a", 2, "min_max", np.array([1.0, -4.0]), np.array([3.0, 4.0]))
    assert scale_back(np.array([[4.0, -0.5], [-9.0, 1.0]]), group).tolist() == [[3.0, -2.0], [1.0, 4.0]]


def turned(vector: NDArray[Any]) -> NDArray[np.float64]:
    """The rotation matrix of a rotation vector, by summing up the exponential's series."""
    x, y, z = vector
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    result, term = np.eye(3), np.eye(3)
    for power in range(1, 60):
        term = term @ cross / power
        result = result + term
    return result


@pytest.mark.parametrize("start", [[0.3, -0.2, 0.9], [0.0, 0.0, 0.0], [3.0, 0.5, -0.4], [0.0, math.pi, 0.0]])
def test_poses_with_rotation_vectors_are_composed_as_matrices(start: list[float]) -> None:
    random = np.random.default_rng(7)
    first = np.array([0.1, 0.2, 0.3, *start])
    offsets = random.uniform(-2, 2, (30, 6))
    offsets[0, 3:] = 0
    offsets[1, 3:] = [1e-9, 0, 0]
    poses = compose("xyz_rotvec", first, offsets)
    for pose, offset in zip(poses, offsets, strict=True):
        assert np.allclose(pose[:3], first[:3] + turned(first[3:]) @ offset[:3])
        assert np.allclose(turned(pose[3:]), turned(first[3:]) @ turned(offset[3:]), atol=1e-9)
        assert np.linalg.norm(pose[3:]) <= math.pi + 1e-9


def test_poses_as_matrices_are_composed_and_their_rotations_made_exact() -> None:
    random = np.random.default_rng(8)
    start, offsets = np.eye(4), np.tile(np.eye(4), (5, 1, 1))
    start[:3, :3], start[:3, 3] = rotation(1), [1, 2, 3]
    for step, offset in enumerate(offsets):
        offset[:3, :3], offset[:3, 3] = rotation(step + 2), random.uniform(-1, 1, 3)
    stretched = offsets.copy()
    stretched[:, :3, :3] *= 1.3  # the nearest rotation to a stretched one is itself
    poses = compose("matrix", start.ravel(), stretched.reshape(5, 16)).reshape(5, 4, 4)
    assert np.allclose(poses, [start @ offset for offset in offsets])


def test_reflections_are_no_rotations() -> None:
    offset = np.diag([1.0, 1.0, -0.5, 1.0]).ravel()
    pose = compose("matrix", np.eye(4).ravel(), offset[None]).reshape(4, 4)
    assert np.linalg.det(pose[:3, :3]) == pytest.approx(1)
