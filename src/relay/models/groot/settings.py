"""`relay.json` beside the weights of a GR00T checkpoint: what the rest of the folder doesn't say. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from relay.engine.json_entries import read_json
from relay.engine.weights import CheckpointError
from relay.protocol.wording import shown

SETTINGS_FILE = "relay.json"

KEYS: Mapping[str, type] = {
    "embodiment": str,
    "metadata": dict,
    "backbone": dict,
    "config": dict,
}
"""Every key `relay.json` may have, and its type: the embodiment to serve, what clients read besides, the backbone's
sizes where they are not the released ones, and entries of the base model's `config.json` where a lerobot folder stands
on another base than the released one."""


def read_settings(folder: Path) -> dict[str, Any]:
    """The folder's `relay.json`, empty where there is none.

    Raises:
        CheckpointError: it is damaged, has an unknown key, or a value of another type.
    """
    path = folder / SETTINGS_FILE
    settings = read_json(path) if path.is_file() else {}
    for key, value in settings.items():
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise CheckpointError(
                f"{SETTINGS_FILE}: unknown key {key!r}{hint}; of a groot folder it takes {', '.join(KEYS)}"
            )
        if type(value) is not KEYS[key]:
            expected = "text" if KEYS[key] is str else "an object"
            raise CheckpointError(f"{SETTINGS_FILE}: {key} is {shown(value)}, expected {expected}")
    return settings
