"""Rows that share a batch: each gets the actions that it would get alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_groot import drawn_noise, drawn_row, load_tiny, tiny_model, tiny_tensors
from torch import Tensor

from relay.models.groot.assemble import assemble
from relay.models.groot.inputs import GrootRow

BATCHES = {
    "same lengths": [drawn_row(1, [(2, 3), (2, 2)], 4), drawn_row(2, [(2, 3), (2, 2)], 4)],
    "longer text": [drawn_row(3, [(2, 3), (2, 2)], 2), drawn_row(4, [(2, 3), (2, 2)], 9)],
    "larger images": [drawn_row(5, [(2, 2)], 5), drawn_row(6, [(4, 3)], 5)],
    "more images": [drawn_row(7, [(2, 2)], 3), drawn_row(8, [(2, 2), (3, 2), (2, 4)], 7)],
}


def actions_of(rows: Sequence[GrootRow], noise: Tensor, num_steps: int = 4) -> Tensor:
    model = tiny_model()
    return model.sample_actions(assemble(model, rows, noise, num_steps))


def distance(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).abs().max() / reference.std())


@pytest.mark.parametrize("name", list(BATCHES))
def test_a_batch_of_two_equals_two_singles(name: str) -> None:
    rows, noise = BATCHES[name], drawn_noise(1, 2)
    singles = [actions_of([row], noise[i : i + 1]) for i, row in enumerate(rows)]
    assert distance(actions_of(rows, noise), torch.cat(singles)) <= 1e-5


@torch.inference_mode()
def test_features_of_a_padded_row_equal_its_own() -> None:
    model, rows = tiny_model(), BATCHES["more images"]
    alone = assemble(model, rows[:1], drawn_noise(1), 1)
    beside = assemble(model, rows, drawn_noise(1, 2), 1)
    length = len(rows[0].tokens)
    assert length < beside.tokens.shape[1]
    by_itself = model.adapt(model.backbone(alone), alone)
    padded = model.adapt(model.backbone(beside), beside).view(2, -1, by_itself.shape[-1])[0]
    assert distance(padded[:length], by_itself) <= 1e-5


def test_what_stands_in_the_padding_changes_nothing() -> None:
    model, rows = tiny_model(), BATCHES["more images"]
    inputs = assemble(model, rows, drawn_noise(1, 2), 4)
    behind = torch.arange(inputs.tokens.shape[1]) >= torch.tensor([[len(row.tokens)] for row in rows])
    patches = inputs.patches.clone()
    for image, (h, w) in zip(patches, inputs.grids, strict=True):
        image[h * w :] = 255
    filled = replace(inputs, tokens=inputs.tokens.masked_fill(behind, 1234), patches=patches)
    assert behind.any()
    assert not torch.equal(patches, inputs.patches)
    assert distance(model.sample_actions(filled), model.sample_actions(inputs)) <= 1e-6


def test_the_order_of_rows_makes_no_difference() -> None:
    rows, noise = BATCHES["more images"], drawn_noise(1, 2)
    assert distance(actions_of(rows[::-1], noise.flip(0)).flip(0), actions_of(rows, noise)) <= 1e-5


def test_a_row_knows_its_own_image_from_its_neighbours() -> None:
    rows, noise = BATCHES["same lengths"], drawn_noise(1, 2)
    swapped = [replace(rows[0], images=rows[1].images), rows[1]]
    actions, other = actions_of(rows, noise), actions_of(swapped, noise)
    assert distance(other[0], actions[0]) > 1e-3
    assert distance(other[1], actions[1]) <= 1e-5


def test_a_batch_holds_rows_of_one_embodiment() -> None:
    rows = [drawn_row(1, [(2, 2)], 2, slot=0), drawn_row(2, [(2, 2)], 2, slot=2)]
    with pytest.raises(ValueError, match=r"one embodiment, got slots \[0, 2\]"):
        assemble(tiny_model(), rows, drawn_noise(1, 2), 4)


@pytest.mark.parametrize("num_steps", [1, 3, 4])
def test_a_step_more_or_less_is_noticed(num_steps: int) -> None:
    row, noise = drawn_row(1, [(2, 2)], 3), drawn_noise(1)
    other = actions_of([row], noise, num_steps + 1)
    assert distance(actions_of([row], noise, num_steps), other) > 1e-4


def test_the_same_noise_gives_the_same_bytes_and_another_does_not() -> None:
    row = drawn_row(1, [(2, 2)], 3)
    first, again, other = (actions_of([row], drawn_noise(seed)) for seed in (1, 1, 2))
    assert first.numpy().tobytes() == again.numpy().tobytes()
    assert distance(other, first) > 0.1


def test_tables_of_many_schedules_and_sizes_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model, noise = load_tiny(tiny_tensors(), slots=[2]), drawn_noise(1)
    monkeypatch.setattr("relay.models.groot.model.TABULATED_STEPS", 5)
    monkeypatch.setattr("relay.models.groot.vision._TABULATED_PATCHES", 40)
    for num_steps, side in ((2, 2), (3, 3), (4, 2)):
        model.sample_actions(assemble(model, [drawn_row(1, [(side, 2)], 3)], noise, num_steps))
    assert list(model._schedules) == [(4, 2)]
    assert list(model.vision._places) == [(6, 4), (4, 4)]


def test_noise_of_a_lower_precision_is_integrated_in_float32() -> None:
    row, noise = drawn_row(1, [(2, 2)], 3), drawn_noise(1).bfloat16()
    assert np.array_equal(actions_of([row], noise).numpy(), actions_of([row], noise.float()).numpy())
