"""Our server on a thread of its own, and our three clients under one handle, for tests that block."""

from __future__ import annotations

import asyncio
import http.client
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
from fake_policy import DIM, FakeEngine

import relay
from relay.engine.base import Engine
from relay.server.app import Server
from relay.server.settings import ServerSettings

VLLM_PATH = "/v1/realtime/robot/openpi"
PATHS = ("/", VLLM_PATH)
CLIENTS = ("Policy", "PolicyClient", "AsyncPolicy")

Infer = Callable[..., Any]
"""`infer(observation, timeout=None)`: actions, or the error map of `PolicyClient`."""


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs in another thread."""

    server: Server
    port: int

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def health(self) -> int:
        """The status of `/healthz`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status
        finally:
            connection.close()


@contextmanager
def serving(load: Engine | Callable[..., Engine] | None = None, **settings: Any) -> Iterator[Served]:
    """Serve an engine, or what a loader returns, on a free port; drained at the end."""
    engine = load if load is not None else FakeEngine()
    started: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Event, Server]] = queue.SimpleQueue()

    async def main() -> None:
        server = Server(engine if callable(engine) else lambda _: engine, ServerSettings(port=0, **settings))
        await server.start()
        stop = asyncio.Event()
        started.put((asyncio.get_running_loop(), stop, server))
        await stop.wait()
        await server.drain()

    thread = threading.Thread(target=asyncio.run, args=(main(),), name="server")
    thread.start()
    loop, stop, server = started.get(timeout=30)
    try:
        yield Served(server, server.port)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


@contextmanager
def robot(client: str, url: str, *, connect_timeout: float | None = 30) -> Iterator[Infer]:
    """One of our clients, by its class's name, connected to the server at `url`."""
    with {"Policy": _policy, "PolicyClient": _policy_client, "AsyncPolicy": _async_policy}[client](
        url, connect_timeout
    ) as infer:
        yield infer


def state(value: float, **fields: Any) -> dict[str, Any]:
    """An observation for the stub engine, which answers with its state."""
    return {"state": np.full(DIM, value, np.float32), **fields}


def refused(infer: Infer, asked: dict[str, Any]) -> str:
    """The error that a request is answered with, in the client's way of telling it."""
    try:
        reply = infer(asked)
    except RuntimeError as error:
        return str(error)
    assert isinstance(reply, dict)
    assert reply["type"] == "error"
    return reply["message"]


@contextmanager
def _policy(url: str, connect_timeout: float | None) -> Iterator[Infer]:
    with relay.Policy(url, connect_timeout=connect_timeout) as policy:
        yield lambda observation, timeout=None: policy.infer(observation, timeout=timeout)["actions"]


@contextmanager
def _policy_client(url: str, connect_timeout: float | None) -> Iterator[Infer]:
    with patch.dict(os.environ, WALLE_URL=url):
        client = relay.PolicyClient("pi05", connect_timeout=connect_timeout)
    with client:
        yield lambda observation, timeout=None: client.infer(observation, timeout=timeout)


@contextmanager
def _async_policy(url: str, connect_timeout: float | None) -> Iterator[Infer]:
    loop = asyncio.new_event_loop()

    async def opened() -> relay.AsyncPolicy:
        return await relay.AsyncPolicy(url, connect_timeout=connect_timeout)

    def infer(observation: dict[str, Any], timeout: float | None = None) -> Any:
        return loop.run_until_complete(policy.infer(observation, timeout=timeout))["actions"]

    try:
        policy = loop.run_until_complete(opened())
        try:
            yield infer
        finally:
            loop.run_until_complete(policy.close())
    finally:
        loop.close()
