"""Our three clients under one blocking handle; asyncio's runs on a loop that never stands still, as in a program."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import relay
from relay.client.exchange import LastCall

CLIENTS = ("Policy", "PolicyClient", "AsyncPolicy")

_ENVIRONMENT = threading.Lock()  # it is the process's, and tests open clients in several threads


@dataclass
class Handle:
    """A client, whichever it is."""

    client: Any
    loop: asyncio.AbstractEventLoop | None = None

    def infer(self, observation: dict[str, Any], timeout: float | None = None) -> Any:
        """The actions, or the error map of `PolicyClient`."""
        reply = self._done(self.client.infer(observation, timeout=timeout))
        return reply if isinstance(self.client, relay.PolicyClient) else reply["actions"]

    def reset(self, timeout: float | None = None) -> None:
        self._done(self.client.reset(timeout=timeout))

    def close(self) -> None:
        self._done(self.client.close())

    @property
    def last(self) -> LastCall:
        assert self.client.last is not None
        return self.client.last

    @property
    def reconnects(self) -> int:
        return self.client.reconnects

    def _done(self, answer: Any) -> Any:
        if self.loop is None:
            return answer
        return asyncio.run_coroutine_threadsafe(answer, self.loop).result(60)


@contextmanager
def each_client(name: str, url: str, **options: Any) -> Iterator[Handle]:
    """A client by its class's name, connected to the server at `url`."""
    with _opened(name, url, options) as handle:
        try:
            yield handle
        finally:
            handle.close()


@contextmanager
def _opened(name: str, url: str, options: dict[str, Any]) -> Iterator[Handle]:
    if name == "Policy":
        yield Handle(relay.Policy(url, **options))
    elif name == "PolicyClient":
        with _ENVIRONMENT, patch.dict(os.environ, WALLE_URL=url):
            client = relay.PolicyClient("pi05", **options)
        yield Handle(client)
    else:
        with running_loop() as loop:

            async def opened() -> relay.AsyncPolicy:
                return await relay.AsyncPolicy(url, **options)

            yield Handle(done(opened(), loop), loop)


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def done(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Any:
    return asyncio.run_coroutine_threadsafe(work, loop).result(60)
