"""What a checkpoint's tensors don't say, key by key, from the first source that says it. Nothing is guessed.

The keys are those of `relay.json`, a file of ours beside the weights. Knows no file formats but that one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from relay.engine.weights import CheckpointError
from relay.protocol.wording import shown

SETTINGS_FILE = "relay.json"

KEYS: dict[str, type] = {
    "model": str,
    "action_horizon": int,
    "action_dim": int,
    "state_dim": int,
    "heads": int,
    "vision_heads": int,
    "head_dim": int,
    "state_in_prompt": bool,
    "max_token_len": int,
    "num_steps": int,
    "normalization": str,
    "asset_id": str,
    "robot": str,
    "metadata": dict,
}
"""Every key `relay.json` may have, and its type."""

NORMALIZATIONS = ("z_score", "quantile", "none")

VISION_HEADS = {"gemma_2b": 16, "gemma_2b_lora": 16}
"""Heads of the vision tower that goes with each of openpi's `paligemma_variant`: SigLIP So400m."""


@dataclass(frozen=True, slots=True)
class Source:
    """One place that says something about a checkpoint.

    Attributes:
        name: for messages, such as `relay.json`.
        values: what it says, as keys of `relay.json`.
        overrides: whoever wrote it meant to override what stands elsewhere, so it may contradict later sources.
    """

    name: str
    values: Mapping[str, Any]
    overrides: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and the source it was taken from."""

    value: Any
    source: str


class Settings(Mapping[str, Any]):
    """What is known about a checkpoint: values by key, each from the first source that has it.

    Raises:
        CheckpointError: two sources contradict each other, and neither was written to override the other.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.found: dict[str, Setting] = {}
        for source in sources:
            for key, value in source.values.items():
                if value is not None:
                    self._add(key, value, source)
        self._overriding = {source.name for source in sources if source.overrides}

    def _add(self, key: str, value: Any, source: Source) -> None:
        first = self.found.setdefault(key, Setting(value, source.name))
        overriding = {"the command line", SETTINGS_FILE}
        if first.value != value and key != "metadata" and first.source not in overriding:
            raise CheckpointError(
                f"{first.source} says {key} {first.value!r}, but {source.name} says {value!r}; "
                f"write the right one into {SETTINGS_FILE}"
            )

    def __getitem__(self, key: str) -> Any:
        if key not in self.found:
            raise CheckpointError(
                f"nothing says {key!r}, and the tensors do not tell it; name openpi's configuration with --config, "
                f"or write {key!r} into {SETTINGS_FILE}"
            )
        return self.found[key].value

    def __contains__(self, key: object) -> bool:
        return key in self.found

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def get(self, key: str, default: Any = None) -> Any:
        return self.found[key].value if key in self.found else default

    def source(self, key: str) -> str:
        """Where a key's value was found."""
        return self.found[key].source


def read_settings(path: Path) -> dict[str, Any]:
    """Read `relay.json`: data only, unknown keys and wrong types refused."""
    try:
        settings = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path.name} holds a {type(settings).__name__}, expected an object")
    for key, value in settings.items():
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise CheckpointError(f"{path.name}: unknown key {key!r}{hint}; it takes {', '.join(KEYS)}")
        if type(value) is not KEYS[key]:
            raise CheckpointError(
                f"{path.name}: {key} is {shown(value)}, expected {'an' if KEYS[key] is int else 'a'} {KEYS[key].__name__}"
            )
    if settings.get("normalization", "none") not in NORMALIZATIONS:
        raise CheckpointError(
            f"{path.name}: normalization is {settings['normalization']!r}, expected {', '.join(NORMALIZATIONS)}"
        )
    return settings
