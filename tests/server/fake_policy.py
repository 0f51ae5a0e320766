"""A policy without a model, told by each observation what to do; and a server around it."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.version import version

from relay.engine.base import Chunk, Failure, Note, PolicySpec, Progress, Work
from relay.protocol.errors import ObservationError
from relay.protocol.messages import Observation, Options
from relay.protocol.msgpack_numpy import pack, unpack
from relay.server.app import Server
from relay.server.settings import ServerSettings

HORIZON, DIM = 4, 3

# Before version 15, websockets knew no proxies.
NO_PROXY: dict[str, Any] = {"proxy": None} if int(version.split(".")[0]) >= 15 else {}

SPEC = PolicySpec(
    model="fake",
    cameras=("front", "wrist"),
    state_dim=DIM,
    action_horizon=HORIZON,
    action_dim=DIM,
    num_steps=10,
    metadata={"reset_pose": [0.0, 1.0]},
)


@dataclass(frozen=True)
class Prepared:
    state: np.ndarray
    do: str
    key: Hashable
    notes: tuple[Note, ...] = ()
    ignored: tuple[str, ...] = ()


@dataclass
class FakeEngine:
    """Answers with the state repeated; `do` in the observation asks for trouble, `key` for a batch of its own.

    While `open` is clear, `infer` waits; every batch is kept as a list of first state values.
    """

    spec: PolicySpec = SPEC
    open: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)
    batches: list[list[float]] = field(default_factory=list)
    options: list[Options] = field(default_factory=list)
    infer_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.open.set()

    def prepare(self, observation: Observation, options: Options) -> Prepared:
        if "state" not in observation:
            raise ObservationError(f"state is missing; {self.spec.model} takes ({self.spec.state_dim},)")
        do = observation.get("do", "")
        if do == "stop iteration":
            return next(iter(()))
        notes = (Note("prompt cut", must_be_told=True),) if do == "note" else ()
        ignored = tuple(key for key in observation if key not in ("state", "do", "key"))
        return Prepared(np.asarray(observation["state"], np.float32), do, observation.get("key", ""), notes, ignored)

    def batch_key(self, prepared: Prepared) -> Hashable:
        return prepared.key

    def warm_up(self, progress: Progress) -> None:
        progress("warming up", 0.5)

    def infer(self, batch: Sequence[Work]) -> Sequence[Chunk | Failure]:
        self.batches.append([float(work.prepared.state[0]) for work in batch])
        self.options += [work.options for work in batch]
        self.began.set()
        assert self.open.wait(20)
        time.sleep(self.infer_seconds)
        return [self._row(work.prepared) for work in batch]

    def _row(self, prepared: Prepared) -> Chunk | Failure:
        actions = np.tile(prepared.state, (HORIZON, 1))
        match prepared.do:
            case "raise":
                raise RuntimeError("cannot read /home/robot/secret/weights.bin")
            case "fail":
                return Failure(ObservationError("state[0] is out of reach"))
            case "nan":
                actions[2, 1] = np.nan
            case "lose device":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            case "fill memory":
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            case "huge":
                return Chunk(np.zeros((2_000_000, 4), np.float32))
            case "groups":
                return Chunk({"arm": actions[:, :2].copy(), "gripper": actions[:, 2:].copy()})
            case "note":
                return Chunk(actions, notes=(Note("slow"),))
            case "remark":
                return Chunk(actions, notes=(Note("camera masked"),))
        return Chunk(actions)


@asynccontextmanager
async def running(load: Any = None, **settings: Any) -> AsyncIterator[Server]:
    """A started server on a free port, drained at the end; `load` may be an engine or a loader."""
    engine = load if load is not None else FakeEngine()
    server = Server(engine if callable(engine) else lambda progress: engine, ServerSettings(port=0, **settings))
    await server.start()
    try:
        yield server
    finally:
        await server.drain()


def dial(port: int, path: str = "/", **options: Any) -> connect:
    """A raw connection, to be awaited or entered."""
    return connect(f"ws://127.0.0.1:{port}{path}", **NO_PROXY, **options)


@asynccontextmanager
async def client(server: Server, path: str = "/", **options: Any) -> AsyncIterator[ClientConnection]:
    """A raw connection whose metadata frame has been read."""
    async with dial(server.port, path, **options) as websocket:
        await websocket.recv()
        yield websocket


async def get(server: Server, path: str, **headers: str) -> tuple[int, str]:
    """Status and text of a plain HTTP request."""

    def request() -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    return await asyncio.to_thread(request)


def observation(value: float = 0.0, **fields: Any) -> bytes:
    return pack({"state": np.full(DIM, value, np.float32), **fields})


async def ask(websocket: ClientConnection, message: bytes | str) -> Any:
    """Send one message and decode the reply, unless it is text."""
    await websocket.send(message)
    reply = await websocket.recv()
    return reply if isinstance(reply, str) else unpack(reply)
