"""Shipped profiles applied: observations of real clients in, the reference's numbers out; bad ones refused by name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from reference import ACTION_DIMS, OFFSET_DIMS, expected_frame, expected_policy_state, expected_robot_actions
from robot_observations import observation_of

from relay.protocol.errors import ObservationError
from relay.robots.profile import ActionDimension, Camera, ProfileError, RobotProfile, StatePart
from relay.robots.profile_file import load_profile, shipped_profiles

ROBOTS = sorted(ACTION_DIMS)
CAMERAS = {
    "droid": {
        "base_0_rgb": "observation/exterior_image_1_left",
        "left_wrist_0_rgb": "observation/wrist_image_left",
    },
    "libero": {"base_0_rgb": "observation/image", "left_wrist_0_rgb": "observation/wrist_image"},
    "aloha": {
        "base_0_rgb": "images/cam_high",
        "left_wrist_0_rgb": "images/cam_left_wrist",
        "right_wrist_0_rgb": "images/cam_right_wrist",
    },
}
IDENTITY = {"mean": [0.0] * 32, "std": [1 - 1e-6] * 32}


def test_the_shipped_profiles_are_those_of_openpis_robots() -> None:
    assert list(shipped_profiles()) == ROBOTS


@pytest.mark.parametrize("robot", ROBOTS)
def test_frames_come_under_the_policys_camera_names(robot: str) -> None:
    observation = observation_of(robot)
    reading = load_profile(robot).read(observation)
    assert dict(reading.keys) == CAMERAS[robot.partition("-")[0]]
    for camera, key in reading.keys.items():
        sent = observation["images"][key.removeprefix("images/")] if "images" in observation else observation[key]
        assert np.array_equal(np.asarray(reading.frames[camera]), expected_frame(sent))


@pytest.mark.parametrize("robot", ROBOTS)
def test_the_state_is_the_references(robot: str) -> None:
    observation = observation_of(robot)
    state = load_profile(robot).read(observation).state
    assert state.dtype == np.float64
    assert state == pytest.approx(expected_policy_state(robot, observation), abs=1e-12)


@pytest.mark.parametrize("robot", ROBOTS)
def test_actions_in_robot_units_are_the_references(robot: str) -> None:
    observation = observation_of(robot)
    profile = load_profile(robot)
    actions = np.random.default_rng(2).normal(size=(5, 32)).astype(np.float32)
    taken = profile.to_robot(actions, profile.read(observation).state)
    expected = expected_robot_actions(robot, observation, actions, {"actions": IDENTITY}, "z_score")
    assert taken.dtype == np.float32
    assert taken.shape == (5, ACTION_DIMS[robot])
    assert taken == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("robot", ROBOTS)
def test_from_robot_undoes_to_robot(robot: str) -> None:
    profile = load_profile(robot)
    state = profile.read(observation_of(robot)).state
    actions = np.random.default_rng(2).normal(size=(5, profile.action_dim))
    assert profile.from_robot(profile.to_robot(actions, state), state) == pytest.approx(actions, abs=1e-6)


def test_two_observations_do_not_mix_their_states() -> None:
    profile = load_profile("droid-jointpos")
    actions = np.zeros((3, 8))
    first, second = (profile.read(observation_of("droid", seed)).state for seed in (1, 2))
    chunks = [profile.to_robot(actions, state) for state in (first, second)]
    for state, chunk in zip((first, second), chunks, strict=True):
        assert chunk[:, :7] == pytest.approx(np.tile(state[:7], (3, 1)), abs=1e-6)
        assert (chunk[:, 7] == 0).all()


def test_to_robot_leaves_its_arguments_as_they_were() -> None:
    profile = load_profile("aloha")
    state = profile.read(observation_of("aloha")).state
    actions = np.ones((3, 14))
    before = state.copy()
    profile.to_robot(actions, state)
    assert (actions == 1).all()
    assert (state == before).all()


def test_actions_beyond_the_limits_are_not_clipped() -> None:
    profile = load_profile("droid")
    assert (profile.to_robot(np.full((2, 8), 7.0), np.zeros(8)) == 7).all()


def test_too_few_action_dimensions_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"droid takes 8 action dimensions, got actions \(2, 7\)"):
        load_profile("droid").to_robot(np.zeros((2, 7)), np.zeros(8))


@pytest.mark.parametrize("robot", ROBOTS)
def test_offsets_are_openpis_masks(robot: str) -> None:
    actions = load_profile(robot).actions
    assert tuple(index for index, action in enumerate(actions) if action.relative) == OFFSET_DIMS[robot]


def test_reading_does_not_copy_frames() -> None:
    observation = observation_of("aloha")
    reading = load_profile("aloha").read(observation)
    assert np.shares_memory(reading.frames["base_0_rgb"], observation["images"]["cam_high"])


def test_reading_leaves_the_observation_as_it_was() -> None:
    observation, same = observation_of("aloha"), observation_of("aloha")
    load_profile("aloha").read(observation)
    assert (observation["state"] == same["state"]).all()
    assert (observation["images"]["cam_high"] == same["images"]["cam_high"]).all()


@pytest.mark.parametrize(
    "gripper",
    [0.25, np.float32(0.25), np.array(0.25), np.array([0.25]), [0.25], np.array([[[0.25]]])],
    ids=["float", "numpy scalar", "0-d", "1-d", "list", "leading axes"],
)
def test_one_number_may_come_with_any_axes_of_one(gripper: Any) -> None:
    state = load_profile("droid").read(observation_of("droid") | {"observation/gripper_position": gripper}).state
    assert state[7] == 0.25


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int16, np.uint8])
def test_every_kind_of_number_is_taken(dtype: type) -> None:
    joints = np.arange(7).astype(dtype)
    state = load_profile("droid").read(observation_of("droid") | {"observation/joint_position": joints}).state
    assert state[:7].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_a_list_and_leading_axes_of_one_are_taken_as_the_plain_state() -> None:
    observation = observation_of("libero")
    plain = load_profile("libero").read(observation).state
    for form in (plain.tolist(), [plain.tolist()], plain[None, None]):
        assert (load_profile("libero").read(observation | {"observation/state": form}).state == plain).all()


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("joint_position", np.zeros(6), "'observation/joint_position' has 6 values; droid expects 7: joint_1, joint_2"),
        ("joint_position", np.zeros((7, 1)), r"'observation/joint_position' has shape \(7, 1\); droid expects 7"),
        ("joint_position", np.zeros((2, 7)), r"'observation/joint_position' has shape \(2, 7\); droid expects 7"),
        ("gripper_position", np.zeros(2), "'observation/gripper_position' has 2 values; droid expects 1: gripper"),
        (
            "joint_position",
            [0, 0, np.nan, 0, 0, 0, 0],
            r"'observation/joint_position'\[2\] is nan; every value must be",
        ),
        ("gripper_position", np.inf, r"'observation/gripper_position'\[0\] is inf; every value must be finite"),
        ("joint_position", "straight", "'observation/joint_position': expected 7 numbers, got 'straight'"),
        ("joint_position", [[1], [2, 3]], "'observation/joint_position': expected 7 numbers, got a list of 2 items"),
        ("joint_position", None, "'observation/joint_position': expected 7 numbers, got nil"),
        ("joint_position", np.zeros(7, bool), "expected 7 numbers, got an array of shape .* and dtype bool"),
        ("gripper_position", b"0.5", "'observation/gripper_position': expected one number, got a byte string"),
    ],
)
def test_a_bad_state_is_refused_naming_key_value_and_what_is_expected(key: str, value: Any, text: str) -> None:
    with pytest.raises(ObservationError, match=text):
        load_profile("droid").read(observation_of("droid") | {f"observation/{key}": value})


def test_a_missing_state_is_refused_with_the_nearest_key_that_came() -> None:
    observation = observation_of("droid")
    observation["observation/joint_positions"] = observation.pop("observation/joint_position")
    text = (
        r"'observation/joint_position' is missing; 'observation/joint_positions' is not a key of droid, "
        r"did you mean 'observation/joint_position'\?; it has 7 numbers: joint_1"
    )
    with pytest.raises(ObservationError, match=text):
        load_profile("droid").read(observation)


@pytest.mark.parametrize("robot", ROBOTS)
def test_cameras_that_do_not_come_are_left_out(robot: str) -> None:
    profile = load_profile(robot)
    observation = observation_of(robot)
    if "images" in observation:
        observation["images"] = {"cam_right_wrist": observation["images"]["cam_right_wrist"]}
    else:
        del observation[profile.cameras[0].keys[0]]
    assert list(profile.read(observation).frames) == [profile.cameras[-1].name]


@pytest.mark.parametrize("images", [{}, {"images": {}}])
def test_no_camera_at_all_is_refused_with_those_it_has(images: dict[str, Any]) -> None:
    observation = {"state": np.zeros(14), "prompt": "wave", **images}
    with pytest.raises(
        ObservationError, match="no camera; send at least one of images/cam_high, images/cam_left_wrist"
    ):
        load_profile("aloha").read(observation)


@pytest.mark.parametrize(
    ("robot", "key", "near"),
    [
        ("droid", "observation/wrist_image_lefd", "observation/wrist_image_left"),
        ("droid", "observation/exterior_image_0_left", "observation/exterior_image_1_left"),
        ("aloha", "images/cam_hihg", "images/cam_high"),
        ("aloha", "observation.images.cam_high", "images/cam_high"),
        ("libero", "observation.images.image", "observation/image"),
    ],
)
def test_an_unknown_camera_is_refused_with_the_nearest_name(robot: str, key: str, near: str) -> None:
    frame = np.zeros((24, 32, 3), np.uint8)
    with pytest.raises(ObservationError, match=f"'{key}' is not a camera of {robot}, did you mean '{near}'"):
        load_profile(robot).read(observation_of(robot) | {key: frame})


def test_an_unknown_camera_is_refused_when_it_comes_as_an_image_file() -> None:
    with pytest.raises(ObservationError, match="'observation/overhead' is not a camera of droid"):
        load_profile("droid").read(observation_of("droid") | {"observation/overhead": b"\xff\xd8\xff"})


def test_an_unknown_camera_in_the_map_is_refused() -> None:
    observation = observation_of("aloha")
    observation["images"]["cam_top"] = observation["images"]["cam_high"]
    with pytest.raises(ObservationError, match="'images/cam_top' is not a camera of aloha"):
        load_profile("aloha").read(observation)


def test_other_numbers_under_the_image_prefix_are_ignored() -> None:
    observation = observation_of("droid") | {"observation/cartesian_position": np.zeros(6), "modality_config": "x"}
    assert load_profile("droid").read(observation).ignored == ("observation/cartesian_position", "modality_config")


def test_alohas_low_camera_is_accepted_and_nothing_to_log() -> None:
    observation = observation_of("aloha")
    observation["images"]["cam_low"] = observation["images"]["cam_high"]
    reading = load_profile("aloha").read(observation)
    assert len(reading.frames) == 3
    assert reading.ignored == ()


@pytest.mark.parametrize("robot", ROBOTS)
def test_of_what_a_robots_own_program_sends_nothing_is_ignored(robot: str) -> None:
    assert load_profile(robot).read(observation_of(robot)).ignored == ()


def test_keys_of_a_map_may_come_flat() -> None:
    observation = observation_of("aloha")
    flat = {f"images/{name}": frame for name, frame in observation.pop("images").items()} | observation
    assert list(load_profile("aloha").read(flat).frames) == list(CAMERAS["aloha"])


def test_a_key_that_comes_flat_and_in_a_map_is_refused() -> None:
    observation = observation_of("aloha")
    observation["images/cam_high"] = observation["images"]["cam_high"]
    with pytest.raises(ObservationError, match="'images/cam_high' came twice"):
        load_profile("aloha").read(observation)


@pytest.mark.parametrize("key", ["image", "image_mask", "state"])
def test_two_formats_in_one_observation_are_refused(key: str) -> None:
    with pytest.raises(ObservationError, match=f"'{key}' beside 'observation/exterior_image_1_left': send"):
        load_profile("droid").read(observation_of("droid") | {key: {"base_0_rgb": b""}})


@pytest.mark.parametrize("robot", ROBOTS)
def test_a_profile_knows_its_robots_observations(robot: str) -> None:
    assert load_profile(robot).is_its(observation_of(robot))


@pytest.mark.parametrize("robot", ROBOTS)
def test_model_format_is_no_robots(robot: str) -> None:
    model_format = {"image": {"base_0_rgb": b""}, "state": np.zeros(32), "prompt": "wave"}
    assert not load_profile(robot).is_its(model_format)


def test_an_observation_without_any_known_key_is_read_as_the_robots_so_that_its_keys_are_told() -> None:
    observation = {"images": {"cam_hihg": np.zeros((3, 4, 5), np.uint8)}, "state": np.zeros(14)}
    assert load_profile("aloha").is_its(observation)


def test_both_formats_at_once_are_the_profiles_to_refuse() -> None:
    assert load_profile("aloha").is_its(observation_of("aloha") | {"image": {}})


def _profile(**changes: Any) -> RobotProfile:
    parts: dict[str, Any] = {
        "name": "arm",
        "cameras": (Camera("base_0_rgb", ("image",)),),
        "state": (StatePart(("joints", "observation.state"), ("a", "b"), ("rad", "rad")),),
        "actions": (ActionDimension("a"), ActionDimension("b"), ActionDimension("c")),
    }
    return RobotProfile(**parts | changes)


def test_a_robot_whose_camera_is_called_image_is_never_taken_for_model_format() -> None:
    observation = {"image": np.zeros((4, 5, 3), np.uint8), "joints": [1, 2]}
    assert _profile().is_its(observation)
    assert _profile().read(observation).state.tolist() == [1, 2]


def test_another_key_may_stand_for_the_first() -> None:
    observation = {"image": np.zeros((4, 5, 3), np.uint8), "observation.state": [1, 2]}
    assert _profile().read(observation).state.tolist() == [1, 2]


def test_two_keys_for_the_same_are_refused() -> None:
    observation = {"image": np.zeros((4, 5, 3), np.uint8), "observation.state": [1, 2], "joints": [1, 2]}
    with pytest.raises(ObservationError, match=r"'joints' and 'observation.state' mean the same; send one"):
        _profile().read(observation)


@pytest.mark.parametrize("keys", [("image",), ("image/front", "image/wrist")], ids=["one key", "a map"])
def test_model_format_is_refused_where_image_is_the_robots_own_key(keys: tuple[str, ...]) -> None:
    cameras = [Camera(name, (key,)) for name, key in zip(("base_0_rgb", "left_wrist_0_rgb"), keys, strict=False)]
    profile = _profile(cameras=tuple(cameras))
    model_format = {"image": {"base_0_rgb": np.zeros((4, 5, 3), np.uint8)}, "state": [0, 0]}
    assert profile.is_its(model_format)
    text = f"'image/base_0_rgb' is not a camera of .*; it has {', '.join(keys)}; model format is not taken"
    with pytest.raises(ObservationError, match=text):
        profile.read(model_format)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cameras": ()}, "cameras: a profile needs at least one"),
        ({"state": ()}, "state: a profile needs at least one part"),
        ({"actions": ()}, "actions: a profile needs at least one dimension"),
        ({"actions": (ActionDimension("a"), ActionDimension("a"))}, "actions: 'a' stands there twice"),
        ({"ignored_cameras": ("joints",)}, "cameras, ignored_cameras and state: 'joints' stands there twice"),
        ({"frames": ("grey",)}, "frames: 'grey' is not a form of frames; known are channels_first, float"),
        ({"conversion": "aloha"}, "state: conversion 'aloha' takes 14 dimensions, the profile has 2"),
        (
            {"actions": (*map(ActionDimension, "ab"), ActionDimension("c", relative=True))},
            "relative: 'c' is action 2, and the state has no dimension 2 to add",
        ),
        (
            {
                "state": (StatePart(("joints",), ("b", "a"), ("rad", "rad")),),
                "actions": (ActionDimension("a", relative=True), ActionDimension("b")),
            },
            "relative: 'a' is action 0, and the state's dimension 0, which would be added, is 'b'",
        ),
        ({"ignored_cameras": ("prompt",)}, "the key 'prompt' is taken"),
        ({"ignored_cameras": ("session_id",)}, "the key 'session_id' is taken"),
        ({"ignored_cameras": ("noise/top",)}, "the key 'noise/top' is taken"),
        (
            {"actions": (ActionDimension("a", limits=(1.0, -1.0)),)},
            r"actions: the limits of 'a' are \[1.0, -1.0\], expected less, more",
        ),
    ],
)
def test_a_profile_that_contradicts_itself_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ProfileError, match=text):
        _profile(**changes)


def test_applying_a_profile_needs_no_yaml() -> None:
    code = "import sys, relay.robots.profile, relay.robots.gripper; sys.exit('yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
