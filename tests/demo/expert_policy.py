"""A stand-in for the trained policy: it plays the episode along on a table of its own, and asks the expert there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from relay.demo.episode import task_of
from relay.demo.robot import chunk_to_commands
from relay.demo.samples import expert_chunk
from relay.demo.tabletop import MAX_STEPS, Tabletop


@dataclass(frozen=True)
class Facts:
    bytes_sent: int = 20_000
    notes: tuple[str, ...] = ()


class ExpertPolicy:
    """Answers as the expert would, for the scenes of these seeds in this order.

    Attributes:
        asked: every observation it was given.
    """

    def __init__(self, seeds: Iterable[tuple[int, ...]], replan_every: int = 4, notes: tuple[str, ...] = ()) -> None:
        self.asked: list[dict[str, Any]] = []
        self.last = Facts(notes=notes)
        self._scenes = (Tabletop(np.random.default_rng(seed)) for seed in seeds)
        self._replan_every = replan_every
        self._table: Tabletop | None = None

    def infer(self, observation: dict[str, Any]) -> Mapping[str, Any]:
        self.asked.append(observation)
        if self._table is None:
            self._table = next(self._scenes)
            self._table.cube, self._table.plate = task_of(observation["prompt"])
        table, actions = self._table, expert_chunk(self._table)
        for command in chunk_to_commands(actions[: self._replan_every], table.tool):
            table.step(command)
            if table.succeeded or table.steps == MAX_STEPS:
                self._table = None
                break
        return {"actions": actions, "server_timing": {"infer_ms": 1.5}}


class IdlePolicy:
    """Answers with actions that go nowhere."""

    last = None

    def __init__(self, shape: tuple[int, ...] = (16, 4), value: float = 0.0) -> None:
        self.asked: list[dict[str, Any]] = []
        self._actions = np.full(shape, value, np.float32)

    def infer(self, observation: dict[str, Any]) -> Mapping[str, Any]:
        self.asked.append(observation)
        return {"actions": self._actions}
