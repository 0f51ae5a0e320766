"""Sessions and several robots."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from counting_policy import CountingEngine, all_closed, count_of
from fake_policy import FakeEngine, ask, client, running
from tiny import image

import relay
from field.loopback import CLIENTS, PATHS, refused, robot, serving, state
from field.tiny_policy import BASE, LEFT, tiny_engine
from field.tiny_policy import observation as tiny_observation
from relay.engine.base import Chunk, Failure, Progress, Work
from relay.models.pi0.engine import Pi0Engine
from relay.protocol.msgpack_numpy import pack

RESET = pack({"endpoint": "reset"})


# ---- 3.1: sessions belong to a connection


@pytest.mark.parametrize("name", CLIENTS)
def test_lesson_3_1_two_connections_that_both_say_default_have_two_histories(name: str):
    """vllm-project/vllm-omni#2162 (review)."""

    def drive(infer: Any, first: float) -> list[tuple[float, ...]]:
        return [tuple(infer(state(first + i, session_id="default"))[0]) for i in range(50)]

    with (
        serving(CountingEngine()) as server,
        robot(name, server.url) as left,
        robot(name, server.url) as right,
        ThreadPoolExecutor(2) as threads,
    ):
        histories = [threads.submit(drive, left, 1_000), threads.submit(drive, right, 2_000)]
        for history, first in zip(histories, (1_000, 2_000), strict=True):
            assert history.result(30) == [(i + 1, first, first + i) for i in range(50)]


# ---- 3.2: any number of sequential sessions


def resident_pages() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads resident memory from /proc")
async def test_lesson_3_2_a_thousand_sessions_in_a_row_leave_memory_and_slots_as_they_were():
    """vllm-project/vllm-omni#5295. Sessions of one connection end with `reset`, as between episodes."""
    engine = CountingEngine()
    slots: dict[int, int] = {}
    pages: dict[int, int] = {}

    async def episode(websocket: Any, number: int) -> None:
        counts = [await count_of(websocket, session_id=f"episode {number}") for _ in range(4)]
        assert counts == [1, 2, 3, 4]
        if number in (20, 1_000):
            slots[number], pages[number] = len(engine.open), resident_pages()

    async with running(engine) as server:
        async with client(server) as websocket:
            for number in range(1, 501):
                await episode(websocket, number)
                await ask(websocket, RESET)
        for number in range(501, 1_001):
            async with client(server) as websocket:
                await episode(websocket, number)
        await all_closed(engine, server)
    assert engine.opened == 1_000
    assert abs(slots[1_000] - slots[20]) <= 1  # the connection before may still be closing
    assert pages[1_000] <= 1.05 * pages[20]


# ---- 3.3: loaded once


@pytest.mark.parametrize("path", PATHS)
def test_lesson_3_3_ten_evaluation_runs_load_the_policy_once(path: str):
    """huggingface/lerobot#2866, #3160."""
    loads: list[str] = []

    def load(progress: Progress) -> FakeEngine:
        loads.append(threading.current_thread().name)
        return FakeEngine()

    with serving(load) as server:
        for run in range(10):
            with relay.Policy(server.url + path) as policy:
                assert policy.infer(state(run))["actions"][0, 0] == run
    assert len(loads) == 1


# ---- 3.4: true batching behind the server, and advice for those who send a batch


@pytest.mark.parametrize("name", CLIENTS)
def test_lesson_3_4_a_batch_of_frames_is_refused_with_advice(name: str, tiny_url: str):
    """Physical-Intelligence/openpi#399 and PR #941."""
    with robot(name, tiny_url) as infer:
        frames = np.zeros((2, 224, 224, 3), np.uint8)
        text = refused(infer, tiny_observation(image={BASE: frames}))
    for part in (f"image['{BASE}']", "(2, 224, 224, 3)", "expected (H, W, 3)", "one connection per robot"):
        assert part in text


def test_lesson_3_4_a_batch_of_states_is_refused_with_both_shapes(tiny_url: str):
    """Physical-Intelligence/openpi#399."""
    with robot("Policy", tiny_url) as infer:
        text = refused(infer, tiny_observation(state=np.zeros((2, 14), np.float32)))
    assert "state has shape (2, 14); this policy expects 14 values" in text


class CheapBatches(FakeEngine):
    """A batch of eight takes twice as long as one row."""

    def infer(self, batch: Sequence[Work]) -> Sequence[Chunk | Failure]:
        self.infer_seconds = ROW_S * cost(len(batch))
        return super().infer(batch)


ROW_S = 0.3


def cost(rows: int) -> float:
    return 1 + (rows - 1) / 7


def test_lesson_3_4_eight_connections_that_ask_at_once_are_merged():
    """Physical-Intelligence/openpi#399. Alone they would take eight times as long as one, merged less than four times.

    The time on the device is what counts; a busy machine adds its own to that on the clock.
    """
    engine = CheapBatches()
    with serving(engine) as server, ExitStack() as stack, ThreadPoolExecutor(8) as threads:
        robots = [stack.enter_context(robot("Policy", server.url)) for _ in range(8)]
        replies = [threads.submit(infer, state(value)) for value, infer in enumerate(robots)]
        assert [reply.result(30)[0, 0] for reply in replies] == list(range(8))
    assert sum(cost(len(rows)) for rows in engine.batches) < 4


class Gated(Pi0Engine):
    """A tiny policy whose batches wait until they are let go, and are counted."""

    gate: threading.Event
    began: threading.Event
    rows: list[int]

    def infer(self, batch: Sequence[Work]) -> Sequence[Chunk | Failure]:
        self.began.set()
        assert self.gate.wait(20)
        self.rows.append(len(batch))
        return super().infer(batch)


def test_lesson_3_4_merged_replies_equal_those_of_the_same_seeds_alone():
    """Physical-Intelligence/openpi#399. Tolerance: 1e-5 of the standard deviation, in float32."""
    engine = tiny_engine(max_batch=8)
    engine.__class__ = Gated
    assert isinstance(engine, Gated)
    engine.gate, engine.began, engine.rows = threading.Event(), threading.Event(), []
    engine.gate.set()
    requests = [tiny_observation(seed=seed, image={BASE: image(seed % 2, 0)}) for seed in range(8)]
    with serving(engine) as server, ExitStack() as stack, ThreadPoolExecutor(8) as threads:
        robots = [stack.enter_context(robot("Policy", server.url)) for _ in range(8)]
        alone = [infer(request) for infer, request in zip(robots, requests, strict=True)]
        engine.rows.clear()
        engine.began.clear()
        engine.gate.clear()
        first = threads.submit(robots[0], requests[0])
        assert engine.began.wait(10)
        others = [threads.submit(infer, request) for infer, request in zip(robots[1:], requests[1:], strict=True)]
        deadline = time.monotonic() + 10
        while server.server.outstanding < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)  # until the last of them is prepared
        engine.gate.set()
        merged = [reply.result(30) for reply in (first, *others)]
    assert engine.rows == [1, 7]
    for reply, expected in zip(merged, alone, strict=True):
        np.testing.assert_allclose(reply, expected, rtol=0, atol=1e-5 * float(np.std(expected)))


# ---- 3.5: the same seed gives the same bytes


def test_lesson_3_5_the_same_seed_gives_the_same_bytes_at_any_time_and_on_any_connection(tiny_url: str):
    """Physical-Intelligence/openpi#841."""
    asked = tiny_observation(num_steps=3)
    random = np.random.default_rng(0)
    with relay.Policy(tiny_url, codec=relay.Codec.RAW) as policy, relay.Policy(tiny_url) as other:
        first = policy.infer(asked)["actions"].tobytes()
        for number in range(2, 500):
            frame = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            traffic = policy if number % 2 else other
            traffic.infer(
                tiny_observation(
                    image={LEFT if number % 3 else BASE: frame},
                    state=random.uniform(-1, 1, 14),
                    seed=number,
                    prompt="put it down" if number % 5 else "pick up the fork",
                )
            )
        assert policy.infer(asked)["actions"].tobytes() == first
        policy.reset()
        assert policy.infer(asked)["actions"].tobytes() == first
    with relay.Policy(tiny_url, codec=relay.Codec.RAW) as second:
        assert second.infer(asked)["actions"].tobytes() == first
        assert second.infer({**asked, "seed": 8})["actions"].tobytes() != first


@pytest.mark.parametrize("name", CLIENTS)
def test_lesson_3_5_actions_that_are_not_finite_are_an_error_and_no_array(name: str):
    """Physical-Intelligence/openpi#841."""
    with serving() as server, robot(name, server.url) as infer:
        text = refused(infer, state(1, do="nan"))
    expected = "Internal inference error" if name == "PolicyClient" else "actions[2, 1] is not finite"
    assert expected in text
