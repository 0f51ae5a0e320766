"""The script that checks and times the engine on a GPU runs from end to end on the CPU, at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("gpu") / "results.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--scale", "tiny", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


def test_nothing_is_wrong_and_nothing_left_out(results: dict[str, Any]) -> None:
    assert results["wrong"] == []
    assert not [name for name, result in results.items() if "left out" in result]


def test_every_numeric_check_is_within_its_bound(results: dict[str, Any]) -> None:
    assert len(results["numerics"]) >= 16
    assert all(check["distance"] <= check["at most"] for check in results["numerics"].values())


@pytest.mark.parametrize("case", ["2 cameras, 15 actions", "3 cameras, 50 actions"])
def test_batches_steps_parts_and_round_trips_are_timed(results: dict[str, Any], case: str) -> None:
    for rows in (1, 2, 4, 8):
        for steps in (10, 4):
            timed = results[f"{case}: prepared, batch {rows}, {steps} steps"]
            assert timed["p50_ms"] > timed["floor_ms"] > 0
    assert results[f"{case}: prepared, batch 8: parts"]["step_ms"] > 0
    assert results[f"{case}: prepared: eight robots over a WebSocket"]["requests_per_s"] > 0
    assert results[f"{case}: prepared: prompts and steps that vary"]["prepared_meanwhile"] == 0
    assert results[f"{case}: launches"]["dispatched"] > 0


def test_groot_is_checked_timed_and_counted(results: dict[str, Any]) -> None:
    assert results["GR00T: rows of a batch against rows alone"]["distance"] < 1e-4
    assert results["GR00T: preparing shapes"]["graphs"] == 24  # two parts, two lengths of prompts, six sizes of batches
    assert results["GR00T: prepared to plain"]["distance"] < 1e-5
    for rows in (1, 2, 4, 8):
        for path in ("plain", "prepared"):
            timed = results[f"GR00T: {path}, batch {rows}, 4 steps"]
            assert timed["p50_ms"] > timed["floor_ms"] > 0
    assert results["GR00T: prepared, batch 8: parts"]["step_ms"] > 0
    assert results["GR00T: launches"]["dispatched"] > 0


def test_the_environment_is_written_down(results: dict[str, Any]) -> None:
    assert {"relay", "torch", "python", "device"} <= results["environment"].keys()
