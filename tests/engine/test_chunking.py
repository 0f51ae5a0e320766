"""Weights and strengths of real-time chunking, from the formulas written out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from relay.engine.chunking import SCHEDULES, Chunking, Schedule

E = math.e - 1
WEIGHTS: dict[Schedule, list[float]] = {
    "linear": [1, 1, 0.75, 0.5, 0.25, 0, 0],
    "exp": [1, 1, *(w * math.expm1(w) / E for w in (0.75, 0.5, 0.25)), 0, 0],
    "ones": [1, 1, 1, 1, 1, 0, 0],
    "zeros": [1, 1, 0, 0, 0, 0, 0],
}


def test_every_schedule_is_tried() -> None:
    assert set(WEIGHTS) == set(SCHEDULES)


@pytest.mark.parametrize("schedule", WEIGHTS)
def test_weights_are_one_for_the_delay_then_fall_and_end_with_the_guided_steps(schedule: Schedule) -> None:
    np.testing.assert_allclose(Chunking(schedule).weights(2, 5, 7), WEIGHTS[schedule], rtol=1e-6)


@pytest.mark.parametrize("schedule", WEIGHTS)
@pytest.mark.parametrize(("delay", "guided"), [(0, 1), (3, 3), (7, 7), (5, 2)])
def test_weights_fit_the_chunk_at_every_edge(schedule: Schedule, delay: int, guided: int) -> None:
    weights = Chunking(schedule).weights(delay, guided, 7)
    assert weights.shape == (7,)
    assert weights.dtype == np.float32
    assert (weights[: min(delay, guided)] == 1).all()
    assert (weights[guided:] == 0).all()
    assert ((weights >= 0) & (weights <= 1)).all()


def test_guidance_is_bounded_at_the_first_step_and_follows_the_formula_after() -> None:
    strengths = Chunking(max_weight=7.5).strengths(4)
    formula = [(1 - tau) / tau * ((1 - tau) ** 2 + tau**2) / (1 - tau) ** 2 for tau in (0.25, 0.5, 0.75)]
    np.testing.assert_allclose(strengths, [7.5, *formula])


def test_a_low_bound_holds_at_every_step() -> None:
    assert (Chunking(max_weight=0.5).strengths(10) == 0.5).all()


def test_an_unknown_schedule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="--rtc-schedule must be one of linear, exp, ones, zeros, got 'cosine'"):
        Chunking("cosine")  # pyright: ignore


@pytest.mark.parametrize("bound", [0, -1.0, math.nan, math.inf])
def test_a_bound_that_is_not_positive_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="--rtc-max-guidance-weight must be a positive number"):
        Chunking(max_weight=bound)
