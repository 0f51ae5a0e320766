"""A checkpoint folder on disk to a configuration, its weights and its tokenizer.

Widths, depths and the family come from the tensors; what they do not say stands in `relay.json`. Nothing is guessed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from relay.engine.base import Progress
from relay.engine.weights import CheckpointError, SafetensorsSource, TensorSource
from relay.models.pi0.config import Pi0Config
from relay.models.pi0.model import Pi0
from relay.models.pi0.tokenizer import PromptTokenizer, load_vocabulary
from relay.models.pi0.weights import load_weights, read_sizes

WEIGHTS_FILE = "model.safetensors"
SETTINGS_FILE = "relay.json"
TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json")

_SETTINGS: dict[str, type] = {
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
}
"""Every key `relay.json` may have, and its type."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint."""

    model: Pi0
    tokenizer: PromptTokenizer


def load_checkpoint(
    folder: Path, *, tokenizer: Path | None, device: torch.device, dtype: torch.dtype, progress: Progress
) -> Checkpoint:
    """Load a folder of `model.safetensors`, `relay.json` and a tokenizer file.

    Args:
        tokenizer: a tokenizer file elsewhere; by default the one in the folder.
        dtype: of the large matrices; the rest stays float32.

    Raises:
        CheckpointError: naming what is missing or does not fit, and the remedy.
    """
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint folder at {folder}")
    settings = read_settings(folder / SETTINGS_FILE)
    weights_file = folder / WEIGHTS_FILE
    if not weights_file.is_file():
        raise CheckpointError(f"no {WEIGHTS_FILE} in {folder}")
    source = SafetensorsSource(weights_file)
    config = _configure(source, settings)
    model = load_weights(config, source, device, dtype, progress)
    progress("loading tokenizer", 0.0)
    vocabulary = load_vocabulary(tokenizer or _tokenizer_in(folder))
    return Checkpoint(model, PromptTokenizer(vocabulary, config.max_token_len, config.state_in_prompt))


def read_settings(path: Path) -> dict[str, Any]:
    """Read `relay.json`: data only, unknown keys and wrong types refused."""
    if not path.is_file():
        raise CheckpointError(
            f"no {path.name} in {path.parent}: it says what the tensors do not (keys: {', '.join(_SETTINGS)})"
        )
    try:
        settings = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path.name} holds a {type(settings).__name__}, expected an object")
    for key, value in settings.items():
        if key not in _SETTINGS:
            near = get_close_matches(key, _SETTINGS, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise CheckpointError(f"{path.name}: unknown key {key!r}{hint}; it takes {', '.join(_SETTINGS)}")
        if type(value) is not _SETTINGS[key]:
            raise CheckpointError(
                f"{path.name}: {key} is {value!r}, expected {'an' if _SETTINGS[key] is int else 'a'} "
                f"{_SETTINGS[key].__name__}"
            )
    return settings


def _configure(source: TensorSource, settings: dict[str, Any]) -> Pi0Config:
    sizes = read_sizes(source.shapes)

    def required(key: str) -> Any:
        if key not in settings:
            raise CheckpointError(f"{SETTINGS_FILE} has no {key!r}, and the tensors do not tell it")
        return settings[key]

    agreed = {
        "model": sizes.family,
        "action_dim": sizes.action_dim,
        "head_dim": sizes.head_dim,
        "heads": sizes.query_width // sizes.head_dim,
    }
    for key, value in agreed.items():
        if settings.get(key, value) != value:
            raise CheckpointError(f"{SETTINGS_FILE} says {key} {settings[key]!r}, but the tensors say {value!r}")
    bounds = {
        "action_horizon": (1, 512),
        "state_dim": (1, sizes.action_dim),
        "max_token_len": (8, 2048),
        "num_steps": (1, 50),
        "vision_heads": (1, sizes.vision_width),
    }
    for key, (least, most) in bounds.items():
        if not least <= required(key) <= most:
            raise CheckpointError(f"{SETTINGS_FILE}: {key} must be between {least} and {most}, got {required(key)}")
    if sizes.vision_width % required("vision_heads"):
        raise CheckpointError(
            f"{SETTINGS_FILE}: vision_heads {required('vision_heads')} does not divide the width {sizes.vision_width}"
        )
    return Pi0Config(
        family=sizes.family,
        vision=sizes.vision(required("vision_heads")),
        language=sizes.language,
        expert=sizes.expert,
        heads=agreed["heads"],
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab_size,
        action_dim=sizes.action_dim,
        action_horizon=required("action_horizon"),
        state_dim=required("state_dim"),
        max_token_len=required("max_token_len"),
        state_in_prompt=required("state_in_prompt"),
        num_steps=required("num_steps"),
    )


def _tokenizer_in(folder: Path) -> Path:
    found = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        raise CheckpointError(
            f"no tokenizer in {folder}; put {' or '.join(TOKENIZER_FILES)} there or pass --tokenizer FILE"
        )
    return found[0]
