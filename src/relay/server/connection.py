"""One client, from greeting to goodbye: receive, decode, resolve the session, submit, await, encode, send.

Knows neither what the frames look like (`dialects.py`) nor how the device is shared (`scheduler.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
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
from relay.server.keepalive import keep_alive, send_promptly
from relay.server.remarks import Remarks
from relay.server.scheduler import Scheduler
from relay.server.sessions import SessionTable
from relay.server.tracebacks import log_failure

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
) -> None:
    """Answer one client until it leaves: greet it once the policy is ready, then one reply a request, in their order.

    When the client vanishes, its requests leave the queue. When `stopping` is set, the requests already taken are
    answered before the connection is closed with the goodbye.
    """
    client = _Client(_peer(websocket), dialect, SessionTable(worker.close_session))
    flow = _Flow()
    reader = asyncio.create_task(_receive(websocket, client, scheduler, flow))
    writer = asyncio.create_task(_reply(websocket, dialect, worker, flow))
    watchers = [asyncio.create_task(keep_alive(websocket))]
    if dialect.idle_timeout:
        watchers.append(asyncio.create_task(close_when_idle(websocket, flow.quiet, dialect.idle_timeout)))
    try:
        await asyncio.wait({reader, writer, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            if worker.engine is not None:
                await _finish(websocket, reader, writer, flow)
            await websocket.close(stopping.result().code, stopping.result().reason)
    finally:
        await _cancel([reader, writer, *watchers, *_outstanding(flow)])
        client.sessions.clear()
    for task in (reader, writer, *watchers):
        if not task.cancelled() and not isinstance(task.exception(), (ConnectionClosed, LoadFailed, DeviceFault)):
            task.result()  # raises what nobody foresaw, for the listener to log and close with 1011


@dataclass(frozen=True, slots=True)
class _Turn:
    """One request in the order of replies: when it arrived, and the task that will know what to reply."""

    arrived: float
    outcome: asyncio.Task[Reply | Reset]


@dataclass(frozen=True, slots=True)
class _Flow:
    """What reader and writer share: requests in flight, oldest first (None after the last), and the room for more."""

    turns: asyncio.Queue[_Turn | None] = field(default_factory=lambda: asyncio.Queue[_Turn | None]())
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_OUTSTANDING_REQUESTS))
    quiet: QuietTime = field(default_factory=QuietTime)


@dataclass(frozen=True, slots=True, eq=False)
class _Client:
    """What is remembered of one client from request to request."""

    peer: str
    dialect: Dialect
    sessions: SessionTable
    remarks: Remarks = field(default_factory=Remarks)


async def _receive(websocket: ServerConnection, client: _Client, scheduler: Scheduler, flow: _Flow) -> None:
    """Start a task for every message; stop reading while as many are outstanding as a connection may have."""
    while True:
        await flow.room.acquire()
        message = await websocket.recv()
        flow.quiet.owe()
        flow.turns.put_nowait(_Turn(perf_counter(), asyncio.create_task(_answer(message, client, scheduler))))


async def _answer(message: str | bytes, client: _Client, scheduler: Scheduler) -> Reply | Reset:
    """Decode one message and do what it asks; all up to the first `await` happens in the order of arrival."""
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
                answer = await scheduler.submit(request, session, client, notes_travel=notes_travel)
            client.remarks.log_ignored(answer.ignored, client.peer)
            notes = client.remarks.fresh(session, answer.notes)
            parse_ms, infer_ms = (decoded - started) * 1e3, (perf_counter() - decoded) * 1e3
            return Reply(request, answer, notes, parse_ms, infer_ms)


async def _reply(websocket: ServerConnection, dialect: Dialect, worker: Worker, flow: _Flow) -> None:
    """Greet, then send one reply for each turn, until the last turn or a failure that ends the connection."""
    engine = await worker.ready()
    await send_promptly(websocket, dialect.greeting(engine.spec))
    flow.quiet.settle()
    prev_total_ms: float | None = None
    while (turn := await flow.turns.get()) is not None:
        close = None
        try:
            match await turn.outcome:
                case Reset():
                    frame = dialect.reset_done()
                case Reply() as reply:
                    frame = dialect.actions(reply, prev_total_ms)
        except Exception as error:
            refusal = dialect.refusal(error, log_failure(error, _peer(websocket)))
            frame, close = refusal.frame, refusal.close
        await send_promptly(websocket, frame)
        if close is not None:
            await websocket.close(*close)
            return
        prev_total_ms = (perf_counter() - turn.arrived) * 1e3
        flow.quiet.settle()
        flow.room.release()


async def _finish(
    websocket: ServerConnection, reader: asyncio.Task[None], writer: asyncio.Task[None], flow: _Flow
) -> None:
    """Take what is on its way, answer all that was taken; give up when the connection is closed under it."""
    await asyncio.wait({reader, writer}, timeout=LAST_CALL_S, return_when=asyncio.FIRST_COMPLETED)
    reader.cancel()
    flow.turns.put_nowait(None)
    closed = asyncio.create_task(websocket.wait_closed())
    await asyncio.wait({writer, closed}, return_when=asyncio.FIRST_COMPLETED)
    await _cancel([closed])


def _outstanding(flow: _Flow) -> Iterable[asyncio.Task[Reply | Reset]]:
    while not flow.turns.empty():
        if (turn := flow.turns.get_nowait()) is not None:
            yield turn.outcome


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _peer(websocket: ServerConnection) -> str:
    address = websocket.remote_address
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)
