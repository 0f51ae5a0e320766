"""Where the stock packages live, how to run a script there, and the frame that both sides look at."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parent.parent / ".venv-stock"
STOCK_PYTHON = ENVIRONMENT / "bin/python"

OLDER_WEBSOCKETS = ("11.0", "13.1")

needs_stock = pytest.mark.skipif(
    not all((ENVIRONMENT / f"websockets-{release}").exists() for release in OLDER_WEBSOCKETS),
    reason="the stock OpenPI packages are not here, or not all of them; `make stock` installs them",
)

FRAME = np.arange(24 * 32 * 3, dtype=np.uint8).reshape(24, 32, 3)


def look(frame: NDArray[np.uint8]) -> list[float]:
    """What looking policies answer about a frame: sum, sum of squares, and 1."""
    pixels = frame.astype(np.float64)
    return [pixels.sum(), (pixels**2).sum(), 1.0]


def run_script(name: str, *arguments: str, websockets: str = "") -> Any:
    """Run a script of this folder there, and return what it printed as JSON.

    Args:
        websockets: an older release that `benchmarks/stock.py` has put beside the environment; empty for its own.
    """
    command = [str(STOCK_PYTHON), "-W", "ignore", str(HERE / name), *arguments]
    finished = subprocess.run(command, env=variables(websockets), capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def variables(websockets: str = "") -> dict[str, str]:
    """Ours, but with nothing of our environment in the path of its imports."""
    path = str(ENVIRONMENT / f"websockets-{websockets}") if websockets else ""
    return {**os.environ, "PYTHONPATH": path}
