"""The packages of the extra `dreamzero`, imported where they are needed, with a remedy where they are missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from relay.engine.weights import CheckpointError


def imported(package: str) -> Any:
    """The module of this name.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        return import_module(package)
    except ImportError:
        raise CheckpointError(
            f"DreamZero needs {package}, which is not installed: pip install 'relay-robotics[dreamzero]'"
        ) from None
