"""What `import relay` offers, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys

import relay


def test_the_public_names_are_exactly_these() -> None:
    assert relay.__all__ == ["AsyncPolicy", "Codec", "Policy", "PolicyClient", "__version__"]
    assert relay.__all__ == sorted(relay.__all__)
    public = {name for name, value in vars(relay).items() if not name.startswith("_") and not is_module(value)}
    assert public == {"AsyncPolicy", "Codec", "Policy", "PolicyClient"}


def test_importing_relay_loads_no_torch_and_no_server() -> None:
    code = (
        "import relay, sys; print([name for name in ('torch', 'relay.server', 'relay.engine') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def is_module(value: object) -> bool:
    return type(value).__name__ == "module"
