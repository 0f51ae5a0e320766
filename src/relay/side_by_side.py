"""A few pieces of work of one request on several cores, such as the frames of its cameras.

Meant for work that lets other threads run, as image codecs do, and that takes a tenth of a millisecond or more.
"""

from __future__ import annotations

import atexit
import contextlib
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

FAREWELL_S: Final = 5.0
"""How long the end of the program waits for a helper to finish its frame."""

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
    if len(items) < 2 or not _help_wanted.get() or not helpers.free.acquire(blocking=False):
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
        self._calls: SimpleQueue[_Shared[Any, Any] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._allowed: set[int] = set()

    def share(self, work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        shared = _Shared(work, items)
        self._look_at_the_cores()
        wanted = min(self.count, len(items) - 1)
        self._start(wanted)
        self._keep_off_the_callers_core()
        for _ in self._threads[:wanted]:
            self._calls.put(shared)
        return shared.finish()

    def _look_at_the_cores(self) -> None:
        """A program may leave its threads fewer cores once it runs, to keep the others for a control loop."""
        cores = _usable_cores()
        if cores != self._cores:
            self._cores, self.count = cores, min(MOST_HELPERS, len(cores) - 1)

    def _start(self, wanted: int) -> None:
        while len(self._threads) < wanted:
            thread = threading.Thread(target=self._help, name="relay-side-by-side", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process may have no more, or is about to end
                return
            self._threads.append(thread)
            self._allowed = set()

    def _keep_off_the_callers_core(self) -> None:
        """Linux likes to wake a thread on the core of the one that wakes it, and there the two only take turns.

        Three frames of 224 pixels took 0.8 ms so, as if alone, and 0.6 on two cores.
        """
        allowed = self._cores - {_core_of_this_thread()}
        if not self.count or allowed == self._allowed or not hasattr(os, "sched_setaffinity"):
            return
        self._allowed = allowed
        with contextlib.suppress(OSError):  # a sandbox may forbid it, or the cores may be others by now
            for thread in self._threads:
                if thread.native_id is not None:
                    os.sched_setaffinity(thread.native_id, allowed)

    def _help(self) -> None:
        while _has_helped(self._calls.get()):  # nothing is kept of a call while this waits for the next
            pass

    def end(self) -> None:
        """Let them finish what an interrupted caller left: a thread that ends within torch aborts the program."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(FAREWELL_S)


def _has_helped(shared: _Shared[Any, Any] | None) -> bool:
    """False when there is nothing more to come."""
    if shared is None:
        return False
    shared.help()
    return True


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
        for _ in self._each(self._left.pop, BaseException):  # the caller waits for what was taken, whatever happens
            self._helped.put(None)

    def finish(self) -> list[_Result]:
        """Take items from the beginning until none is left, and wait for those that helpers have taken."""
        try:
            own = sum(1 for _ in self._each(self._left.popleft, Exception))
        finally:
            self._left.clear()  # if the caller was interrupted, nobody wants the rest
        for _ in range(len(self._items) - own):
            self._helped.get()
        return [_result(outcome) for outcome in self._outcomes]

    def _each(self, take: Callable[[], int], caught: type[BaseException]) -> Iterator[None]:
        while True:
            try:
                index = take()
            except IndexError:
                return
            try:
                self._outcomes[index] = self._work(self._items[index])
            except caught as error:
                self._outcomes[index] = _Failed(error)
            yield


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


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
    try:
        import ctypes

        return getattr(ctypes.PyDLL(None), "sched_getcpu", None)  # called without letting the interpreter go
    except (ImportError, OSError):  # an interpreter built without libffi, or a static one
        return None


_sched_getcpu: Final = _find_sched_getcpu()
_helpers = _Helpers()


def _forget_helpers() -> None:
    """A forked child has none of the threads, and perhaps a lock that nobody will release."""
    global _helpers
    _helpers = _Helpers()


atexit.register(lambda: _helpers.end())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helpers)
