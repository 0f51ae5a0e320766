"""The recipes of the tiny checkpoints' embodiments, and observations for them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from dreamzero_folders import TEMPLATES, conf_yaml, metadata_json, tokenizer
from tiny_dreamzero import ENCODERS, config_json

from relay.models.dreamzero.config import read_config
from relay.models.dreamzero.recipe import Recipe, read_recipe
from relay.models.dreamzero.tokenizer import PromptTokenizer, _Json  # pyright: ignore[reportPrivateUsage]


def recipe_of(robot: str, conf: dict[str, Any] | None = None, metadata: dict[str, Any] | None = None) -> Recipe:
    """One embodiment's recipe; `conf` and `metadata` replace the files' content."""
    config = read_config(config_json(), ENCODERS)
    return read_recipe(conf or conf_yaml([robot]), metadata or metadata_json([robot]), robot, config)


@cache
def droid() -> Recipe:
    return recipe_of("oxe_droid")


@cache
def agibot() -> Recipe:
    return recipe_of("agibot")


def prompts(robot: str = "oxe_droid") -> PromptTokenizer:
    return PromptTokenizer(_Json(tokenizer()), TEMPLATES[robot])


def frame(seed: int, height: int = 180, width: int = 320) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def droid_observation(first: int = 0, frames: int | None = None, **changes: Any) -> dict[str, Any]:
    """What RoboArena's clients send, or DROID's with `first` 1; `frames` moments, or one without an axis of time.

    Args:
        changes: entries to replace by the last part of their keys; None leaves them out.
    """

    def camera(seed: int) -> Any:
        return frame(seed) if frames is None else np.stack([frame(seed + 10 * step) for step in range(frames)])

    entries = {
        f"observation/exterior_image_{first}_left": camera(0),
        f"observation/exterior_image_{first + 1}_left": camera(1),
        "observation/wrist_image_left": camera(2),
        "observation/joint_position": np.array([0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7]),
        "observation/cartesian_position": np.zeros(6),
        "observation/gripper_position": np.array([0.25]),
        "prompt": "pick up the Fork",
    }
    for name, value in changes.items():
        key = name if name == "prompt" else f"observation/{name}"
        entries[key] = value
        if value is None:
            del entries[key]
    return entries
