"""Listener, sessions and scheduling. Knows no model's name and imports no torch.

For a policy of one's own: `serve`, and what it may need. They are loaded when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relay.engine.base import PolicySpec
    from relay.protocol.errors import ObservationError
    from relay.server.own_policy import serve
    from relay.server.settings import ServerSettings

__all__ = ["ObservationError", "PolicySpec", "ServerSettings", "serve"]

_HOMES = {
    "ObservationError": "relay.protocol.errors",
    "PolicySpec": "relay.engine.base",
    "ServerSettings": "relay.server.settings",
    "serve": "relay.server.own_policy",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
