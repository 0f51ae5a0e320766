"""Values out of JSON objects: what is refused, and by which sentence."""

from __future__ import annotations

from typing import Any

import pytest

from relay.engine.json_entries import Entries, entry
from relay.engine.weights import CheckpointError

FILE = "a.json"


@pytest.mark.parametrize("value", [0, -1, 8, 1.0, True, "3", None, [3]])
def test_a_count_is_an_integer_within_its_bounds(value: Any) -> None:
    assert Entries({"n": 7}, FILE).count("n", 7) == 7
    with pytest.raises(CheckpointError, match=r"^a\.json: n is .*, expected an integer from 1 to 7$"):
        Entries({"n": value}, FILE).count("n", 7)


@pytest.mark.parametrize("value", [-0.1, 1.5, True, "0.5", None, float("nan"), 10**400])
def test_a_number_lies_within_its_bounds_and_is_no_switch(value: Any) -> None:
    assert [Entries({"x": good}, FILE).number("x", 0, 1) for good in (0, 0.5, 1)] == [0.0, 0.5, 1.0]
    with pytest.raises(CheckpointError, match=r"^a\.json: x is .*, expected a number from 0 to 1$"):
        Entries({"x": value}, FILE).number("x", 0, 1)


def test_another_choice_is_answered_with_the_nearest() -> None:
    assert Entries({"kind": "fixed"}, FILE).one_of("kind", ("fixed", "dynamic")) == "fixed"
    with pytest.raises(CheckpointError, match="kind is 'fix', expected 'fixed' or 'dynamic', did you mean 'fixed'"):
        Entries({"kind": "fix"}, FILE).one_of("kind", ("fixed", "dynamic"))


def test_an_entry_that_is_missing_is_told_with_one_that_is_nearly_it() -> None:
    with pytest.raises(CheckpointError, match=r"^a\.json: width is missing \(there is 'widht'\), expected an integer$"):
        entry({3: 4, "widht": 64, "depth": 2}, "width", int, FILE)  # pyright: ignore[reportArgumentType]
    with pytest.raises(CheckpointError, match=r"^a\.json: width is missing, expected an integer$"):
        entry({"depth": 2}, "width", int, FILE)


@pytest.mark.parametrize("value", ["true", False, [True], {}, None])
def test_a_choice_may_be_of_any_kind(value: Any) -> None:
    assert Entries({"on": True}, FILE).one_of("on", (True,)) is True
    with pytest.raises(CheckpointError, match=r"^a\.json: on is .*, expected True$"):
        Entries({"on": value}, FILE).one_of("on", (True,))


def test_an_object_inside_another_is_read_with_its_place_and_the_same_remedy() -> None:
    outer = Entries({"a": {"b": {"n": None}}}, FILE, "; copy the file again")
    inner = outer.inner("a").inner("b")
    with pytest.raises(CheckpointError, match=r"^a\.json: a\.b: n is null, expected an integer from 1 to 1,048,576$"):
        inner.count("n")
    with pytest.raises(CheckpointError, match=r"^a\.json: a\.b: m is missing, expected .*; copy the file again$"):
        inner.count("m")


def test_an_unknown_key_is_answered_with_those_that_are_known() -> None:
    Entries({"width": 1}, FILE).refuse_unknown(("width", "depth"))
    with pytest.raises(CheckpointError, match=r"unknown key 'dept', did you mean 'depth'\?; known are width, depth"):
        Entries({"dept": 1}, FILE).refuse_unknown(("width", "depth"))
