"""The keys of an observation: flat or in maps, whose they are, and which of them hold frames."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from relay.protocol.errors import ObservationError
from relay.protocol.options import OPTION_KEYS
from relay.protocol.wording import as_text, quoted

MODEL_KEYS = frozenset({"image", "image_mask", "state"})
"""Keys of model format; those that a robot uses too do not tell which of the two it is."""

PROMPT_KEYS = frozenset({"prompt", "tokenized_prompt", "tokenized_prompt_mask"})
"""The task in words, the same in every format."""

RESERVED_KEYS = PROMPT_KEYS.union(OPTION_KEYS, ("session_id",))
"""Keys that mean the same for every robot; what comes under them never gets to a profile."""


def flattened(observation: Mapping[str, Any]) -> dict[str, Any]:
    """Values by their keys; those of a map under `map/key`.

    Raises:
        ObservationError: a key came in both forms.
    """
    flat: dict[str, Any] = {}
    for key, value in observation.items():
        if isinstance(value, Mapping):
            inner = cast("Mapping[Any, Any]", value)
            entries: Iterable[tuple[str, Any]] = ((f"{key}/{as_text(name)}", part) for name, part in inner.items())
        else:
            entries = ((key, value),)
        for name, part in entries:
            if name in flat:
                raise ObservationError(f"{quoted(name)} came twice, as a key and in a map; send one")
            flat[name] = part
    return flat


def one_of(keys: Sequence[str], came: Mapping[str, Any]) -> str | None:
    """The one of several alternative keys that came.

    Raises:
        ObservationError: more than one did.
    """
    found = [key for key in keys if key in came]
    if len(found) > 1:
        raise ObservationError(f"{found[0]!r} and {found[1]!r} mean the same; send one")
    return found[0] if found else None


def is_camera(key: str, value: Any) -> bool:
    """Whether a key that no profile names was meant as a camera, by how it begins or by what it holds.

    Under `observation/` robots send numbers too.
    """
    return key.startswith(_CAMERA_PREFIXES) or (key.startswith("observation/") and _may_be_frame(value))


_CAMERA_PREFIXES = ("images/", "observation.images", "video.", "video/")


def _may_be_frame(value: Any) -> bool:
    while isinstance(value, (list, tuple)) and value:
        value = cast("list[Any]", value)[0]
    if isinstance(value, np.ndarray):
        return cast("NDArray[Any]", value).ndim >= 3
    return isinstance(value, (bytes, memoryview))
