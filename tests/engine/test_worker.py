"""The device thread: loading, batches, bad rows, lost devices."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from relay.engine import worker as worker_module
from relay.engine.base import Chunk, Failure, PolicySpec, Progress, Work
from relay.engine.worker import DeviceFault, DeviceFull, LoadFailed, NonFiniteActions, Worker
from relay.protocol.errors import ObservationError
from relay.protocol.messages import Options


class RowEngine:
    """Each prepared value is a function that gives the row's answer; a batch runs them in order."""

    spec = PolicySpec("rows", ("front",), 3, 2, 3, 1)

    def __init__(self) -> None:
        self.threads: list[str] = []

    def prepare(self, observation: Any, options: Options) -> Any:
        return observation

    def batch_key(self, prepared: Any) -> int:
        return 0

    def warm_up(self, progress: Progress) -> None:
        self.threads.append(threading.current_thread().name)

    def infer(self, batch: Sequence[Work]) -> Sequence[Chunk | Failure]:
        self.threads.append(threading.current_thread().name)
        return [work.prepared() for work in batch]


def good() -> Chunk:
    return Chunk(np.ones((2, 3), np.float32))


def raising(error: BaseException) -> Callable[[], Chunk]:
    def row() -> Chunk:
        raise error

    return row


def rows(*answers: Callable[[], Any]) -> list[Work]:
    return [Work(answer, Options()) for answer in answers]


@asynccontextmanager
async def started(load: Callable[[Progress], Any]) -> AsyncIterator[tuple[Worker, list[Exception]]]:
    fatal: list[Exception] = []
    worker = Worker(load, fatal.append)
    worker.start()
    yield worker, fatal
    assert await worker.stop(5)


async def test_load_warm_up_and_batches_run_in_the_one_thread():
    engine = RowEngine()

    def load(progress: Progress) -> RowEngine:
        engine.threads.append(threading.current_thread().name)
        return engine

    async with started(load) as (worker, _):
        await worker.infer(rows(good))
    assert engine.threads == ["relay-worker"] * 3


async def test_the_status_names_phase_and_share_until_ready():
    reported, go_on = threading.Event(), threading.Event()

    def load(progress: Progress) -> RowEngine:
        progress("loading weights", 0.4)
        reported.set()
        assert go_on.wait(5)
        return RowEngine()

    async with started(load) as (worker, _):
        await asyncio.to_thread(reported.wait, 5)
        assert (worker.status.phase, worker.status.share, worker.status.ready) == ("loading weights", 0.4, False)
        assert worker.engine is None
        go_on.set()
        await worker.ready()
        assert worker.status.ready
        assert worker.engine is not None


async def test_one_waiter_that_gives_up_leaves_the_others_waiting():
    go_on = threading.Event()

    def load(progress: Progress) -> RowEngine:
        assert go_on.wait(5)
        return RowEngine()

    async with started(load) as (worker, _):
        gone, patient = asyncio.create_task(worker.ready()), asyncio.create_task(worker.ready())
        await asyncio.sleep(0)
        gone.cancel()
        go_on.set()
        assert await patient is worker.engine


async def test_those_who_wait_for_the_engine_go_on_in_the_order_in_which_they_came():
    go_on = threading.Event()
    order: list[str] = []

    def load(progress: Progress) -> RowEngine:
        assert go_on.wait(20)
        return RowEngine()

    async def wait(name: str) -> None:
        await worker.ready()
        order.append(name)

    async def come_as_it_gets_ready() -> None:
        while worker.engine is None:
            await asyncio.sleep(0)
        await wait("late")

    async with started(load) as (worker, _):
        late = asyncio.create_task(come_as_it_gets_ready())
        early = [asyncio.create_task(wait(name)) for name in ("first", "second", "third")]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(*early, late)
        await wait("afterwards")
    assert order == ["first", "second", "third", "late", "afterwards"]


@pytest.mark.parametrize("error", [FileNotFoundError("no norm_stats.json"), SystemExit(3)])
async def test_a_load_that_fails_is_fatal_and_says_why(error: BaseException):
    def load(progress: Progress) -> RowEngine:
        raise error

    async with started(load) as (worker, fatal):
        with pytest.raises(LoadFailed, match=f"could not be loaded: {type(error).__name__}: {error}"):
            await worker.ready()
        assert [type(failure) for failure in fatal] == [LoadFailed]
        assert fatal[0].__cause__ is error
        assert not worker.status.ready


async def test_a_row_that_fails_leaves_the_others_alone():
    async with started(lambda progress: RowEngine()) as (worker, _):
        answer = await worker.infer(rows(good, lambda: Failure(ObservationError("no")), good))
        assert [type(row) for row in answer.rows] == [Chunk, Failure, Chunk]
        assert answer.started <= answer.finished


async def test_a_batch_that_raises_is_run_row_by_row():
    bad = ValueError("row 1")
    async with started(lambda progress: RowEngine()) as (worker, fatal):
        answer = await worker.infer(rows(good, raising(bad), good))
        assert [type(row) for row in answer.rows] == [Chunk, Failure, Chunk]
        failure = answer.rows[1]
        assert isinstance(failure, Failure)
        assert failure.error is bad
        assert not fatal


async def test_answers_that_do_not_match_the_batch_are_failures():
    class Short(RowEngine):
        def infer(self, batch: Sequence[Work]) -> Sequence[Chunk | Failure]:
            return []

    async with started(lambda progress: Short()) as (worker, _):
        answer = await worker.infer(rows(good, good))
        assert ["0 rows of a batch of 1" in str(row.error) for row in answer.rows if isinstance(row, Failure)] == [
            True,
            True,
        ]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
async def test_non_finite_actions_become_a_failure_of_their_row(value: float):
    actions = np.ones((2, 3), np.float32)
    actions[1, 2] = value
    async with started(lambda progress: RowEngine()) as (worker, _):
        answer = await worker.infer(rows(good, lambda: Chunk(actions)))
        failure = answer.rows[1]
        assert isinstance(answer.rows[0], Chunk)
        assert isinstance(failure, Failure)
        assert isinstance(failure.error, NonFiniteActions)
        assert str(failure.error).startswith("actions[1, 2] is not finite, with 1 of 6 values")


async def test_a_group_with_non_finite_actions_is_named():
    groups = {"arm": np.ones((2, 3), np.float32), "gripper": np.full((2, 1), np.nan, np.float32)}
    async with started(lambda progress: RowEngine()) as (worker, _):
        (row,) = (await worker.infer(rows(lambda: Chunk(groups)))).rows
        assert isinstance(row, Failure)
        assert "gripper[0, 0] is not finite" in str(row.error)


def wrapped(error: Exception) -> Exception:
    outer = ValueError("sampling failed")
    outer.__cause__ = error
    return outer


class AcceleratorError(RuntimeError):
    """Named like torch's."""


LOST = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    AcceleratorError("device-side assert triggered"),
    wrapped(RuntimeError("CUDA error: unspecified launch failure")),
]


@pytest.mark.parametrize("error", LOST, ids=["text", "type", "cause"])
async def test_a_lost_device_is_fatal_and_fails_the_batch(error: Exception):
    async with started(lambda progress: RowEngine()) as (worker, fatal):
        with pytest.raises(DeviceFault):
            await worker.infer(rows(good, raising(error)))
        assert [type(failure) for failure in fatal] == [DeviceFault]
        with pytest.raises(DeviceFault):
            await worker.infer(rows(good))
        assert not worker.status.ready


async def test_a_lost_device_that_the_engine_reports_for_a_row_is_fatal_too():
    async with started(lambda progress: RowEngine()) as (worker, fatal):
        with pytest.raises(DeviceFault):
            await worker.infer(rows(lambda: Failure(LOST[0])))
        assert len(fatal) == 1


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory."), ValueError("prompt 'CUDA error' is too long")])
async def test_an_error_that_only_looks_alike_hurts_its_row_only(error: Exception):
    async with started(lambda progress: RowEngine()) as (worker, fatal):
        answer = await worker.infer(rows(raising(error), good))
        assert [type(row) for row in answer.rows] == [Failure, Chunk]
        assert not fatal


class SessionEngine(RowEngine):
    """Its sessions are functions, called when they are closed."""

    def open_session(self) -> Any:
        raise NotImplementedError

    def close_session(self, session: Callable[[], Any]) -> None:
        self.threads.append(threading.current_thread().name)
        session()


async def test_a_session_is_closed_in_the_device_thread_after_the_running_batch():
    engine, go_on, order = SessionEngine(), threading.Event(), list[str]()

    def row() -> Chunk:
        assert go_on.wait(5)
        order.append("batch")
        return good()

    async with started(lambda progress: engine) as (worker, _):
        running = asyncio.create_task(worker.infer(rows(row)))
        await asyncio.sleep(0.02)
        worker.close_session(lambda: order.append("closed"))
        go_on.set()
        await running
    assert order == ["batch", "closed"]
    assert set(engine.threads) == {"relay-worker"}


async def test_a_session_that_cannot_be_closed_is_logged_and_the_rest_goes_on(caplog: pytest.LogCaptureFixture):
    async with started(lambda progress: SessionEngine()) as (worker, fatal):
        await worker.ready()
        worker.close_session(raising(ValueError("no such block")))
        assert len((await worker.infer(rows(good))).rows) == 1
        assert not fatal
    assert "no such block" in caplog.text


async def test_a_device_lost_while_a_session_is_closed_is_fatal():
    async with started(lambda progress: SessionEngine()) as (worker, fatal):
        await worker.ready()
        worker.close_session(raising(LOST[0]))
        with pytest.raises(DeviceFault):
            await worker.infer(rows(good))
        assert len(fatal) == 1


async def test_stop_gives_up_on_a_batch_that_hangs():
    hang = threading.Event()

    def row() -> Chunk:
        assert hang.wait(5)
        return good()

    async with started(lambda progress: RowEngine()) as (worker, _):
        running = asyncio.create_task(worker.infer(rows(row)))
        await asyncio.sleep(0.02)
        assert not await worker.stop(0.02)
        assert worker.alive
        hang.set()
        assert len((await running).rows) == 1


NO_MEMORY = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class CachingEngine(RowEngine):
    """Finds no memory for more than `room` rows."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.freed: list[str] = []

    def infer(self, batch: Sequence[Work]) -> Sequence[Chunk | Failure]:
        if len(batch) > self.room:
            raise NO_MEMORY
        return super().infer(batch)

    def free_memory(self) -> None:
        self.freed.append(threading.current_thread().name)


async def test_a_batch_that_finds_no_memory_frees_the_caches_and_is_run_row_by_row():
    engine = CachingEngine(room=1)
    async with started(lambda progress: engine) as (worker, fatal):
        answer = await worker.infer(rows(good, good, good))
        assert [type(row) for row in answer.rows] == [Chunk] * 3
        assert engine.freed == ["relay-worker"]
        assert not fatal


async def test_a_request_that_finds_no_memory_fails_alone():
    engine = CachingEngine(room=9)
    async with started(lambda progress: engine) as (worker, fatal):
        answer = await worker.infer(rows(good, raising(NO_MEMORY), good))
        assert [type(row) for row in answer.rows] == [Chunk, Failure, Chunk]
        assert engine.freed == ["relay-worker"] * 2  # of the batch, and of the row
        assert not fatal


async def test_caches_that_cannot_be_freed_are_logged_and_the_rows_are_run(caplog: pytest.LogCaptureFixture):
    engine = CachingEngine(room=1)
    engine.free_memory = raising(ValueError("no such pool"))  # pyright: ignore[reportAttributeAccessIssue]
    async with started(lambda progress: engine) as (worker, fatal):
        answer = await worker.infer(rows(good, good))
        assert [type(row) for row in answer.rows] == [Chunk] * 2
        assert not fatal
    assert "no such pool" in caplog.text


async def test_a_device_lost_while_its_caches_are_freed_is_fatal():
    engine = CachingEngine(room=1)
    engine.free_memory = raising(LOST[0])  # pyright: ignore[reportAttributeAccessIssue]
    async with started(lambda progress: engine) as (worker, fatal):
        with pytest.raises(DeviceFault):
            await worker.infer(rows(good, good))
        assert [type(failure) for failure in fatal] == [DeviceFault]


async def test_a_batch_without_memory_holds_none_of_it_while_its_rows_are_run():
    class Tensor:
        pass

    held: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    class FillingEngine(RowEngine):
        def infer(self, batch: Sequence[Work]) -> Sequence[Chunk | Failure]:
            if len(batch) > 1:
                tensor = Tensor()
                held.append(weakref.ref(tensor))
                raise NO_MEMORY
            alive.append(held[0]() is not None)
            return super().infer(batch)

    async with started(lambda progress: FillingEngine()) as (worker, _):
        await worker.infer(rows(good, good))
    assert alive == [False, False]


async def test_three_requests_without_memory_in_a_minute_call_for_a_new_process_and_the_worker_goes_on():
    async with started(lambda progress: RowEngine()) as (worker, fatal):
        await worker.infer(rows(raising(NO_MEMORY)))
        await worker.infer(rows(raising(NO_MEMORY)))
        assert [type(row) for row in (await worker.infer(rows(good))).rows] == [Chunk]
        assert not fatal
        await worker.infer(rows(raising(NO_MEMORY)))
        assert [type(row) for row in (await worker.infer(rows(good))).rows] == [Chunk]
        assert [type(failure) for failure in fatal] == [DeviceFull]


async def test_requests_without_memory_far_apart_call_for_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_module, "MEMORY_WINDOW_S", 0.02)
    async with started(lambda progress: RowEngine()) as (worker, fatal):
        for _ in range(4):
            await worker.infer(rows(raising(NO_MEMORY)))
            await asyncio.sleep(0.015)
        assert not fatal


async def test_an_idle_worker_keeps_no_observation_alive():
    class Observed:
        def __call__(self) -> Chunk:
            return good()

    async with started(lambda progress: RowEngine()) as (worker, _):
        observed = Observed()
        gone = weakref.ref(observed)
        await worker.infer([Work(observed, Options())])
        del observed
        for _ in range(100):
            if gone() is None:
                break
            await asyncio.sleep(0.01)
        assert gone() is None
