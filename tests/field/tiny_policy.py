"""A real π0.5 of random weights behind a vocabulary of characters, and observations that it takes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
from tiny import image, tiny_model

from relay.models.pi0.config import CAMERAS
from relay.models.pi0.engine import Pi0Engine
from relay.models.pi0.tokenizer import PromptTokenizer

STATE_DIM, ACTION_DIM = 14, 32
MAX_TOKENS = 120
BASE, LEFT, RIGHT = CAMERAS


class Characters:
    """One id for each character: the network's vocabulary has 64 entries."""

    bos_id = 2
    unknown_id = None

    def encode(self, text: str) -> list[int]:
        return [3 + ord(character) % 61 for character in text]


def tiny_engine(**options: Any) -> Pi0Engine:
    """A robot of 14 joints in a network of 32 dimensions."""
    model = copy.copy(tiny_model("pi05"))
    model.config = replace(model.config, state_dim=STATE_DIM, max_token_len=MAX_TOKENS)
    return Pi0Engine("pi05", model, PromptTokenizer(Characters(), MAX_TOKENS, True), **{"max_batch": 1, **options})


def observation(**changes: Any) -> dict[str, Any]:
    """One camera, one step, one seed; a change to None leaves the key out."""
    usual = {
        "image": {BASE: image(0, 0)},
        "state": np.linspace(-0.9, 0.9, STATE_DIM, dtype=np.float32),
        "prompt": "pick up the fork",
        "seed": 7,
        "num_steps": 1,
    }
    return {key: value for key, value in {**usual, **changes}.items() if value is not None}
