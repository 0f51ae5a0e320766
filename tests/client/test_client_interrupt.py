"""Ctrl-C in the middle of a call: the next one gets its own reply or is told that the connection is closed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import websockets.sync
from tiny_servers import METADATA, LoopbackServers, echo_state, openpi_server
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

import relay
from relay.protocol import msgpack_numpy

INSIDE = (str(Path(relay.__file__).parent / "client"), str(Path(websockets.sync.__file__).parent))


def state(value: float) -> dict[str, Any]:
    return {"state": np.full(3, value, np.float32)}


@contextmanager
def interrupted_at(line: int) -> Iterator[list[str]]:
    """Raise `KeyboardInterrupt` in this thread before the given line of the clients' code; yields where that was."""
    place: list[str] = []
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(INSIDE):
            return None
        # Not between a block's end and the release of its lock, nor at `try`, where tracing can raise but no signal.
        block = getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(("with ", "try:"))
        if event == "line" and not block:
            lines += 1
            if lines == line:
                place.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield place
    finally:
        sys.settrace(before)


def test_wherever_a_call_is_interrupted_no_reply_is_taken_for_another(servers: LoopbackServers) -> None:
    url = servers.start(openpi_server(echo_state, METADATA), relay=True)
    outcomes: dict[str, list[str]] = {"answered": [], "closed": []}
    for line in range(1, 1000):
        with relay.Policy(url) as policy:
            policy.infer(state(1))
            with interrupted_at(line) as place:
                try:
                    policy.infer(state(2))
                except KeyboardInterrupt:
                    pass
                else:
                    assert place == [], "the interrupt was swallowed"
                    break  # the call has fewer lines
            try:
                answers = [policy.infer(state(value), timeout=10)["actions"][0] for value in (3, 4)]
            except ConnectionClosed as error:
                outcomes["closed"] += [f"{at}: {error.__cause__}" for at in place]
            else:
                assert answers == [3, 4], place
                outcomes["answered"] += place
    assert [outcome for outcome in outcomes["closed"] if "an earlier call was interrupted" not in outcome] == []
    assert len(outcomes["closed"]) > 10
    assert len(outcomes["answered"]) > 10


def test_a_call_that_waits_can_be_interrupted_and_the_next_one_says_so(servers: LoopbackServers) -> None:
    async def never_answer(websocket: ServerConnection) -> None:
        await websocket.send(msgpack_numpy.pack(METADATA))
        await websocket.recv()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        await websocket.wait_closed()

    with relay.Policy(servers.start(never_answer, relay=True)) as policy:
        with pytest.raises(KeyboardInterrupt):
            policy.infer(state(1))
        with pytest.raises(ConnectionClosed) as error:
            policy.infer(state(2))
        assert "an earlier call was interrupted" in str(error.value.__cause__)
