"""`relay parity`: passes on what openpi's JAX implementation answered, fails when one value is off by 1 %."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import TINY, norm_stats, write_lerobot, write_openpi, write_relay
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tiny import golden, image

from relay.cli.main import main
from relay.cli.reference_file import InvalidReference, read_reference
from relay.models.pi0.config import CAMERAS

Capture = pytest.CaptureFixture[str]
Arrays = dict[str, NDArray[Any]]

JAX = {"source": "openpi", "versions": {"jax": "0.5.3"}, "dtype": "float32", "units": "model"}


def in_model_units(family: str) -> Arrays:
    """The golden observations and JAX's actions, two samples."""
    gold = golden(family)
    return {
        **{f"image/{name}": np.stack([image(row, i) for row in (0, 1)]) for i, name in enumerate(CAMERAS)},
        **{f"image_mask/{name}": gold[f"mask_{name}"].astype(bool) for name in CAMERAS},
        "state": gold["state"],
        "tokenized_prompt": gold["tokens"],
        "tokenized_prompt_mask": gold["token_mask"],
        "noise": gold["noise"],
        "num_steps": np.int64(10),
        "actions": gold["actions_f32_10"],
    }


def in_droid_units() -> Arrays:
    """The golden row without a right wrist camera as DROID has it, with JAX's actions as openpi unnormalizes them."""
    gold, stats = golden("pi05"), norm_stats(8, shift=0.2)
    low, high = np.array(stats["q01"]), np.array(stats["q99"])
    network = gold["actions_f32_10"][:1, :, :8].astype(np.float64)
    return {
        "observation/exterior_image_1_left": image(0, 0)[None],
        "observation/wrist_image_left": image(0, 1)[None],
        "observation/joint_position": np.zeros((1, 7)),
        "observation/gripper_position": np.zeros((1, 1)),
        "tokenized_prompt": gold["tokens"][:1],
        "tokenized_prompt_mask": gold["token_mask"][:1],
        "noise": gold["noise"][:1],
        "num_steps": np.int64(10),
        "actions": (network + 1) / 2 * (high - low + 1e-6) + low,
    }


def droid(folder: Path) -> Path:
    return write_openpi(folder, "pi05", settings={**TINY, "action_horizon": 10})


def write(path: Path, arrays: Mapping[str, Any], metadata: Mapping[str, Any] = JAX) -> Path:
    np.savez(path, **arrays, metadata=json.dumps(metadata))
    return path


def parity(capsys: Capture, checkpoint: Path, reference: Path, *options: str) -> tuple[int, str]:
    """The exit code, and what was printed on either stream."""
    command = ["parity", "--checkpoint", str(checkpoint), "--reference", str(reference), "--device", "cpu"]
    code = main([*command, *options])
    told = capsys.readouterr()
    return code, told.out + told.err


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_jax_s_own_answers_are_within_the_tolerance(family: str, tmp_path: Path, capsys: Capture) -> None:
    code, told = parity(
        capsys, write_relay(tmp_path / family, family), write(tmp_path / "r.npz", in_model_units(family))
    )
    assert code == 0
    assert "reference: openpi (jax 0.5.3), computed in float32" in told
    assert "compared: 2 samples, this engine in float32" in told
    assert "tolerance: 0.0001; within" in told


@pytest.mark.parametrize("place", [(0, 0, 0), (0, 9, 31), (1, 4, 17)])
@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_one_value_that_is_1_percent_off_is_above_it(
    family: str, place: tuple[int, int, int], tmp_path: Path, capsys: Capture
) -> None:
    arrays = in_model_units(family)
    changed = arrays["actions"].copy()
    changed[place] *= 1.01
    folder = write_relay(tmp_path / family, family)
    code, told = parity(capsys, folder, write(tmp_path / "r.npz", {**arrays, "actions": changed}))
    assert code == 1
    assert f"(sample {place[0]}, step {place[1]}, action_{place[2]})" in told
    assert "tolerance: 0.0001; above" in told


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_nearly_every_value_is_large_enough_for_1_percent_to_show(family: str) -> None:
    actions = golden(family)["actions_f32_10"]
    shows = np.abs(actions) * 0.01 > 1.5e-4 * actions.std()  # the tolerance and half of it for rounding
    assert shows.mean() > 0.97


def test_a_robots_answers_are_compared_in_its_units(tmp_path: Path, capsys: Capture) -> None:
    reference = write(tmp_path / "r.npz", in_droid_units(), {**JAX, "units": "robot"})
    code, told = parity(capsys, droid(tmp_path / "droid"), reference, "--config", "pi05_droid", "--robot", "droid")
    assert code == 0, told
    assert "joint_7" in told
    assert "0 open to 1 closed" in told
    assert "3 rad/s" in told  # what one of the action's 1 is


def test_a_lerobot_policys_offsets_from_the_state_are_compared_as_positions(tmp_path: Path, capsys: Capture) -> None:
    gold, stats = golden("pi05"), norm_stats(6, shift=0.2)
    low, high = np.array(stats["q01"]), np.array(stats["q99"])
    network = gold["actions_f32_10"][:1, :, :6].astype(np.float64)
    state = np.array([[1.0, -2.0, 0.5, 0.0, 3.0, 0.25]])
    offsets = state * [1, 1, 1, 1, 1, 0]  # the gripper stays a position
    arrays = {
        "observation.images.front": image(0, 0)[None],
        "observation.images.wrist": image(0, 1)[None],
        "observation.state": state.astype(np.float32),
        "tokenized_prompt": gold["tokens"][:1],
        "tokenized_prompt_mask": gold["token_mask"][:1],
        "noise": gold["noise"][:1],
        "actions": (network + 1) * (high - low) / 2 + low + offsets[:, None],
    }
    folder = write_lerobot(tmp_path / "lerobot", "pi05", relative={"enabled": True})
    code, told = parity(capsys, folder, write(tmp_path / "r.npz", arrays))
    assert code == 0, told
    assert "joint_4.pos" in told
    arrays["actions"][0, 3, 4] += 2e-4 * np.std(network) * (high - low)[4] / 2
    assert parity(capsys, folder, write(tmp_path / "r.npz", arrays))[0] == 1


@pytest.mark.parametrize("dimension", range(8))
def test_1_percent_shows_in_every_dimension_of_a_robot(dimension: int, tmp_path: Path, capsys: Capture) -> None:
    arrays = in_droid_units()
    step = int(np.abs(arrays["actions"][0, :, dimension]).argmax())
    arrays["actions"][0, step, dimension] *= 1.01
    reference = write(tmp_path / "r.npz", arrays)
    assert parity(capsys, droid(tmp_path / "droid"), reference, "--config", "pi05_droid")[0] == 1


def test_the_tolerance_may_be_given(tmp_path: Path, capsys: Capture) -> None:
    folder = write_relay(tmp_path / "pi05", "pi05")
    reference = write(tmp_path / "r.npz", in_model_units("pi05"))
    code, told = parity(capsys, folder, reference, "--tolerance", "1e-7")
    assert code == 1
    assert "tolerance: 1e-07; above" in told


def test_bfloat16_has_a_tolerance_of_its_own_and_says_so(tmp_path: Path, capsys: Capture) -> None:
    folder = write_relay(tmp_path / "pi05", "pi05")
    reference = write(tmp_path / "r.npz", in_model_units("pi05"))
    code, told = parity(capsys, folder, reference, "--dtype", "bfloat16")
    assert code == 0
    assert "tolerance: 0.011; within" in told
    assert "bfloat16 hides small mistakes" in told


def test_what_jax_serves_in_bfloat16_is_compared_widely(tmp_path: Path, capsys: Capture) -> None:
    arrays = {**in_model_units("pi0"), "actions": golden("pi0")["actions_bf16_10"].astype(np.float32)}
    reference = write(tmp_path / "r.npz", arrays, {**JAX, "dtype": "bfloat16"})
    code, told = parity(capsys, write_relay(tmp_path / "pi0", "pi0"), reference)
    assert code == 0
    assert "tolerance: 0.029; within" in told


def test_a_prompt_and_notes_are_passed_on(tmp_path: Path, capsys: Capture) -> None:
    arrays = in_droid_units()
    for name in ("tokenized_prompt", "tokenized_prompt_mask"):
        del arrays[name]
    arrays["observation/unheard_of"] = np.zeros((1, 3))
    reference = write(tmp_path / "r.npz", arrays, {**JAX, "prompt": "pick up 100 % of it"})
    code, told = parity(capsys, droid(tmp_path / "droid"), reference, "--config", "pi05_droid")
    assert code == 1  # another prompt than the recorded one
    assert "note: prompt holds words this policy never saw: '%'" in told
    assert "note: ignored: observation" in told


class TestUnusable:
    """Nothing can be compared: code 2 and one sentence."""

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"noise": None}, "has no array 'noise'"),
            ({"noise": np.zeros((10, 32))}, "noise is an array of shape (10, 32) and dtype float64, expected (samples"),
            (
                {"actions": np.zeros((3, 10, 32))},
                "actions is an array of shape (3, 10, 32) and dtype float64, expected 2",
            ),
            ({"actions": np.full((2, 10, 32), np.nan)}, "finite numbers"),
            ({"actions": np.ones((2, 10, 32))}, "all actions of the reference are the same"),
            ({"actions": np.zeros((2, 10, 7))}, "sample 0: the reference's actions are (10, 7), ours (10, 32)"),
            ({"noise": np.zeros((2, 4, 32))}, "noise: expected (10, 32) float32, got (4, 32)"),
            (
                {"num_steps": np.float32(10)},
                "and dtype float32, expected one integer, or one per sample",
            ),
            ({"state": np.zeros((2, 5))}, "state has 5 values"),
            ({"image/base_0_rgb": None}, "image_mask['base_0_rgb'] is true but image holds no frame for it"),
        ],
    )
    def test_arrays_that_do_not_fit(
        self, change: Mapping[str, Any], text: str, tmp_path: Path, capsys: Capture
    ) -> None:
        arrays = {name: array for name, array in {**in_model_units("pi05"), **change}.items() if array is not None}
        folder = write_relay(tmp_path / "pi05", "pi05")
        code, told = parity(capsys, folder, write(tmp_path / "r.npz", arrays))
        assert code == 2
        assert text in told

    @pytest.mark.parametrize(
        ("metadata", "text"),
        [
            ({"dtype": "float16"}, "metadata's dtype is 'float16', expected 'float32' or 'bfloat16'"),
            ({"units": "mm"}, "metadata's units is 'mm', expected 'robot' or 'model'"),
            ({"prompt": ["one"]}, "prompt is a list of 1 items, expected a text, or 2 of them"),
            (["openpi"], "expected a JSON object"),
        ],
    )
    def test_metadata_that_make_no_sense(self, metadata: Any, text: str, tmp_path: Path) -> None:
        with pytest.raises(InvalidReference) as raised:
            read_reference(write(tmp_path / "r.npz", in_model_units("pi05"), metadata))
        assert text in str(raised.value)

    @pytest.mark.parametrize("name", ["r.npz", "r.safetensors"])
    def test_a_damaged_file(self, name: str, tmp_path: Path, capsys: Capture) -> None:
        (tmp_path / name).write_bytes(b"PK\x03\x04 and no more")
        code, told = parity(capsys, write_relay(tmp_path / "pi05", "pi05"), tmp_path / name)
        assert code == 2
        assert f"{tmp_path / name} is not a whole" in told

    def test_a_pickle_is_never_loaded(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "r.npz", noise=np.array([{"a": 1}], object))
        with pytest.raises(InvalidReference, match=r"is not a whole \.npz file of plain arrays"):
            read_reference(tmp_path / "r.npz")

    def test_a_file_of_another_kind(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidReference, match=r"expected a file that ends in \.npz or \.safetensors"):
            read_reference(tmp_path / "r.pkl")

    def test_no_file(self, tmp_path: Path, capsys: Capture) -> None:
        code, told = parity(capsys, write_relay(tmp_path / "pi05", "pi05"), tmp_path / "nowhere.npz")
        assert code == 2
        assert "nowhere.npz" in told

    def test_a_checkpoint_with_problems(self, tmp_path: Path, capsys: Capture) -> None:
        reference = write(tmp_path / "r.npz", in_droid_units())
        code, told = parity(capsys, droid(tmp_path / "droid"), reference)
        assert code == 2
        assert "nothing says how they are used" in told

    def test_a_robots_observation_without_its_profile(self, tmp_path: Path, capsys: Capture) -> None:
        reference = write(tmp_path / "r.npz", in_droid_units())
        code, told = parity(capsys, write_relay(tmp_path / "pi05", "pi05"), reference)
        assert code == 2
        assert "is missing" in told or "start it with --robot NAME" in told


def test_safetensors_say_the_same_as_npz(tmp_path: Path) -> None:
    arrays = {name: np.ascontiguousarray(array) for name, array in in_model_units("pi0").items()}
    save_file(arrays, tmp_path / "r.safetensors", {"metadata": json.dumps({**JAX, "prompt": "go"})})
    one = read_reference(tmp_path / "r.safetensors")
    other = read_reference(write(tmp_path / "r.npz", {**arrays, "prompt": np.array(["go", "go"])}))
    for first, second in zip(one.samples, other.samples, strict=True):
        assert first.observation["prompt"] == second.observation["prompt"] == "go"
        assert np.array_equal(first.observation["image"]["base_0_rgb"], second.observation["image"]["base_0_rgb"])
        assert np.array_equal(first.actions, second.actions)
        assert first.num_steps == second.num_steps == 10
