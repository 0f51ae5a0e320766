"""What clients send, in either set of camera keys: what is taken, and which sentence refuses the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dreamzero_recipes import agibot, droid, droid_observation, frame

from relay.models.dreamzero.observation import read_observation
from relay.protocol.errors import ObservationError
from relay.protocol.images import Codec, encode_frame

LEFT, RIGHT, WRIST = "exterior_image_1_left", "exterior_image_2_left", "wrist_image_left"


def refused(observation: dict[str, Any], **options: Any) -> str:
    with pytest.raises(ObservationError) as error:
        read_observation(observation, options.pop("recipe", droid()), **options)
    return str(error.value)


@pytest.mark.parametrize(("camera_set", "first"), [("roboarena", 0), ("droid", 1)])
def test_each_camera_set_tells_left_from_right(camera_set: str, first: int) -> None:
    observation = droid_observation(first)
    frames = read_observation(observation, droid(), camera_set=camera_set).frames
    assert list(frames) == [LEFT, RIGHT, WRIST]
    for camera, key in ((LEFT, f"exterior_image_{first}_left"), (RIGHT, f"exterior_image_{first + 1}_left")):
        ((name, pixels),) = frames[camera].items()
        assert name == f"observation/{key}"
        assert pixels is observation[name]


def test_a_client_of_the_other_numbering_is_refused_with_the_option_that_takes_it() -> None:
    told = refused(droid_observation(1))
    assert told == (
        "'observation/exterior_image_2_left' is not a camera of this policy; it takes "
        "observation/exterior_image_0_left, observation/exterior_image_1_left, observation/wrist_image_left. "
        "This server numbers exteriors as RoboArena does, from 0; --cameras droid is for the other numbering"
    )
    told = refused(droid_observation(0), camera_set="droid")
    assert "'observation/exterior_image_0_left' is not a camera" in told
    assert "as DROID does, from 1; --cameras roboarena" in told


def test_frames_under_an_unknown_key_are_refused_with_the_nearest() -> None:
    observation = droid_observation(wrist_image_left=None)
    observation["observation/wrist_image"] = frame(0)
    told = refused(observation)
    assert (
        "'observation/wrist_image' is not a camera of this policy, did you mean 'observation/wrist_image_left'?" in told
    )


def test_keys_without_frames_that_mean_nothing_are_told_but_the_cartesian_position_is_not() -> None:
    reading = read_observation({**droid_observation(), "episode": 3}, droid())
    assert reading.ignored == ("episode",)


@pytest.mark.parametrize("exterior", ["exterior_image_0_left", "exterior_image_1_left"])
def test_an_exterior_may_be_missing_and_the_caller_is_told(exterior: str) -> None:
    reading = read_observation(droid_observation(**{exterior: None}), droid())
    assert len(reading.frames) == 2
    assert [note.text for note in reading.notes] == [
        f"'observation/{exterior}' is missing: the network sees black there"
    ]


def test_the_wrist_must_be_there() -> None:
    assert refused(droid_observation(wrist_image_left=None)).startswith("'observation/wrist_image_left' is missing")


def test_one_exterior_must_be_there() -> None:
    told = refused(droid_observation(exterior_image_0_left=None, exterior_image_1_left=None))
    assert told.startswith("'observation/exterior_image_0_left' is missing")


def test_other_robots_need_every_view() -> None:
    observation = {"observation/top_head": frame(0), "observation/hand_left": frame(1), "prompt": "go"}
    assert refused(observation, recipe=agibot()).startswith("'observation/hand_right' is missing")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 9])
def test_frames_in_time_come_as_an_array_or_as_a_list_of_files_or_arrays(count: int) -> None:
    arrays = read_observation(droid_observation(frames=count), droid()).frames
    files = {
        key: [encode_frame(moment, Codec.JPEG_Q90) for moment in value] if "image" in key else value
        for key, value in droid_observation(frames=count).items()
    }
    lists = {key: list(value) if "image" in key else value for key, value in droid_observation(frames=count).items()}
    for other in (files, lists):
        frames = read_observation(other, droid()).frames
        assert {camera: list(named) for camera, named in frames.items()} == {
            camera: list(named) for camera, named in arrays.items()
        }
    assert list(arrays[WRIST]) == [f"observation/wrist_image_left[{step}]" for step in range(count)]


@pytest.mark.parametrize("count", [0, 5, 6, 7, 10])
def test_other_numbers_of_frames_are_refused(count: int) -> None:
    told = refused({**droid_observation(frames=count or 1), **({} if count else empty())})
    assert told == f"observation/exterior_image_0_left holds {count} frames; 1, 2, 3, 4, 8 or 9 are taken, oldest first"


def empty() -> dict[str, Any]:
    cameras = [key for key in droid_observation() if "image" in key]
    return {key: np.zeros((0, 180, 320, 3), np.uint8) for key in cameras}


def test_every_camera_has_as_many_frames() -> None:
    told = refused(droid_observation(frames=4, wrist_image_left=np.stack([frame(0)])))
    assert told == (
        "observation/wrist_image_left holds 1 frame, but observation/exterior_image_0_left 4; send as many of each "
        "camera"
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.zeros((180, 320), np.uint8), "expected (H, W, 3) uint8 RGB"),
        (np.zeros((1, 4, 180, 320, 3), np.uint8), "expected frames in time, (T, H, W, 3)"),
        ([[b"\xff\xd8\xff"]], "observation/wrist_image_left[0][0] is a truncated image file"),
        ("a picture", "observation/wrist_image_left is 'a picture'"),
        (b"no picture", "observation/wrist_image_left"),
    ],
)
def test_what_is_no_frame_is_refused_by_its_camera(value: Any, expected: str) -> None:
    told = refused(droid_observation(wrist_image_left=value))
    assert "observation/wrist_image_left" in told
    assert expected in told


def test_the_state_comes_in_any_usual_shape() -> None:
    whole = np.arange(7.0)
    for joints, gripper in (
        (whole, 0.5),
        (whole[None], [[0.5]]),
        (list(whole), [0.5]),
        (whole.astype("f4"), np.float32(0.5)),
    ):
        state = read_observation(droid_observation(joint_position=joints, gripper_position=gripper), droid()).state
        assert np.array_equal(state["joint_position"], whole)
        assert state["gripper_position"].tolist() == [0.5]
        assert state["joint_position"].dtype == np.float64


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"joint_position": None}, "'observation/joint_position' is missing; it has 7 numbers in the robot's units"),
        (
            {"joint_position": None, "joint_positions": np.zeros(7)},
            "'observation/joint_position' is missing ('observation/joint_positions' came, did you mean "
            "'observation/joint_position'?); it has 7 numbers in the robot's units",
        ),
        ({"joint_position": np.zeros(8)}, "observation/joint_position has shape (8,), expected (7,)"),
        ({"joint_position": np.zeros((7, 1))}, "observation/joint_position has shape (7, 1), expected (7,)"),
        ({"joint_position": "seven"}, "observation/joint_position: expected 7 numbers, got 'seven'"),
        ({"joint_position": np.ones(7, bool)}, "observation/joint_position: expected 7 numbers, got an array of shape"),
        (
            {"gripper_position": [np.nan]},
            "observation/gripper_position[0] is nan; every value must be a finite float32",
        ),
        ({"gripper_position": [1e300]}, "observation/gripper_position[0] is 1e+300; every value must be a finite"),
        ({"prompt": None}, "'prompt' is missing; it is the task in plain language"),
        ({"prompt": "  "}, "prompt is empty; it is the task in plain language"),
        ({"prompt": 3}, "prompt: expected a string, got 3"),
        ({"prompt": b"\xff"}, "prompt: these bytes are not UTF-8"),
        ({"prompt": "x" * 100_000}, "prompt has 100000 bytes of UTF-8"),
    ],
)
def test_what_is_wrong_with_state_or_prompt_is_told(changes: dict[str, Any], told: str) -> None:
    assert refused(droid_observation(**changes)).startswith(told)


@pytest.mark.parametrize("prompt", ["go", b"go", ["go"]])
def test_a_prompt_is_text_in_any_wrapping(prompt: Any) -> None:
    assert read_observation(droid_observation(prompt=prompt), droid()).prompt == "go"


@pytest.mark.parametrize("prompt", [None, "", " \n"])
def test_the_servers_default_stands_in_for_an_empty_prompt(prompt: str | None) -> None:
    reading = read_observation(droid_observation(prompt=prompt), droid(), default_prompt="wait")
    assert reading.prompt == "wait"


def test_too_many_pixels_are_refused_before_any_is_decoded() -> None:
    file = encode_frame(np.zeros((2048, 2048, 3), np.uint8), Codec.JPEG_Q50)
    observation = droid_observation(frames=9)
    observation.update({key: [file] * 9 for key in observation if "image" in key})
    assert "the frames of all cameras hold" in refused(observation)
