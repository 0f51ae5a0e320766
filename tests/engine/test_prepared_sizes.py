"""Sizes that a network is prepared for, and which one holds what comes."""

from __future__ import annotations

import pytest

from relay.engine.prepared_sizes import at_least, batch_sizes, rounded_up


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, (1,)), (2, (1, 2)), (5, (1, 2, 3, 4, 5)), (8, (1, 2, 3, 4, 6, 8)), (20, (1, 2, 3, 4, 6, 8, 12, 16, 20))],
)
def test_batch_sizes_end_at_the_largest_batch(most: int, sizes: tuple[int, ...]) -> None:
    assert batch_sizes(most) == sizes


def test_at_most_a_third_of_a_batch_is_padding() -> None:
    for most in range(1, 70):
        for rows in range(1, most + 1):
            size = at_least(batch_sizes(most), rows)
            assert size is not None
            assert 3 * (size - rows) <= size


def test_the_smallest_size_that_is_large_enough_is_taken() -> None:
    assert [at_least((2, 4, 8), needed) for needed in (1, 2, 3, 8, 9)] == [2, 2, 4, 8, None]


def test_multiples_stay_and_other_numbers_go_up_to_the_next() -> None:
    assert [rounded_up(value, 8) for value in (1, 8, 9, 16)] == [8, 8, 16, 16]
