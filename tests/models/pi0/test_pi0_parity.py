"""The network against openpi's JAX implementation: same weights, same noise, recorded actions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny import golden, golden_inputs, tiny_model

from relay.models.pi0.gemma import key_bias, rotation

FAMILIES = ("pi0", "pi05")
STEPS = (1, 2, 5, 10)
BF16_GATE = {"pi05": 2e-2, "pi0": 3e-2}


def distance(actions: torch.Tensor, reference: NDArray[np.float32]) -> float:
    """Largest difference in units of the reference's standard deviation."""
    return float(np.abs(actions.numpy() - reference).max() / reference.std())


@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_actions_equal_the_jax_reference(family: str, num_steps: int) -> None:
    actions = tiny_model(family).sample_actions(golden_inputs(family, (0, 1), num_steps))
    assert distance(actions, golden(family)[f"actions_f32_{num_steps}"]) <= 1e-4


@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_actions_stay_near_the_float32_reference(family: str, num_steps: int) -> None:
    model = tiny_model(family, torch.bfloat16)
    actions = model.sample_actions(golden_inputs(family, (0, 1), num_steps, dtype=torch.bfloat16))
    assert distance(actions, golden(family)[f"actions_f32_{num_steps}"]) <= BF16_GATE[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_leaving_masked_tokens_out_equals_masking_them(family: str) -> None:
    compact = tiny_model(family).sample_actions(golden_inputs(family, (0, 1), 10))
    full = tiny_model(family).sample_actions(golden_inputs(family, (0, 1), 10, compact=False))
    assert distance(full, compact.numpy()) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_two_equals_two_singles(family: str) -> None:
    batch = tiny_model(family).sample_actions(golden_inputs(family, (0, 1), 10))
    singles = torch.cat([tiny_model(family).sample_actions(golden_inputs(family, (row,), 10)) for row in (0, 1)])
    assert distance(batch, singles.numpy()) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_different_step_counts_equal_their_own_runs(family: str) -> None:
    batch = tiny_model(family).sample_actions(golden_inputs(family, (0, 1), (10, 3)))
    singles = [tiny_model(family).sample_actions(golden_inputs(family, (row,), n)) for row, n in ((0, 10), (1, 3))]
    assert distance(batch, torch.cat(singles).numpy()) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_prefix_embeddings_keys_and_values_equal_the_reference(family: str) -> None:
    model, gold = tiny_model(family), golden(family)
    inputs = golden_inputs(family, (0, 1), 1, compact=False)
    rows, length = inputs.layout.index.shape
    config = model.config
    cache = model.new_cache(rows, length)
    embedded = model.embed_tokens(model.vision(inputs.images), inputs.tokens, inputs.layout)
    assert inputs.layout.valid is not None
    bias = key_bias(inputs.layout.valid, 0, torch.float32)
    model.run_prefix(embedded, rotation(inputs.layout.positions, config.head_dim), cache, bias)

    at = torch.from_numpy(gold["prefix_probe_positions"])
    seen = inputs.layout.valid[:, at].numpy()  # the reference holds nothing meaningful at masked positions
    for ours, reference in (
        (embedded[:, at][None], gold["prefix_embed_probe"][None]),
        (cache.keys[:, :, at], gold["prefix_k_probe"]),
        (cache.values[:, :, at], gold["prefix_v_probe"]),
    ):
        for layer, expected in zip(ours.numpy(), reference, strict=True):
            assert np.abs(layer - expected)[seen].max() / expected[seen].std() <= 1e-4


def test_a_wrong_state_token_would_be_noticed() -> None:
    inputs = golden_inputs("pi0", (0, 1), 10)
    assert inputs.state is not None
    actions = tiny_model("pi0").sample_actions(dataclasses.replace(inputs, state=inputs.state.flip(0)))
    assert distance(actions, golden("pi0")["actions_f32_10"]) > 1e-2
