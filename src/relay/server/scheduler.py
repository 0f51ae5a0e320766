"""The way to the device and back: observations are prepared, wait in line, and go to the worker in batches.

Work-conserving and without a timer: whenever the device is free, something that waits is run. What that is
`waiting_line.py` says. Knows neither connections nor dialects.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, TypeGuard

from relay.engine.base import AdaptingEngine, Chunk, Engine, Failure, Note, StatefulEngine, Work
from relay.engine.worker import BatchAnswer, DeviceFault, LoadFailed, Worker
from relay.protocol.errors import ObservationError
from relay.protocol.messages import Actions, Infer
from relay.server.batch_cost import BatchCosts
from relay.server.histogram import Histogram
from relay.server.options import admit
from relay.server.preparation import Expired, Preparation, Ready
from relay.server.sessions import Session
from relay.server.settings import ServerSettings
from relay.server.waiting_line import Waiting, WaitingLine

BATCH_ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Bounds of the histogram of batch sizes."""


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
        self._preparation = Preparation(settings.prepare_threads)
        self._costs = BatchCosts()
        self._line: WaitingLine[_Row] = WaitingLine(self._costs)
        self._held = 0
        self._running: list[Waiting[_Row]] = []
        self._feeding = False
        self.batch_rows = Histogram(BATCH_ROWS)

    @property
    def held(self) -> int:
        """How many requests are submitted and not yet answered."""
        return self._held

    @property
    def waiting(self) -> int:
        """How many requests are prepared and wait for the device."""
        return len(self._line)

    async def submit(self, request: Infer, session: Session, client: Hashable, *, notes_travel: bool = True) -> Answer:
        """Answer one request, when its turn comes; cancelling the call takes it out of the queue.

        Args:
            session: whose requests run one after the other if the policy remembers; else it makes no difference.
            client: which connection asks: when many wait, each has its turn.
            notes_travel: whether the reply can carry notes; if not, one that must be told refuses the request.

        Raises:
            ServerFull: the queue is at its limit.
            Expired: its deadline passed before the device was free.
            ObservationError: the policy cannot take the observation or the options.
            Exception: whatever the engine raised for this row.
        """
        if self._held >= self._settings.max_queue:
            raise ServerFull(f"the server is full: {self._held} requests are waiting; try again in a moment")
        self._held += 1
        try:
            engine = await self._worker.ready()
            if not _remembers(engine):
                return await self._answer(engine, request, None, client, notes_travel)
            async with session.turn:
                return await self._remember(engine, request, session, client, notes_travel)
        finally:
            self._held -= 1

    def close(self) -> None:
        """Stop feeding the worker; what still waits is cancelled."""
        for waiting in self._line.take_all():
            waiting.item.outcome.cancel()
        self._preparation.close()

    async def _remember(
        self, engine: StatefulEngine, request: Infer, session: Session, client: Hashable, notes_travel: bool
    ) -> Answer:
        """Answer with the session's memory, which begins with its first success."""
        state = engine.open_session() if session.state is None else session.state
        try:
            answer = await self._answer(engine, request, state, client, notes_travel)
        except BaseException:
            if session.state is None:
                self._worker.close_session(state)
            raise
        session.state = state
        return answer

    async def _answer(self, engine: Engine, request: Infer, state: Any, client: Hashable, notes_travel: bool) -> Answer:
        submitted = perf_counter()
        options = admit(
            request.options,
            engine.spec,
            self._settings.seed,
            adapters=engine.adapters if adapts(engine) else None,
            name_adapters=not self._settings.several_tenants,
        )
        deadline = math.inf if options.deadline_ms is None else submitted + options.deadline_ms / 1e3
        try:
            ready = await self._preparation.prepare(
                engine,
                request.observation,
                options,
                client=client,
                deadline=deadline,
                idle_device=not self._running,
                alone=self._held == 1,
            )
            untold = [note.text for note in ready.notes if note.must_be_told and not notes_travel]
            if untold:
                raise ObservationError("; ".join(untold))
            queued = perf_counter()
            outcome = await self._run(ready, Work(ready.prepared, options, state), client, queued, deadline)
            if isinstance(outcome.answer, Failure):
                raise outcome.answer.error
        except Expired:
            raise Expired(
                f"deadline_ms: {options.deadline_ms:g} ms had passed before the device was free, "
                "so the observation was not run"
            ) from None
        return Answer(
            actions=outcome.answer.actions,
            notes=(*ready.notes, *outcome.answer.notes),
            ignored=ready.ignored,
            prepare_ms=(queued - submitted) * 1e3,
            queue_ms=(outcome.started - queued) * 1e3,
            model_ms=(outcome.finished - outcome.started) * 1e3,
        )

    async def _run(self, ready: Ready, work: Work, client: Hashable, queued: float, deadline: float) -> _Outcome:
        row = _Row(work, asyncio.get_running_loop().create_future())
        waiting = Waiting(row, client, ready.batch_key, queued, deadline)
        self._line.join(waiting)
        self._feed_soon()
        try:
            return await row.outcome
        except asyncio.CancelledError:
            self._line.leave(waiting, perf_counter())
            raise

    def _feed_soon(self) -> None:
        """Feed the worker: at once if nobody else can join, else when all that the event loop has at hand has."""
        if self._held == 1:
            self._feed()
        elif not self._feeding and not self._running:
            self._feeding = True
            asyncio.get_running_loop().call_soon(self._feed)

    def _feed(self) -> None:
        """Give the worker its next batch, if it has none."""
        self._feeding = False
        engine = self._worker.engine
        if self._running or engine is None or not self._line:
            return
        now = perf_counter()
        for expired in self._line.take_expired(now):
            _settle(expired, _Outcome(Failure(Expired()), now, now))
        most = min(self._settings.max_batch or engine.spec.max_batch, engine.spec.max_batch)
        self._running = self._line.take_batch(now, most)
        if self._running:
            self._worker.begin([waiting.item.work for waiting in self._running], self._finish)

    def _finish(self, answer: BatchAnswer | LoadFailed | DeviceFault) -> None:
        """Tell each row of the batch that ran, and go on; of a lost device also those still to come learn."""
        batch, self._running = self._running, []
        self.batch_rows.observe(len(batch))
        if isinstance(answer, BatchAnswer):
            self._costs.learn(batch[0].batch_key, len(batch), answer.finished - answer.started)
            outcomes = [_Outcome(row, answer.started, answer.finished) for row in answer.rows]
        else:
            outcomes = [_Outcome(Failure(answer), 0.0, 0.0) for _ in batch]
        self._feed()
        for waiting, outcome in zip(batch, outcomes, strict=True):
            _settle(waiting, outcome)


@dataclass(frozen=True, slots=True)
class _Outcome:
    answer: Chunk | Failure
    started: float
    finished: float


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    work: Work
    outcome: asyncio.Future[_Outcome]


def _settle(waiting: Waiting[_Row], outcome: _Outcome) -> None:
    if not waiting.item.outcome.done():
        waiting.item.outcome.set_result(outcome)


def _remembers(engine: Engine) -> TypeGuard[StatefulEngine]:
    return hasattr(engine, "open_session")  # isinstance of a protocol would take 0.1 ms of every request


def adapts(engine: Engine) -> TypeGuard[AdaptingEngine]:
    """Whether it may hold adapters."""
    return hasattr(engine, "rescan_adapters")
