"""Values out of JSON objects: what is refused, and by which sentence."""

from __future__ import annotations

from typing import Any

import pytest

from relay.engine.json_entries import count, entry, number, one_of, refuse_unknown
from relay.engine.weights import CheckpointError

FILE = "a.json"


@pytest.mark.parametrize("value", [0, -1, 8, 1.0, True, "3", None, [3]])
def test_a_count_is_an_integer_within_its_bounds(value: Any) -> None:
    assert count({"n": 7}, "n", 7, FILE) == 7
    with pytest.raises(CheckpointError, match=r"^a\.json: n is .*, expected an integer from 1 to 7$"):
        count({"n": value}, "n", 7, FILE)


@pytest.mark.parametrize("value", [-0.1, 1.5, True, "0.5", None, float("nan"), 10**400])
def test_a_number_lies_within_its_bounds_and_is_no_switch(value: Any) -> None:
    assert [number({"x": good}, "x", 0, 1, FILE) for good in (0, 0.5, 1)] == [0.0, 0.5, 1.0]
    with pytest.raises(CheckpointError, match=r"^a\.json: x is .*, expected a number from 0 to 1$"):
        number({"x": value}, "x", 0, 1, FILE)


def test_another_choice_is_answered_with_the_nearest() -> None:
    assert one_of({"kind": "fixed"}, "kind", ("fixed", "dynamic"), FILE) == "fixed"
    with pytest.raises(CheckpointError, match="kind is 'fix', expected 'fixed' or 'dynamic', did you mean 'fixed'"):
        one_of({"kind": "fix"}, "kind", ("fixed", "dynamic"), FILE)


def test_an_entry_that_is_missing_is_told_with_one_that_is_nearly_it() -> None:
    with pytest.raises(CheckpointError, match=r"^a\.json: width is missing \(there is 'widht'\), expected an integer$"):
        entry({3: 4, "widht": 64, "depth": 2}, "width", int, FILE)  # pyright: ignore[reportArgumentType]
    with pytest.raises(CheckpointError, match=r"^a\.json: width is missing, expected an integer$"):
        entry({"depth": 2}, "width", int, FILE)


def test_an_unknown_key_is_answered_with_those_that_are_known() -> None:
    refuse_unknown({"width": 1}, ("width", "depth"), FILE)
    with pytest.raises(CheckpointError, match=r"unknown key 'dept', did you mean 'depth'\?; known are width, depth"):
        refuse_unknown({"dept": 1}, ("width", "depth"), FILE)
