"""Numbers in whatever form clients send them, and nothing else."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from relay.protocol.numbers import as_numbers


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, np.array(3)),
        ([1, 2.5, True], np.array([1.0, 2.5, 1.0])),
        ([[1, 2], [3, 4]], np.array([[1, 2], [3, 4]])),
        ((np.float32(1), 2), np.array([1.0, 2.0])),
        ([np.arange(2), np.arange(2)], np.array([[0, 1], [0, 1]])),
        ([True, False], np.array([True, False])),
        ([], np.array([])),
    ],
)
def test_numbers_and_lists_of_them_become_an_array(value: Any, expected: Any):
    array = as_numbers(value)
    assert array is not None
    assert array.dtype == expected.dtype
    assert np.array_equal(array, expected)


def test_an_array_is_not_copied():
    array = np.arange(3, dtype=np.float32)
    assert as_numbers(array) is array


@pytest.mark.parametrize(
    "value",
    [None, "1", b"1", ["1"], [1, None], [[1, 2], [3]], {"a": 1}, [{}], [[], [1, 2]], np.array(["1"]), [2**70], [1j]],
)
def test_everything_else_is_none(value: Any):
    assert as_numbers(value) is None


@pytest.mark.parametrize("text", ["x" * 65_536, b"x" * 65_536])
def test_long_text_among_many_items_takes_no_memory(text: Any):
    tracemalloc.start()
    try:
        assert as_numbers([text] + [""] * 4_095) is None
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
