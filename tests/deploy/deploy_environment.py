"""Where the recipes lie, and the environment of tools that check them."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
TOOLS = ROOT / ".venv-deploy/bin"

needs_deploy_tools = pytest.mark.skipif(
    not (TOOLS / "kubernetes-validate").exists() or not (TOOLS / "modal").exists(),
    reason="the tools that check recipes are not here; `make deploy-tools` installs them",
)
