"""Denoising steps over fixed buffers give what the plain ones give, whatever the buffers held before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from tiny_groot import (
    drawn_noise,
    drawn_row,
    golden,
    golden_inputs,
    load_tiny,
    tiny_model,
    tiny_tensors,
    two_frame_model,
)
from torch import Tensor

from relay.models.groot.assemble import assemble
from relay.models.groot.fixed_shapes import FixedShapes
from relay.models.groot.inputs import GrootRow
from relay.models.groot.model import Groot
from relay.models.groot.shapes import Pictures, Shape, ShapePlan
from relay.models.groot.transforms import GrootPrepared

PLAN = ShapePlan(texts=(16, 32), images=(8, 24), rows=(1, 2, 3, 4))
SQUARE, WIDE = [(2, 2)], [(2, 3), (3, 4)]  # 4 and 18 image tokens
ONE, TWO, ODD = [(2, 4)], [(3, 4)] * 2, [(3, 3)]  # images that are prepared from the start of a call
PICTURES = {8: Pictures(1, 64, 128), 16: Pictures(1, 96, 96), 24: Pictures(2, 96, 128)}
WHOLE = ShapePlan(texts=(16, 32), images=(8, 16, 24), rows=(1, 2, 3, 4), pictures=PICTURES)


def prepared(plan: ShapePlan = PLAN, model: Groot | None = None, slot: int = 2, **options: int) -> FixedShapes:
    fixed = FixedShapes(model or tiny_model(), slot, plan, capture=False, **options)
    fixed.prepare(lambda phase, share: None)
    return fixed


@cache
def shared() -> FixedShapes:
    return prepared()


def sample(fixed: FixedShapes, rows: Sequence[GrootRow], num_steps: int = 4, first_seed: int = 0) -> Tensor:
    actions = fixed.sample(of(rows), noise_of(rows, first_seed), num_steps)
    assert actions is not None
    return actions


def of(rows: Sequence[GrootRow]) -> list[GrootPrepared]:
    return [GrootPrepared(row, raw_state={}) for row in rows]


def noise_of(rows: Sequence[GrootRow], first_seed: int = 0) -> Tensor:
    return drawn_noise(*range(first_seed, first_seed + len(rows)))


def plain(rows: Sequence[GrootRow], num_steps: int = 4) -> Tensor:
    model = tiny_model()
    return model.sample_actions(assemble(model, rows, noise_of(rows), num_steps))


def distance(actions: Tensor, reference: Tensor) -> float:
    return float((actions - reference).abs().max() / reference.std())


GOLDEN_PLAN = ShapePlan(texts=(16, 32), images=(16, 24), rows=(1, 2, 4))


@pytest.mark.parametrize("shape", list(GOLDEN_PLAN), ids=str)
@pytest.mark.parametrize(("num_steps", "slot"), [(1, 2), (4, 2), (10, 2), (4, 0)])
def test_golden_observations_give_the_golden_actions_in_every_shape(shape: Shape, num_steps: int, slot: int) -> None:
    fixed = golden_shapes(slot)
    inputs = golden_inputs(num_steps, slot=slot, shape=shape)
    fixed.look(inputs, shape)
    actions = fixed.denoise(inputs.noise, two_frame_model().schedule(num_steps, slot), shape).numpy()
    steps = "1_step" if num_steps == 1 else f"{num_steps}_steps"
    reference = golden()[f"actions_{steps}" + ("_embodiment_0" if slot == 0 else "")]
    assert np.abs(actions - reference).max() / reference.std() <= 1e-5


@cache
def golden_shapes(slot: int) -> FixedShapes:
    return prepared(GOLDEN_PLAN, two_frame_model(), slot)


@pytest.mark.parametrize("words", [1, 7, 8, 9, 10, 22, 23])
@pytest.mark.parametrize("grids", [SQUARE, [(2, 4)], WIDE, [(4, 6)]], ids=str)
def test_padding_to_a_prepared_number_of_tokens_changes_nothing(words: int, grids: list[tuple[int, int]]) -> None:
    rows = [drawn_row(words, grids, words)]
    assert distance(sample(shared(), rows), plain(rows)) <= 1e-5


BATCHES = {
    "full": [drawn_row(seed, SQUARE, 4) for seed in range(4)],
    "one of two": [drawn_row(5, WIDE, 3)],
    "two": [drawn_row(6, WIDE, 3), drawn_row(7, WIDE, 3)],
    "different prompts": [drawn_row(8, SQUARE, 1), drawn_row(9, SQUARE, 20), drawn_row(10, SQUARE, 7)],
    "one image, whole": [drawn_row(20, ONE, 3), drawn_row(21, ONE, 9), drawn_row(22, ONE, 1)],
    "two images, whole": [drawn_row(23, TWO, 7), drawn_row(24, TWO, 8)],
    "nine tokens in sixteen, whole": [drawn_row(25, ODD, 7), drawn_row(26, ODD, 20), drawn_row(27, ODD, 2)],
    "one, whole": [drawn_row(28, TWO, 3)],
    "as many tokens in other images": [drawn_row(29, [(4, 2)], 3), drawn_row(30, ONE, 3)],
    "different images": [drawn_row(11, [(2, 2)], 3), drawn_row(12, [(4, 3)], 3), drawn_row(13, [(1, 3)] * 3, 3)],
}
SIZES = {
    "every size": PLAN,
    "padded to four": ShapePlan(texts=(32,), images=(24,), rows=(4,)),
    "padded to five": ShapePlan(texts=(40,), images=(48,), rows=(5,)),
    "whole": WHOLE,
    "whole, padded to five": replace(WHOLE, texts=(40,), rows=(5,)),
}


@pytest.mark.parametrize("plan", SIZES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("num_steps", [1, 4, 7])
def test_a_batch_gives_what_the_plain_path_gives(batch: str, plan: str, num_steps: int) -> None:
    rows = BATCHES[batch]
    assert distance(sample(of_plan(plan), rows, num_steps), plain(rows, num_steps)) <= 1e-5


@cache
def of_plan(name: str) -> FixedShapes:
    return prepared(SIZES[name])


@pytest.mark.parametrize("plan", SIZES)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_row_of_a_batch_gives_what_it_gives_alone(batch: str, plan: str) -> None:
    fixed, rows = of_plan(plan), BATCHES[batch]
    alone = torch.cat([sample(fixed, [one], first_seed=seed) for seed, one in enumerate(rows)])
    assert distance(sample(fixed, rows), alone) <= 1e-5


@pytest.mark.parametrize("batch", BATCHES)
def test_rows_of_just_the_prepared_images_are_replayed_from_the_start(
    batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed, replayed = of_plan("whole"), Counter[str]()
    replay = fixed.graphs.replay
    monkeypatch.setattr(fixed.graphs, "replay", lambda key: (replayed.update([key[0]]), replay(key)))
    sample(fixed, BATCHES[batch])
    assert replayed == ({"look": 1, "step": 4} if batch.endswith("whole") else {"step": 4})


@pytest.mark.parametrize("plan", SIZES)
def test_what_earlier_batches_left_in_the_buffers_changes_nothing(plan: str) -> None:
    fixed = of_plan(plan)
    batches = [BATCHES[name] for name in ("different prompts", "one of two", "two images, whole", "one image, whole")]
    before = [sample(fixed, rows) for rows in batches]
    for rows, expected in zip(reversed(batches), reversed(before), strict=True):
        fixed.spoil()
        assert torch.equal(sample(fixed, rows), expected)


@pytest.mark.parametrize("batch", ["two", "two images, whole"])
def test_damage_in_one_row_stays_in_that_row(batch: str) -> None:
    fixed, rows = of_plan("whole"), BATCHES[batch]
    whole = noise_of(rows)
    damaged = whole.clone()
    damaged[0] = float("nan")
    actions, expected = fixed.sample(of(rows), damaged, 4), fixed.sample(of(rows), whole, 4)
    assert actions is not None
    assert expected is not None
    assert not actions[0].isfinite().any()
    assert torch.equal(actions[1], expected[1])


def test_tables_of_image_sizes_may_be_forgotten_by_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_tiny(tiny_tensors(), slots=[2])
    fixed, rows = prepared(WHOLE, model), BATCHES["two images, whole"]
    tables = {id(model.vision.tabulated(grid)) for grid in ((4, 8), (6, 6), (6, 8))}
    monkeypatch.setattr("relay.models.groot.vision._TABULATED_PATCHES", 1)
    model.vision.tabulated((2, 2))
    assert list(model.vision._places) == [(2, 2)]
    assert {id(held) for held in fixed._tables} == tables
    assert distance(sample(fixed, rows), plain(rows)) <= 1e-5


def test_answers_do_not_change_when_the_buffers_are_used_again() -> None:
    fixed, rows = shared(), BATCHES["two"]
    actions = sample(fixed, rows)
    kept = actions.clone()
    fixed.spoil()
    assert torch.equal(actions, kept)


def test_any_number_of_steps_runs_on_what_is_prepared() -> None:
    fixed, rows = shared(), BATCHES["two"]
    graphs = len(fixed.graphs)
    assert distance(sample(fixed, rows, 50), plain(rows, 50)) <= 1e-5
    assert len(fixed.graphs) == graphs == len(list(PLAN))


def test_a_batch_outside_the_plan_is_left_to_the_plain_path() -> None:
    fixed = prepared(ShapePlan(texts=(16,), images=(8,), rows=(1, 2)))
    for rows in ([drawn_row(1, SQUARE, 10)], [drawn_row(1, WIDE, 1)], [drawn_row(1, SQUARE, 1)] * 3):
        assert fixed.sample(of(rows), noise_of(rows), 4) is None


def test_without_memory_for_graphs_shapes_are_left_out_and_said() -> None:
    fixed = prepared(ShapePlan(texts=(16, 32), images=(8,), rows=(1,)), budget_bytes=0)
    assert [str(shape) for shape in fixed.left_out] == [
        "32 text and 8 image tokens × batch 1",
        "16 text and 8 image tokens × batch 1",
    ]
    rows = [drawn_row(1, SQUARE, 1)]
    assert fixed.sample(of(rows), noise_of(rows), 4) is None


def test_progress_names_the_shape() -> None:
    said: list[str] = []
    fixed = FixedShapes(tiny_model(), 2, ShapePlan((16,), (8,), (4,)), capture=False)
    fixed.prepare(lambda phase, share: said.append(phase))
    assert said == ["capturing 16 text and 8 image tokens × batch 4"]


def test_bfloat16_steps_stay_near_the_plain_ones() -> None:
    model = tiny_model(torch.bfloat16)
    fixed, rows = prepared(model=model), BATCHES["different prompts"]
    expected = model.sample_actions(assemble(model, rows, noise_of(rows), 4))
    assert distance(sample(fixed, rows), expected) <= 5e-2
