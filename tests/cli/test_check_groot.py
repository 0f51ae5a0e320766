"""`relay check` and `relay parity` on GR00T folders."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from groot_folders import (
    ACTION_WIDTHS,
    BACKBONE,
    CAMERAS,
    DROID,
    IDS,
    LANGUAGE,
    LIBERO,
    observation,
    write_isaac,
    write_lerobot,
)
from step_by_step import IDENTITY, expected_actions

from relay.cli.main import main
from relay.engine.weights import SafetensorsSource
from relay.models import registry
from relay.protocol.images import Codec, encode_frame

pytestmark = pytest.mark.vocab

Capture = pytest.CaptureFixture[str]


def check(capsys: Capture, folder: Path, *options: str) -> tuple[int, str]:
    """The exit code, and what was printed on either stream."""
    code = main(["check", str(folder), *options])
    told = capsys.readouterr()
    return code, told.out + told.err


def sections(capsys: Capture, folder: Path, *options: str) -> dict[str, Any]:
    assert main(["check", str(folder), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)["sections"]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_isaac(tmp_path_factory.mktemp("both"), tags=[DROID, LIBERO])


def test_a_folder_that_would_start_is_told_with_code_0_and_no_tensor_is_read(
    both: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(SafetensorsSource, "read")
    code, told = check(capsys, both, "--embodiment", "libero_panda")
    assert code == 0
    assert "format       Isaac-GR00T" in told
    assert f"embodiments  {DROID}, {LIBERO}" in told
    assert "no problems: relay serve groot would start" in told


@pytest.mark.parametrize("flat", [False, True])
def test_a_lerobot_folder_is_told_too(flat: bool, tmp_path: Path, capsys: Capture) -> None:
    code, told = check(capsys, write_lerobot(tmp_path, flat=flat))
    assert code == 0
    assert "format       lerobot" in told
    assert "here the client does" in told


def test_a_folder_of_several_embodiments_wants_one_named(both: Path, capsys: Capture) -> None:
    code, told = check(capsys, both)
    assert code == 1
    assert f"problem: --embodiment is needed, since this checkpoint knows several: {DROID}, {LIBERO}" in told


def test_cameras_state_and_actions_are_told_with_their_kinds(both: Path, capsys: Capture) -> None:
    told = sections(capsys, both, "--embodiment", DROID)
    assert [row["camera"] for row in told["Cameras"]["rows"]] == list(CAMERAS[DROID])
    assert {row["frames"] for row in told["Cameras"]["rows"]} == {"-15, 0"}
    assert LANGUAGE[DROID] in told["Cameras"]["remarks"][1]
    assert {row["group"]: (row["numbers"], row["network gives"]) for row in told["Actions"]["rows"]} == {
        "eef_9d": (9, "poses seen from the state's pose"),
        "gripper_position": (1, "absolute"),
        "joint_position": (7, "offsets from the state"),
    }
    assert len(told["Statistics of state"]["rows"]) == 17
    assert told["Tensors"]["remarks"][0] == "ignored: backbone.model.lm_head.weight"


def test_memory_is_that_of_one_embodiment(both: Path, capsys: Capture) -> None:
    told = dict(sections(capsys, both, "--embodiment", LIBERO)["Memory"]["rows"])
    model = registry.load("groot", checkpoint=both, embodiment=LIBERO, device="cpu").model
    count = sum(parameter.numel() for parameter in model.parameters())
    stored = int(told["parameters of one embodiment"].replace(",", ""))
    assert stored == pytest.approx(count, rel=5e-3)  # of the patches' two frames only the sum is kept


def test_the_preview_shows_frames_state_and_prompt_as_the_network_gets_them(
    both: Path, capsys: Capture, tmp_path: Path
) -> None:
    told = sections(capsys, both, "--embodiment", LIBERO, "--output", str(tmp_path), "--prompt", "Open it!")
    frames = told["What the model sees: frames"]["rows"]
    assert [row["cropped and resized"] for row in frames] == ["640x480 to 352x256"] * 2
    assert max(abs(row["normalized"]) for row in told["What the model sees: state"]["rows"]) < 1e-6
    assert "".join(row["piece"] for row in told["What the model sees: prompt"]["rows"]).endswith("open it<|im_end|>\n")
    assert (tmp_path / "frames.png").is_file()


def test_a_sample_of_ones_own_is_shown(both: Path, capsys: Capture, tmp_path: Path) -> None:
    frame = tmp_path / "frame.jpg"
    frame.write_bytes(encode_frame(np.zeros((256, 256, 3), np.uint8), Codec.JPEG_Q90))
    options = ["--embodiment", LIBERO, "--frame", str(frame), str(frame), "--state", "0.1,0.2,0.3,0,0,0,0.04,-0.04"]
    told = sections(capsys, both, *options)
    assert [row["robot"] for row in told["What the model sees: state"]["rows"]][:3] == pytest.approx([0.1, 0.2, 0.3])
    assert told["What the model sees: frames"]["rows"][0]["cropped and resized"] == "256x256 to 256x256"


def test_a_sample_of_another_robot_is_refused_with_code_2(both: Path, capsys: Capture) -> None:
    code, told = check(capsys, both, "--embodiment", LIBERO, "--state", "1,2,3")
    assert code == 2
    assert "--state has 3 values; this embodiment expects 8: x (1), y (1)" in told


def test_write_keeps_the_embodiment_in_relay_json(tmp_path: Path, capsys: Capture) -> None:
    folder = write_isaac(tmp_path, tags=[DROID, LIBERO])
    assert check(capsys, folder, "--embodiment", "LIBERO_PANDA", "--write")[0] == 0
    assert json.loads((folder / "relay.json").read_text()) == {"embodiment": LIBERO, "backbone": BACKBONE}
    assert check(capsys, folder)[0] == 0


def test_tensors_that_do_not_fit_are_listed(tmp_path: Path, capsys: Capture) -> None:
    folder = write_isaac(tmp_path, config={"select_layer": 3})
    code, told = check(capsys, folder)
    assert code == 1
    assert "unknown: backbone.model.model.language_model.layers.3.input_layernorm.weight" in told


def test_a_folder_of_an_earlier_version_is_told_as_groots(tmp_path: Path, capsys: Capture) -> None:
    folder = write_isaac(tmp_path, config={"model_type": "gr00t_n1_5", "architectures": ["GR00T_N1_5"]})
    code, told = check(capsys, folder)
    assert code == 1
    assert "problem: this is a GR00T N1.5 checkpoint; only N1.7 is served" in told


def test_a_folder_above_the_checkpoints_is_told_as_groots(tmp_path: Path, capsys: Capture) -> None:
    write_isaac(tmp_path / "libero_10")
    assert "choose one of libero_10" in check(capsys, tmp_path)[1]


@cache
def identity() -> Path:
    """A folder of both embodiments for which frames of 256x256 stay as they are."""
    return write_isaac(Path(_HOME.name), tags=[DROID, LIBERO], processor=IDENTITY)


_HOME = TemporaryDirectory(prefix="relay-groot-parity-")


@cache
def recorded(tag: str) -> dict[str, Any]:
    """Two samples as another implementation answers them, in float64, each group by itself."""
    asked = [observation(tag, seed, (256, 256)) for seed in (1, 2)]
    answers = [expected_actions(identity(), tag, IDS[tag], one, seed) for seed, one in enumerate(asked)]
    noise = [_noise(seed) for seed in range(2)]
    return {
        **{f"video/{camera}": np.stack([one["video"][camera][0] for one in asked]) for camera in CAMERAS[tag]},
        **{f"state/{key}": np.stack([one["state"][key][0] for one in asked]) for key in asked[0]["state"]},
        **{f"actions/{key}": np.stack([answer[key][0] for answer in answers]) for key in ACTION_WIDTHS[tag]},
        "noise": np.stack(noise),
    }


def recording(path: Path, tag: str, **changes: Any) -> Path:
    prompt = "Pick up the black bowl!"
    np.savez(path, **{**recorded(tag), **changes}, metadata=json.dumps({"source": "by hand", "prompt": prompt}))
    return path


def _noise(seed: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, 40, 20), generator=generator, dtype=torch.bfloat16)[0].float().numpy()


def parity(capsys: Capture, tag: str, reference: Path, *options: str) -> tuple[int, str]:
    command = ["parity", "--checkpoint", str(identity()), "--embodiment", tag, "--reference", str(reference)]
    code = main([*command, "--device", "cpu", *options])
    told = capsys.readouterr()
    return code, told.out + told.err


@pytest.mark.parametrize("tag", [DROID, LIBERO])
def test_parity_compares_every_number_of_every_group(tag: str, tmp_path: Path, capsys: Capture) -> None:
    code, told = parity(capsys, tag, recording(tmp_path / "r.npz", tag))
    assert code == 0, told
    for key, width in ACTION_WIDTHS[tag].items():
        assert f"{key}[{width - 1}]" in told


def test_parity_finds_one_number_that_is_off(tmp_path: Path, capsys: Capture) -> None:
    joints = recorded(DROID)["actions/joint_position"].copy()
    joints[1, 7, 3] += 0.01
    reference = recording(tmp_path / "changed.npz", DROID, **{"actions/joint_position": joints})
    code, told = parity(capsys, DROID, reference)
    assert code == 1
    assert "(sample 1, step 7, joint_position[3])" in told


def test_parity_refuses_the_groups_of_another_robot(tmp_path: Path, capsys: Capture) -> None:
    reference = recording(tmp_path / "r.npz", LIBERO, **{"actions/yaw": np.zeros((2, 16, 3))})
    code, told = parity(capsys, LIBERO, reference)
    assert code == 2
    assert "another robot's, or in other units" in told


def test_parity_in_bfloat16_wants_a_tolerance(tmp_path: Path, capsys: Capture) -> None:
    code, told = parity(capsys, LIBERO, recording(tmp_path / "r.npz", LIBERO), "--dtype", "bfloat16")
    assert code == 2
    assert "has not been measured: give --tolerance" in told
