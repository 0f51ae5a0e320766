"""`relay.json` beside the weights of a DreamZero checkpoint: what the rest of the folder doesn't say. Data only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from relay.engine.json_entries import read_json
from relay.engine.weights import CheckpointError
from relay.models.dreamzero.observation import CAMERA_SETS
from relay.protocol.wording import shown

SETTINGS_FILE = "relay.json"

KEYS: Mapping[str, type] = {
    "embodiment": str,
    "cameras": str,
    "encoders": dict,
    "prompts": dict,
}
"""Every key `relay.json` may have, and its type: the embodiment to serve, how clients number DROID's exteriors, sizes
of the three encoders where they are not the released ones, and the SHA-256 of each text in `prompts.json` that is not
the released model's."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


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
                f"{SETTINGS_FILE}: unknown key {key!r}{hint}; of a dreamzero folder it takes {', '.join(KEYS)}"
            )
        if type(value) is not KEYS[key]:
            expected = "text" if KEYS[key] is str else "an object"
            raise CheckpointError(f"{SETTINGS_FILE}: {key} is {shown(value)}, expected {expected}")
    check_camera_set(settings.get("cameras", CAMERA_SETS[0]), f"{SETTINGS_FILE}: cameras")
    for name, digest in settings.get("prompts", {}).items():
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise CheckpointError(f"{SETTINGS_FILE}: prompts.{name} is {shown(digest)}, expected a SHA-256 in hex")
    return settings


def check_camera_set(value: str, place: str) -> str:
    """A set of camera keys that exists.

    Raises:
        CheckpointError: it doesn't.
    """
    if value not in CAMERA_SETS:
        raise CheckpointError(f"{place} is {shown(value)}, expected {' or '.join(CAMERA_SETS)}")
    return value
