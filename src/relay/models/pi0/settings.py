"""What a checkpoint's tensors don't say, key by key, from the first source that says it. Nothing is guessed.

The keys are those of `relay.json`, a file of ours beside the weights. Knows no file formats but that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from relay.engine.json_entries import read_json
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
    "lora_alpha": dict,
    "rslora": bool,
}
"""Every key `relay.json` may have, and its type."""

NORMALIZATIONS = ("z_score", "quantile", "none")

_FULL_SIZE = ("gemma_2b", "gemma_2b_lora")
_SO400M = (1152, 27)
_SO400M_HEADS = 16


@dataclass(frozen=True, slots=True)
class Source:
    """One place that says something about a checkpoint.

    Attributes:
        name: for messages, such as `relay.json`.
        values: what it says, as keys of `relay.json`; None where it says nothing.
        overrides: it was written to override what stands elsewhere, so it may contradict later sources.
    """

    name: str
    values: Mapping[str, Any]
    overrides: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it was found."""

    value: Any
    source: str
    overrides: bool = False


class Settings:
    """What is known about a checkpoint: values by key, each from the first source that has it.

    Raises:
        CheckpointError: two sources contradict each other, and the first was not written to override the other.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.found: dict[str, Setting] = {}
        for source in sources:
            for key, value in source.values.items():
                if value is not None:
                    self._add(key, Setting(value, source.name, source.overrides))

    def _add(self, key: str, setting: Setting) -> None:
        first = self.found.setdefault(key, setting)
        if first.value != setting.value and not first.overrides:
            raise CheckpointError(
                f"{first.source} says {key} {first.value!r}, but {setting.source} says {setting.value!r}; "
                f"write the right one into {SETTINGS_FILE}"
            )

    def get(self, key: str) -> Any:
        """The value of `key`, or None if nothing says it."""
        return self.found[key].value if key in self.found else None

    def require(self, key: str) -> Any:
        """The value of `key`.

        Raises:
            CheckpointError: nothing says it.
        """
        return self.require_all([key])[key]

    def require_all(self, keys: Sequence[str]) -> dict[str, Any]:
        """The values of `keys`.

        Raises:
            CheckpointError: nothing says some of them; all of those are named.
        """
        missing = ", ".join(repr(key) for key in keys if key not in self.found)
        if missing:
            raise CheckpointError(
                f"nothing says {missing}, and the tensors do not tell it: write it into {SETTINGS_FILE}, "
                "or name openpi's configuration with --config"
            )
        return {key: self.found[key].value for key in keys}

    def source(self, key: str) -> str:
        """Where the value of `key` was found."""
        return self.found[key].source


def read_settings(path: Path) -> dict[str, Any]:
    """Read `relay.json`: data only, unknown keys and wrong types refused."""
    settings = read_json(path)
    for key, value in settings.items():
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise CheckpointError(f"{path.name}: unknown key {key!r}{hint}; it takes {', '.join(KEYS)}")
        if type(value) is not KEYS[key]:
            expected = f"{'an' if KEYS[key] is int else 'a'} {KEYS[key].__name__}"
            raise CheckpointError(f"{path.name}: {key} is {shown(value)}, expected {expected}")
    if settings.get("normalization", "none") not in NORMALIZATIONS:
        raise CheckpointError(
            f"{path.name}: normalization is {settings['normalization']!r}, expected {', '.join(NORMALIZATIONS)}"
        )
    return settings


def heads_of(variant: str | None, vision_width: int, vision_depth: int) -> int | None:
    """Heads of the vision tower, where openpi's `paligemma_variant` and the sizes say that it is SigLIP So400m."""
    return _SO400M_HEADS if variant in _FULL_SIZE and (vision_width, vision_depth) == _SO400M else None
