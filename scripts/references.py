"""An environment of its own for Orbax and JAX, which tests have write the checkpoints that `relay` reads without them.

    python scripts/references.py      makes .venv-orbax, or finds it, and prints its interpreter

Used by `tests/models/pi0/test_pi0_orbax.py`. Nothing of it is imported into `relay`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ENVIRONMENT = Path(__file__).resolve().parent.parent / ".venv-orbax"

PACKAGES = (
    "orbax-checkpoint==0.12.8; python_version >= '3.11'",
    "orbax-checkpoint; python_version < '3.11'",
    "jax",
    "safetensors",
)


def python() -> Path:
    """The interpreter of the environment, whether it exists or not."""
    return ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def is_ready() -> bool:
    """Whether the packages can be imported there."""
    if not python().exists():
        return False
    check = [str(python()), "-c", "import orbax.checkpoint, safetensors"]
    return subprocess.run(check, capture_output=True).returncode == 0


def ensure() -> Path:
    """Make the environment if it is not there, and return its Python."""
    if not is_ready():
        print(f"making {ENVIRONMENT} with {', '.join(PACKAGES)}", file=sys.stderr)
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        install = [str(python()), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, *PACKAGES], check=True)
    return python()


if __name__ == "__main__":
    print(ensure())
