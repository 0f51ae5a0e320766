"""The thread that owns the device: it loads one engine, warms it up and runs its batches, one at a time.

Knows no sockets, no queueing policy and no model, and imports no torch; whatever the engine imports is imported
inside the thread, so that an event loop keeps answering while gigabytes of weights are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias, cast

import numpy as np

from relay.engine.base import Chunk, Engine, Failure, Progress, StatefulEngine, Work

MEMORY_FAILURES = 3
MEMORY_WINDOW_S = 60.0
"""As many requests that found no memory within this time are more than one client's large observation."""

LoadEngine: TypeAlias = Callable[[Progress], Engine]
"""Loads a policy onto the device, reporting a phase and the share done; called once, in the worker's thread."""

logger = logging.getLogger(__name__)


class LoadFailed(RuntimeError):
    """The policy could not be loaded or warmed up; the cause is chained."""


class DeviceFault(RuntimeError):
    """The device context is lost: nothing in this process can use it again."""


class DeviceFull(DeviceFault):
    """Request after request finds no memory on the device; the worker goes on, but the process should start anew."""


class NonFiniteActions(RuntimeError):
    """A policy produced NaN or infinite actions, which must never reach a robot."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """How far the policy is: a phase ("loading weights"), the share of it done in [0, 1], and whether it serves.

    `remarks` says what runs otherwise than it could, such as a fast path that was turned off, and why.
    """

    phase: str
    share: float = 0.0
    ready: bool = False
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """One answer per row, and when the device thread began and finished the batch (`time.perf_counter` seconds)."""

    rows: Sequence[Chunk | Failure]
    started: float
    finished: float


class Worker:
    """One engine in one thread, used from one event loop.

    Args:
        load: makes the engine; runs in the worker's thread.
        on_fatal: called on the event loop with a `LoadFailed` or a `DeviceFault` when this process cannot serve any
            more, or with a `DeviceFull` when it still can, but badly; it should end the process with a non-zero code
            and leave the restart to its supervisor.
    """

    def __init__(self, load: LoadEngine, on_fatal: Callable[[LoadFailed | DeviceFault], None]) -> None:
        self._load = load
        self._on_fatal = on_fatal
        self._status = WorkerStatus("starting")
        self._jobs: queue.SimpleQueue[_Job | _Closing | None] = queue.SimpleQueue()
        self._fatal: LoadFailed | DeviceFault | None = None
        # A daemon, because a load or a kernel that hangs must not keep a stopping server alive.
        self._thread = threading.Thread(target=self._run, name="relay-worker", daemon=True)
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop
        self._loaded: asyncio.Future[Engine]
        self._waiting = 0
        self._turn: asyncio.Lock

    def start(self) -> None:
        """Begin to load; call it once, from the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loaded = self._loop.create_future()
        self._turn = asyncio.Lock()
        self._thread.start()

    @property
    def status(self) -> WorkerStatus:
        """The present phase; may be read at any time and from any thread."""
        return self._status

    @property
    def alive(self) -> bool:
        """Whether the thread is loading, waiting or running a batch."""
        return self._thread.is_alive()

    @property
    def engine(self) -> Engine | None:
        """The engine from the moment it is warm, also after its device was lost; None before."""
        return self._engine

    async def ready(self) -> Engine:
        """Wait until the engine is loaded and warm; those who wait go on in the order in which they came.

        Raises:
            LoadFailed: it never will be.
            DeviceFault: it was, but its device is lost.
        """
        if self._fatal is not None:
            raise self._fatal
        if self._engine is not None and not self._waiting:
            return self._engine
        self._waiting += 1
        try:
            async with self._turn:  # who comes when the engine is just loaded must not pass those who waited for it
                return await asyncio.shield(self._loaded)  # one waiter that gives up must not cancel the others
        finally:
            self._waiting -= 1

    async def infer(self, batch: Sequence[Work]) -> BatchAnswer:
        """Run one batch on the device; exactly one answer per row, and no row with non-finite actions.

        Raises:
            DeviceFault: the device was lost, during this batch or before.
        """
        await self.ready()
        answer: asyncio.Future[BatchAnswer] = self._loop.create_future()

        def settle(outcome: BatchAnswer | LoadFailed | DeviceFault) -> None:
            if answer.done():
                return
            if isinstance(outcome, BatchAnswer):
                answer.set_result(outcome)
            else:
                answer.set_exception(outcome)

        self.begin(batch, settle)
        return await answer

    def begin(self, batch: Sequence[Work], on_end: Callable[[BatchAnswer | LoadFailed | DeviceFault], None]) -> None:
        """Like `infer`, of a worker that is ready; calls `on_end` on the event loop, once, with answer or error."""
        if self._fatal is not None:
            self._loop.call_soon(on_end, self._fatal)
        else:
            self._jobs.put(_Job(batch, on_end))

    def close_session(self, session: Any) -> None:
        """Have the engine free a session that it opened, after the batch that runs now."""
        self._jobs.put(_Closing(session))

    async def stop(self, timeout: float) -> bool:
        """Let the running batch finish, for at most `timeout` seconds; True if the thread has ended."""
        self._jobs.put(None)
        deadline = perf_counter() + timeout
        while self.alive and perf_counter() < deadline:
            await asyncio.sleep(0.005)
        return not self.alive

    def _run(self) -> None:
        try:
            engine = self._load(self._report)
            engine.warm_up(self._report)
        except BaseException as error:  # a loader that calls sys.exit must not leave a server that waits for ever
            failed = LoadFailed(f"the policy could not be loaded: {type(error).__name__}: {error}")
            failed.__cause__ = error
            self._post(self._fail, failed)
            return
        self._post(self._serve, engine)
        memory = _DeviceMemory(engine)
        while (job := self._jobs.get()) is not None:
            started = perf_counter()
            try:
                if isinstance(job, _Closing):
                    _close_session(engine, job.session)
                    continue
                rows = _answer_rows(engine, job.batch, memory)
            except BaseException as error:
                fault = DeviceFault(f"the device is lost after {type(error).__name__}: {error}")
                fault.__cause__ = error
                self._post(self._fail, fault, job.on_end if isinstance(job, _Job) else None)
                return
            self._post(job.on_end, BatchAnswer(rows, started, perf_counter()))
            exhausted = memory.is_exhausted(rows, perf_counter())
            job = rows = None  # while it waits for more, this thread keeps no observation alive
            if exhausted:
                self._post(self._on_fatal, DeviceFull(f"{MEMORY_FAILURES} requests within a minute found no memory"))

    def _report(self, phase: str, share: float) -> None:
        self._status = WorkerStatus(phase, min(max(float(share), 0.0), 1.0))

    def _post(self, callback: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed under a batch or a load that nobody waits for
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _serve(self, engine: Engine) -> None:
        self._engine = engine
        self._status = WorkerStatus("ready", 1.0, ready=True, remarks=tuple(getattr(engine, "remarks", ())))
        self._loaded.set_result(engine)

    def _fail(self, fatal: LoadFailed | DeviceFault, on_end: _OnEnd | None = None) -> None:
        self._fatal = fatal
        self._status = WorkerStatus("failed")
        if not self._loaded.done():
            self._loaded.set_exception(fatal)
            self._loaded.exception()  # taken here, since perhaps nobody waits
        waiting = [] if on_end is None else [on_end]
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                waiting += [job.on_end] if isinstance(job, _Job) else []
        for tell in waiting:
            tell(fatal)
        self._on_fatal(fatal)


_OnEnd: TypeAlias = Callable[[BatchAnswer | LoadFailed | DeviceFault], None]


@dataclass(frozen=True, slots=True)
class _Job:
    batch: Sequence[Work]
    on_end: _OnEnd


@dataclass(frozen=True, slots=True)
class _Closing:
    session: Any


def _answer_rows(engine: Engine, batch: Sequence[Work], memory: _DeviceMemory) -> list[Chunk | Failure]:
    """Run the batch; when all of it fails, run its rows singly, so that a bad row hurts only itself."""
    try:
        rows = list(engine.infer(batch))
        if len(rows) != len(batch):
            raise RuntimeError(f"infer answered {len(rows)} rows of a batch of {len(batch)}")
    except Exception as error:
        if loses_device(error):
            raise
        failed: Exception = error
    else:
        return [_checked(row) for row in rows]
    if len(batch) > 1:
        logger.warning("a batch of %d rows failed and is run row by row", len(batch), exc_info=failed)
    if lacks_memory(failed):
        memory.free(failed)
    if len(batch) > 1:
        return [_answer_rows(engine, [row], memory)[0] for row in batch]
    return [Failure(failed)]


class _DeviceMemory:
    """Makes room after a batch that found none, and notices when that does not help."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._failures: deque[float] = deque(maxlen=MEMORY_FAILURES)

    def free(self, error: Exception) -> None:
        """Let go of what the failed batch left behind: its tensors in the traceback's frames, then the caches."""
        for link in _chain(error):
            traceback.clear_frames(link.__traceback__)
        free = getattr(self._engine, "free_memory", None)
        if free is None:
            return
        try:
            free()
        except Exception as failed:
            if loses_device(failed):
                raise
            logger.exception("the device's memory could not be freed")

    def is_exhausted(self, rows: Sequence[Chunk | Failure], now: float) -> bool:
        """Whether so many requests failed within a minute; true once for as many."""
        failures = sum(isinstance(row, Failure) and lacks_memory(row.error) for row in rows)
        self._failures.extend([now] * failures)
        if len(self._failures) < MEMORY_FAILURES or now - self._failures[0] > MEMORY_WINDOW_S:
            return False
        self._failures.clear()
        return True


def _close_session(engine: Engine, session: Any) -> None:
    try:
        cast(StatefulEngine, engine).close_session(session)
    except Exception as error:
        if loses_device(error):
            raise
        logger.exception("a session could not be closed")


def _checked(row: Chunk | Failure) -> Chunk | Failure:
    if isinstance(row, Failure):
        if loses_device(row.error):
            raise row.error
        return row
    groups: Mapping[str, Any] = row.actions if isinstance(row.actions, Mapping) else {"actions": row.actions}
    for name, actions in groups.items():
        finite = np.isfinite(actions)
        if not finite.all():
            first = ", ".join(str(index) for index in np.argwhere(~finite)[0])
            return Failure(
                NonFiniteActions(
                    f"{name}[{first}] is not finite, with {int((~finite).sum())} of {finite.size} values; "
                    "such a chunk is not sent to a robot"
                )
            )
    return row


OUT_OF_MEMORY = "out of memory"

LOST_DEVICE_TYPES = ("AcceleratorError", "DeviceFault")
LOST_DEVICE_TEXTS = ("CUDA error", "HIP error")
"""RuntimeErrors after which every later call on the device fails too (the "sticky" errors of the CUDA programming
guide); running out of memory is not one of them."""


def loses_device(error: BaseException) -> bool:
    """Whether nothing in this process can use the device again after this error."""
    return any(
        isinstance(link, RuntimeError)  # as all of torch's are; a ValueError may quote what a client wrote
        and OUT_OF_MEMORY not in str(link)
        and (
            any(kind.__name__ in LOST_DEVICE_TYPES for kind in type(link).__mro__)
            or any(text in str(link) for text in LOST_DEVICE_TEXTS)
        )
        for link in _chain(error)
    )


def lacks_memory(error: BaseException) -> bool:
    """Whether the device had no room: of torch, a RuntimeError of its own kind or CUDA's own words."""
    return any(isinstance(link, (RuntimeError, MemoryError)) and OUT_OF_MEMORY in str(link) for link in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what caused it, each once: a wrapped device error is still a device error."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
