"""The examples that drive the built-in robot, against `relay serve demo`."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str, **changes: Any) -> Any:
    """The example's `main`, with other values for some of its constants."""
    names = runpy.run_path(str(EXAMPLES / name))
    main = names["main"]
    main.__globals__.update(changes)
    return main


def test_the_closed_loop_completes_its_episodes(demo_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    load("closed_loop.py")(demo_url)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert sum(": done in " in line for line in lines) >= 3


def test_the_overlapping_loop_completes_its_episodes(demo_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten times as fast as the robot: on a slow machine chunks come late, which changes nothing in what is executed."""
    load("overlap.py", CONTROL_HZ=100.0)(demo_url, "5")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert sum(": done in " in line for line in lines) >= 3
    assert all(line.endswith(" chunks came late") for line in lines)
