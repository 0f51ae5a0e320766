"""The queue in front of the device: prepares observations in threads, then batches what waits.

Work-conserving and without a timer: whenever the device is free, the oldest request leaves, and with it everything
that waits with the same batch key, up to the largest batch. A single robot never waits for company. Knows neither
connections nor dialects.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeGuard

from relay.engine.base import Chunk, Engine, Failure, Note, StatefulEngine, Work
from relay.engine.worker import LoadFailed, Worker
from relay.protocol.errors import ObservationError
from relay.protocol.messages import Actions, Infer, Observation, Options
from relay.server.options import admit
from relay.server.sessions import Session
from relay.server.settings import ServerSettings


class ServerFull(RuntimeError):
    """As many requests wait as the server is willing to hold; its text is safe to show to the sender."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's actions and where its time went.

    Attributes:
        actions: float32, `(horizon, dim)` or named groups.
        notes: remarks of preparation and inference, in that order.
        ignored: keys of the observation that the policy does not know.
        prepare_ms: from submission until the observation was ready for the device, waiting for a thread included.
        queue_ms: from then until its batch began.
        model_ms: its whole batch on the device, synchronised.
    """

    actions: Actions
    notes: tuple[Note, ...]
    ignored: tuple[str, ...]
    prepare_ms: float
    queue_ms: float
    model_ms: float


class Scheduler:
    """Decides what the worker runs next.

    Args:
        worker: the device; its engine prepares and answers.
        settings: bounds of the queue and of a batch, threads, default seed.
    """

    def __init__(self, worker: Worker, settings: ServerSettings) -> None:
        self._worker = worker
        self._settings = settings
        self._threads = ThreadPoolExecutor(settings.prepare_threads, thread_name_prefix="relay-prepare")
        self._held = 0
        self._waiting: deque[_Waiting] = deque()
        self._arrival = asyncio.Event()
        self._dispatcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to feed the worker; call it once, from the running event loop."""
        self._dispatcher = asyncio.create_task(self._dispatch(), name="relay-dispatch")

    @property
    def held(self) -> int:
        """How many requests are submitted and not yet answered."""
        return self._held

    @property
    def waiting(self) -> int:
        """How many requests are prepared and wait for the device."""
        return len(self._waiting)

    async def submit(self, request: Infer, session: Session, *, notes_travel: bool = True) -> Answer:
        """Answer one request, in order of arrival with all others; cancelling the call takes it out of the queue.

        Args:
            session: whose requests run one after the other if the policy remembers; else it makes no difference.
            notes_travel: whether the reply can carry notes; if not, one that must be told refuses the request.

        Raises:
            ServerFull: the queue is at its limit.
            ObservationError: the policy cannot take the observation or the options.
            Exception: whatever the engine raised for this row.
        """
        if self._held >= self._settings.max_queue:
            raise ServerFull(f"the server is full: {self._held} requests are waiting; try again in a moment")
        self._held += 1
        try:
            async with session.turn:
                engine = await self._worker.ready()
                if _remembers(engine):
                    return await self._remember(engine, request, session, notes_travel)
            return await self._answer(engine, request, None, notes_travel)
        finally:
            self._held -= 1

    async def close(self) -> None:
        """Stop feeding the worker; what still waits is cancelled."""
        for waiting in self._waiting:
            waiting.row.cancel()
        if self._dispatcher is not None:
            self._dispatcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._dispatcher
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _remember(self, engine: StatefulEngine, request: Infer, session: Session, notes_travel: bool) -> Answer:
        """Answer with the session's memory, which begins with its first success."""
        state = engine.open_session() if session.state is None else session.state
        try:
            answer = await self._answer(engine, request, state, notes_travel)
        except BaseException:
            if session.state is None:
                self._worker.close_session(state)
            raise
        session.state = state
        return answer

    async def _answer(self, engine: Engine, request: Infer, state: Any, notes_travel: bool) -> Answer:
        submitted = perf_counter()
        options = admit(
            request.options, engine.spec, self._settings.seed, name_adapters=not self._settings.several_tenants
        )
        ready = await self._prepare(engine, request.observation, options)
        untold = [note.text for note in ready.notes if note.must_be_told and not notes_travel]
        if untold:
            raise ObservationError("; ".join(untold))
        return await self._queue(ready, Work(ready.prepared, options, state), submitted)

    async def _prepare(self, engine: Engine, observation: Observation, options: Options) -> _Ready:
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(self._threads, _prepare, engine, observation, options)
        if isinstance(prepared, Exception):
            raise prepared
        return prepared

    async def _queue(self, ready: _Ready, work: Work, submitted: float) -> Answer:
        queued = perf_counter()
        useful_ms = work.options.deadline_ms
        expires = math.inf if useful_ms is None else submitted + useful_ms / 1e3
        waiting = _Waiting(work, ready.batch_key, expires)
        self._waiting.append(waiting)
        self._arrival.set()
        try:
            row = await waiting.row
        except asyncio.CancelledError:
            with contextlib.suppress(ValueError):  # already on the device
                self._waiting.remove(waiting)
            raise
        if isinstance(row.answer, Failure):
            raise row.answer.error
        return Answer(
            actions=row.answer.actions,
            notes=(*ready.notes, *row.answer.notes),
            ignored=ready.ignored,
            prepare_ms=(queued - submitted) * 1e3,
            queue_ms=(row.started - queued) * 1e3,
            model_ms=(row.finished - row.started) * 1e3,
        )

    async def _dispatch(self) -> None:
        try:
            engine = await self._worker.ready()
        except LoadFailed:  # told to the server by the worker, and to every request by `submit`
            return
        most = min(self._settings.max_batch or engine.spec.max_batch, engine.spec.max_batch)
        while True:
            await self._arrival.wait()
            batch = self._take(most)
            if not batch:
                self._arrival.clear()
                continue
            try:
                answer = await self._worker.infer([waiting.work for waiting in batch])
            except Exception as error:  # the device is lost: each one learns it, also those still to come
                rows = [_Row(Failure(error), 0.0, 0.0) for _ in batch]
            else:
                rows = [_Row(row, answer.started, answer.finished) for row in answer.rows]
            for waiting, row in zip(batch, rows, strict=True):
                if not waiting.row.done():
                    waiting.row.set_result(row)

    def _take(self, most: int) -> Sequence[_Waiting]:
        """Remove the oldest request and those that may share its batch, oldest first; fail those that are too late."""
        batch: list[_Waiting] = []
        others: deque[_Waiting] = deque()
        now = perf_counter()
        for waiting in self._waiting:
            if waiting.row.done():
                continue
            if now > waiting.expires:
                waiting.row.set_result(_Row(Failure(_expired(waiting.work.options)), now, now))
                continue
            fits = len(batch) < most and (not batch or waiting.batch_key == batch[0].batch_key)
            (batch if fits else others).append(waiting)
        self._waiting = others
        return batch


@dataclass(frozen=True, slots=True)
class _Ready:
    prepared: object
    batch_key: Hashable
    notes: tuple[Note, ...]
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Row:
    answer: Chunk | Failure
    started: float
    finished: float


def _new_row() -> asyncio.Future[_Row]:
    return asyncio.get_running_loop().create_future()


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    work: Work
    batch_key: Hashable
    expires: float
    row: asyncio.Future[_Row] = field(default_factory=_new_row)


def _expired(options: Options) -> ObservationError:
    return ObservationError(
        f"deadline_ms: {options.deadline_ms:g} ms had passed before the device was free, so the observation was not run"
    )


def _remembers(engine: Engine) -> TypeGuard[StatefulEngine]:
    return hasattr(engine, "open_session")  # isinstance of a protocol would take 0.1 ms of every request


def _prepare(engine: Engine, observation: Observation, options: Options) -> _Ready | Exception:
    """Runs in a thread. Errors come back as values, since a future cannot carry every kind (StopIteration, for one)."""
    try:
        prepared = engine.prepare(observation, options)
        key = engine.batch_key(prepared)
        hash(key)
        return _Ready(prepared, key, tuple(prepared.notes), tuple(prepared.ignored))
    except Exception as error:
        return error
