"""JSON files that hold an object, and single values out of them with their type checked. Knows no keys."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from difflib import get_close_matches
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
        raise CheckpointError(f"{file}: {key} is {_told(values, key)}, expected {_IN_WORDS[kind]}")
    return cast("_Value", value)


def entry_or(values: Mapping[str, Any], key: str, default: _Value, file: str) -> _Value:
    """The value of `key`, or the default, whose type it must have, where it is missing or null.

    Raises:
        CheckpointError: it is of another type.
    """
    return default if values.get(key) is None else entry(values, key, type(default), file)


def count(values: Mapping[str, Any], key: str, most: int, file: str) -> int:
    """The integer of `key`, which must be there, from 1 to `most`.

    Raises:
        CheckpointError: it is missing, of another type or outside.
    """
    value = values.get(key)
    if type(value) is not int or not 1 <= value <= most:
        raise CheckpointError(f"{file}: {key} is {_told(values, key)}, expected an integer from 1 to {most:,}")
    return value


def number(values: Mapping[str, Any], key: str, low: float, high: float, file: str) -> float:
    """The number of `key`, which must be there, from `low` to `high`.

    Raises:
        CheckpointError: it is missing, of another type or outside; a bool is no number, and NaN is outside.
    """
    value = values.get(key)
    if type(value) not in (int, float) or not low <= cast("float", value) <= high:
        raise CheckpointError(f"{file}: {key} is {_told(values, key)}, expected a number from {low:g} to {high:g}")
    return float(cast("float", value))


def one_of(values: Mapping[str, Any], key: str, choices: Collection[str], file: str) -> str:
    """The text of `key`, which must be there and one of the choices.

    Raises:
        CheckpointError: it is missing or another, with the nearest of them.
    """
    value = values.get(key)
    if not isinstance(value, str) or value not in choices:
        expected = " or ".join(map(repr, choices))
        raise CheckpointError(
            f"{file}: {key} is {_told(values, key)}, expected {expected}{did_you_mean(value, choices)}"
        )
    return value


def refuse_unknown(values: Mapping[str, Any], known: Collection[str], file: str) -> None:
    """See that every key is a known one.

    Raises:
        CheckpointError: one isn't, with the nearest that is.
    """
    for key in values:
        if key not in known:
            raise CheckpointError(
                f"{file}: unknown key {key!r}{did_you_mean(key, known)}; known are {', '.join(known)}"
            )


def did_you_mean(given: Any, known: Collection[str]) -> str:
    """The end of a sentence that names the nearest of the known names; empty where none is near."""
    near = get_close_matches(given, known, n=1) if isinstance(given, str) else []
    return f", did you mean {near[0]!r}?" if near else ""


_MISSPELT = 0.8  # of a key's letters in their order; less would take one real key of a file for another


def _told(values: Mapping[str, Any], key: str) -> str:
    if values.get(key) is not None:
        return shown(values[key])
    near = get_close_matches(
        key, [name for name in values if isinstance(name, str) and name != key], n=1, cutoff=_MISSPELT
    )
    return f"missing (there is {near[0]!r})" if near else "missing"
