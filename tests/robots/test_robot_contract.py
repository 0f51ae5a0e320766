"""The metadata's `robot` says enough to drive a robot that was never read about elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from robot_observations import observation_of

from relay.protocol.msgpack_numpy import pack, unpack
from relay.robots.gripper import Gripper, convert_gripper
from relay.robots.profile_file import load_profile, shipped_profiles


class Arm:
    """A simulated arm that follows whatever the metadata asks of it; its own gripper closes at -1 and opens at 1."""

    OWN_GRIPPER = Gripper(closed_at=-1, open_at=1)

    def __init__(self, contract: Mapping[str, Any]) -> None:
        self.contract = contract
        self.values = {dimension["name"]: 0.0 for dimension in [*contract["state"], *contract["actions"]]}
        self.gripper = 0.0

    def observation(self) -> dict[str, Any]:
        observation: dict[str, Any] = {key: np.zeros((24, 32, 3), np.uint8) for key in self.contract["cameras"]}
        for dimension in self.contract["state"]:
            observation.setdefault(dimension["key"], []).append(self.values[dimension["name"]])
        return observation | {"prompt": "wave"}

    def step(self, action: Any) -> None:
        grippers = {gripper["index"]: gripper for gripper in self.contract["gripper"]}
        for index, (value, dimension) in enumerate(zip(action, self.contract["actions"], strict=True)):
            name, amount = dimension["name"], value * dimension.get("scale", 1)
            if index in grippers:
                given = Gripper(grippers[index]["closed_at"], grippers[index]["open_at"])
                self.gripper = float(convert_gripper(value, given, self.OWN_GRIPPER))
            elif dimension["kind"] == "velocity":
                self.values[name] += amount / self.contract["control_hz"]
            elif dimension["kind"] == "relative":
                self.values[name] += amount
            else:
                assert dimension["kind"] == "position"
                self.values[name] = amount


def told(robot: str) -> dict[str, Any]:
    """What a client gets, after the wire."""
    return unpack(pack(load_profile(robot).contract()))


@pytest.mark.parametrize("robot", shipped_profiles())
def test_an_observation_built_from_the_contract_alone_is_taken(robot: str) -> None:
    profile = load_profile(robot)
    reading = profile.read(Arm(told(robot)).observation())
    assert list(reading.frames) == [camera.name for camera in profile.cameras]
    assert reading.state.shape == (profile.state_dim,)


def test_an_arm_of_7_joints_moves_by_velocities_as_droid_does() -> None:
    arm = Arm(told("droid"))
    for _ in range(15):
        arm.step([1, -0.5, 0, 0, 0, 0, 0, 1])
    joints = [arm.values[f"joint_{number}"] for number in range(1, 8)]
    assert joints == pytest.approx([3.0, -1.5, 0, 0, 0, 0, 0])  # one second at 0.2 rad a step
    assert arm.gripper == -1


def test_the_same_arm_moves_by_positions_that_count_from_its_own_state() -> None:
    profile, arm = load_profile("droid-jointpos"), Arm(told("droid-jointpos"))
    arm.values["joint_3"] = 0.7
    offsets = np.zeros((2, 32))
    offsets[:, 2], offsets[:, 7] = 0.1, 0.0
    for action in profile.to_robot(offsets, profile.read(arm.observation()).state):
        arm.step(action.tolist())
    assert arm.values["joint_3"] == pytest.approx(0.8)
    assert arm.gripper == 1


def test_the_same_arm_moves_by_offsets_of_its_hand() -> None:
    arm = Arm(told("libero"))
    for _ in range(2):
        arm.step([1, 0, -1, 0, 0, 0.5, -1])
    assert [arm.values[name] for name in ("x", "y", "z", "axis_angle_z")] == pytest.approx([0.1, 0, -0.1, 0.5])
    assert arm.gripper == 1


@pytest.mark.parametrize("robot", shipped_profiles())
def test_every_action_has_name_unit_and_a_kind_that_is_explained(robot: str) -> None:
    contract = told(robot)
    assert len({action["name"] for action in contract["actions"]}) == load_profile(robot).action_dim
    for action in contract["actions"]:
        assert action["unit"] not in ("", "unknown")
        assert contract["kinds"][action["kind"]]


@pytest.mark.parametrize(
    ("robot", "hertz", "grippers"),
    [
        ("droid", 15, [{"index": 7, "closed_at": 1, "open_at": 0}]),
        ("libero", 20, [{"index": 6, "closed_at": 1, "open_at": -1}]),
        (
            "aloha",
            50,
            [{"index": 6, "closed_at": 0, "open_at": 1}, {"index": 13, "closed_at": 0, "open_at": 1}],
        ),
    ],
)
def test_rate_and_gripper_conventions_are_told(robot: str, hertz: float, grippers: list[Any]) -> None:
    assert told(robot)["control_hz"] == hertz
    assert told(robot)["gripper"] == grippers


def test_limits_are_told_where_they_are_known_and_only_there() -> None:
    assert told("droid")["actions"][0]["limits"] == [-1, 1]
    assert "limits" not in told("aloha")["actions"][0]


def test_the_contract_survives_the_wire_unchanged() -> None:
    assert told("aloha") == load_profile("aloha").contract()


def test_the_state_is_told_in_the_order_and_under_the_keys_of_the_observation() -> None:
    state = told("droid")["state"]
    assert [dimension["key"] for dimension in state] == ["observation/joint_position"] * 7 + [
        "observation/gripper_position"
    ]
    assert len(observation_of("droid")["observation/joint_position"]) == 7
