"""What the command line's tests share: the checkpoint folders of all families, and settings without a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

for family in ("pi0", "groot"):
    sys.path.insert(0, str(Path(__file__).parents[1] / "models" / family))


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `relay serve demo` with these flags, or `relay serve` with another model or file, would serve with."""
    from relay.cli.main import main
    from relay.server import app

    def settings_of(*flags: str, model: str = "demo") -> Any:
        served: list[Any] = []
        monkeypatch.setattr(app, "serve", lambda load, settings: served.append(settings))
        assert main(["serve", model, *flags]) == 0
        return served[0]

    return settings_of
