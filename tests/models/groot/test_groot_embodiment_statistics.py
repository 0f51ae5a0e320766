"""What a checkpoint's statistics say of one embodiment, and what is refused about them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from groot_folders import DROID, statistics_of

from relay.engine.weights import CheckpointError
from relay.models.groot.embodiment_statistics import EmbodimentStatistics

PAIRS = {"state": ("q01", "q99"), "action": ("q01", "q99"), "relative_action": ("min", "max")}


def test_a_pair_is_the_two_statistics_asked_for() -> None:
    numbers = statistics_of(DROID)
    low, high = EmbodimentStatistics(numbers, DROID).pair("relative_action", "eef_9d", "min", "max")
    assert np.array_equal(low, numbers["relative_action"]["eef_9d"]["min"])
    assert np.array_equal(high, numbers["relative_action"]["eef_9d"]["max"])
    assert low.shape == (40, 9)


def test_the_width_is_that_of_whichever_statistic_there_is() -> None:
    assert EmbodimentStatistics({"state": {"arm": {"q99": [1.0, 2.0]}}}, DROID).width("state", "arm") == 2
    with pytest.raises(CheckpointError, match="has none of min, max, mean, std, q01, q99"):
        EmbodimentStatistics({"state": {"arm": {}}}, DROID).width("state", "arm")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("state", "eef_9d", "q01"), [float("nan")] * 9, r"q01 of .*nan, expected a finite number"),
        (("state", "eef_9d", "mean"), [float("nan")] * 9, "mean of eef_9d\\[0\\] is nan, expected a finite number"),
        (("state", "eef_9d", "q01"), [*[0.0] * 8, 99.0], "q01 of eef_9d\\[8\\] is 99, above q99"),
        (("state", "eef_9d", "q99"), [1.0] * 8, r"q01 has shape \(9,\), but q99 \(8,\)"),
        (("state", "eef_9d", "q99"), ..., f"state of 'eef_9d' of {DROID} has no q99"),
        (("state", "eef_9d"), ..., "eef_9d is missing, expected an object"),
        (("relative_action", "eef_9d"), ..., "eef_9d is missing"),
        (("relative_action",), ..., "relative_action is missing"),
        (("action", "gripper_position", "q01"), ["a"], "q01 is not a list of numbers"),
        (("action", "gripper_position", "q01"), [[0.0]], r"q01 has shape \(1, 1\)"),
    ],
)
def test_statistics_that_do_not_fit_are_refused(place: tuple[str, ...], value: Any, message: str) -> None:
    numbers = copy.deepcopy(statistics_of(DROID))
    *way, last = place
    inner: Any = numbers
    for key in way:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    with pytest.raises(CheckpointError, match=message):
        read_all(numbers)


def read_all(numbers: dict[str, Any]) -> None:
    statistics = EmbodimentStatistics(numbers, DROID)
    for modality, names in PAIRS.items():
        for key in statistics_of(DROID)[modality]:
            statistics.pair(modality, key, *names)
