"""What is predicted of a batch from those that ran."""

from __future__ import annotations

import pytest

from relay.server.batch_cost import REMEMBERED_KEYS, BatchCosts


def learnt(*batches: tuple[int, float]) -> BatchCosts:
    costs = BatchCosts()
    for rows, seconds in batches:
        costs.learn("key", rows, seconds)
    return costs


def test_nothing_is_predicted_of_a_key_that_never_ran():
    assert learnt((4, 0.1)).predict("other", 4) == 0


def test_of_one_size_others_are_taken_to_cost_in_proportion():
    costs = learnt((2, 0.040))
    assert [costs.predict("key", rows) for rows in (1, 2, 4)] == pytest.approx([0.020, 0.040, 0.080])


def test_two_sizes_tell_rows_and_batch_apart():
    costs = learnt((1, 0.020), (8, 0.041))
    assert [costs.predict("key", rows) for rows in (1, 4, 16)] == pytest.approx([0.020, 0.029, 0.065])


def test_a_slow_batch_now_and_then_moves_nothing():
    costs = learnt(*[(1, 0.020), (4, 0.029), (8, 0.041)] * 5, (4, 9.0), (8, 9.0))
    assert costs.predict("key", 8) == pytest.approx(0.041)


def test_a_device_that_became_slower_is_followed():
    costs = learnt(*[(1, 0.020)] * 100, *[(1, 0.040)] * 10)
    assert costs.predict("key", 1) == pytest.approx(0.040)


def test_more_rows_are_never_predicted_to_take_less():
    costs = learnt((1, 0.050), (8, 0.040))
    assert costs.predict("key", 8) >= costs.predict("key", 1) > 0


def test_keys_without_end_do_not_fill_the_memory():
    costs = learnt((1, 0.1))
    for key in range(2 * REMEMBERED_KEYS):
        costs.learn(key, 1, 0.1)
    assert costs.predict("key", 1) == 0
    assert costs.predict(2 * REMEMBERED_KEYS - 1, 1) > 0


def test_the_key_that_was_used_least_recently_is_forgotten():
    costs = learnt((1, 0.1))
    for key in (*range(REMEMBERED_KEYS - 1), "key", "one more"):
        costs.learn(key, 1, 0.1)
    assert costs.predict("key", 1) > 0
    assert costs.predict(0, 1) == 0
