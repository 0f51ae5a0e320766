"""A process that serves: its event loop, its threads' turns, what signals do, its memory, and the abrupt way out.

Knows no listener and no policy.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar, cast

SWITCH_S = 0.000_5
"""How long a thread keeps the interpreter while another wants it. The event loop asks for it again after each system
call, and a policy that launches kernels from Python hardly lets go by itself: at Python's 5 ms a request would wait
so long several times over."""

_Outcome = TypeVar("_Outcome")


def run(main: Coroutine[Any, Any, _Outcome]) -> _Outcome:
    """`asyncio.run` on uvloop where it is installed (a twentieth less per raw call), without a handler for SIGINT.

    The process's threads take turns more often from then on.
    """
    sys.setswitchinterval(SWITCH_S)
    try:
        loop = cast(asyncio.AbstractEventLoop, importlib.import_module("uvloop").new_event_loop())
    except ImportError:
        loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(_cancel_leftovers())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _cancel_leftovers() -> None:
    leftovers = asyncio.all_tasks() - {asyncio.current_task()}
    for task in leftovers:
        task.cancel()
    await asyncio.gather(*leftovers, return_exceptions=True)


def stop_on_signals(stop: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Have SIGTERM or SIGINT begin to stop, and a second of them end the process at once."""
    loop = asyncio.get_running_loop()
    stopping: list[asyncio.Task[None]] = []

    def on_signal(number: int) -> None:
        if stopping:
            os._exit(128 + number)
        stopping.append(loop.create_task(stop()))

    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, on_signal, number)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda number, _: loop.call_soon_threadsafe(on_signal, number))


def look_again_on_hangup(*looks: Callable[[], Coroutine[Any, Any, None]]) -> set[asyncio.Task[None]]:
    """Do all of these on SIGHUP, side by side; the set holds what is under way."""
    under_way: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()

    def look_again() -> None:
        for look in looks:
            task = loop.create_task(look())
            under_way.add(task)
            task.add_done_callback(under_way.discard)

    if hasattr(signal, "SIGHUP"):  # Windows has none
        loop.add_signal_handler(signal.SIGHUP, look_again)
    return under_way


def freeze_memory() -> None:
    """Keep the collector from walking what there is by now, which would stop every thread now and then."""
    gc.collect()
    gc.freeze()


def exit_without_unwinding(code: int) -> NoReturn:
    """End the process at once, with everything logged and printed."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
