"""Where observations are made ready for the device: cheap ones at once on the event loop, the others in threads.

A thread costs two hand-overs, about 0.1 ms and more on busy cores, and lets the event loop go on. So what has been
measured to take less than that is done in place; what takes up to a millisecond is done in place while the device has
nothing to do, since then it is what everybody waits for. Knows neither batches nor sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import Any, Final, TypeAlias, cast

import numpy as np

from relay.engine.base import Engine, Note
from relay.protocol.errors import ObservationError
from relay.protocol.image_header import image_header, is_image_file
from relay.protocol.messages import Observation, Options
from relay.server.batch_cost import BatchCosts
from relay.server.waiting_line import Waiting, WaitingLine
from relay.side_by_side import without_help

TRIVIAL_S: Final = 0.000_15
CHEAP_S: Final = 0.001_2
"""What is always done in place, and what is done in place for an idle device."""

TURN_S: Final = 0.002
"""How long one turn of the event loop may prepare in place, all requests together; the rest goes to the threads."""

LARGEST_HERE: Final = 1 << 21
"""Bytes of arrays and decoded frames beyond which nothing is done in place, whatever was measured."""

MOST_VALUES: Final = 512
"""In one observation; of more, looking at each would take a millisecond and more of the event loop."""

JPEG_SEGMENTS: Final = 8
"""How many segments of a JPEG are stepped over to its frame header; cameras write it after one to six."""

REMEMBERED_KINDS: Final = 256


@dataclass(frozen=True, slots=True)
class Ready:
    """An observation that can go to the device."""

    prepared: object
    batch_key: Hashable
    notes: tuple[Note, ...]
    ignored: tuple[str, ...]


class Expired(ObservationError):
    """The deadline of a request passed before it could be run."""


class Preparation:
    """The work before the device, for one engine.

    Args:
        threads: how many observations are prepared at once.
    """

    def __init__(self, threads: int) -> None:
        self._free_threads = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="relay-prepare")
        self._waiting: WaitingLine[_Task] = WaitingLine(BatchCosts())
        self._busy = 0
        self._seconds: dict[_Kind, float] = {}
        self._spent_here = 0.0

    async def prepare(
        self,
        engine: Engine,
        observation: Observation,
        options: Options,
        *,
        client: Hashable,
        deadline: float,
        idle_device: bool,
        alone: bool,
    ) -> Ready:
        """Have the engine prepare one observation, in the order of deadlines, clients in turn.

        Args:
            client: whose turn it is.
            deadline: `perf_counter` time after which it is not worth doing.
            idle_device: whether the device waits for it.
            alone: whether no other request is there, so that it may have the other cores as well.

        Raises:
            Expired: the deadline passed.
            Exception: whatever the engine raised.
        """
        kind = _kind(observation)
        if self._may_run_here(kind, idle_device):
            return _value(self._run_here(kind, lambda: _measured(engine, observation, options, alone)))
        outcome: asyncio.Future[_Outcome] = asyncio.get_running_loop().create_future()
        task = _Task(lambda: _measured(engine, observation, options, alone), kind, outcome)
        waiting = Waiting(task, client, None, perf_counter(), deadline)
        self._waiting.join(waiting)
        self._feed_threads()
        try:
            return _value(await outcome)
        except asyncio.CancelledError:
            self._waiting.leave(waiting, perf_counter())
            raise

    def close(self) -> None:
        """Begin nothing more."""
        for waiting in self._waiting.take_all():
            waiting.item.outcome.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _may_run_here(self, kind: _Kind | None, idle_device: bool) -> bool:
        if kind is None or self._busy or self._spent_here >= TURN_S:  # a later request must not pass an earlier one
            return False
        return self._seconds.get(kind, 1.0) <= (CHEAP_S if idle_device else TRIVIAL_S)

    def _run_here(self, kind: _Kind | None, run: Callable[[], tuple[_Outcome, float]]) -> _Outcome:
        if not self._spent_here:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        started = perf_counter()
        outcome, seconds = run()
        self._spent_here += perf_counter() - started
        self._learn(kind, outcome, seconds)
        return outcome

    def _begin_turn(self) -> None:
        self._spent_here = 0.0

    def _feed_threads(self) -> None:
        now = perf_counter()
        for expired in self._waiting.take_expired(now):
            if not expired.item.outcome.done():
                expired.item.outcome.set_result(Expired("the deadline passed"))
        loop = asyncio.get_running_loop()
        while self._busy < self._free_threads and (taken := self._waiting.take_batch(now, 1)):
            self._busy += 1
            self._threads.submit(_in_thread, taken[0].item, loop, self._finish)

    def _finish(self, task: _Task, outcome: _Outcome, seconds: float) -> None:
        self._busy -= 1
        self._learn(task.kind, outcome, seconds)
        if not task.outcome.done():
            task.outcome.set_result(outcome)
        self._feed_threads()

    def _learn(self, kind: _Kind | None, outcome: _Outcome, seconds: float) -> None:
        """Follow a rise at once and a fall slowly: one wrong guess blocks the loop, the other costs a hand-over.

        What was refused before the work was done says nothing of what the work takes.
        """
        if kind is None or (isinstance(outcome, Exception) and seconds <= self._seconds.get(kind, math.inf)):
            return
        if len(self._seconds) >= REMEMBERED_KINDS and kind not in self._seconds:
            self._seconds.clear()
        known = self._seconds.get(kind, seconds)
        self._seconds[kind] = max(seconds, known + (seconds - known) / 8)


_Outcome: TypeAlias = Ready | Exception
_Kind: TypeAlias = tuple[int, int, int]
"""Magnitudes (powers of two) of array and text bytes, decoded JPEG bytes and other decoded bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    run: Callable[[], tuple[_Outcome, float]]
    kind: _Kind | None
    outcome: asyncio.Future[_Outcome]


def _value(outcome: _Outcome) -> Ready:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _in_thread(task: _Task, loop: asyncio.AbstractEventLoop, on_end: Callable[[_Task, _Outcome, float], None]) -> None:
    outcome, seconds = task.run()
    with contextlib.suppress(RuntimeError):  # the loop was closed
        loop.call_soon_threadsafe(on_end, task, outcome, seconds)


def _measured(engine: Engine, observation: Observation, options: Options, alone: bool) -> tuple[_Outcome, float]:
    """Errors come back as values, since a future cannot carry every kind (StopIteration, for one).

    The seconds are those of this thread on a core, as other programs' share of it says nothing about the work; but no
    less than a quarter of those that passed, should an engine wait for something.
    """
    started, worked = perf_counter(), thread_time()
    outcome: _Outcome
    try:
        with contextlib.nullcontext() if alone else without_help():
            prepared = engine.prepare(observation, options)
        key = engine.batch_key(prepared)
        hash(key)
        outcome = Ready(prepared, key, tuple(prepared.notes), tuple(prepared.ignored))
    except Exception as error:
        outcome = error
    return outcome, max(thread_time() - worked, (perf_counter() - started) / 4)


def _kind(observation: Observation) -> _Kind | None:
    """What the work depends on, roughly; None for what is never done in place."""
    sizes = [0, 0, 0, 0]
    try:
        _add_sizes(observation, sizes)
    except ObservationError:  # an unusual image, or one that the engine will refuse
        return None
    plain, jpeg, other, _ = sizes
    if plain + jpeg + other > LARGEST_HERE:
        return None
    return plain.bit_length(), jpeg.bit_length(), other.bit_length()


def _add_sizes(value: Any, sizes: list[int]) -> None:
    sizes[3] += 1
    if sizes[3] > MOST_VALUES:
        raise ObservationError("very many values")
    if isinstance(value, dict):
        for part in cast("dict[Any, Any]", value).values():
            _add_sizes(part, sizes)
    elif isinstance(value, list):
        for part in cast("list[Any]", value):
            _add_sizes(part, sizes)
    elif isinstance(value, np.ndarray):
        sizes[0] += cast("np.ndarray[Any, Any]", value).nbytes
    elif isinstance(value, bytes) and value.startswith(b"\xff\xd8"):
        sizes[1] += _baseline_bytes(value)
    elif isinstance(value, bytes) and is_image_file(value):
        sizes[2] += image_header(value).decoded_bytes
    elif isinstance(value, (bytes, str)):
        sizes[0] += 64 * len(value)  # to tokenize


def _baseline_bytes(data: bytes) -> int:
    """Decoded size of a baseline JPEG, at a glance, where reading all of its header would take a tenth of the decoding.

    Segments are stepped over, as decoders do: a comment may hold what looks like a frame header.

    Raises:
        ObservationError: it has no such header near its beginning; a progressive file may take many times as long.
    """
    start, last = 2, len(data) - 9
    for _ in range(JPEG_SEGMENTS):
        if start > last:
            break
        marker, length, _, height, width = _SEGMENT.unpack_from(data, start)
        if marker == 0xFFC0:
            return 3 * height * width
        if marker not in _BEFORE_FRAME:
            break
        start += 2 + length
    raise ObservationError("not a plain baseline JPEG")


_SEGMENT: Final = struct.Struct(">HHBHH")
"""Marker and length; of a frame header also bits, height and width."""

_BEFORE_FRAME: Final = frozenset(0xFF00 | marker for marker in (0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE))
"""Tables, restart interval, application data and comments."""
