"""Fixtures of the client's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_servers import STATE, Ask, LoopbackServers

from free_ports import free_port
from relay import AsyncPolicy, Policy, PolicyClient


def pytest_configure(config: pytest.Config) -> None:
    if sys.version_info < (3, 11):  # asyncio's TLS transports complain there even after an orderly end
        config.addinivalue_line("filterwarnings", "ignore:unclosed transport <asyncio.sslproto:ResourceWarning")


@pytest.fixture
def servers() -> Iterator[LoopbackServers]:
    """Starts WebSocket servers on loopback, and stops them after the test."""
    running = LoopbackServers()
    yield running
    running.stop()


@pytest.fixture
def unused_port() -> int:
    """A port of this machine where nobody listens."""
    return free_port()


async def ask_policy(url: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    with Policy(url, **options) as policy:
        return policy.infer({"state": STATE})["actions"]


async def ask_async_policy(url: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    async with AsyncPolicy(url, **options) as policy:
        return (await policy.infer({"state": STATE}))["actions"]


async def ask_policy_client(url: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    monkeypatch.setenv("WALLE_URL", url)
    with PolicyClient("pi05", **options) as client:
        return client.infer({"state": STATE})


@pytest.fixture(params=[ask_policy, ask_async_policy, ask_policy_client], ids=["Policy", "AsyncPolicy", "PolicyClient"])
def ask(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Connect with one of the three clients, send `STATE` and return the actions."""

    async def with_client(url: str, **options: Any) -> Any:
        return await request.param(url, monkeypatch, **options)

    return with_client
