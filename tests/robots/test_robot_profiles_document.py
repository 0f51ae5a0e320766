"""docs/robot-profiles.md: its example loads, its Python runs, its tables are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relay.robots import profile_file
from relay.robots.profile import KINDS, RobotProfile
from relay.robots.profile_file import load_profile, shipped_profiles

PAGE = (Path(__file__).parents[2] / "docs" / "robot-profiles.md").read_text("utf-8")
EXAMPLE = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1]  # pyright: ignore[reportOptionalSubscript]
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def profile(tmp_path: Path) -> RobotProfile:
    (tmp_path / "my-arm.yaml").write_text(EXAMPLE, "utf-8")
    return load_profile(tmp_path / "my-arm.yaml")


def _table(heading: str) -> dict[str, str]:
    """First column to second column of the table under this heading row."""
    rows = PAGE.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name.strip("`"): row[1] for row in cells for name in row[0].split(", ")}


def test_a_whole_profile_takes_at_most_25_lines() -> None:
    assert len(EXAMPLE.splitlines()) <= 25


def test_the_example_loads(profile: RobotProfile) -> None:
    assert (profile.name, profile.control_hz, profile.state_dim, profile.action_dim) == ("my-arm", 20, 7, 7)
    assert [action.relative for action in profile.actions] == [True] * 6 + [False]
    assert profile.actions[1].limits == (-2, 2)
    assert profile.statistics is not None


def test_the_examples_observations_are_read(profile: RobotProfile) -> None:
    frame = np.zeros((24, 32, 3), np.uint8)
    reading = profile.read({"images": {"front": frame, "back": frame}, "wrist": frame, "joints": [0] * 6, "gripper": 1})
    assert list(reading.frames) == ["base_0_rgb", "left_wrist_0_rgb"]


def test_the_python_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: RobotProfile) -> None:
    monkeypatch.chdir(tmp_path)
    frame = np.zeros((24, 32, 3), np.uint8)
    names: dict[str, Any] = {
        "observation": {"images": {"front": frame}, "joints": np.ones(6), "gripper": 0.5},
        "chunk": np.random.default_rng(0).normal(size=(10, 7)),
    }
    for block in PYTHON:
        exec(block, names)
    assert len(PYTHON) == 2


def test_the_page_lists_the_shipped_profiles() -> None:
    assert tuple(sorted(_table("profile | robot | actions"))) == shipped_profiles()


def test_the_page_lists_every_key_of_a_profile() -> None:
    keys = PAGE.partition("## Keys")[2].partition("`cameras`, `state` and `actions` are needed")[0]
    rows = set(re.findall(r"^\| `(\w+)` \|", keys, re.MULTILINE))
    assert rows == set(profile_file.PROFILE_KEYS)


def test_the_page_explains_the_kinds_in_the_metadatas_words() -> None:
    assert _table("kind | what the robot does with the number") == dict(KINDS)


def test_the_page_lists_every_key_of_a_group() -> None:
    state = PAGE.partition("A group of `state`")[2].partition("A group of `actions`")
    assert set(re.findall(r"^\| `(\w+)` \|", state[0], re.MULTILINE)) == set(profile_file.STATE_KEYS)
    actions = re.findall(r"^\| `(\w+)`(?:, `(\w+)`)? \|", state[2].partition("| kind |")[0], re.MULTILINE)
    assert {key for row in actions for key in row if key} == set(profile_file.ACTION_KEYS)


def test_the_page_lists_every_key_of_the_contract() -> None:
    told = PAGE.partition("## What clients are told")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", told, re.MULTILINE)) == set(load_profile("droid").contract())
