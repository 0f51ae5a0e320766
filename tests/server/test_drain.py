"""SIGTERM at any moment under load: every request is answered once or was never run, every client hears 1012."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
from fake_policy import DIM, HORIZON, dial, observation
from test_server_process import ended, process
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage

import relay
from free_ports import free_port
from relay.client import cold_start
from relay.protocol.limits import SUBPROTOCOL
from relay.protocol.msgpack_numpy import unpack

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")

ROBOTS = 16
GRACE_S = 20.0
"""A server with nothing slow to finish has 15 s for its requests, and some for the goodbyes."""


@dataclass
class Robot:
    """What became of one client: how much it sent and got, and the code that it was closed with.

    Attributes:
        upgraded: it came through the door.
        code: None if there was no close frame, which programs see as 1006.
    """

    number: int
    ahead: int
    sent: int = 0
    answered: int = 0
    upgraded: bool = False
    code: int | None = None

    @property
    def path(self) -> str:
        return "/v1/realtime/robot/openpi" if self.number % 2 else "/"

    async def drive(self, port: int) -> None:
        """Ask back to back until the server closes."""
        try:
            websocket = await dial(port, self.path, **({"subprotocols": [SUBPROTOCOL]} if self.number % 4 > 1 else {}))
        except (OSError, InvalidHandshake, InvalidMessage, EOFError):
            return  # the port was closed before the connection was made
        self.upgraded = True
        due: deque[float] = deque()
        try:
            await websocket.recv()
            while True:
                with suppress(ConnectionClosed):  # replies may have come before the close frame
                    await self.send_ahead(websocket, due)
                self.check(await websocket.recv(), due.popleft())
                self.answered += 1
        except ConnectionClosed as error:
            self.code = None if error.rcvd is None else error.rcvd.code
        finally:
            await websocket.close()

    async def send_ahead(self, websocket: ClientConnection, due: deque[float]) -> None:
        while len(due) < self.ahead:
            due.append(self.number * 10_000.0 + self.sent)
            self.sent += 1
            await websocket.send(observation(due[-1]))

    def check(self, reply: str | bytes, expected: float) -> None:
        """The reply is whole, and that of this very request."""
        assert isinstance(reply, bytes), reply
        value = unpack(reply)
        actions = value if self.number % 2 else value["actions"]
        assert actions.shape == (HORIZON, DIM)
        assert (actions == expected).all()


async def stop_at(moment: float, ahead: int) -> None:
    """Let the robots work for `moment` seconds, then stop the server and see what became of every request."""
    async with process("quick") as (server, port):
        robots = [Robot(number, ahead if number % 4 == 3 else 1) for number in range(ROBOTS)]
        driving = [asyncio.create_task(robot.drive(port)) for robot in robots]
        await asyncio.sleep(moment)
        stopped = time.monotonic()
        server.send_signal(signal.SIGTERM)
        code, out, err = await ended(server)
        assert time.monotonic() - stopped < GRACE_S
        assert code == 0, err
        await asyncio.gather(*driving)
    print(f"{sum(robot.upgraded for robot in robots)} connected, {sum(robot.answered for robot in robots)} answered")
    for robot in robots:
        assert not robot.upgraded or robot.code == 1012, robot
        assert robot.answered <= robot.sent <= robot.answered + robot.ahead
    assert out == f"returned {sum(robot.answered for robot in robots)}\n"  # none ran without being answered


MOMENTS = 50
SEED = 20_251


@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
async def test_a_server_that_is_stopped_under_load_loses_nothing(seed: int):
    await stop_under_load(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEED + 3, SEED + MOMENTS))
async def test_a_server_that_is_stopped_under_load_at_any_moment_loses_nothing(seed: int):
    await stop_under_load(seed)


async def stop_under_load(seed: int) -> None:
    random = Random(seed)
    moment, ahead = random.uniform(0.0, 0.8), random.choice([1, 3, 6])
    print(f"seed {seed}: SIGTERM after {moment:.3f} s, up to {ahead} requests at once")
    await stop_at(moment, ahead)


# ---- our own clients, across a restart


@dataclass
class Reconnecting:
    """One of our clients, asking back to back until it is told to stop."""

    policy: Any
    number: int
    stopping: threading.Event
    answered: int = 0

    async def drive(self) -> None:
        if isinstance(self.policy, relay.Policy):
            await asyncio.to_thread(self._drive_blocking)
            return
        while not self.stopping.is_set():
            self._check(await self.policy.infer(self._observation(), timeout=60))

    def _drive_blocking(self) -> None:
        while not self.stopping.is_set():
            self._check(self.policy.infer(self._observation(), timeout=60))

    def _observation(self) -> dict[str, Any]:
        return {"state": np.full(DIM, self._value, np.float32)}

    def _check(self, reply: dict[str, Any]) -> None:
        assert (reply["actions"] == self._value).all()
        self.answered += 1

    @property
    def _value(self) -> float:
        return self.number * 10_000.0 + self.answered


async def test_reconnecting_clients_outlive_a_restart_and_no_observation_runs_twice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cold_start, "LONGEST_DELAY_S", 0.25)
    stopping, port, ran = threading.Event(), free_port(), 0
    robots: list[Reconnecting] = []
    driving: list[asyncio.Task[None]] = []
    try:
        for restarts in range(2):
            async with process("quick", port) as (server, port):
                if not robots:
                    url = f"ws://127.0.0.1:{port}"
                    for number in range(8):
                        address = url + ("/v1/realtime/robot/openpi" if number % 2 else "")
                        kind = relay.Policy if number < 4 else relay.AsyncPolicy
                        opened = await asyncio.to_thread(kind, address, reconnect=True)
                        policy = await opened if isinstance(opened, relay.AsyncPolicy) else opened
                        robots.append(Reconnecting(policy, number, stopping))
                    driving = [asyncio.create_task(robot.drive()) for robot in robots]
                while any(robot.policy.reconnects < restarts for robot in robots):
                    await asyncio.wait(driving, timeout=0.02, return_when=asyncio.FIRST_EXCEPTION)
                    assert not any(task.done() for task in driving), [task for task in driving if task.done()]
                await asyncio.sleep(0.3)
                if restarts == 1:
                    stopping.set()
                    await asyncio.gather(*driving)
                server.send_signal(signal.SIGTERM)
                code, out, err = await ended(server)
                assert code == 0, err
                ran += int(out.removeprefix("returned "))
        assert ran == sum(robot.answered for robot in robots)
        assert [robot.policy.reconnects for robot in robots] == [1] * 8
    finally:
        stopping.set()
        for robot in robots:
            closing = robot.policy.close()
            if closing is not None:
                await closing
