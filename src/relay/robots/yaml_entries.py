"""A YAML map whose values are taken out one by one, each with its type checked and its place named in errors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import yaml

from relay.protocol.wording import shown
from relay.robots.profile import ProfileError


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of one map.

    Attributes:
        source: the file, for messages.
        place: where in the file the map stands, such as `actions[1]`; empty for the whole file.
    """

    source: str
    place: str
    values: Mapping[str, Any]

    def error(self, key: str, what: str) -> ProfileError:
        """What is wrong with a key, with file and place."""
        return ProfileError(f"{self.source}: {self._path(key)}: {what}")

    def unfit(self, key: str, expected: str) -> ProfileError:
        """A value that is not what was expected."""
        return ProfileError(f"{self.source}: {self._path(key)} is {shown(self.values[key])}, expected {expected}")

    def missing(self, key: str) -> ProfileError:
        """A key that has to be there and is not."""
        return ProfileError(f"{self.source}: {self._path(key)} is missing")

    def text(self, key: str, default: Any = ...) -> Any:
        """Text, or the default where the key is not there."""
        value = self._get(key, default)
        if value is not default and (not isinstance(value, str) or not value):
            raise self.unfit(key, "text")
        return value

    def texts(self, key: str, default: Any = ...) -> tuple[str, ...]:
        """One text, or a list of them."""
        value = self._get(key, default)
        if value is default:
            return default
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in cast("list[Any]", texts)):
            raise self.unfit(key, "text, or a list of texts")
        return tuple(cast("list[str]", texts))

    def names(self, key: str) -> tuple[str, ...]:
        """At least one name, ranges written out."""
        names = expand(self.texts(key), self, key)
        if not names:
            raise self.unfit(key, "at least one name")
        return names

    def number(self, key: str) -> float:
        """A finite number."""
        value = self._get(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise self.unfit(key, "a number")
        return float(value)

    def positive(self, key: str) -> float | None:
        """A number above zero; None where the key is not there."""
        if key not in self.values:
            return None
        number = self.number(key)
        if number <= 0:
            raise self.unfit(key, "a number above 0")
        return number

    def choice(self, key: str, choices: Sequence[str]) -> Any:
        """One of a few texts; None where the key is not there."""
        value = self._get(key, None)
        if value is not None and value not in choices:
            raise self.unfit(key, " or ".join(map(repr, choices)))
        return value

    def path(self, key: str, folder: Path) -> Path | None:
        """A path, relative to the file's folder; None where the key is not there."""
        value = self.text(key, None)
        return None if value is None else folder / Path(value).expanduser()

    def map(self, key: str, known: Sequence[str] | None = None) -> Entries:
        """A map of its own, whose keys are checked if `known` names them."""
        return _entries(self._get(key), self.source, self._path(key), known)

    def groups(self, key: str, known: Sequence[str]) -> list[Entries]:
        """A list of maps."""
        value = self._get(key)
        if not isinstance(value, list) or not value:
            raise self.unfit(key, "a list of maps")
        groups = cast("list[Any]", value)
        return [
            _entries(group, self.source, f"{self._path(key)}[{index}]", known) for index, group in enumerate(groups)
        ]

    def _get(self, key: str, default: Any = ...) -> Any:
        if key not in self.values and default is ...:
            raise self.missing(key)
        return self.values.get(key, default)

    def _path(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key


def read_yaml(content: str, source: str, known: Sequence[str]) -> Entries:
    """The entries of a YAML text; data only.

    Raises:
        ProfileError: it is no YAML, no map, or has a key twice or one that is not known.
    """
    try:
        value = yaml.load(content, _Loader)
    except yaml.YAMLError as error:
        raise ProfileError(f"{source} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ProfileError(f"{source} is not YAML: it is nested too deeply") from None
    except (ValueError, TypeError, AttributeError, LookupError) as error:  # PyYAML's on values like `!!int x`
        raise ProfileError(f"{source} is not YAML: a value cannot be read ({error})") from None
    return _entries(value, source, "", known)


def expand(texts: Sequence[str], entries: Entries, key: str) -> tuple[str, ...]:
    """Names with ranges written out: `joint_1..3` is joint_1, joint_2, joint_3."""
    names: list[str] = []
    for text in texts:
        match = re.fullmatch(r"(.*?)(\d+)\.\.(\d+)", text)
        if match is None:
            names.append(text)
            continue
        stem, first, last = match[1], int(match[2]), int(match[3])
        if not first <= last <= first + 255:
            raise entries.error(key, f"the range {text!r} goes from {first} to {last}")
        names += [f"{stem}{number}" for number in range(first, last + 1)]
    return tuple(names)


def _entries(value: Any, source: str, place: str, known: Sequence[str] | None) -> Entries:
    where = f"{source}: {place}" if place else source
    if not isinstance(value, dict):
        raise ProfileError(f"{where} is {shown(value)}, expected a map")
    for key in cast("dict[Any, Any]", value):
        if not isinstance(key, str):
            raise ProfileError(f"{where}: the key {shown(key)} is not text")
        if known is not None and key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise ProfileError(f"{where}: unknown key {key!r}{hint}; it takes {', '.join(known)}")
    return Entries(source, place, cast("dict[str, Any]", value))


class _Loader(yaml.SafeLoader):
    """YAML as plain data, in which no key may stand twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.value in seen and isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} stands there twice", key_node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)
