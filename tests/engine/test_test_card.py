"""The test card: its colours have their names' RGB values, and nothing of it is cut off at its own size."""

from __future__ import annotations

import numpy as np

from relay.engine.test_card import draw_test_card


def test_the_bars_are_in_rgb_order() -> None:
    card = draw_test_card("front")
    assert card.shape == (480, 640, 3)
    assert card.dtype == np.uint8
    assert [tuple(card[80, 80 * bar + 40]) for bar in (5, 3, 6)] == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


def test_cards_of_different_cameras_differ() -> None:
    assert not np.array_equal(draw_test_card("front"), draw_test_card("wrist"))
