"""YAML as plain data: no Python objects, no key twice, and every mistake told with its line.

Knows nothing of what the data means.
"""

from __future__ import annotations

from typing import Any

import yaml

from relay.protocol.wording import quoted


class InvalidYaml(ValueError):
    """A text that is no YAML of plain data; the error's text says where, on one line."""


def load_yaml(content: str) -> Any:
    """The data that a YAML text holds.

    Raises:
        InvalidYaml: it is no YAML, has a key twice, or a value that is not of the kind it is written as.
    """
    try:
        return yaml.load(content, _Loader)
    except yaml.YAMLError as error:
        raise InvalidYaml(" ".join(str(error).split())) from None
    except RecursionError:
        raise InvalidYaml("it is nested too deeply") from None


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, ArithmeticError):  # such as 2001-99-99, or !!int "abc"
            kind = node.tag.rpartition(":")[2]
            raise _error(f"{_short(node.value)} cannot be read as {kind}", node) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # refused below, where it cannot be a key
            if key_node.value in seen:
                raise _error(f"the key {key_node.value!r} stands there twice", key_node)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _error(what: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, what, node.start_mark)


def _short(value: Any) -> str:
    return quoted(value, 40) if isinstance(value, str) else "a list or map"
