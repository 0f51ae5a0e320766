"""An environment of its own for the stock OpenPI client and server, which pin an older NumPy than `relay` takes.

    python benchmarks/stock.py      makes .venv-stock, or what is missing of it, and prints its interpreter

Used by `benchmarks/wire.py` and by `tests/integration/test_stock_*.py`. Nothing of it is imported into `relay`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

ENVIRONMENT = Path(__file__).resolve().parent.parent / ".venv-stock"

PACKAGES = (
    "openpi-client==0.1.2",
    "openpi-server==0.1.0",
    "typing_extensions",  # imported by openpi-client 0.1.2, which does not ask for it
    "inspect-robots==0.60.0",
)
WITHOUT_DEPENDENCIES = ("inspect-robots-franka==0.1.0",)  # asks for OpenCV too, for cameras that a test has not
IMPORTED = "openpi_client.websocket_client_policy, openpi_server, inspect_robots_franka"

OLDER_WEBSOCKETS = ("11.0", "13.1")
"""Releases that openpi-client 0.1.2 allows besides ours, its oldest first; each in a folder for PYTHONPATH."""


def python() -> Path:
    """The interpreter of the environment, whether it exists or not."""
    return ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def ensure() -> Path:
    """Make what is missing of the environment, with the same release of `websockets` as ours, and return its Python."""
    if not _is_ready():
        print(f"making {ENVIRONMENT} with {', '.join(PACKAGES + WITHOUT_DEPENDENCIES)}", file=sys.stderr)
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        _install(*PACKAGES, f"websockets=={version('websockets')}")
        _install("--no-deps", *WITHOUT_DEPENDENCIES)
    for release in OLDER_WEBSOCKETS:
        folder = older_websockets(release)
        if not folder.exists():
            unfinished = folder.with_name("unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            _install("--no-deps", f"--target={unfinished}", f"websockets=={release}")
            unfinished.rename(folder)
    return python()


def older_websockets(release: str) -> Path:
    """The folder that holds one of `OLDER_WEBSOCKETS`, whether it exists or not."""
    return ENVIRONMENT / f"websockets-{release}"


def _is_ready() -> bool:
    if not python().exists():
        return False
    return subprocess.run([str(python()), "-c", f"import {IMPORTED}"], capture_output=True).returncode == 0


def _install(*what: str) -> None:
    pip = [str(python()), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *what], check=True)


if __name__ == "__main__":
    print(ensure())
