"""Which shapes are prepared for an embodiment, and which one a batch gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from groot_folders import DROID, LIBERO
from groot_observations import RECIPES
from tiny_groot import drawn_row

from relay.models.groot.recipe import ImageRecipe
from relay.models.groot.shapes import Pictures, Shape, ShapePlan

PLAN = ShapePlan(texts=(16, 32), images=(8, 24), rows=(1, 2, 3))


@pytest.mark.parametrize(("tag", "images"), [(DROID, (256, 352, 448)), (LIBERO, (128, 176, 224))])
def test_images_are_those_of_square_and_wide_frames_of_all_cameras_and_times(tag: str, images: tuple[int, ...]) -> None:
    assert ShapePlan.of(RECIPES[tag], 1).images == images


def test_a_row_of_usual_frames_is_prepared_from_the_start() -> None:
    plan = ShapePlan.of(RECIPES[LIBERO], 1)
    assert plan.pictures == {128: Pictures(2, 256, 256), 176: Pictures(2, 256, 352), 224: Pictures(2, 256, 448)}
    wide, square = drawn_row(1, [(8, 11)] * 2, 3), drawn_row(1, [(8, 8)] * 2, 3)
    assert plan.whole([wide, wide], Shape(32, 176, 2))
    assert plan.whole([square], Shape(32, 128, 1))
    assert not plan.whole([wide, square], Shape(32, 176, 2))
    assert not plan.whole([drawn_row(1, [(11, 8)] * 2, 3)], Shape(32, 176, 1))
    assert not plan.whole([drawn_row(1, [(8, 11)], 3)], Shape(32, 176, 1))
    assert not PLAN.whole([drawn_row(1, [(2, 4)], 9)], Shape(16, 8, 1))


def test_frames_that_all_become_squares_need_one_shape() -> None:
    recipe = replace(RECIPES[LIBERO], image=ImageRecipe("area", letterbox=True, shortest_edge=256))
    assert ShapePlan.of(recipe, 1).images == (128,)


def test_texts_hold_the_template_and_16_48_or_128_tokens_of_an_instruction() -> None:
    assert ShapePlan.of(RECIPES[LIBERO], 1).texts == (32, 64, 144)  # of 9 + 16, 9 + 48 and 9 + 128


def test_batch_sizes_end_at_the_largest_batch() -> None:
    assert ShapePlan.of(RECIPES[LIBERO], 8).rows == (1, 2, 3, 4, 6, 8)


def test_a_batch_gets_the_smallest_shape_that_holds_its_longest_row() -> None:
    assert PLAN.fit([drawn_row(1, [(2, 4)], 9)]) == Shape(16, 8, 1)
    assert PLAN.fit([drawn_row(1, [(2, 4)], 9), drawn_row(2, [(2, 4)], 10)]) == Shape(32, 8, 2)
    assert PLAN.fit([drawn_row(1, [(3, 4)], 1), drawn_row(2, [(1, 4)] * 2, 1)]) == Shape(16, 24, 2)


def test_no_shape_holds_more_than_the_plan_says() -> None:
    assert PLAN.fit([drawn_row(1, [(2, 4)], 26)]) is None
    assert PLAN.fit([drawn_row(1, [(5, 5)], 1)]) is None
    assert PLAN.fit([drawn_row(1, [(2, 4)], 1)] * 4) is None


def test_the_largest_shape_comes_first() -> None:
    assert next(iter(PLAN)) == PLAN.largest == Shape(32, 24, 3)
    assert len(list(PLAN)) == 12
