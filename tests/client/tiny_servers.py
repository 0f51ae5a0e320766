"""Tiny policy servers on loopback, and a connection that needs no network."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from relay.client.connection import Greeting
from relay.protocol import msgpack_numpy
from relay.protocol.limits import SUBPROTOCOL

METADATA = {
    "model": "pi05",
    "cameras": ["base_0_rgb"],
    "state_dim": 3,
    "action_horizon": 4,
    "action_dim": 2,
    "num_steps": 10,
}
VLLM_METADATA = {
    "image_resolution": [224, 224],
    "needs_session_id": False,
    "action_space": "joint_position",
    "action_horizon": 4,
    "action_dim": 2,
}
STATE = np.full(3, 5, np.float32)
ACTIONS = np.arange(8, dtype=np.float32).reshape(4, 2)

Behaviour = Callable[[ServerConnection], Awaitable[None]]
Ask = Callable[..., Awaitable[Any]]


class FakeConnection:
    """Answers with what it was given, in order; an exception is raised instead. Remembers what was sent."""

    def __init__(self, greeting: Greeting, answers: list[Any]) -> None:
        self.greeting = greeting
        self.answers = deque(answers)
        self.sent: list[Any] = []
        self.timeouts: list[float | None] = []
        self.late_replies = 0
        self.closed = False

    def request(self, message: bytes, timeout: float | None) -> bytes | str:
        self.sent.append(msgpack_numpy.unpack(message))
        self.timeouts.append(timeout)
        answer = self.answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, (str, bytes)) else msgpack_numpy.pack(answer)

    def close(self) -> None:
        self.closed = True


class LoopbackServers:
    """Starts WebSocket servers that behave as told, each on its own loop and thread; stops them all in the end."""

    def __init__(self) -> None:
        self._running = ExitStack()

    def start(self, behaviour: Behaviour, *, relay: bool = False, port: int = 0, **options: Any) -> str:
        """Serve and return the URL; `relay` selects the subprotocol, as our own server does."""
        if relay:
            options["subprotocols"] = [SUBPROTOCOL]
        return self._running.enter_context(_serving(behaviour, port, options))

    def stop(self) -> None:
        self._running.close()


@contextmanager
def _serving(behaviour: Behaviour, port: int, options: dict[str, Any]) -> Iterator[str]:
    started: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Event, int]] = queue.SimpleQueue()

    async def until_hung_up(websocket: ServerConnection) -> None:
        with suppress(ConnectionClosed):
            await behaviour(websocket)

    async def main() -> None:
        stop = asyncio.Event()
        async with serve(
            until_hung_up, "127.0.0.1", port, compression=None, max_size=None, ping_interval=None, **options
        ) as server:
            bound = next(iter(server.sockets)).getsockname()[1]
            started.put((asyncio.get_running_loop(), stop, bound))
            await stop.wait()
        if "ssl" in options:
            await asyncio.sleep(0.1)  # until TLS connections that were refused have said goodbye, or asyncio complains

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    loop, stop, bound = started.get(timeout=10)
    try:
        yield f"{'wss' if 'ssl' in options else 'ws'}://127.0.0.1:{bound}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def openpi_server(policy: Callable[[dict[str, Any]], Any], metadata: dict[str, Any] | None = None) -> Behaviour:
    """OpenPI's framing as the stock server has it, the policy on the event loop included."""

    async def behave(websocket: ServerConnection) -> None:
        await websocket.send(msgpack_numpy.pack({} if metadata is None else metadata))
        while True:
            observation = msgpack_numpy.unpack(await websocket.recv())  # pyright: ignore[reportArgumentType]
            try:
                answer = policy(observation)
            except Exception:
                await websocket.send(traceback.format_exc())
                await websocket.close(1011, "Internal server error. Traceback included in previous frame.")
                return
            await websocket.send(answer if isinstance(answer, str) else msgpack_numpy.pack(answer))

    return behave


def vllm_server(policy: Callable[[dict[str, Any]], Any], metadata: dict[str, Any] | None = None) -> Behaviour:
    """vLLM-Omni's framing: bare arrays, a map that confirms a reset, error maps that leave the connection open."""

    async def behave(websocket: ServerConnection) -> None:
        await websocket.send(msgpack_numpy.pack(VLLM_METADATA if metadata is None else metadata))
        while True:
            observation = msgpack_numpy.unpack(await websocket.recv())  # pyright: ignore[reportArgumentType]
            try:
                reset = observation.get("endpoint") == "reset"
                answer = {"status": "reset successful"} if reset else policy(observation)
            except Exception as error:
                answer = {"type": "error", "message": str(error)}
            await websocket.send(msgpack_numpy.pack(answer))

    return behave


def echo_state(observation: dict[str, Any]) -> dict[str, Any]:
    """A policy whose actions show which observation they belong to; `sleep` makes it slow."""
    time.sleep(observation.get("sleep", 0.0))
    return {"actions": np.asarray(observation["state"], np.float32), "policy_timing": {"infer_ms": 0.1}}
