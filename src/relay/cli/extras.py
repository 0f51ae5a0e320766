"""Whether what a command needs besides the command line itself is installed. Imports none of it."""

from __future__ import annotations

import importlib.util


def missing_for_models(doing: str) -> str | None:
    """A sentence that names what is missing to load models, and how to install it; None if nothing is."""
    missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return f"{doing} needs {' and '.join(missing)}; install with: pip install 'relay-robotics[server]'"
