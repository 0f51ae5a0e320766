"""Which shapes are prepared, and which one a batch gets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny import tiny_model

from relay.models.pi0.shapes import Shape, ShapePlan
from relay.models.pi0.transforms import Pi0Prepared

CONFIG = replace(tiny_model("pi05").config, max_token_len=200)


def rows(*sizes: tuple[int, int]) -> list[Pi0Prepared]:
    state = np.zeros(32, np.float32)
    return [Pi0Prepared(np.zeros((c, 1, 1, 3), np.uint8), (1,) * prompt, state, 10) for c, prompt in sizes]


def test_prompts_come_in_steps_of_16_and_of_32_where_they_are_rare() -> None:
    assert ShapePlan.of(CONFIG, 1).prompts == (16, 32, 48, 64, 80, 96, 128, 160, 192, 200)


def test_lengths_that_no_prompt_has_are_left_out() -> None:
    assert ShapePlan.of(CONFIG, 1, shortest_prompt=33).prompts[0] == 48


def test_a_prompt_may_always_be_as_long_as_the_network_takes() -> None:
    assert ShapePlan.of(replace(CONFIG, max_token_len=45), 1).prompts == (16, 32, 48)
    assert ShapePlan.of(replace(CONFIG, max_token_len=45), 1, shortest_prompt=45).prompts == (48,)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, (1,)), (2, (1, 2)), (5, (1, 2, 3, 4, 5)), (8, (1, 2, 3, 4, 6, 8)), (20, (1, 2, 3, 4, 6, 8, 12, 16, 20))],
)
def test_batch_sizes_end_at_the_largest_batch(most: int, sizes: tuple[int, ...]) -> None:
    assert ShapePlan.of(CONFIG, most).rows == sizes


def test_a_batch_gets_the_smallest_shape_that_holds_it() -> None:
    plan = ShapePlan.of(CONFIG, 8)
    assert plan.fit(rows((2, 17))) == Shape(2, 32, 1)
    assert plan.fit(rows((1, 16), (2, 97), (2, 3), (1, 1), (1, 1))) == Shape(2, 128, 6)


def test_no_shape_holds_more_than_the_plan_says() -> None:
    plan = ShapePlan.of(CONFIG, 2)
    assert plan.fit(rows((1, 201))) is None
    assert plan.fit(rows((4, 1))) is None
    assert plan.fit(rows((1, 1), (1, 1), (1, 1))) is None


def test_the_tower_is_prepared_for_every_full_batch() -> None:
    assert ShapePlan((1, 2), (16,), (1, 2, 3)).images == (1, 2, 3, 4, 6)


def test_the_largest_shape_comes_first() -> None:
    plan = ShapePlan.of(CONFIG, 4)
    assert next(iter(plan)) == plan.largest == Shape(3, 200, 4)
