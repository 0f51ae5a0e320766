"""A few pieces of work of one request on several cores, such as the frames of its cameras.

Meant for work that lets other threads run, as image codecs do, and that takes a tenth of a millisecond or more.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

MOST_HELPERS: Final = 3
"""Threads beside the caller's; robots have two to four cameras."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def side_by_side(work: Callable[[_Item], _Result], items: Sequence[_Item], /) -> list[_Result]:
    """The same as `[work(item) for item in items]`, sooner where there are idle cores.

    Nothing is handed over: the caller begins with the first item, and threads that wake in time take from the other
    end. So where none does, it takes no longer than alone. One caller at a time has their help.

    Raises:
        Exception: what `work` raised for the first item that failed; others may have been worked on by then.
    """
    helpers = _helpers
    if len(items) < 2 or not helpers.count or not _help_wanted.get() or not helpers.free.acquire(blocking=False):
        return [work(item) for item in items]
    try:
        return helpers.share(work, items)
    finally:
        helpers.free.release()


@contextlib.contextmanager
def without_help() -> Iterator[None]:
    """Within this block, for this thread or task, `side_by_side` works alone.

    Where other requests wait, their work fills the cores, and waking threads for one of them costs all.
    """
    token = _help_wanted.set(False)
    try:
        yield
    finally:
        _help_wanted.reset(token)


_help_wanted: ContextVar[bool] = ContextVar("help wanted", default=True)


class _Helpers:
    """The threads of this process, started when they are first needed."""

    def __init__(self) -> None:
        self._cores = _usable_cores()
        self.count = min(MOST_HELPERS, len(self._cores) - 1)
        self.free = threading.Lock()
        self._calls: SimpleQueue[_Shared[Any, Any]] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._avoided: int | None = None

    def share(self, work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        shared = _Shared(work, items)
        wanted = min(self.count, len(items) - 1)
        while len(self._threads) < wanted:
            self._threads.append(threading.Thread(target=self._help, name="relay-side-by-side", daemon=True))
            self._threads[-1].start()
            self._avoided = None
        self._avoid_the_callers_core()
        for _ in range(wanted):
            self._calls.put(shared)
        return shared.finish()

    def _avoid_the_callers_core(self) -> None:
        """Linux likes to wake a thread on the core of the one that wakes it, and there the two only take turns.

        Three frames of 224 pixels took 0.8 ms so, as if alone, and 0.6 on two cores.
        """
        core = _core_of_this_thread()
        if core == self._avoided or core not in self._cores:
            return
        self._avoided = core
        with contextlib.suppress(OSError):  # a sandbox may forbid it, or the cores may be others by now
            for thread in self._threads:
                if thread.native_id is not None:
                    os.sched_setaffinity(thread.native_id, self._cores - {core})

    def _help(self) -> None:
        while True:
            self._calls.get().help()  # nothing is kept of it while this waits for the next


class _Shared(Generic[_Item, _Result]):
    """One call's items, taken from both ends."""

    def __init__(self, work: Callable[[_Item], _Result], items: Sequence[_Item]) -> None:
        self._work = work
        self._items = items
        self._left = deque(range(len(items)))  # taking from a deque is one step for the interpreter
        self._outcomes: list[_Result | _Failed] = [_NOT_DONE] * len(items)
        self._helped: SimpleQueue[None] = SimpleQueue()

    def help(self) -> None:
        """Take items from the end until none is left."""
        for _ in self._each(self._left.pop):
            self._helped.put(None)

    def finish(self) -> list[_Result]:
        """Take items from the beginning until none is left, and wait for those that helpers have taken."""
        try:
            own = sum(1 for _ in self._each(self._left.popleft))
        finally:
            self._left.clear()  # if the caller was interrupted, nobody wants the rest
        for _ in range(len(self._items) - own):
            self._helped.get()
        return [_result(outcome) for outcome in self._outcomes]

    def _each(self, take: Callable[[], int]) -> Iterator[None]:
        while True:
            try:
                index = take()
            except IndexError:
                return
            try:
                self._outcomes[index] = self._work(self._items[index])
            except Exception as error:
                self._outcomes[index] = _Failed(error)
            yield


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


_NOT_DONE: Final = _Failed(RuntimeError("not done"))


def _result(outcome: _Result | _Failed) -> _Result:
    if isinstance(outcome, _Failed):
        raise outcome.error
    return outcome


def _usable_cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _core_of_this_thread() -> int | None:
    return None if _sched_getcpu is None else _sched_getcpu()


def _find_sched_getcpu() -> Callable[[], int] | None:
    """Linux's; elsewhere threads are not kept off a core either."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    return getattr(ctypes.PyDLL(None), "sched_getcpu", None)  # called without letting the interpreter go


_sched_getcpu: Final = _find_sched_getcpu()
_helpers = _Helpers()


def _forget_helpers() -> None:
    """A forked child has none of the threads, and perhaps a lock that nobody will release."""
    global _helpers
    _helpers = _Helpers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helpers)
