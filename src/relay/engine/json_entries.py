"""JSON files that hold an object, and single values out of them with their type checked. Knows no keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from relay.engine.weights import CheckpointError
from relay.protocol.wording import shown

_Value = TypeVar("_Value", bool, int, str, list[Any], dict[str, Any])

_IN_WORDS = {bool: "true or false", int: "an integer", str: "text", list: "a list", dict: "an object"}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        CheckpointError: it cannot be read, is not JSON or holds something else.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path.name} is not JSON: {error}") from None
    except RecursionError:
        raise CheckpointError(f"{path.name} is not JSON: it is nested too deeply") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} holds a {type(content).__name__}, expected an object")
    return cast("dict[str, Any]", content)


def entry(values: Mapping[str, Any], key: str, kind: type[_Value], file: str) -> _Value:
    """The value of `key`, which must be there.

    Raises:
        CheckpointError: it is missing or of another type; an integer with a decimal point and a bool are no integers.
    """
    value = values.get(key)
    if type(value) is not kind:
        raise CheckpointError(f"{file}: {key} is {_told(value)}, expected {_IN_WORDS[kind]}")
    return cast("_Value", value)


def entry_or(values: Mapping[str, Any], key: str, default: _Value, file: str) -> _Value:
    """The value of `key`, or the default, whose type it must have, where it is missing or null.

    Raises:
        CheckpointError: it is of another type.
    """
    return default if values.get(key) is None else entry(values, key, type(default), file)


def _told(value: Any) -> str:
    return "missing" if value is None else shown(value)
