"""A real server of ours in a thread of this process, around any engine; for clients that block or run elsewhere."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from relay.engine.base import Chunk, Engine, Progress, Work
from relay.engine.worker import LoadEngine
from relay.server.app import Server
from relay.server.settings import ServerSettings


class AnswersWhenPrepared:
    """What is alike in engines that know their answer in `prepare`: `spec` and `prepare` are left to them.

    `prepare` returns an object with `chunk`, `notes` and `ignored`.
    """

    def batch_key(self, prepared: Any) -> None:
        return None

    def infer(self, batch: Sequence[Work]) -> Sequence[Chunk]:
        return [Chunk(work.prepared.chunk) for work in batch]

    def warm_up(self, progress: Progress) -> None:
        progress("warming up", 1.0)


@contextmanager
def serving(policy: Engine | LoadEngine, **settings: Any) -> Iterator[str]:
    """Serve an engine, or what loads one, on loopback, by default on a free port; yields the URL, drains in the end."""
    started: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Event, int]] = queue.SimpleQueue()

    async def main() -> None:
        load = policy if callable(policy) else lambda _: policy
        server = Server(load, ServerSettings(**{"port": 0, **settings}))
        await server.start()
        stop = asyncio.Event()
        started.put((asyncio.get_running_loop(), stop, server.port))
        await stop.wait()
        await server.drain()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    loop, stop, port = started.get(timeout=30)
    try:
        yield f"ws://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
