"""Pieces of work on several cores: the same results and errors as one after the other, and never a wait for nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from relay import side_by_side as module
from relay.side_by_side import side_by_side


@pytest.fixture(autouse=True)
def helpers(monkeypatch: pytest.MonkeyPatch) -> module._Helpers:
    """Two helpers, however many cores there are."""
    helpers = module._Helpers()
    helpers.count = 2
    monkeypatch.setattr(module, "_helpers", helpers)
    return helpers


def slowly(item: int) -> int:
    time.sleep(0.02)
    return item * item


def test_results_stand_in_the_order_of_the_items():
    assert side_by_side(slowly, range(7)) == [0, 1, 4, 9, 16, 25, 36]


def test_helpers_take_part():
    threads: set[str] = set()

    def work(item: int) -> None:
        threads.add(threading.current_thread().name)
        time.sleep(0.05)

    side_by_side(work, range(6))

    assert "relay-side-by-side" in threads
    assert threading.current_thread().name in threads


def test_the_caller_does_all_itself_when_helpers_do_not_wake(helpers: module._Helpers, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(helpers, "_help", lambda: time.sleep(30))

    assert side_by_side(lambda item: threading.current_thread(), range(3)) == [threading.current_thread()] * 3


def test_the_first_item_that_failed_raises_whoever_had_it():
    def work(item: int) -> int:
        time.sleep(0.01 if item else 0.05)
        if item in (1, 4, 5):
            raise ValueError(f"item {item}")
        return item

    for _ in range(5):
        with pytest.raises(ValueError, match="item 1"):
            side_by_side(work, range(6))


def test_a_second_caller_works_alone_while_the_helpers_are_taken():
    inside, leave = threading.Event(), threading.Event()

    def hold(item: int) -> None:
        inside.set()
        assert leave.wait(10)

    first = threading.Thread(target=side_by_side, args=(hold, range(2)))
    first.start()
    assert inside.wait(10)
    try:
        assert side_by_side(lambda item: threading.current_thread(), range(3)) == [threading.current_thread()] * 3
    finally:
        leave.set()
        first.join()


def test_work_may_ask_for_help_itself():
    assert side_by_side(lambda item: sum(side_by_side(slowly, range(item))), range(1, 4)) == [0, 1, 5]


def test_helpers_go_on_after_failures():
    with pytest.raises(ZeroDivisionError):
        side_by_side(lambda item: 1 // item, [0, 0, 0])

    assert side_by_side(slowly, range(4)) == [0, 1, 4, 9]


def test_an_interrupted_caller_leaves_no_work_behind():
    done: list[int] = []

    def work(item: int) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        time.sleep(0.02)
        done.append(item)

    with pytest.raises(KeyboardInterrupt):
        side_by_side(work, range(100))

    time.sleep(0.2)
    assert len(done) <= 2
    assert side_by_side(slowly, range(3)) == [0, 1, 4]


def test_whatever_ends_a_helpers_work_reaches_the_caller():
    def work(item: int) -> int:
        time.sleep(0.02)
        if threading.current_thread().name == "relay-side-by-side":
            raise SystemExit(7)
        return item

    raised: list[BaseException] = []

    def call() -> None:
        try:
            side_by_side(work, range(4))
        except SystemExit as error:
            raised.append(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(10)

    assert [str(error) for error in raised] == ["7"]
    assert side_by_side(slowly, range(4)) == [0, 1, 4, 9]


def test_the_caller_works_alone_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threading.Thread, "start", refuse_to_start)

    assert side_by_side(lambda item: threading.current_thread(), range(3)) == [threading.current_thread()] * 3


def test_threads_that_could_not_be_started_are_left_no_work(helpers: module._Helpers, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse_to_start)
        for _ in range(3):
            side_by_side(slowly, range(3))
    assert helpers._calls.empty()

    test_helpers_take_part()


def refuse_to_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be bound to cores here")
def test_helpers_keep_to_the_cores_that_the_caller_was_left_later():
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core only")
    side_by_side(slowly, range(6))
    left = {min(before)}
    os.sched_setaffinity(0, left)
    try:
        seen = side_by_side(lambda item: time.sleep(0.02) or os.sched_getaffinity(0), range(6))
    finally:
        os.sched_setaffinity(0, before)

    assert seen == [left] * 6


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be bound to cores here")
def test_helpers_come_back_when_the_caller_has_its_cores_again(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setattr(module, "_usable_cores", lambda: {0})
        assert side_by_side(lambda item: threading.current_thread(), range(3)) == [threading.current_thread()] * 3
    monkeypatch.setattr(module, "_usable_cores", lambda: {0, 1})

    test_helpers_take_part()


def test_an_interpreter_without_ctypes_has_helpers_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ctypes", None)

    assert module._find_sched_getcpu() is None


def test_the_program_ends_after_what_a_helper_has_begun():
    program = """
import os, threading, time
from relay import side_by_side as module
module._helpers.count = 1
def work(item):
    if threading.current_thread() is threading.main_thread():
        time.sleep(0.2)
        raise KeyboardInterrupt
    time.sleep(0.5)
    os.write(1, b"finished")
try:
    module.side_by_side(work, range(2))
except KeyboardInterrupt:
    pass
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)

    assert (done.returncode, done.stdout, done.stderr) == (0, b"finished", b"")


def test_nothing_of_a_call_is_kept_until_the_next():
    import gc
    import weakref

    class Frame:
        pass

    frames = [Frame() for _ in range(3)]
    kept = [weakref.ref(frame) for frame in frames]
    side_by_side(lambda frame: time.sleep(0.01), frames)
    frames.clear()
    time.sleep(0.1)
    gc.collect()

    assert [ref() for ref in kept] == [None] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_has_helpers_of_its_own():
    side_by_side(slowly, range(3))
    child = os.fork()
    if child == 0:
        os._exit(0 if side_by_side(slowly, range(5)) == [0, 1, 4, 9, 16] else 1)

    deadline = time.monotonic() + 10
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert ended[1] == 0
