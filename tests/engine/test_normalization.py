"""State and actions between the robot's units and the model's, worked out by hand from both references' formulas."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from relay.engine.normalization import Kind, Normalization, Statistics, Style


def vector(*values: float) -> NDArray[np.float64]:
    return np.array(values, np.float64)


STATE = Statistics(
    mean=vector(1.0, -2.0),
    std=vector(0.5, 4.0),
    q01=vector(0.0, -10.0),
    q99=vector(2.0, 6.0),
    min=vector(-1.0, -12.0),
    max=vector(3.0, 8.0),
)


def normalization(kind: Kind, style: Style, *, actions_kind: Kind | None = None) -> Normalization:
    return Normalization(kind, style, STATE, STATE, actions_kind)


@pytest.mark.parametrize(
    ("kind", "style", "expected"),
    [
        # state (2, 0): (2 - 1) / (0.5 + eps), (0 + 2) / (4 + eps)
        ("z_score", "openpi", [1.0 / 0.500001, 2.0 / 4.000001]),
        ("z_score", "lerobot", [2.0, 0.5]),
        # (2 - 0) / (2 - 0 + eps) * 2 - 1, (0 + 10) / (6 + 10 + eps) * 2 - 1
        ("quantile", "openpi", [2.0 / 2.000001 * 2 - 1, 10.0 / 16.000001 * 2 - 1]),
        ("quantile", "lerobot", [1.0, 0.25]),
        # 2 * (2 + 1) / (3 + 1) - 1, 2 * (0 + 12) / (8 + 12) - 1
        ("min_max", "lerobot", [0.5, 0.2]),
        ("none", "lerobot", [2.0, 0.0]),
    ],
)
def test_a_state_is_scaled_by_the_references_formula(kind: Kind, style: Style, expected: list[float]) -> None:
    scaled = normalization(kind, style).normalize_state(vector(2.0, 0.0))
    assert scaled.dtype == np.float64
    np.testing.assert_allclose(scaled, expected, rtol=1e-15 if style == "openpi" else 1e-6)


@pytest.mark.parametrize(
    ("kind", "style", "expected"),
    [
        # action (1, -1): 1 * (0.5 + eps) + 1, -1 * (4 + eps) - 2
        ("z_score", "openpi", [1.500001, -6.000001]),
        ("z_score", "lerobot", [1.5, -6.0]),
        # (1 + 1) / 2 * (2 + eps) + 0, (-1 + 1) / 2 * (16 + eps) - 10
        ("quantile", "openpi", [2.000001, -10.0]),
        ("quantile", "lerobot", [2.0, -10.0]),
        ("min_max", "lerobot", [3.0, -12.0]),
        ("none", "openpi", [1.0, -1.0]),
    ],
)
def test_actions_are_unscaled_by_the_references_formula(kind: Kind, style: Style, expected: list[float]) -> None:
    actions = np.array([[1.0, -1.0], [1.0, -1.0]], np.float32)
    unscaled = normalization(kind, style).unnormalize_actions(actions)
    np.testing.assert_allclose(unscaled, [expected, expected], rtol=1e-15 if style == "openpi" else 1e-6)


def test_openpi_keeps_dimensions_beyond_the_statistics() -> None:
    actions = np.array([[1.0, -1.0, 0.5]], np.float32)
    assert normalization("z_score", "openpi").unnormalize_actions(actions)[0, 2] == 0.5 * 1.000001
    assert normalization("quantile", "openpi").unnormalize_actions(actions)[0, 2] == 0.5


def test_lerobot_cuts_dimensions_beyond_the_statistics() -> None:
    assert normalization("quantile", "lerobot").unnormalize_actions(np.zeros((3, 32), np.float32)).shape == (3, 2)


def test_nothing_is_clipped() -> None:
    for style in ("openpi", "lerobot"):
        scaled = normalization("quantile", style).normalize_state(vector(1000.0, -1000.0))
        assert scaled[0] > 900
        assert scaled[1] < -100


def test_openpi_computes_in_float64_so_that_bins_fall_as_in_the_reference() -> None:
    # Just below the edge between bins 128 and 129 in float64; float32 would round it onto the edge.
    edge = 0.0078125
    wanted = edge - 1e-12
    statistics = Statistics(q01=vector(-1.0), q99=vector(1.0 - 1e-6))  # the divisor is 2
    scaled = Normalization("quantile", "openpi", statistics, statistics).normalize_state(vector(wanted))
    assert scaled[0] < edge
    assert np.float32(scaled[0]) == np.float32(edge)


def test_lerobot_computes_in_float32_as_the_reference() -> None:
    statistics = Statistics(mean=vector(0.1), std=vector(0.3))
    scaled = Normalization("z_score", "lerobot", statistics, statistics).normalize_state(vector(0.7))
    expected = (np.float32(0.7) - np.float32(0.1)) / (np.float32(0.3) + np.float32(1e-8))
    assert scaled[0] == np.float64(expected)
    assert scaled[0] != (0.7 - 0.1) / (0.3 + 1e-8)


def test_lerobot_divides_by_its_constant_only_where_the_width_is_zero() -> None:
    statistics = Statistics(q01=vector(2.0), q99=vector(2.0))
    still = Normalization("quantile", "lerobot", statistics, statistics)
    assert still.normalize_state(vector(2.0))[0] == -1.0
    np.testing.assert_allclose(still.unnormalize_actions(np.ones((1, 1), np.float32)), [[2.0]], atol=1e-7)


def test_actions_may_be_scaled_otherwise_than_the_state() -> None:
    mixed = normalization("z_score", "lerobot", actions_kind="none")
    assert mixed.normalize_state(vector(1.0, -2.0)).tolist() == [0.0, 0.0]
    assert mixed.unnormalize_actions(np.ones((1, 2), np.float32)).tolist() == [[1.0, 1.0]]


def test_degrees_in_place_of_radians_are_remarked_with_dimension_value_and_range() -> None:
    degrees = vector(1.0, -2.0) * 57.3
    remark = normalization("quantile", "openpi").outside(degrees, names=("shoulder", "elbow"))
    assert remark == (
        "state[0] (shoulder) is 57.3, far outside 0 to 2 (1st to 99th percentile of the training data); units?"
    )
    remark = normalization("z_score", "openpi").outside(degrees)
    assert remark == "state[0] is 57.3, 113 standard deviations from the mean 1 of the training data; units?"


@pytest.mark.parametrize("kind", ["z_score", "quantile"])
def test_ten_thousand_states_of_the_training_distribution_earn_no_remark(kind: Kind) -> None:
    random = np.random.default_rng(0)
    mean, std = np.linspace(-1, 1, 8), np.linspace(0.01, 3, 8)
    statistics = Statistics(mean=mean, std=std, q01=mean - 2.326 * std, q99=mean + 2.326 * std)
    scaling = Normalization(kind, "openpi", statistics, statistics)
    states = random.normal(mean, std, size=(10_000, 8))
    assert not any(scaling.outside(state) for state in states)


def test_an_unscaled_state_has_no_range_to_leave() -> None:
    assert normalization("none", "lerobot").outside(vector(1e9, 0.0)) is None
