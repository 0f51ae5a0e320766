"""What runs with what, in which order, and what leaves the queue unanswered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_policy import SPEC, FakeEngine

from relay.engine.worker import DeviceFault, Worker
from relay.protocol.messages import Infer, Options
from relay.server.preparation import Expired, Preparation, Ready
from relay.server.scheduler import Answer, Scheduler, ServerFull
from relay.server.sessions import Session
from relay.server.settings import ServerSettings


@asynccontextmanager
async def scheduling(engine: FakeEngine, *, prepare_threads: int = 1, **settings: int) -> AsyncIterator[Scheduler]:
    worker = Worker(lambda progress: engine, lambda fatal: None)
    scheduler = Scheduler(worker, ServerSettings(prepare_threads=prepare_threads, **settings))
    worker.start()
    try:
        yield scheduler
    finally:
        engine.open.set()
        scheduler.close()
        assert await worker.stop(5)


def infer(value: float, options: Options | None = None, **fields: str) -> Infer:
    return Infer({"state": np.full(3, value, np.float32), **fields}, options or Options())


OF_ANOTHER_KIND = infer(0, key="long" * 1_000)
"""Has the policy loaded, and leaves it open how long small observations take, which so are prepared in threads."""


async def submit(scheduler: Scheduler, request: Infer, client: Hashable = "robot") -> Answer:
    return await scheduler.submit(request, Session("default"), client)


async def queued(scheduler: Scheduler, *requests: Infer) -> list[asyncio.Task[Answer]]:
    """Submit in this order, each as a client of its own, and come back when all are prepared and wait."""
    tasks = [asyncio.create_task(submit(scheduler, request, client)) for client, request in enumerate(requests)]
    for _ in range(200):
        await asyncio.sleep(0.005)
        if scheduler.waiting >= len(requests):
            return tasks
    raise AssertionError(f"{scheduler.waiting} of {len(requests)} wait")


@asynccontextmanager
async def busy(engine: FakeEngine, scheduler: Scheduler) -> AsyncIterator[None]:
    """The device is taken by request 99 inside, and free again after."""
    engine.open.clear()
    first = asyncio.create_task(submit(scheduler, infer(99)))
    await asyncio.to_thread(engine.began.wait, 5)
    yield
    engine.open.set()
    await first


async def test_an_idle_device_takes_one_request_at_once():
    engine = FakeEngine()
    async with scheduling(engine) as scheduler:
        answer = await submit(scheduler, infer(1))
        assert np.array_equal(answer.actions, np.ones((4, 3), np.float32))
        assert engine.batches == [[1]]


async def test_what_waits_with_the_same_key_shares_a_batch():
    engine = FakeEngine()
    async with scheduling(engine) as scheduler:
        async with busy(engine, scheduler):
            tasks = await queued(scheduler, infer(1, key="a"), infer(2, key="b"), infer(3, key="a"), infer(4, key="b"))
        answers = await asyncio.gather(*tasks)
        assert engine.batches == [[99], [1, 3], [2, 4]]
        assert [float(np.asarray(answer.actions)[0, 0]) for answer in answers] == [1, 2, 3, 4]


@pytest.mark.parametrize(("policy_most", "server_most"), [(2, 8), (8, 2)])
async def test_a_batch_holds_no_more_than_policy_and_server_allow(policy_most: int, server_most: int):
    engine = FakeEngine(spec=replace(SPEC, max_batch=policy_most))
    async with scheduling(engine, max_batch=server_most) as scheduler:
        async with busy(engine, scheduler):
            tasks = await queued(scheduler, *(infer(value) for value in range(5)))
        await asyncio.gather(*tasks)
        assert engine.batches == [[99], [0, 1], [2, 3], [4]]


async def test_a_cancelled_request_is_skipped_and_leaves_the_queue():
    engine = FakeEngine()
    async with scheduling(engine) as scheduler:
        async with busy(engine, scheduler):
            tasks = await queued(scheduler, infer(1), infer(2), infer(3))
            tasks[1].cancel()
            await asyncio.sleep(0.01)
            assert scheduler.waiting == 2
        await asyncio.gather(tasks[0], tasks[2])
        assert engine.batches == [[99], [1, 3]]


async def test_beyond_the_limit_a_request_is_refused_and_the_rest_is_answered():
    engine = FakeEngine()
    async with scheduling(engine, max_queue=2) as scheduler:
        async with busy(engine, scheduler):
            (waiting,) = await queued(scheduler, infer(1))
            with pytest.raises(ServerFull, match="2 requests are waiting"):
                await submit(scheduler, infer(2))
        await waiting
        await submit(scheduler, infer(3))


async def test_a_failing_row_raises_for_its_request_only():
    engine = FakeEngine()
    async with scheduling(engine) as scheduler:
        async with busy(engine, scheduler):
            tasks = await queued(scheduler, infer(1), infer(2, do="raise"), infer(3))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [Answer, RuntimeError, Answer]


async def test_an_error_that_no_future_can_carry_is_raised_all_the_same():
    async with scheduling(FakeEngine()) as scheduler:
        with pytest.raises((StopIteration, RuntimeError)):
            await submit(scheduler, infer(1, do="stop iteration"))


async def test_a_key_that_cannot_be_compared_fails_its_request_only():
    async with scheduling(FakeEngine()) as scheduler:
        with pytest.raises(TypeError, match="unhashable"):
            await submit(scheduler, Infer({"state": np.zeros(3), "key": [1]}))
        await submit(scheduler, infer(1))


async def test_timings_add_up_to_the_time_spent():
    engine = FakeEngine()
    async with scheduling(engine) as scheduler:
        async with busy(engine, scheduler):
            (task,) = await queued(scheduler, infer(1))
            await asyncio.sleep(0.02)
        answer = await task
        assert answer.queue_ms >= 15
        assert answer.prepare_ms > 0
        assert answer.model_ms > 0


async def test_notes_of_preparation_and_inference_come_together():
    async with scheduling(FakeEngine()) as scheduler:
        notes = (await submit(scheduler, infer(1, do="note"))).notes
        assert [note.text for note in notes] == ["prompt cut", "slow"]


async def test_the_default_seed_reaches_the_engine():
    engine = FakeEngine()
    async with scheduling(engine, seed=5) as scheduler:
        await submit(scheduler, infer(1))
        await submit(scheduler, replace(infer(1), options=Options(seed=6)))
        assert [options.seed for options in engine.options] == [5, 6]


async def test_a_lost_device_fails_what_runs_and_what_waits():
    engine = FakeEngine()
    async with scheduling(engine) as scheduler:
        engine.open.clear()
        tasks = [asyncio.create_task(submit(scheduler, infer(1, do="lose device")))]
        await asyncio.to_thread(engine.began.wait, 5)
        tasks += await queued(scheduler, infer(2), infer(3, key="b"))
        engine.open.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [DeviceFault] * 3


async def test_a_request_whose_deadline_has_passed_is_failed_instead_of_run():
    engine = FakeEngine()
    async with scheduling(engine) as scheduler:
        async with busy(engine, scheduler):
            late, patient = await queued(
                scheduler, infer(1, Options(deadline_ms=200.0)), infer(2, Options(deadline_ms=60_000.0))
            )
            await asyncio.sleep(0.25)
        with pytest.raises(Expired, match="deadline_ms: 200 ms had passed"):
            await late
        assert np.array_equal((await patient).actions, np.full((4, 3), 2.0))
    assert engine.batches == [[99], [2]]


async def test_a_request_that_expires_while_another_is_prepared_is_failed_too():
    engine = FakeEngine()
    async with scheduling(engine) as scheduler:
        with pytest.raises(Expired, match=r"deadline_ms: 0\.0001 ms had passed before the device was free"):
            await submit(scheduler, infer(1, Options(deadline_ms=0.0001)))
    assert engine.batches == []


async def test_the_tightest_deadline_leaves_first():
    engine = FakeEngine()
    async with scheduling(engine, max_batch=1) as scheduler:
        async with busy(engine, scheduler):
            deadlines = (90_000.0, 30_000.0, 60_000.0)
            tasks = await queued(scheduler, *(infer(value, Options(deadline_ms=value)) for value in deadlines))
        await asyncio.gather(*tasks)
    assert engine.batches == [[99], [30_000], [60_000], [90_000]]


async def test_a_client_with_four_requests_waiting_lets_every_other_one_go_after_its_first():
    engine = FakeEngine()
    async with scheduling(engine, max_batch=1) as scheduler:
        async with busy(engine, scheduler):
            tasks = [asyncio.create_task(submit(scheduler, infer(value), "greedy")) for value in (1, 2, 3, 4)]
            tasks += [asyncio.create_task(submit(scheduler, infer(value), value)) for value in (11, 12)]
            while scheduler.waiting < 6:
                await asyncio.sleep(0.005)
        await asyncio.gather(*tasks)
    assert engine.batches == [[99], [1], [11], [12], [2], [3], [4]]


async def test_what_is_prepared_while_the_event_loop_is_held_up_shares_a_batch():
    engine = FakeEngine()
    async with scheduling(engine, prepare_threads=2) as scheduler:
        await submit(scheduler, OF_ANOTHER_KIND)
        tasks = [asyncio.create_task(submit(scheduler, infer(value), value)) for value in (1, 2)]
        await asyncio.sleep(0)  # both are given to threads
        time.sleep(0.2)
        await asyncio.gather(*tasks)
    assert engine.batches == [[0], [1, 2]]


async def test_what_a_batch_took_is_learnt_for_its_key_and_size():
    engine = FakeEngine(infer_seconds=0.02)
    async with scheduling(engine) as scheduler:
        async with busy(engine, scheduler):
            tasks = await queued(scheduler, *(infer(value, key="a") for value in range(3)))
        answers = await asyncio.gather(*tasks)
        learnt = scheduler._costs.predict("a", 3)  # pyright: ignore[reportPrivateUsage]
    assert engine.batches == [[99], [0, 1, 2]]
    assert learnt == pytest.approx(answers[0].model_ms / 1e3)


async def test_preparation_is_told_whether_the_device_waits_and_whether_others_are_there(
    monkeypatch: pytest.MonkeyPatch,
):
    told: list[tuple[bool, bool]] = []
    prepare = Preparation.prepare

    async def watched(self: Preparation, *values: Any, idle_device: bool, alone: bool, **named: Any) -> Ready:
        told.append((idle_device, alone))
        return await prepare(self, *values, idle_device=idle_device, alone=alone, **named)

    monkeypatch.setattr(Preparation, "prepare", watched)
    engine = FakeEngine()
    async with scheduling(engine) as scheduler:
        await submit(scheduler, OF_ANOTHER_KIND)
        told.clear()
        await asyncio.gather(submit(scheduler, infer(1)), submit(scheduler, infer(2)))
        assert told == [(True, True), (True, False)]
        async with busy(engine, scheduler):
            tasks = await queued(scheduler, infer(3))
        await asyncio.gather(*tasks)
    assert told[2:] == [(True, True), (False, False)]


async def test_batches_are_counted_by_size():
    engine = FakeEngine()
    async with scheduling(engine) as scheduler:
        async with busy(engine, scheduler):
            tasks = await queued(scheduler, infer(1), infer(2), infer(3))
        await asyncio.gather(*tasks)
        assert (scheduler.batch_rows.counts[0], scheduler.batch_rows.counts[2]) == (1, 1)
        assert scheduler.batch_rows.sum == 4


async def test_closing_cancels_what_waits():
    engine = FakeEngine()
    async with scheduling(engine) as scheduler, busy(engine, scheduler):
        (task,) = await queued(scheduler, infer(1))
        scheduler.close()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert engine.batches == [[99]]
