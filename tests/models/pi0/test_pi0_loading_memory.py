"""Loading needs one copy of the weights and little more, measured in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "full_size.py"

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc"),
    pytest.mark.torch,
]


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("full_size", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_loading_half_a_gigabyte_needs_a_tenth_of_a_gigabyte_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)  # where the script's own modules are
    script = benchmark()
    script.write_random(tmp_path / "model.safetensors", script.stored_shapes(script.config("small")))
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--scale", "small", "--load-only", "--measure"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["weight_bytes"] > 500e6
    assert result["peak_bytes"] - result["start_bytes"] - result["weight_bytes"] < 100e6
