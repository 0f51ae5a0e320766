"""The product as a newcomer meets it: the policy solves its task, for reasons that can be taken away."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def demo(output: Path, *options: str) -> dict[str, Any]:
    """Run `relay demo` and return its results."""
    command = [sys.executable, "-m", "relay.cli.main", "demo", "--output", str(output), "--seed", "90210", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((output / "results.json").read_text("utf-8"))


def test_the_policy_solves_most_of_twenty_scenes(tmp_path: Path) -> None:
    results = demo(tmp_path, "--episodes", "20", "--check", "--threshold", "0.8")
    assert results["success_rate"] >= 0.8
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "episode.gif").read_bytes()[:3] == b"GIF"


def test_without_its_cameras_it_solves_next_to_nothing(tmp_path: Path) -> None:
    assert demo(tmp_path, "--episodes", "6", "--ablate", "cameras")["success_rate"] <= 0.34


def test_the_second_robot_solves_most_of_twenty_scenes_with_its_adapter(tmp_path: Path) -> None:
    options = ("--robot", "cross", "--episodes", "20", "--check", "--threshold", "0.8")
    assert demo(tmp_path, *options)["success_rate"] >= 0.8


def test_the_second_robot_solves_few_scenes_without_its_adapter(tmp_path: Path) -> None:
    assert demo(tmp_path, "--robot", "cross", "--adapter", "base", "--episodes", "6")["success_rate"] <= 0.34
