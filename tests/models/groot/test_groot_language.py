"""Rotary tables of the language model, where a recorded run of few tokens cannot tell."""

from __future__ import annotations

import math

import numpy as np
import torch
from tiny_groot import tiny_model

from relay.models.groot.language import interleaved_axes


def test_rotary_tables_stay_exact_at_the_positions_of_long_prompts() -> None:
    language = tiny_model().language
    sizes = language.sizes
    half = sizes.head_dim // 2
    positions = torch.tensor([[[300, 299, 301], [1001, 1002, 1003], [4095, 4094, 4093]]])  # (1, tokens, axes)
    tables = language.tables(positions)
    for token, place in enumerate(positions[0].tolist()):
        for i, axis in enumerate(interleaved_axes(sizes.rope_sections)):
            angle = place[axis] * sizes.rope_base ** -(i / half)
            assert np.isclose(float(tables.cos[0, token, 0, i]), math.cos(angle), atol=2e-3), (token, i)
