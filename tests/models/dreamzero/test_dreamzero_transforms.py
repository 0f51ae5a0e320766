"""A whole observation to what the network takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dreamzero_recipes import agibot, droid, droid_observation, frame, prompts

from relay.models.dreamzero.frames import fit
from relay.models.dreamzero.transforms import DreamZeroPrepared, prepare
from relay.protocol.errors import ObservationError
from relay.protocol.images import Codec, decode_frame, encode_frame
from relay.protocol.messages import Options

pytestmark = pytest.mark.dreamzero


def prepared(observation: dict[str, Any], options: Options | None = None, **others: Any) -> DreamZeroPrepared:
    return prepare(observation, options or Options(), droid(), prompts(), **others)


def test_pictures_hold_every_moment_with_each_camera_in_its_place() -> None:
    observation = droid_observation(frames=4)
    pictures = prepared(observation).pictures
    assert pictures.shape == (4, 48, 64, 3)
    assert pictures.dtype == np.uint8
    left, right, wrist = (
        fit(list(observation[f"observation/{key}"]), droid().views)
        for key in ("exterior_image_0_left", "exterior_image_1_left", "wrist_image_left")
    )
    assert (pictures[:, :24] == wrist.repeat(2, axis=2)).all()
    assert (pictures[:, 24:, :32] == left).all()
    assert (pictures[:, 24:, 32:] == right).all()


def test_both_camera_sets_show_the_same_picture_to_the_network() -> None:
    from_zero = prepared(droid_observation(0))
    from_one = prepared(droid_observation(1), camera_set="droid")
    assert (from_zero.pictures == from_one.pictures).all()


def test_a_missing_exterior_is_black_and_noted() -> None:
    ours = prepared(droid_observation(exterior_image_1_left=None))
    assert (ours.pictures[:, 24:, 32:] == 0).all()
    assert ours.pictures[:, 24:, :32].any()
    assert [note.text for note in ours.notes] == [
        "'observation/exterior_image_1_left' is missing: the network sees black there"
    ]


@pytest.mark.parametrize("codec", [Codec.LOSSLESS, Codec.JPEG_Q90])
def test_encoded_frames_are_what_their_files_hold(codec: Codec) -> None:
    observation = droid_observation(frames=4)
    files = {key: [encode_frame(part, codec) for part in observation[key]] for key in observation if "image" in key}
    arrays = {key: np.stack([decode_frame(file, key) for file in column]) for key, column in files.items()}
    assert (prepared({**observation, **files}).pictures == prepared({**observation, **arrays}).pictures).all()
    single = {key: column[0] for key, column in files.items()}
    assert (prepared({**observation, **single}).pictures == prepared({**observation, **arrays}).pictures[:1]).all()


def test_state_and_prompt_are_ready_and_the_raw_state_is_kept() -> None:
    ours = prepared(droid_observation())
    assert ours.state.shape == (64,)
    assert ours.state[7] == np.float32(-0.5)
    assert ours.robot_state["joint_position"].tolist() == [0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7]
    assert ours.prompt == prompts()("pick up the Fork")
    assert ours.num_steps is None
    assert ours.notes == ()
    assert ours.ignored == ()


def test_a_state_far_outside_is_noted() -> None:
    ours = prepared(droid_observation(joint_position=np.full(7, 90.0)))
    assert "units?" in ours.notes[0].text


@pytest.mark.parametrize("num_steps", [5, 6, 7, 8, 16])
def test_the_numbers_of_steps_that_have_a_schedule_are_taken(num_steps: int) -> None:
    assert prepared(droid_observation(), Options(num_steps=num_steps)).num_steps == num_steps


@pytest.mark.parametrize("num_steps", [1, 4, 9, 15, 17])
def test_other_numbers_of_steps_are_refused(num_steps: int) -> None:
    with pytest.raises(ObservationError, match=rf"^num_steps is {num_steps}; .* 5, 6, 7, 8, 16 times"):
        prepared(droid_observation(), Options(num_steps=num_steps))


def test_noise_is_that_of_the_actions() -> None:
    prepared(droid_observation(), Options(noise=np.zeros((24, 32), np.float32)))
    with pytest.raises(ObservationError, match=r"^noise: expected \(24, 32\) float32"):
        prepared(droid_observation(), Options(noise=np.zeros((24, 8), np.float32)))


def test_a_frame_that_cannot_be_decoded_is_named_with_its_moment() -> None:
    files = [encode_frame(frame(step), Codec.JPEG_Q90) for step in range(4)]
    files[2] = files[2][:-200]
    with pytest.raises(ObservationError, match=r"^observation/wrist_image_left\[2\] is a damaged or truncated JPEG"):
        prepared(droid_observation(frames=4, wrist_image_left=files))


def test_another_robots_keys_follow_its_configuration() -> None:
    cameras = {f"observation/{key}": frame(seed) for seed, key in enumerate(("top_head", "hand_left", "hand_right"))}
    state = {
        "observation/left_arm_joint_position": np.full(7, 0.1),
        "observation/right_arm_joint_position": np.full(7, 0.2),
        "observation/head_position": np.full(2, 0.3),
    }
    ours = prepare({**cameras, **state, "prompt": "go"}, Options(), agibot(), prompts("agibot"))
    tiles = [fit([frame(seed)], agibot().views) for seed in range(3)]
    assert (ours.pictures[:, :24, :32] == tiles[0]).all()
    assert (ours.pictures[:, 24:, :32] == tiles[1]).all()
    assert (ours.pictures[:, :24, 32:] == tiles[2]).all()
    assert ours.state[:16].any(), "seven, seven and two numbers"
    assert not ours.state[16:].any()
