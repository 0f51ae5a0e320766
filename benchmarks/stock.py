"""An environment of its own for the stock OpenPI client and server, which pin an older NumPy than `relay` takes.

    python benchmarks/stock.py      makes .venv-stock, or finds it, and prints its interpreter

Used by `benchmarks/wire.py` and `tests/integration/test_stock_peers.py`. Nothing of it is imported into `relay`.
"""

from __future__ import annotations

import os
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
)


def python() -> Path:
    """The interpreter of the environment, whether it exists or not."""
    return ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def is_ready() -> bool:
    """Whether the stock packages can be imported there."""
    if not python().exists():
        return False
    check = [str(python()), "-c", "import openpi_client.websocket_client_policy, openpi_server"]
    return subprocess.run(check, capture_output=True).returncode == 0


def ensure() -> Path:
    """Make the environment if it is not there, with the same release of `websockets` as ours, and return its Python."""
    if not is_ready():
        print(f"making {ENVIRONMENT} with {', '.join(PACKAGES)}", file=sys.stderr)
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        install = [str(python()), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, *PACKAGES, f"websockets=={version('websockets')}"], check=True)
    return python()


if __name__ == "__main__":
    print(ensure())
