"""One row whose numbers overflow, among eight of one batch: its own error, and nothing for its neighbours."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fake_policy import running
from folders import write_relay
from numpy.typing import NDArray
from tiny import golden, image

import relay
from relay.engine.base import Work
from relay.models import registry
from relay.models.pi0.config import CAMERAS
from relay.protocol.options import MOST_NOISE

ROBOTS, POISONED = 8, 5


def observation(robot: int) -> dict[str, Any]:
    """One of the golden observations, with a starting noise of this robot's own or one that `HeldBack` poisons."""
    gold, row = golden("pi05"), robot % 2
    return {
        "image": {camera: image(row, i) for i, camera in enumerate(CAMERAS) if gold[f"mask_{camera}"][row]},
        "state": gold["state"][row],
        "tokenized_prompt": gold["tokens"][row],
        "tokenized_prompt_mask": gold["token_mask"][row],
        "noise": noise(robot),
    }


def noise(robot: int) -> NDArray[np.float32]:
    shape = golden("pi05")["noise"][0].shape
    drawn = np.random.default_rng(robot).standard_normal(shape).astype(np.float32)
    return np.full(shape, MOST_NOISE, np.float32) if robot == POISONED else drawn


def poisoned(work: Work) -> Work:
    """The row with a noise that overflows, which no request can bring, in place of the largest that is taken."""
    noise = work.options.noise
    if noise is None or noise.max() < MOST_NOISE:
        return work
    return replace(work, options=replace(work.options, noise=np.full_like(noise, 3e38)))


class HeldBack:
    """Holds the engine's first batch until as many more requests are prepared, which then share the next one."""

    def __init__(self, engine: Any, requests: int) -> None:
        self.sizes: list[int] = []
        self.expected = 1 + requests
        self._infer, self._prepare = engine.infer, engine.prepare
        self._all_there = threading.Event()
        engine.infer, engine.prepare = self.infer, self.prepare

    def prepare(self, *args: Any) -> Any:
        prepared = self._prepare(*args)
        self.expected -= 1
        if self.expected == 0:
            threading.Timer(0.3, self._all_there.set).start()  # the last one has yet to be queued
        return prepared

    def infer(self, batch: Sequence[Any]) -> Any:
        self._all_there.wait(60)
        self.sizes.append(len(batch))
        return self._infer([poisoned(work) for work in batch])


async def test_a_poisoned_row_among_eight_gets_its_own_error_and_its_neighbours_their_solo_actions(
    tmp_path: Path,
) -> None:
    checkpoint = write_relay(tmp_path / "checkpoint", "pi05", num_steps=3)
    engine: Any = registry.load("pi05", checkpoint=checkpoint, dtype="float32", device="cpu", max_batch=ROBOTS)
    async with running(engine) as server:
        await server.ready()
        robots = [relay.AsyncPolicy(f"ws://127.0.0.1:{server.port}", relay.Codec.RAW) for _ in range(ROBOTS + 1)]
        await asyncio.gather(*(robot.__aenter__() for robot in robots))
        batches = HeldBack(engine, ROBOTS)
        first = asyncio.create_task(robots[ROBOTS].infer(observation(0)))
        while batches.expected > ROBOTS:  # it has the device to itself
            await asyncio.sleep(0.01)
        together = await asyncio.gather(
            *(robots[number].infer(observation(number)) for number in range(ROBOTS)), return_exceptions=True
        )
        await first
        healthy = [number for number in range(ROBOTS) if number != POISONED]
        alone = {number: await robots[ROBOTS].infer(observation(number)) for number in healthy}
        await asyncio.gather(*(robot.close() for robot in robots))
    assert batches.sizes == [1, ROBOTS, *[1] * (ROBOTS - 1)]
    assert "not finite" in str(together[POISONED])
    for number, answer in alone.items():
        shared: Any = together[number]
        assert np.abs(shared["actions"] - answer["actions"]).max() <= 1e-5 * answer["actions"].std()
