"""Fixtures of the client's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tiny_servers import LoopbackServers


@pytest.fixture
def servers() -> Iterator[LoopbackServers]:
    """Starts WebSocket servers on loopback, and stops them after the test."""
    running = LoopbackServers()
    yield running
    running.stop()
