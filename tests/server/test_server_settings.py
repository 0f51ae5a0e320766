"""Settings that cannot work are refused when they are made."""

from __future__ import annotations

from typing import Any

import pytest

from relay.server.settings import ServerSettings


def test_the_default_is_loopback():
    assert ServerSettings().host == "127.0.0.1"


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70_000},
        {"max_batch": 0},
        {"prepare_threads": 0},
        {"drain_seconds": -1.0},
        {"idle_timeout": -0.5},
        {"seed": 2**64},
    ],
)
def test_a_value_out_of_range_is_named(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must .*{next(iter(wrong.values()))}"):
        ServerSettings(**wrong)


def test_an_unknown_handshake_is_refused_with_the_nearest():
    wrong: Any = "RoboArena"
    with pytest.raises(
        ValueError, match=r"handshake must be 'openpi' or 'roboarena', got 'RoboArena'; did you mean 'rob"
    ):
        ServerSettings(handshake=wrong)
