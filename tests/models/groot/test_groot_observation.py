"""The forms of observations that clients send, and what is said of those that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from groot_folders import DROID, LIBERO, observation
from groot_observations import EXTERIOR, FORMS, LANGUAGE, RECIPES, WRIST, in_form, state_with, with_text

from relay.engine.frames import read_frame
from relay.models.groot.observation import Reading, read_observation
from relay.protocol.errors import ObservationError
from relay.protocol.images import Codec, encode_frame


def read(came: dict[str, Any], tag: str = DROID, default: str | None = None) -> Reading:
    return read_observation(came, RECIPES[tag], default)


@pytest.mark.parametrize("tag", [DROID, LIBERO])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_same_frames_state_and_instruction(form: str, tag: str) -> None:
    expected, reading = read(observation(tag), tag), read(in_form(form, tag), tag)
    pixels = [read_frame(frame, name) for name, frame in reading.frames.items()]
    assert len(pixels) == len(RECIPES[tag].frames) * 2
    for frame, own in zip(pixels, expected.frames.values(), strict=True):
        assert np.array_equal(frame, own)
    assert list(reading.state) == [part.key for part in RECIPES[tag].state]
    for key, values in expected.state.items():
        assert np.array_equal(reading.state[key], values)
        assert reading.state[key].dtype == np.float32
    assert reading.prompt == "Pick up the black bowl!"
    assert reading.flat == form.startswith("flat")
    assert not reading.notes
    assert reading.ignored == (("embodiment", "modality_config") if form == "lerobot" else ())


def test_frames_stand_by_time_and_then_by_camera_and_are_named_so() -> None:
    came = observation(DROID)
    frames = read(came).frames
    assert list(frames) == [
        f"video['{EXTERIOR}'][0]",
        f"video['{WRIST}'][0]",
        f"video['{EXTERIOR}'][1]",
        f"video['{WRIST}'][1]",
    ]
    assert np.array_equal(frames[f"video['{WRIST}'][0]"], came["video"][WRIST][0, 0])


def test_cameras_are_taken_by_name_in_any_order() -> None:
    came = observation(DROID)
    swapped = {**came, "video": dict(reversed(came["video"].items()))}
    assert list(read(swapped).frames) == list(read(came).frames)


def test_foreign_camera_names_are_taken_in_their_order_and_told() -> None:
    came = observation(DROID)
    first, second = came["video"].values()
    reading = read({**came, "video": {"external_0": first, "hand": second}})
    assert list(reading.frames)[:2] == ["video['external_0'][0]", "video['hand'][0]"]
    assert np.array_equal(reading.frames["video['hand'][1]"], second[0, 1])
    (note,) = reading.notes
    assert note.text == f"cameras taken in the order they came: 'external_0' as {EXTERIOR}, 'hand' as {WRIST}"


VIDEO = observation(DROID)["video"]
ONE, TWO = VIDEO[EXTERIOR], VIDEO[WRIST]


@pytest.mark.parametrize(
    ("video", "message"),
    [
        ({EXTERIOR: ONE}, rf"video\['{WRIST}'\] is missing; this policy needs 2 cameras: {EXTERIOR}, {WRIST}"),
        ({EXTERIOR: ONE, "wrist_image_lefft": TWO}, rf"video\['wrist_image_lefft'\] is not .* did you mean '{WRIST}'"),
        ({EXTERIOR: ONE, "zzz": TWO}, r"video\['zzz'\] is not a camera of this policy; this policy needs 2 cameras"),
        ({"a": ONE, "b": TWO, "c": TWO}, r"video\['a'\] is not a camera of this policy; this policy needs 2"),
        ({**VIDEO, "top": ONE}, rf"video\['top'\] is not a camera .* it takes {EXTERIOR}, {WRIST} and no other"),
        (
            {"wrist_image_lef": TWO, "exterior_image_1_lef": ONE},
            rf"video\['wrist_image_lef'\] is not a camera of this policy, did you mean '{WRIST}'",
        ),
        ({}, rf"video\['{EXTERIOR}'\] is missing; this policy needs 2 cameras"),
        ([ONE], f"video is a list of 1; as a list it holds one entry per camera, in the order {EXTERIOR}, {WRIST}"),
        (ONE, "video: expected a map of camera name to frames .*, got an array of shape"),
        (3, "video: expected a map of camera name to frames .*, got 3"),
    ],
)
def test_cameras_that_do_not_fit_are_refused(video: Any, message: str) -> None:
    with pytest.raises(ObservationError, match=message):
        read({**observation(DROID), "video": video})


@pytest.mark.parametrize(
    ("tag", "frames", "message"),
    [
        (DROID, ONE[0, 0], "holds 1 frame; this policy takes 2 frames of each camera, of the control steps -15, 0"),
        (DROID, ONE[:, :1], "holds 1 frame; this policy takes 2 frames"),
        (DROID, np.concatenate([ONE, ONE], axis=1), "holds 4 frames; this policy takes 2 frames"),
        (DROID, [encode_frame(ONE[0, 0], Codec.LOSSLESS)], "holds 1 frame; this policy takes 2 frames"),
        (DROID, [], "holds 0 frames"),
        (DROID, np.concatenate([ONE, ONE]), "got 2 observations; .* open one connection per robot"),
        (DROID, ONE[None], r"got an array of shape \(1, 1, 2, 64, 80, 3\)"),
        (LIBERO, ONE[0], "holds 2 frames; this policy takes one frame of each camera"),
        (LIBERO, np.stack([ONE[:, 0], ONE[:, 0]]), "got 2 observations"),
        (LIBERO, 7, r"video\['image'\] is 7; expected an \(H, W, 3\) uint8 RGB array or the bytes"),
    ],
)
def test_another_number_of_frames_is_refused_with_what_is_expected(tag: str, frames: Any, message: str) -> None:
    came = observation(tag)
    first = RECIPES[tag].cameras[0]
    with pytest.raises(ObservationError, match=message):
        read({**came, "video": {**came["video"], first: frames}}, tag)


@pytest.mark.parametrize("gripper", [0.25, [0.25], [[0.25]], [[[0.25]]], np.float64(0.25), np.full((1, 1, 1), 0.25)])
def test_a_number_is_taken_with_any_leading_axes_of_one(gripper: Any) -> None:
    assert read(state_with(gripper_position=gripper)).state["gripper_position"].tolist() == [[0.25]]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"joint_position": ...},
            r"state\['joint_position'\] is missing; this policy needs eef_9d \(9\), gripper_position \(1\), "
            r"joint_position \(7\)",
        ),
        (
            {"joint_position": ..., "joint_positions": [0.0] * 7},
            r"\('joint_positions' came, did you mean 'joint_position'\?\)",
        ),
        ({"joint_position": [0.0] * 6}, r"state\['joint_position'\] has shape \(6,\), expected \(7,\)"),
        ({"joint_position": np.zeros((2, 7))}, r"has shape \(2, 7\), expected \(7,\)"),
        ({"joint_position": np.zeros((2, 1, 7))}, r"has shape \(2, 1, 7\), expected \(7,\); .* one connection per"),
        ({"joint_position": "left"}, r"state\['joint_position'\]: expected \(7,\) numbers, got 'left'"),
        ({"joint_position": [True] * 7}, r"expected \(7,\) numbers, got a list of 7 items"),
        ({"joint_position": 0.0}, r"state\['joint_position'\] has shape \(\), expected \(7,\)"),
        ({"joint_position": [0.0] * 6 + [float("nan")]}, r"state\['joint_position'\]: value 6 is nan"),
        ({"gripper_position": 1e300}, r"state\['gripper_position'\]: value 0 is 1e\+300"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_with_keys_and_sizes(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ObservationError, match=message):
        read(state_with(**parts))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (..., r"'state' is missing; it maps each part to its values: eef_9d \(9\), gripper_position \(1\)"),
        (np.zeros(16), r"state: expected a map of its parts \(.*\) or all 17 numbers in this order, got an array"),
        ("home", "state: expected a map of its parts"),
    ],
)
def test_a_state_of_another_kind_is_refused(state: Any, message: str) -> None:
    came = {**observation(DROID), "state": state}
    with pytest.raises(ObservationError, match=message):
        read({key: value for key, value in came.items() if value is not ...})


def test_spare_parts_of_the_state_are_told_as_ignored() -> None:
    assert read(state_with(torque=[1.0])).ignored == ("state['torque']",)


@pytest.mark.parametrize(
    "keys",
    [
        {"prompt": "pick"},
        {"prompt": b"pick"},
        {"prompt": ["pick"]},
        {"prompt": [["pick"]]},
        {"language": "pick"},
        {"language": {LANGUAGE: [["pick"]]}},
        {"language": {LANGUAGE: ["pick"]}},
        {"language": {LANGUAGE: "pick"}},
        {LANGUAGE: ("pick",)},
        {LANGUAGE: ["pick"], "prompt": "pick"},
        {"prompt": "pick", "language": None},
    ],
)
def test_instructions_are_read_wherever_they_stand(keys: dict[str, Any]) -> None:
    reading = read(with_text(**keys))
    assert reading.prompt == "pick"
    assert not reading.ignored


@pytest.mark.parametrize("key", ["task", "annotation.human.coarse_action"])
def test_the_simulators_two_spellings_of_the_instructions_key_are_one(key: str) -> None:
    from dataclasses import replace

    recipe = replace(RECIPES[DROID], language_key="task")
    assert read_observation(with_text(**{key: ["pick"]}), recipe).prompt == "pick"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "'prompt' is missing; it is the task in plain language"),
        ({"promt": "pick up the fork"}, "'prompt' is missing; 'promt' is not a key .* did you mean 'prompt'"),
        ({"prompt": ""}, "prompt is empty; it is the task in plain language"),
        ({"language": {LANGUAGE: [["  "]]}}, rf"language\['{LANGUAGE}'\] is empty"),
        ({"language": {"task": [["pick"]]}}, f"language holds 'task'; this policy reads '{LANGUAGE}'"),
        ({"prompt": ["pick", "place"]}, "prompt: expected one instruction .* a list of 2; .* one connection per robot"),
        ({"prompt": []}, "got a list of 0"),
        ({"prompt": 3}, "prompt: expected text, got 3"),
        ({"prompt": b"\xff"}, "prompt: these bytes are not UTF-8"),
        ({"prompt": "x" * 5000}, "prompt has 5000 bytes of UTF-8; at most 4096 are taken"),
        ({"prompt": "pick", LANGUAGE: "place"}, f"{LANGUAGE} and prompt hold different instructions"),
    ],
)
def test_instructions_that_do_not_fit_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ObservationError, match=message):
        read(with_text(**keys))


@pytest.mark.parametrize("keys", [{}, {"prompt": ""}, {"prompt": None}, {"language": {LANGUAGE: [[""]]}}])
def test_a_default_prompt_stands_in_for_one_that_is_missing_or_empty(keys: dict[str, Any]) -> None:
    assert read(with_text(**keys), default="wait").prompt == "wait"
    assert read(with_text(prompt="pick"), default="wait").prompt == "pick"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"image_mask": {EXTERIOR: True}}, "image_mask: this model has no mask of cameras, each of them is required"),
        ({"tokenized_prompt": [1]}, "tokenized_prompt: this model takes the instruction as text"),
        ({"images": VIDEO}, "'video' beside 'images': send frames under one of the two"),
        ({"image": VIDEO}, "'video' beside 'image'"),
        ({"video.top": ONE}, "'video' beside 'video.top'"),
        ({"observation/image": ONE}, "'video' beside 'observation/image'"),
        ({"state.x": 1.0}, "'state' beside 'state.x': send one of the two"),
    ],
)
def test_keys_of_two_forms_or_other_models_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ObservationError, match=message):
        read({**observation(DROID), **keys})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, f"'video' is missing; it maps {EXTERIOR}, {WRIST} to frames"),
        ({"vide": VIDEO}, "'vide' is not a key of this policy, did you mean 'video'"),
        ({"image": VIDEO}, "'image' is not a key of this policy; send frames as a map 'video'"),
        ({"observation/exterior_image_1_left": ONE}, "'observation/exterior_image_1_left' is not a key of this policy"),
    ],
)
def test_frames_under_other_keys_are_refused(keys: dict[str, Any], message: str) -> None:
    came = observation(DROID)
    del came["video"]
    with pytest.raises(ObservationError, match=message):
        read({**came, **keys})


def test_frames_of_too_many_pixels_are_refused_before_one_is_decoded() -> None:
    huge = np.zeros((1, 2, 1, 1, 3), np.uint8)
    big = np.broadcast_to(huge, (1, 2, 8192, 8192, 3))
    with pytest.raises(ObservationError, match="the frames hold 768 MiB of pixels, at most 256 MiB are taken"):
        read({**observation(DROID), "video": {EXTERIOR: big, WRIST: big}})


def test_other_keys_are_told_as_ignored() -> None:
    assert read(
        {**observation(DROID), "reward": 1.0, "embodiment_tag": "OXE_DROID_RELATIVE_EEF_RELATIVE_JOINT"}
    ).ignored == (
        "reward",
        "embodiment_tag",
    )


def test_a_client_of_another_robot_is_told() -> None:
    (note,) = read({**observation(DROID), "embodiment": "libero_sim"}).notes
    assert note.text == f"embodiment is 'libero_sim', but this server runs {DROID}"
