"""Gripper conventions: one number's meaning in another robot's terms."""

from __future__ import annotations

import numpy as np
import pytest

from relay.robots.gripper import Gripper, convert_gripper

DROID = Gripper(closed_at=1, open_at=0)
LIBERO = Gripper(closed_at=1, open_at=-1)
ALOHA = Gripper(closed_at=0, open_at=1)
CONVENTIONS = [DROID, LIBERO, ALOHA]


@pytest.mark.parametrize("given", CONVENTIONS)
@pytest.mark.parametrize("wanted", CONVENTIONS)
def test_closed_stays_closed_and_open_stays_open(given: Gripper, wanted: Gripper) -> None:
    assert convert_gripper([given.closed_at, given.open_at], given, wanted).tolist() == [
        wanted.closed_at,
        wanted.open_at,
    ]


@pytest.mark.parametrize("given", CONVENTIONS)
@pytest.mark.parametrize("wanted", CONVENTIONS)
def test_there_and_back_is_the_same_value(given: Gripper, wanted: Gripper) -> None:
    values = np.linspace(-1.5, 1.5, 13).reshape(13, 1)
    assert convert_gripper(convert_gripper(values, given, wanted), wanted, given) == pytest.approx(values)


def test_half_closed_is_half_closed_where_closing_is_negative() -> None:
    assert convert_gripper(0.75, DROID, Gripper(closed_at=-1, open_at=1)) == pytest.approx(-0.5)


def test_a_gripper_that_cannot_move_is_refused() -> None:
    with pytest.raises(ValueError, match="closed and open at 1 cannot move"):
        Gripper(1, 1)
