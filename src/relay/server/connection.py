"""One client, from greeting to goodbye: receive, decode, resolve the session, submit, await, encode, send.

Knows neither what the frames look like (`dialects.py`) nor how the device is shared (`scheduler.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from relay.engine.worker import DeviceFault, LoadFailed, Worker
from relay.protocol.limits import MAX_OUTSTANDING_REQUESTS
from relay.protocol.messages import Infer, Reset, decode_request
from relay.server.dialects import Dialect, Reply
from relay.server.idle import QuietTime, close_when_idle
from relay.server.keepalive import drop_when_gone, keep_alive, send_promptly
from relay.server.metrics import Outcome, PolicyMetrics, outcome_of
from relay.server.remarks import Remarks, misspelt_options
from relay.server.scheduler import Scheduler
from relay.server.sessions import SessionTable
from relay.server.tracebacks import FailureLog

LAST_CALL_S = 0.05
"""How long a stopping server still takes requests: those already on their way are answered rather than cut off."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Why the server is stopping, as every client reads it in its close frame."""

    code: int
    reason: str


async def serve_connection(
    websocket: ServerConnection,
    dialect: Dialect,
    worker: Worker,
    scheduler: Scheduler,
    stopping: asyncio.Future[Goodbye],
    metrics: PolicyMetrics,
    on_greeting: Callable[[], None] = lambda: None,
) -> None:
    """Answer one client until it leaves: greet it once the policy is ready, then one reply a request, in their order.

    `on_greeting` is called when the policy is ready, just before the first frame is sent.
    When the client vanishes, its requests leave the queue. When `stopping` is set, the requests already taken are
    answered before the connection is closed with the goodbye.
    """
    client = _Client(
        websocket,
        peer_name(websocket),
        dialect,
        scheduler,
        metrics,
        SessionTable(worker.close_session),
        FailureLog(peer_name(websocket)),
    )
    metrics.open_sessions.add(client.sessions)
    client.answering = client.start(_greet(client, worker, on_greeting))
    client.listen()
    closed = asyncio.create_task(websocket.wait_closed())  # a listener that waits for room would not notice
    watchers = [closed, asyncio.create_task(keep_alive(websocket)), asyncio.create_task(drop_when_gone(websocket))]
    if dialect.idle_timeout:
        watchers.append(asyncio.create_task(close_when_idle(websocket, client.quiet, dialect.idle_timeout)))
    try:
        await asyncio.wait({client.over, closed, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            if worker.engine is not None:
                await _finish(client, closed)
            await websocket.close(stopping.result().code, stopping.result().reason)
    finally:
        tasks = [*watchers, *client.turns]
        await _cancel(tasks)
        client.sessions.clear()
        metrics.open_sessions.discard(client.sessions)
        client.failures.close()
    for task in tasks:
        if not task.cancelled() and not isinstance(task.exception(), (ConnectionClosed, LoadFailed, DeviceFault)):
            task.result()  # raises what nobody foresaw, for the listener to log and close with 1011


def peer_name(websocket: ServerConnection) -> str:
    """The client's address, as logs show it."""
    address = websocket.remote_address
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)


def _new_over() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class _Client:
    """One client, and what its requests share.

    Attributes:
        room: for the requests that it may have outstanding.
        turns: the greeting, the requests in flight and the one to come; each returns whether the conversation goes on.
        answering: the last one that has its message. The next one waits for it before it sends, so that replies keep
            the order of the requests.
        listening: the one that waits for a message.
        over: set when one of them ended the conversation.
        prev_total_ms: what the previous reply took, from the arrival of its request until it was sent.
    """

    websocket: ServerConnection
    peer: str
    dialect: Dialect
    scheduler: Scheduler
    metrics: PolicyMetrics
    sessions: SessionTable
    failures: FailureLog
    remarks: Remarks = field(default_factory=Remarks)
    quiet: QuietTime = field(default_factory=QuietTime)
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_OUTSTANDING_REQUESTS))
    turns: set[asyncio.Task[bool]] = field(default_factory=lambda: set[asyncio.Task[bool]]())
    answering: asyncio.Task[bool] = field(init=False)
    listening: asyncio.Task[bool] = field(init=False)
    over: asyncio.Future[None] = field(default_factory=_new_over)
    prev_total_ms: float | None = None

    def start(self, turn: Coroutine[Any, Any, bool]) -> asyncio.Task[bool]:
        task = asyncio.create_task(turn)
        self.turns.add(task)
        task.add_done_callback(self._ended)
        return task

    def listen(self) -> None:
        """Begin the turn of the next message."""
        self.listening = self.start(_take_turn(self, self.answering))

    async def stop_listening(self) -> None:
        self.listening.remove_done_callback(self._ended)
        await _cancel([self.listening])

    def heard(self, message: str | bytes) -> None:
        """The listening turn has its message; from now on the next one listens."""
        self.quiet.owe()
        self.metrics.received_bytes += len(message)
        self.answering = self.listening
        self.listen()

    def _ended(self, turn: asyncio.Task[bool]) -> None:
        if _goes_on(turn):
            self.turns.discard(turn)
        elif not self.over.done():
            self.over.set_result(None)


async def _greet(client: _Client, worker: Worker, on_greeting: Callable[[], None]) -> bool:
    engine = await worker.ready()
    on_greeting()
    await send_promptly(client.websocket, client.dialect.greeting(engine.spec))
    client.quiet.settle()
    return True


async def _take_turn(client: _Client, before: asyncio.Task[bool]) -> bool:
    """Wait for a message and answer it, once the one before it is answered; False when the connection is over.

    While as many are outstanding as a connection may have, nothing is read. A message is worked on as soon as it is
    there: up to its first `await`, in the order of the messages.
    """
    await client.room.acquire()
    message = await client.websocket.recv()
    arrived = perf_counter()
    client.heard(message)
    outcome: Outcome = "dropped"
    try:
        answered = await _answer_or_error(message, client)
        if not before.done():
            await asyncio.wait({before})
        if not _goes_on(before):
            return False
        sending = perf_counter()
        frame, close, ended = _encoded(answered, client)
        await send_promptly(client.websocket, frame)
        outcome = ended
    finally:
        client.metrics.requests[client.dialect.name, outcome] += 1
    sent = perf_counter()
    client.prev_total_ms = (sent - arrived) * 1e3
    client.metrics.sent_bytes += len(frame)
    client.metrics.observe_ms(send=(sent - sending) * 1e3, total=client.prev_total_ms)
    if close is not None:
        await client.websocket.close(*close)
        return False
    client.quiet.settle()
    client.room.release()
    return True


def _goes_on(turn: asyncio.Task[bool]) -> bool:
    return not turn.cancelled() and turn.exception() is None and turn.result()


async def _answer_or_error(message: str | bytes, client: _Client) -> Reply | Reset | Exception:
    try:
        return await _answer(message, client)
    except Exception as error:
        return error


def _encoded(
    answered: Reply | Reset | Exception, client: _Client
) -> tuple[str | bytes, tuple[int, str] | None, Outcome]:
    """The frame to send, how to close the connection after it, if at all, and how the request is counted."""
    try:
        match answered:
            case Reset():
                return client.dialect.reset_done(), None, "reset"
            case Reply():
                return client.dialect.actions(answered, client.prev_total_ms), None, "answered"
            case _:
                error = answered
    except Exception as failed:
        error = failed
    refusal = client.dialect.refusal(error, client.failures.add(error))
    return refusal.frame, refusal.close, outcome_of(error)


async def _answer(message: str | bytes, client: _Client) -> Reply | Reset:
    """Decode one message and do what it asks."""
    started = perf_counter()
    request = decode_request(message)
    decoded = perf_counter()
    match request:
        case Reset():
            client.sessions.clear()
            return request
        case Infer():
            with client.sessions.request(request.session_id) as session:
                notes_travel = client.dialect.notes_travel(request)
                answer = await client.scheduler.submit(request, session, client, notes_travel=notes_travel)
            client.remarks.log_ignored(answer.ignored, client.peer)
            notes = client.remarks.fresh(session, (*answer.notes, *misspelt_options(answer.ignored)))
            parse_ms, infer_ms = (decoded - started) * 1e3, (perf_counter() - decoded) * 1e3
            client.metrics.observe_ms(
                parse=parse_ms, prepare=answer.prepare_ms, queue=answer.queue_ms, model=answer.model_ms
            )
            return Reply(request, answer, notes, parse_ms, infer_ms)


async def _finish(client: _Client, closed: asyncio.Task[None]) -> None:
    """Take what is on its way, answer all that was taken; give up when the connection is closed under it."""
    await asyncio.wait({client.over, closed}, timeout=LAST_CALL_S, return_when=asyncio.FIRST_COMPLETED)
    await client.stop_listening()
    await asyncio.wait({client.answering, client.over, closed}, return_when=asyncio.FIRST_COMPLETED)


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
