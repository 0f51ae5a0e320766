"""Who goes next, by rule and in play: a device and its robots on a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Hashable

import pytest
from queue_simulation import ByUrgency, FirstComeFirstServed, Robot, fleet, simulate

from relay.server.batch_cost import BatchCosts
from relay.server.waiting_line import PATIENCE_S, Waiting, WaitingLine

ROW_S, BATCH_S = 0.003, 0.017


class Line:
    """A waiting line of names, on a device of 20 ms for one row and 3 ms for each further one."""

    def __init__(self) -> None:
        costs = BatchCosts()
        for rows in (1, 8):
            costs.learn("a", rows, ROW_S * rows + BATCH_S)
        self.line: WaitingLine[str] = WaitingLine(costs)

    def join(
        self, name: str, client: Hashable = None, *, came: float = 0.0, deadline: float = math.inf, key: str = "a"
    ) -> Waiting[str]:
        waiting = Waiting(name, name if client is None else client, key, came, deadline)
        self.line.join(waiting)
        return waiting

    def take(self, now: float = 0.0, most: int = 8) -> str:
        return "".join(waiting.item for waiting in self.line.take_batch(now, most))


def test_nobody_is_taken_from_an_empty_line():
    assert Line().take() == ""


def test_without_deadlines_who_came_first_goes_first():
    line = Line()
    for name, came in (("y", 0.2), ("x", 0.1), ("z", 0.3)):
        line.join(name, came=came)
    assert [line.take(0.3, most=2), line.take(0.3, most=2)] == ["xy", "z"]


def test_the_tightest_deadline_goes_first():
    line = Line()
    line.join("l", deadline=0.5)
    line.join("t", deadline=0.1)
    assert line.take(most=1) == "t"


def test_a_deadline_further_off_than_the_patience_goes_after_those_without():
    line = Line()
    line.join("d", deadline=PATIENCE_S + 0.1)
    line.join("n")
    assert line.take(most=1) == "n"


def test_only_equal_keys_share_a_batch():
    line = Line()
    for name, key in (("x", "a"), ("y", "b"), ("z", "a")):
        line.join(name, key=key)
    assert [line.take(), line.take()] == ["xz", "y"]


def test_a_batch_grows_no_further_than_its_tightest_deadline_allows():
    line = Line()
    line.join("t", deadline=0.027)  # 26 ms for three rows, 29 ms for four
    for name in "uvwx":
        line.join(name)
    assert line.take() == "tuv"


def test_a_deadline_that_the_batch_would_miss_leaves_its_request_out_and_takes_the_next():
    line = Line()
    line.join("t", deadline=0.021)
    line.join("u", deadline=0.022)
    line.join("v")
    assert line.take() == "t"
    assert line.take(0.0) == "u"


def test_each_client_has_one_row_before_any_has_two():
    line = Line()
    for name in "1234":
        line.join(name, "greedy")
    for came, name in enumerate("xyz", start=1):
        line.join(name, came=came / 100)
    assert line.take(0.03, most=5) == "1xyz2"


def test_an_alone_client_fills_the_batch_with_its_own():
    line = Line()
    for name in "1234":
        line.join(name, "only")
    assert line.take() == "1234"


def test_what_stood_behind_its_own_counts_as_come_when_it_reaches_the_front():
    line = Line()
    line.join("1", "greedy")
    line.join("2", "greedy")
    line.join("x", came=0.01)
    assert [line.take(0.02, most=1) for _ in range(3)] == ["1", "x", "2"]


def test_one_clients_requests_keep_their_order_whatever_their_deadlines():
    line = Line()
    line.join("1", "robot", deadline=9)
    line.join("2", "robot", deadline=0.5)
    assert line.take() == "12"


def test_what_cannot_meet_its_deadline_gives_way_and_runs_when_nothing_else_waits():
    line = Line()
    line.join("h", deadline=0.019)
    line.join("x", deadline=0.1)
    assert [line.take(), line.take()] == ["x", "h"]


def test_hopeless_requests_share_a_batch():
    line = Line()
    line.join("g", deadline=0.018)
    line.join("h", deadline=0.019)
    assert line.take() == "gh"


def test_in_a_crowd_a_full_batch_goes_before_a_request_that_would_shrink_it():
    line = Line()
    line.join("t", deadline=0.021)
    for number in range(24):
        line.join("x", number, came=number / 1000, deadline=0.5)
    assert line.take() == "x" * 8


def test_expired_requests_are_taken_out_wherever_they_stand():
    line = Line()
    line.join("1", "robot")
    line.join("2", "robot", deadline=0.1)
    line.join("x", deadline=0.2)
    assert [waiting.item for waiting in line.line.take_expired(0.15)] == ["2"]
    assert line.take(0.15) == "x1"


def test_who_leaves_is_gone_and_can_leave_only_once():
    line = Line()
    first, second = line.join("1", "robot"), line.join("2", "robot", deadline=9)
    assert line.line.leave(first, 0.1)
    assert not line.line.leave(first, 0.1)
    assert (len(line.line), second.came) == (1, 0.1)
    assert line.take() == "2"
    assert not line.line.leave(second, 0.1)


LOADS = range(70, 131, 10)
SEEDS = range(20)


@pytest.fixture(scope="module")
def played() -> dict[int, tuple[int, int, int, float]]:
    """By load in percent, over all seeds: misses in order of arrival, ours, requests with deadlines, longest wait."""
    table: dict[int, tuple[int, int, int, float]] = {}
    for load in LOADS:
        plain, ours, asked, longest = 0, 0, 0, 0.0
        for seed in SEEDS:
            robots = fleet(load / 100, seed)
            plain += simulate(FirstComeFirstServed(), robots, 5, seed).missed
            outcome = simulate(ByUrgency(), robots, 5, seed)
            ours += outcome.missed
            asked += outcome.with_deadline
            longest = max(longest, outcome.longest_wait)
        table[load] = plain, ours, asked, longest
    return table


@pytest.mark.parametrize("load", LOADS)
def test_no_more_deadlines_are_missed_than_in_order_of_arrival(
    played: dict[int, tuple[int, int, int, float]], load: int
):
    plain, ours, asked, _ = played[load]
    assert asked > 5_000
    assert ours <= plain


@pytest.mark.parametrize("load", [load for load in LOADS if load >= 100])
def test_under_overload_less_than_half_as_many_are_missed(played: dict[int, tuple[int, int, int, float]], load: int):
    plain, ours, _, _ = played[load]
    assert ours < plain / 2


@pytest.mark.parametrize("load", LOADS)
def test_nobody_starves(played: dict[int, tuple[int, int, int, float]], load: int):
    """A robot without deadlines waits at most for its patience, the batch then running, and its own requests before.

    Of those it can have three, and each reaches the front with a patience of its own.
    """
    assert played[load][3] < 4 * (PATIENCE_S + 0.1)


@pytest.mark.parametrize("patience", [0.1, 0.3])
def test_a_robot_without_deadline_is_served_among_any_number_with_one(patience: float):
    robots = [Robot(0.1), *(Robot(0.05, patience) for _ in range(30))]  # three times what the device can do
    outcome = simulate(ByUrgency(), robots, 5, seed=1)
    assert len(outcome.waits[0]) > 10
    assert max(outcome.waits[0]) < 4 * (PATIENCE_S + 0.1)


def test_a_robot_that_asks_without_pause_gets_no_more_than_its_turn():
    patient = [Robot(0.2) for _ in range(23)]  # 60 % load
    quiet = simulate(ByUrgency(), [*patient, Robot(0.2)], 5, seed=2)
    beside = simulate(ByUrgency(), [*patient, Robot(0.001)], 5, seed=2)
    assert max(max(beside.waits[robot]) for robot in range(23)) < 2 * max(
        max(quiet.waits[robot]) for robot in range(23)
    )
    assert len(beside.waits[23]) > 2 * len(quiet.waits[23])
