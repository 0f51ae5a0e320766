"""Statistics that look wrong are remarked, sound ones are not."""

from __future__ import annotations

import numpy as np
import pytest

from relay.engine.doubts import doubts, never_computed
from relay.engine.normalization import Kind, Statistics

SOUND = Statistics(
    mean=np.array([0.1, 0.5]),
    std=np.array([0.4, 0.02]),
    q01=np.array([-1.0, 0.45]),
    q99=np.array([1.2, 0.55]),
    min=np.array([-1.5, 0.4]),
    max=np.array([1.5, 0.6]),
)


def changed(**values: list[float]) -> Statistics:
    fields = {name: getattr(SOUND, name) for name in ("mean", "std", "q01", "q99", "min", "max")}
    return Statistics(**{**fields, **{name: np.array(value) for name, value in values.items()}})


@pytest.mark.parametrize("kind", ["z_score", "quantile", "min_max", "none"])
def test_sound_statistics_raise_no_doubt(kind: Kind) -> None:
    assert not any(doubts(SOUND, kind, ("rad", "m")))


def test_a_dimension_that_hardly_moves_is_remarked() -> None:
    first, second = doubts(changed(std=[0.4, 5e-4]), "z_score")
    assert first == ""
    assert second == "almost constant: an error of 0.0005 is as large as the whole range"


def test_only_radians_can_be_more_than_two_turns() -> None:
    statistics = changed(q99=[90.0, 0.55], max=[95.0, 0.6])
    assert doubts(statistics, "quantile", ("rad", "m"))[0] == "90 rad is more than 2 turns: degrees?"
    assert doubts(statistics, "quantile", ("deg", "m"))[0] == ""


def test_values_outside_the_extremes_are_remarked() -> None:
    assert doubts(changed(mean=[2.0, 0.5]), "z_score")[0].endswith("damaged?")


@pytest.mark.parametrize(
    ("values", "kind"),
    [({"mean": [0.0, 0.0], "std": [1.0, 1.0]}, "z_score"), ({"q01": [-1.0, -1.0], "q99": [1.0, 1.0]}, "quantile")],
)
def test_values_that_stand_for_none_are_recognised(values: dict[str, list[float]], kind: Kind) -> None:
    assert never_computed(changed(**values), kind)
    assert not never_computed(SOUND, kind)
