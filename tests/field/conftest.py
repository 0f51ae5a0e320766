"""Fixtures of the field tests, and the way to the stubs of other folders."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / folder) for folder in ("client", "server", "models/pi0")]

from tiny_servers import LoopbackServers  # noqa: E402

from field.loopback import serving  # noqa: E402


@pytest.fixture
def servers() -> Iterator[LoopbackServers]:
    """Starts WebSocket servers of any kind on loopback, and stops them after the test."""
    running = LoopbackServers()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def tiny_url() -> Iterator[str]:
    """A server with a tiny pi0.5, one row a batch."""
    from field.tiny_policy import tiny_engine  # here, because the other tests need no torch

    with serving(tiny_engine()) as server:
        yield server.url
