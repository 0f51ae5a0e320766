"""What is sent fits the policy at hand, or it is said what is missing."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relay.bench.observations import PROMPT, observations
from relay.protocol import msgpack_numpy

CHOICES: dict[str, Any] = {"robot": None, "file": None, "prompt": PROMPT, "size": 16, "seed": 0}


def first(metadata: dict[str, Any], **choices: Any) -> dict[str, Any]:
    return next(observations(metadata, **(CHOICES | choices)))


def test_the_metadatas_cameras_and_state_are_sent() -> None:
    sent = first({"cameras": ["front", "wrist"], "state_dim": 7})
    assert {name: frame.shape for name, frame in sent["image"].items()} == {
        "front": (16, 16, 3),
        "wrist": (16, 16, 3),
    }
    assert sent["state"].shape == (7,)
    assert sent["prompt"] == PROMPT
    assert "session_id" not in sent


def test_vllm_omnis_metadata_is_enough_for_pi0s_cameras_and_a_session() -> None:
    sent = first({"max_action_dim": 32, "action_dim": 7, "needs_session_id": True})
    assert list(sent["image"]) == ["base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"]
    assert sent["state"].shape == (32,)
    assert sent["session_id"] == "bench"


def test_a_robots_own_keys_are_sent() -> None:
    sent = first({}, robot="droid")
    assert sent["observation/exterior_image_1_left"].shape == (16, 16, 3)
    assert sent["observation/joint_position"].shape == (7,)
    assert sent["observation/gripper_position"].shape == (1,)


def test_a_robot_with_a_map_of_images_gets_one() -> None:
    sent = first({}, robot="aloha")
    assert sorted(sent["images"]) == ["cam_high", "cam_left_wrist", "cam_right_wrist"]
    assert sent["state"].shape == (14,)


def test_metadata_that_tells_nothing_is_an_error_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"does not say what its policy takes.*--robot.*--observation"):
        first({"reset_pose": [0.0]})


def test_no_two_observations_are_alike() -> None:
    source = observations({"cameras": ["front"], "state_dim": 3}, **CHOICES)
    frames = {observation["image"]["front"].tobytes() for observation in islice(source, 40)}
    assert len(frames) == 40


def test_a_file_is_sent_as_it_is_but_for_its_frames_which_move(tmp_path: Path) -> None:
    frame = np.arange(4 * 8 * 3, dtype=np.uint8).reshape(4, 8, 3)
    told = {"image": {"base": frame}, "state": np.ones(3, np.float32), "prompt": "fold"}
    path = tmp_path / "observation.msgpack"
    path.write_bytes(msgpack_numpy.pack(told))
    sent = list(islice(observations({}, **(CHOICES | {"file": path})), 2))
    assert np.array_equal(sent[0]["image"]["base"], frame)
    assert np.array_equal(sent[1]["image"]["base"], np.roll(frame, 1, axis=1))
    assert sent[1]["prompt"] == "fold"
    assert np.array_equal(sent[1]["state"], told["state"])


@pytest.mark.parametrize(
    ("content", "told"), [(b"\xc1", "is no packed observation"), (b"\x01", "holds a int; expected an observation")]
)
def test_a_file_that_is_no_observation_is_refused(content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "observation.msgpack"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=told):
        first({}, file=path)


def test_a_robot_and_a_file_are_not_taken_together() -> None:
    with pytest.raises(ValueError, match="either a robot or an observation file"):
        first({}, robot="droid", file=Path("observation.msgpack"))
