"""`relay check`: what is told about folders of every format, which problems, and what is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import (
    ORBAX_PYTHON,
    TINY,
    change_json,
    norm_stats,
    write_json,
    write_lerobot,
    write_openpi,
    write_openpi_jax,
    write_relay,
)
from PIL import Image
from safetensors.torch import load_file, save_file

from relay.cli.main import main
from relay.engine.frames import resize_with_pad
from relay.engine.weights import SafetensorsSource
from relay.models.pi0.inspection import inspect_checkpoint
from relay.robots.profile_file import load_profile

DROID = ("--config", "pi05_droid")

Capture = pytest.CaptureFixture[str]


def droid(folder: Path, **others: Any) -> Path:
    return write_openpi(folder, "pi05", action_horizon=15, **others)


def check(capsys: Capture, folder: Path, *options: str) -> tuple[int, str]:
    """The exit code, and what was printed on either stream."""
    code = main(["check", str(folder), *options])
    told = capsys.readouterr()
    return code, told.out + told.err


def section(capsys: Capture, folder: Path, title: str, *options: str) -> list[dict[str, Any]]:
    """The rows of a section, from the JSON."""
    assert main(["check", str(folder), "--json", *options]) == 0
    sections = json.loads(capsys.readouterr().out)["sections"]
    return next(content["rows"] for name, content in sections.items() if name.startswith(title))


@pytest.mark.parametrize(
    ("write", "options", "form", "robot"),
    [
        (droid, DROID, "openpi, PyTorch", "droid"),
        (lambda folder: write_lerobot(folder, "pi0"), (), "lerobot", "lerobot"),
        (lambda folder: write_relay(folder, "pi0"), (), "relay", "none: model format only"),
    ],
    ids=["openpi", "lerobot", "relay"],
)
def test_a_folder_that_would_start_is_told_with_code_0(
    write: Callable[[Path], Path], options: tuple[str, ...], form: str, robot: str, tmp_path: Path, capsys: Capture
) -> None:
    code, told = check(capsys, write(tmp_path), *options)
    assert code == 0
    assert f"format     {form}" in told
    assert f"robot      {robot}" in told
    assert "no problems: relay serve pi0" in told


def test_a_jax_folder_is_told_too(tmp_path: Path, capsys: Capture) -> None:
    if not ORBAX_PYTHON.exists():
        pytest.skip("Orbax and JAX are not here; `make references` installs them")
    settings = {**TINY, "action_horizon": 15}
    code, told = check(capsys, write_openpi_jax(tmp_path, "pi05", settings=settings), *DROID)
    assert code == 0
    assert "openpi, JAX (Orbax)" in told
    assert "tensors  95" in told
    assert "95 float32" in told


def test_no_tensor_is_read(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(SafetensorsSource, "read")
    assert check(capsys, droid(tmp_path), *DROID)[0] == 0


def test_tensors_are_counted_and_the_ignored_ones_named(tmp_path: Path, capsys: Capture) -> None:
    folder = droid(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    _, told = check(capsys, folder, *DROID)
    assert f"tensors  {len(tensors)}" in told
    assert f"size     {sum(tensor.nbytes for tensor in tensors.values()) / 1000:.2f} kB" in told
    assert "ignored: paligemma_with_expert.gemma_expert.lm_head.weight" in told
    assert "lm_head.weight (" not in told


def test_every_setting_is_told_with_its_source(tmp_path: Path, capsys: Capture) -> None:
    rows = {row["setting"]: row for row in section(capsys, droid(tmp_path), "Settings", *DROID)}
    assert rows["action_horizon"] == {"setting": "action_horizon", "value": "15", "from": "openpi's config.json"}
    assert rows["vision_heads"]["from"] == "relay.json"
    assert rows["normalization"]["value"] == "quantile"


def test_statistics_are_told_per_dimension(tmp_path: Path, capsys: Capture) -> None:
    rows = section(capsys, droid(tmp_path), "Statistics of state", *DROID)
    expected = norm_stats(8)
    assert [row["name"] for row in rows] == list(load_profile("droid").state_names)
    assert [(row["q01"], row["q99"]) for row in rows] == list(zip(expected["q01"], expected["q99"], strict=True))
    assert {row["suspicious"] for row in rows} == {""}


def test_statistics_in_degrees_are_suspicious(tmp_path: Path, capsys: Capture) -> None:
    folder = droid(tmp_path)
    change_json(folder / "assets/droid/norm_stats.json", "norm_stats", "state", "q99", 2, value=90.0)
    change_json(folder / "assets/droid/norm_stats.json", "norm_stats", "state", "max", 2, value=95.0)
    rows = section(capsys, folder, "Statistics of state", *DROID)
    assert [row["index"] for row in rows if row["suspicious"]] == [2]
    assert rows[2]["suspicious"] == "90 rad is more than 2 turns: degrees?"


def test_the_robots_actions_are_told(tmp_path: Path, capsys: Capture) -> None:
    options = (*DROID, "--robot", "droid-jointpos")
    rows = section(capsys, droid(tmp_path), "Robot: actions", *options)
    assert [row["offset from the state"] for row in rows] == [True] * 7 + [False]
    assert rows[7]["gripper"] == "closed 1, open 0"


def test_a_unit_is_told_with_its_scale(tmp_path: Path, capsys: Capture) -> None:
    rows = section(capsys, droid(tmp_path), "Robot: actions", *DROID)
    assert [row["unit"] for row in rows] == ["3 rad/s"] * 7 + [load_profile("droid").actions[7].unit]


class TestProblems:
    """Why a folder would not start."""

    def test_all_are_told_at_once_with_code_1(self, tmp_path: Path, capsys: Capture) -> None:
        folder = droid(tmp_path, tokenizer=False)
        tensors = load_file(folder / "model.safetensors")
        del tensors["action_in_proj.bias"]
        save_file(tensors, folder / "model.safetensors")
        code, told = check(capsys, folder)
        assert code == 1
        for text in (
            "problem: there are statistics (droid), but nothing says how they are used: name openpi's configuration",
            "problem: nothing says 'max_token_len', 'num_steps', 'state_in_prompt', and the tensors do not tell it",
            "problem: no tokenizer in",
            "missing: action_in_proj.bias",
            "4 problems: it would not start",
        ):
            assert text in told

    def test_a_folder_of_nothing_is_one(self, tmp_path: Path, capsys: Capture) -> None:
        code, told = check(capsys, tmp_path)
        assert code == 1
        assert f"no model.safetensors in {tmp_path}" in told

    def test_another_models_tokenizer_is_one(self, tmp_path: Path, capsys: Capture) -> None:
        folder = droid(tmp_path)
        content = json.loads((folder / "tokenizer.json").read_text())
        content["model"]["vocab"]["1"] = 64
        write_json(folder / "tokenizer.json", content)
        code, told = check(capsys, folder, *DROID)
        assert code == 1
        assert "problem: the tokenizer gives the id 64, but this network has 64 tokens" in told

    def test_another_model_than_asked_for_is_one(self, tmp_path: Path, capsys: Capture) -> None:
        code, told = check(capsys, write_relay(tmp_path, "pi05"), "--model", "pi0")
        assert code == 1
        assert "problem: this is a pi05 checkpoint; serve it as pi05, not as pi0" in told

    def test_an_unknown_model_cannot_be_checked(self, tmp_path: Path, capsys: Capture) -> None:
        code, told = check(capsys, tmp_path, "--model", "pi5")
        assert code == 2
        assert "model 'pi5' is not known, did you mean 'pi05'?" in told


class TestPreview:
    """What the model would see."""

    def test_the_prompts_pieces_are_its_text(self, tmp_path: Path, capsys: Capture) -> None:
        options = (*DROID, "--prompt", "Stack_all ")
        rows = section(capsys, droid(tmp_path), "What the model sees: prompt", *options)
        text = "".join(row["piece"] for row in rows)
        assert text == "<bos>Task: Stack all, State: 128 128 128 128 128 128 128 128;\nAction: "
        assert rows[0] == {"place": 0, "id": 2, "piece": "<bos>"}

    def test_a_long_prompt_is_said_to_be_cut(self, tmp_path: Path, capsys: Capture) -> None:
        code, told = check(capsys, droid(tmp_path), *DROID, "--prompt", "pick " * 100)
        assert code == 0
        assert "prompt truncated: it needs" in told

    def test_a_state_is_normalized_as_in_serving(self, tmp_path: Path, capsys: Capture) -> None:
        folder = droid(tmp_path)
        given = np.linspace(-1, 1, 8)
        options = (*DROID, "--state", ",".join(map(str, given)))
        rows = section(capsys, folder, "What the model sees: state", *options)
        stats = norm_stats(8)
        low, high = np.array(stats["q01"]), np.array(stats["q99"])
        assert [row["robot"] for row in rows] == pytest.approx(given)
        assert [row["normalized"] for row in rows] == pytest.approx((given - low) / (high - low) * 2 - 1, abs=1e-5)

    def test_a_state_outside_the_training_data_is_remarked(self, tmp_path: Path, capsys: Capture) -> None:
        _, told = check(capsys, droid(tmp_path), *DROID, "--state", "0,0,0,57.3,0,0,0,0")
        assert "state[3] (joint_4) is 57.3, far outside -1.3 to 1.625" in told

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            (("--state", "1,2"), "sample does not fit: --state has 2 values; droid expects 8: joint_1"),
            (
                ("--frame", "a.png", "b.png", "c.png"),
                "sample does not fit: 3 frames for 2 cameras: base_0_rgb, left_wrist_0_rgb",
            ),
            (("--prompt", ""), "sample does not fit: prompt is empty"),
            (("--frame", "text.png"), "sample does not fit: image['base_0_rgb'] begins with the bytes"),
        ],
    )
    def test_a_sample_that_does_not_fit_is_refused(
        self, options: tuple[str, ...], text: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("a.png", "b.png", "c.png"):
            Image.new("RGB", (4, 4)).save(name)
        Path("text.png").write_text("no picture")
        code, told = check(capsys, droid(tmp_path), *DROID, *options, "--write")
        assert code == 2
        assert text in told
        assert "no problems: relay serve pi05 would start" in told
        assert "wrote" in told

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            (("--state", "1,x"), "--state 1,x: expected numbers with commas between them"),
            (("--frame", "nowhere.png"), "nowhere.png"),
        ],
    )
    def test_an_option_that_cannot_be_read_ends_with_code_2(
        self, options: tuple[str, ...], text: str, tmp_path: Path, capsys: Capture
    ) -> None:
        code, told = check(capsys, droid(tmp_path), *DROID, *options)
        assert code == 2
        assert text in told

    def test_the_picture_shows_the_pixels_that_the_model_gets(self, tmp_path: Path, capsys: Capture) -> None:
        pixels = np.random.default_rng(0).integers(256, size=(120, 200, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "base.png")
        code, told = check(
            capsys, droid(tmp_path), *DROID, "--frame", str(tmp_path / "base.png"), "--output", str(tmp_path / "seen")
        )
        assert code == 0
        assert f"wrote {tmp_path / 'seen/frames.png'}" in told
        picture = np.asarray(Image.open(tmp_path / "seen/frames.png"))
        assert np.array_equal(picture[20:244, 8:232], resize_with_pad(pixels, 224, 224))
        assert "left_wrist_0_rgb   masked" in told  # no file for it

    def test_without_files_every_camera_of_the_robot_shows_a_test_card(self, tmp_path: Path, capsys: Capture) -> None:
        rows = section(capsys, droid(tmp_path), "What the model sees: frames", *DROID)
        assert [row["frame"] for row in rows] == ["test card", "test card", "masked"]

    @pytest.mark.parametrize("state", [(), ("--state", "0,0,0,0,0,0,0,1")], ids=["a neutral state", "a robot's state"])
    def test_a_robot_may_have_a_key_image_of_its_own(
        self, state: tuple[str, ...], tmp_path: Path, capsys: Capture
    ) -> None:
        write_json(tmp_path / "arm.yaml", {"base": "droid", "cameras": {"base_0_rgb": "image/front"}})
        options = (*DROID, "--robot", str(tmp_path / "arm.yaml"), *state)
        rows = section(capsys, droid(tmp_path), "What the model sees: frames", *options)
        assert [row["frame"] for row in rows] == ["test card", "masked", "masked"]


class TestWritingSettings:
    """`--write`."""

    def test_the_folder_starts_without_options_afterwards(self, tmp_path: Path, capsys: Capture) -> None:
        folder = droid(tmp_path, settings={})
        change_json(folder / "config.json", "paligemma_variant", value="none")
        write_json(folder / "relay.json", TINY)
        assert check(capsys, folder, *DROID, "--write")[0] == 0
        code, told = check(capsys, folder)
        assert code == 0
        assert "vision_heads     2         relay.json" in told
        assert inspect_checkpoint(folder).profile == load_profile("droid")

    def test_a_complete_file_is_left_alone(self, tmp_path: Path, capsys: Capture) -> None:
        folder = droid(tmp_path)
        check(capsys, folder, *DROID, "--write", "--force")
        before = (folder / "relay.json").stat().st_mtime_ns
        code, told = check(capsys, folder, "--write")
        assert code == 0
        assert "is complete already" in told
        assert (folder / "relay.json").stat().st_mtime_ns == before

    def test_a_file_that_says_something_else_is_not_replaced(self, tmp_path: Path, capsys: Capture) -> None:
        folder = droid(tmp_path, settings={**TINY, "robot": "droid"})
        before = (folder / "relay.json").read_text()
        code, told = check(capsys, folder, *DROID, "--robot", "droid-jointpos", "--write")
        assert code == 2
        assert "relay.json is there and says something else: changes robot; --force" in told
        assert (folder / "relay.json").read_text() == before

    @pytest.mark.parametrize(
        ("place", "stored"), [("folder/arm.yaml", "arm.yaml"), ("arm.yaml", "{}/arm.yaml")], ids=["inside", "outside"]
    )
    def test_a_profiles_file_is_stored_so_that_it_is_found(
        self, place: str, stored: str, tmp_path: Path, capsys: Capture
    ) -> None:
        folder = droid(tmp_path / "folder")
        write_json(tmp_path / place, {"base": "droid"})
        robot = str(tmp_path / "folder" / ".." / place)
        assert check(capsys, folder, *DROID, "--robot", robot, "--write")[0] == 0
        assert json.loads((folder / "relay.json").read_text())["robot"] == stored.format(tmp_path.resolve())
        assert check(capsys, folder)[0] == 0

    def test_what_is_refused_keeps_nothing_else_from_being_written(self, tmp_path: Path, capsys: Capture) -> None:
        folder = droid(tmp_path / "folder", settings={**TINY, "robot": "droid"})
        options = (*DROID, "--robot", "droid-jointpos", "--write", "--write-profile", str(tmp_path / "arm.yaml"))
        code, told = check(capsys, folder, *options, "--output", str(tmp_path / "seen"))
        assert code == 2
        assert "relay.json is there and says something else" in told
        assert (tmp_path / "arm.yaml").exists()
        assert (tmp_path / "seen/frames.png").exists()

    def test_nothing_is_written_while_there_are_problems(self, tmp_path: Path, capsys: Capture) -> None:
        folder = droid(tmp_path)
        before = (folder / "relay.json").read_text()
        assert check(capsys, folder, "--write", "--force")[0] == 1
        assert (folder / "relay.json").read_text() == before


class TestWritingAProfile:
    """`--write-profile`."""

    def test_lerobots_own_is_read_back_the_same(self, tmp_path: Path, capsys: Capture) -> None:
        relative = {"enabled": True}
        folder = write_lerobot(
            tmp_path / "policy", "pi05", relative=relative, rename={"cam": "observation.images.front"}
        )
        code, _ = check(capsys, folder, "--write-profile", str(tmp_path / "arm.yaml"))
        assert code == 0
        profile = inspect_checkpoint(folder).profile
        assert profile is not None
        assert profile.actions[0].relative
        assert load_profile(tmp_path / "arm.yaml") == profile

    def test_an_openpi_folders_is_the_named_robots(self, tmp_path: Path, capsys: Capture) -> None:
        assert check(capsys, droid(tmp_path), *DROID, "--write-profile", str(tmp_path / "arm.yml"))[0] == 0
        assert load_profile(tmp_path / "arm.yml") == load_profile("droid")

    def test_an_edited_file_is_not_replaced_without_force(self, tmp_path: Path, capsys: Capture) -> None:
        path = tmp_path / "arm.yaml"
        path.write_text("base: droid\n")
        options = (*DROID, "--write-profile", str(path))
        code, told = check(capsys, droid(tmp_path), *options)
        assert code == 2
        assert "is there and says something else; --force replaces it" in told
        assert path.read_text() == "base: droid\n"
        assert check(capsys, tmp_path, *options, "--force")[0] == 0
        assert load_profile(path).state_names == load_profile("droid").state_names

    def test_a_file_that_could_not_be_loaded_is_refused(self, tmp_path: Path, capsys: Capture) -> None:
        code, told = check(capsys, droid(tmp_path), *DROID, "--write-profile", str(tmp_path / "arm.json"))
        assert code == 2
        assert "expected a file that ends in .yaml" in told

    def test_without_a_robot_there_is_none_to_write(self, tmp_path: Path, capsys: Capture) -> None:
        code, told = check(capsys, write_relay(tmp_path, "pi05"), "--write-profile", str(tmp_path / "arm.yaml"))
        assert code == 2
        assert "no robot is known; name one with --robot" in told


def test_json_holds_problems_and_sections(tmp_path: Path, capsys: Capture) -> None:
    code, told = check(capsys, droid(tmp_path), "--json")
    content = json.loads(told)
    assert code == 1
    assert content["model"] == "pi05"
    assert len(content["problems"]) == 2
    assert content["settings"] is None
    assert ["format", "openpi, PyTorch"] in content["sections"]["Checkpoint"]["rows"]


def test_a_terminal_gets_tables(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    code, told = check(capsys, droid(tmp_path), *DROID)
    assert code == 0
    assert "│ vision_heads    │ 2" in told
