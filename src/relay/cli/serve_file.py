"""Reads the YAML file of `relay serve FILE.yaml`: several policies on one port, each under its own name.

The keys are the options of the command line, with `_` for `-`. Knows no model and starts nothing.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from relay.cli.options import ListenerOptions, PolicyOptions
from relay.protocol.wording import shown

Options = TypeVar("Options", PolicyOptions, ListenerOptions)


class InvalidFile(ValueError):
    """A serve file that cannot be taken as it stands; the text names file, key and what was expected."""


@dataclass(frozen=True, slots=True)
class ServeFile:
    """What a serve file says.

    Attributes:
        policies: by name, the default one first: the model, and how it is served.
        listener: the options that concern all of them.
    """

    policies: Mapping[str, tuple[str, PolicyOptions]]
    listener: ListenerOptions


def read_serve_file(path: Path) -> ServeFile:
    """Read and check a serve file.

    Args:
        path: YAML with `models`, a map from names to policy options with the key `model`, which may be left out where
            it is the name; beside it listener options and `default`. Paths in it are relative to its folder.

    Raises:
        InvalidFile: it is not YAML of that form.
        OSError: it cannot be read.
    """
    from relay.robots.plain_yaml import InvalidYaml, load_yaml

    try:
        content = load_yaml(path.read_text("utf-8"))
    except (InvalidYaml, UnicodeDecodeError) as error:
        raise InvalidFile(f"{path} is not YAML: {error}") from None
    if not isinstance(content, dict) or not isinstance(cast("dict[str, Any]", content).get("models"), dict):
        raise InvalidFile(f"{path}: expected a map with the key 'models', a map from names to policies")
    settings = dict(cast("dict[str, Any]", content))
    models = cast("dict[Any, Any]", settings.pop("models"))
    default = settings.pop("default", None)
    policies = dict(_policy(name, given, path) for name, given in models.items())
    if default is not None:
        if not isinstance(default, str) or default not in policies:
            raise InvalidFile(f"{path}: default is {shown(default)}, expected one of {', '.join(policies)}")
        policies = {default: policies.pop(default), **policies}
    return ServeFile(policies, _options(ListenerOptions, settings, path, ""))


def _policy(name: Any, given: Any, path: Path) -> tuple[str, tuple[str, PolicyOptions]]:
    from relay.server.policies import check_name

    if not isinstance(name, str):
        raise InvalidFile(f"{path}: models: a name is {shown(name)}, expected text")
    try:
        check_name(name)
    except ValueError as error:
        raise InvalidFile(f"{path}: models: {error}") from None
    if not isinstance(given, (dict, types.NoneType)):
        raise InvalidFile(f"{path}: models.{name} is {shown(given)}, expected a map of options")
    values: dict[Any, Any] = dict(given or {})
    model = _value(str, values.pop("model", name), path, f"models.{name}.model")
    options = _options(PolicyOptions, values, path, f"models.{name}.")
    adapters = tuple(_adapter(text, path, f"models.{name}.adapter") for text in options.adapter)
    return name, (model, replace(options, adapter=adapters))


def _adapter(text: str, path: Path, place: str) -> str:
    """`name=folder` with the folder relative to the file's own."""
    name, _, folder = text.partition("=")
    return f"{name}={_beside(folder, path, place)}" if folder else text


def _beside(text: str, path: Path, place: str) -> Path:
    """A path in the file, relative to its folder."""
    if "\0" in text:
        raise InvalidFile(f"{path}: {place} is {shown(text)}, expected a path")
    try:
        return path.parent / Path(text).expanduser()
    except RuntimeError:
        raise InvalidFile(f"{path}: {place} is {shown(text)}, and there is no such home folder") from None


def _options(kind: type[Options], values: Mapping[Any, Any], path: Path, prefix: str) -> Options:
    """An options dataclass from a part of the file."""
    hints = get_type_hints(kind)
    known = [option.name for option in fields(cast(Any, kind))]
    for key in values:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise InvalidFile(f"{path}: {prefix}{key} is not an option{hint}; known are {', '.join(known)}")
    return kind(**{key: _value(hints[key], value, path, f"{prefix}{key}") for key, value in values.items()})


def _value(hint: Any, value: Any, path: Path, name: str) -> Any:
    """A YAML value as the option's type has it."""
    origin, choices = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value in choices:
            return value
        raise InvalidFile(f"{path}: {name} is {shown(value)}, expected {' or '.join(map(repr, choices))}")
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _value(next(choice for choice in choices if choice is not types.NoneType), value, path, name)
    if origin is tuple:
        if isinstance(value, list):
            return tuple(_value(choices[0], item, path, name) for item in cast("list[Any]", value))
        raise InvalidFile(f"{path}: {name} is {shown(value)}, expected a list")
    if hint is Path and isinstance(value, str):
        return _beside(value, path, name)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in _KINDS and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise InvalidFile(f"{path}: {name} is {shown(value)}, expected {_KINDS.get(hint, 'another kind of value')}")


_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
