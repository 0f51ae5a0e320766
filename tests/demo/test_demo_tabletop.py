"""The simulation and its expert: exact repetition, kinematics, grasping, and that the task can be done."""

import numpy as np
import pytest

from relay.demo.drawing import IMAGE_SIZE, object_pixels, render_all
from relay.demo.expert import expert_command
from relay.demo.tabletop import (
    CUBES,
    LOWEST_TOOL_M,
    MAX_JOINT_STEP_RAD,
    MAX_STEPS,
    PLATES,
    ROBOTS,
    Tabletop,
    joints_for,
    tool_position,
)


def table_of(seed: int) -> Tabletop:
    return Tabletop(np.random.default_rng(seed))


def solve(table: Tabletop) -> int:
    while not table.succeeded and table.steps < MAX_STEPS:
        table.step(expert_command(table))
    return table.steps


def test_the_same_seed_gives_the_same_episode_to_the_bit() -> None:
    first, second = table_of(7), table_of(7)
    for _ in range(30):
        assert np.array_equal(render_all(first), render_all(second))
        assert (first.joints, first.opening, first.cubes) == (second.joints, second.opening, second.cubes)
        first.step(expert_command(first))
        second.step(expert_command(second))


def test_robots_differ_in_what_their_base_camera_sees_and_in_nothing_else() -> None:
    front, cross = (Tabletop(np.random.default_rng(7), robot) for robot in ROBOTS)
    for _ in range(20):
        (front_base, front_wrist), (cross_base, cross_wrist) = render_all(front), render_all(cross)
        assert not np.array_equal(front_base, cross_base)
        assert np.array_equal(front_wrist, cross_wrist)
        assert (front.joints, front.opening, front.cubes) == (cross.joints, cross.opening, cross.cubes)
        front.step(expert_command(front))
        cross.step(expert_command(cross))


def test_the_second_robots_camera_stands_across_the_table() -> None:
    for robot, sees_left_on_its in (("front", "right"), ("cross", "left")):
        table = Tabletop(np.random.default_rng(0), robot)
        table.plates = {"yellow": (0.3, 0.15), "purple": (0.3, -0.15)}
        yellow, purple = object_pixels(table, "base_0_rgb")[:2, 0]
        assert ("left" if yellow < purple else "right") == sees_left_on_its


def test_every_robot_has_all_objects_in_view() -> None:
    for robot in ROBOTS:
        for seed in range(60):
            pixels = object_pixels(Tabletop(np.random.default_rng(seed), robot), "base_0_rgb")
            assert (pixels > 0).all()
            assert (pixels < IMAGE_SIZE).all()


def test_an_unknown_robot_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="robot 'corss' is not known; the nearest is 'cross', known are front, cross"):
        Tabletop(np.random.default_rng(0), "corss")


def test_another_seed_gives_another_scene() -> None:
    assert table_of(1).cubes != table_of(2).cubes


def test_inverse_kinematics_undoes_forward_kinematics() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        place = rng.uniform((0.15, -0.25, 0.012), (0.45, 0.25, 0.2))
        assert tool_position(joints_for(place)) == pytest.approx(tuple(place), abs=1e-9)


def test_objects_do_not_touch_each_other() -> None:
    for seed in range(50):
        table = table_of(seed)
        places = [*table.plates.values(), *(cube[:2] for cube in table.cubes.values())]
        gaps = [np.hypot(a[0] - b[0], a[1] - b[1]) for i, a in enumerate(places) for b in places[:i]]
        assert min(gaps) > 0.06


def test_every_task_is_drawn() -> None:
    tasks = {(table.cube, table.plate) for table in map(table_of, range(100))}
    assert tasks == {(cube, plate) for cube in CUBES for plate in PLATES}


def test_the_expert_solves_every_scene() -> None:
    steps = []
    for seed in range(60):
        table = table_of(seed)
        steps.append(solve(table))
        assert table.succeeded, f"scene {seed}"
    assert np.mean(steps) < 40


def test_the_expert_puts_the_wrong_cube_down_and_takes_the_right_one() -> None:
    table = table_of(3)
    right = table.cube
    table.cube = next(cube for cube in CUBES if cube != right)
    while table.held is None:
        table.step(expert_command(table))
    table.cube = right
    solve(table)
    assert table.succeeded


def test_joints_move_no_faster_than_they_can() -> None:
    table = table_of(0)
    before = table.joints
    table.step((3.0, 2.0, -2.5, 1.0))
    assert np.abs(np.subtract(table.joints, before)).max() <= MAX_JOINT_STEP_RAD + 1e-12


def test_the_table_stops_the_tool() -> None:
    table = table_of(0)
    for _ in range(10):
        table.step((*joints_for((0.3, 0.0, -0.05)), 1.0))
    assert table.tool[2] == pytest.approx(LOWEST_TOOL_M)


def test_a_copy_is_the_same_robot() -> None:
    assert Tabletop(np.random.default_rng(0), "cross").copy().robot == "cross"


def test_a_copy_goes_its_own_way() -> None:
    table = table_of(4)
    before = dict(table.cubes), table.joints
    solve(table.copy())
    assert (table.cubes, table.joints) == before
