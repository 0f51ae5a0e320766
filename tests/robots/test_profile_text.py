"""Profiles as text: what is written is read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from relay.robots.gripper import Gripper
from relay.robots.profile import ActionDimension, Camera, RobotProfile, StatePart
from relay.robots.profile_file import load_profile, shipped_profiles
from relay.robots.profile_text import profile_text


def read_back(profile: RobotProfile, folder: Path) -> RobotProfile:
    path = folder / "written.yaml"
    path.write_text(profile_text(profile), "utf-8")
    return load_profile(path)


@pytest.mark.parametrize("name", shipped_profiles())
def test_a_shipped_profile_is_read_back_equal(name: str, tmp_path: Path) -> None:
    assert read_back(load_profile(name), tmp_path) == load_profile(name)


def test_everything_that_a_profile_may_hold_is_read_back(tmp_path: Path) -> None:
    profile = RobotProfile(
        name="größer: arm",
        cameras=(Camera("front", ("observation.images.front", "images/front")), Camera("yes", ("on",))),
        state=(
            StatePart(("observation.state", "state"), ("a", "b", "c"), ("rad", "m", "rad")),
            StatePart(("tool",), ("null",), ("unknown",)),
        ),
        actions=(
            ActionDimension("a", "rad", "position", relative=True, limits=(-3.1, 3.2)),
            ActionDimension("b", "m", "velocity", scale=0.25, limits=(-1, 1)),
            ActionDimension("c", gripper=Gripper(-1, 1)),
            ActionDimension("d"),
        ),
        control_hz=12.5,
        ignored_cameras=("images/back",),
        frames=("float",),
        statistics=tmp_path / "stats.json",
        normalization="z_score",
    )
    assert read_back(profile, tmp_path) == profile


def test_a_relative_path_to_statistics_leads_to_the_same_file(tmp_path: Path) -> None:
    profile = replace(load_profile("droid"), statistics=Path("stats.json"))
    assert read_back(profile, tmp_path).statistics == Path("stats.json").absolute()
