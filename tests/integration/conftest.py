"""A real server with the shipped demo policy, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from relay.cli.local_server import LocalServer


@pytest.fixture(scope="session")
def demo_url() -> Iterator[str]:
    """`relay serve demo`, one row per batch, so that seeded replies are equal to the byte."""
    with LocalServer(["demo", "--max-batch", "1"]) as server:
        server.wait_until_ready(lambda phase: None)
        yield server.url
