"""How error messages name the sender's values: escaped, on one line, short; never their full content."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray


def quoted(text: str | bytes, limit: int = 80) -> str:
    """The sender's text as it may stand in a message or a log: escaped, on one line, cut to `limit` characters."""
    escaped = ascii(as_text(text[: limit + 1]))
    return escaped if len(escaped) <= limit else f"{escaped[: limit - 3]}...'"


def clipped(text: str, limit: int = 16_384) -> str:
    """The text, or its two ends and how much is left out between them, when it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def shown(value: object) -> str:
    """What came, for the middle of a sentence: a number or short text itself, of anything else its type and size."""
    if value is None:
        return "nil"
    if isinstance(value, (str, bytes)):
        return quoted(value) if isinstance(value, str) else f"a byte string of {len(value)} bytes"
    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        return f"an array of shape {array.shape} and dtype {array.dtype}"
    if isinstance(value, _NUMBERS):
        return str(value)
    if isinstance(value, (dict, list, tuple)):
        count = len(cast("list[Any]", value))
        return f"a {'map' if isinstance(value, dict) else 'list'} of {count} items"
    return f"a {type(value).__name__}"


_NUMBERS: Final[tuple[Any, ...]] = (bool, int, float, np.generic)


def as_text(value: Any) -> Any:
    """Byte strings as text, whatever they hold; other values as they are."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def child_path(path: str, key: object) -> str:
    """How messages name a part of a value: `image['base_0_rgb']`, `images[2]`."""
    if isinstance(key, (str, bytes)):
        return f"{path}[{quoted(key)}]" if path else quoted(key)[1:-1]
    return f"{path}[{shown(key)}]"


def key_path(keys: Iterable[object]) -> str:
    """The path of the part under these keys, from the outermost in; empty for the whole."""
    return reduce(child_path, keys, "")
