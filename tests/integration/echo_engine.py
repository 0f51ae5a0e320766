"""A policy that answers with the state it was sent, and the two paths that serve it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from example_traffic import read, written
from numpy.typing import NDArray
from threaded_server import AnswersWhenPrepared

from relay.engine.base import Chunk, PolicySpec, Work
from relay.protocol.errors import ObservationError
from relay.protocol.messages import Observation, Options

OPENPI, VLLM = "/", "/v1/realtime/robot/openpi"
PATHS = {"openpi": OPENPI, "vllm": VLLM}


@dataclass(frozen=True, slots=True)
class Told:
    """What to answer and how long to take over it."""

    chunk: NDArray[np.float32]
    seconds: float
    notes: Sequence[Any] = ()
    ignored: Sequence[str] = ()


class EchoEngine(AnswersWhenPrepared):
    """One row per reply, equal to `state`; `sleep` in the observation is how many seconds the device takes."""

    spec = PolicySpec("echo", ("front",), state_dim=3, action_horizon=1, action_dim=3, num_steps=1)

    def prepare(self, observation: Observation, options: Options) -> Told:
        state = np.asarray(observation["state"], np.float32)
        if state.shape != (3,):
            raise ObservationError(f"state has {state.size} values; echo expects 3")
        return Told(state[None], float(observation.get("sleep", 0.0)))

    def infer(self, batch: Sequence[Work]) -> Sequence[Chunk]:
        time.sleep(max(work.prepared.seconds for work in batch))
        return [Chunk(work.prepared.chunk) for work in batch]


def request(value: float = 0.0, **fields: Any) -> bytes:
    return written({"state": np.full(3, value, np.float32), **fields})


def answered(frame: bytes | str) -> float:
    """The value of the request that a reply of either path belongs to."""
    reply = read(frame)
    actions = reply["actions"] if isinstance(reply, dict) else reply
    assert actions.shape == (1, 3)
    return float(actions[0, 0])
