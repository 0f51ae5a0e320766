"""JSON files that hold an object, and single values out of them with their type checked. Knows no keys."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
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
        CheckpointError: it is missing or of another type.
    """
    return Entries(values, file).entry(key, kind)


def entry_or(values: Mapping[str, Any], key: str, default: _Value, file: str) -> _Value:
    """The value of `key`, or the default, whose type it must have, where it is missing or null.

    Raises:
        CheckpointError: it is of another type.
    """
    return Entries(values, file).entry_or(key, default)


@dataclass(frozen=True, slots=True)
class Entries:
    """An object of a JSON file, of which one value after the other is read.

    What is missing, of another kind or outside its bounds is a `CheckpointError` that names place and key, what came,
    what was expected, and a name that is nearly it.

    Attributes:
        place: the file, and where in it the object stands.
        if_missing: the end of an error about a key that isn't there.
    """

    values: Mapping[str, Any]
    place: str
    if_missing: str = ""

    def entry(self, key: str, kind: type[_Value]) -> _Value:
        """A value of this type; an integer with a decimal point and a bool are no integers."""
        value = self.values.get(key)
        if type(value) is not kind:
            raise self._wrong(key, _IN_WORDS[kind])
        return cast("_Value", value)

    def entry_or(self, key: str, default: _Value) -> _Value:
        """A value of the default's type, or the default where it is missing or null."""
        return default if self.values.get(key) is None else self.entry(key, type(default))

    def inner(self, key: str) -> Entries:
        """An object of its own."""
        place = f"{self.place}{'.' if ': ' in self.place else ': '}{key}"
        return Entries(self.entry(key, dict), place, self.if_missing)

    def count(self, key: str, most: int = 2**20) -> int:
        """An integer from 1 to `most`; a damaged size would otherwise be built first and refused then."""
        value = self.values.get(key)
        if type(value) is not int or not 1 <= value <= most:
            raise self._wrong(key, f"an integer from 1 to {most:,}")
        return value

    def number(self, key: str, low: float, high: float) -> float:
        """A number within these bounds; a bool is no number, and NaN is outside."""
        value = self.values.get(key)
        if type(value) not in (int, float) or not low <= cast("float", value) <= high:
            raise self._wrong(key, f"a number from {low:g} to {high:g}")
        return float(cast("float", value))

    def one_of(self, key: str, choices: Collection[Any]) -> Any:
        """One of a few values."""
        value = self.values.get(key)
        if key not in self.values or value not in list(choices):
            raise self._wrong(key, " or ".join(map(repr, choices)) + did_you_mean(value, choices))
        return value

    def refuse_unknown(self, known: Collection[str]) -> None:
        """See that every key is a known one."""
        for key in self.values:
            if key not in known:
                raise CheckpointError(
                    f"{self.place}: unknown key {key!r}{did_you_mean(key, known)}; known are {', '.join(known)}"
                )

    def _wrong(self, key: str, expected: str) -> CheckpointError:
        if key in self.values:
            value = self.values[key]
            came = "null" if value is None else shown(value)
            return CheckpointError(f"{self.place}: {key} is {came}, expected {expected}")
        near = _nearest(key, self.values, _MISSPELT)
        there = f" (there is {near!r})" if near else ""
        return CheckpointError(f"{self.place}: {key} is missing{there}, expected {expected}{self.if_missing}")


def did_you_mean(given: Any, known: Collection[Any]) -> str:
    """The end of a sentence that names the nearest of the known names; empty where none is near."""
    near = _nearest(given, known)
    return f", did you mean {near!r}?" if near else ""


_MISSPELT = 0.8  # of a key's letters in their order; less would take one real key of a file for another


def _nearest(given: Any, known: Collection[Any], likeness: float = 0.6) -> str | None:
    names = [name for name in known if isinstance(name, str)]
    return next(iter(get_close_matches(given, names, 1, likeness)), None) if isinstance(given, str) else None
