"""docs/real-time-chunking.md: its loop runs, and executes every step once; its tables are those of the code."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_servers import LoopbackServers, openpi_server

from relay.engine.chunking import SCHEDULES, Chunking
from relay.protocol.options import CHUNKING_KEYS

PAGE = (Path(__file__).parents[2] / "docs" / "real-time-chunking.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
STEPS, HORIZON = 120, 30


@dataclass
class Robot:
    """Its state is the number of actions executed so far; each takes two milliseconds."""

    actions: list[np.ndarray] = field(default_factory=list)
    held: int = 0

    def observe(self) -> dict[str, Any]:
        return {"state": np.full(3, len(self.actions), np.float32)}

    def send(self, action: np.ndarray) -> None:
        self.actions.append(action)
        time.sleep(0.002)

    def hold(self) -> None:
        self.held += 1
        time.sleep(0.002)

    def done(self) -> bool:
        return len(self.actions) >= STEPS


@dataclass
class Server:
    """Answers with a chunk whose action for step n of the run is n; keeps what it is asked.

    It takes 20 ms, or where it is `slow`, until the robot has held its position once more.
    """

    slow: bool = False
    robot: Robot = field(default_factory=Robot)
    asked: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, observation: dict[str, Any]) -> dict[str, Any] | str:
        if observation.get("endpoint") == "reset":
            return "reset successful"
        self.asked.append(observation)
        held, deadline = self.robot.held, time.monotonic() + (10 if self.slow and "prev_actions" in observation else 0)
        time.sleep(0.02)
        while self.robot.held == held and time.monotonic() < deadline:
            time.sleep(0.001)
        return {"actions": observation["state"][0] + np.arange(HORIZON, dtype=np.float32)[:, None]}


@pytest.fixture
def drive(servers: LoopbackServers) -> Callable[..., Robot]:
    def run(server: Server, *, relay: bool = True) -> Robot:
        robot = server.robot
        names: dict[str, Any] = {
            "get_observation": robot.observe,
            "send_to_robot": robot.send,
            "hold_position": robot.hold,
            "episode_done": robot.done,
        }
        url = servers.start(openpi_server(server), relay=relay)
        code = BLOCKS[0].replace("ws://gpu-box:8000", url)
        exec(compile(code, "real-time-chunking.md", "exec"), names)
        return robot

    return run


def test_the_loop_executes_every_step_once_and_in_order(drive: Callable[..., Robot]) -> None:
    robot = drive(Server())
    assert [int(action[0]) for action in robot.actions] == list(range(len(robot.actions)))
    assert len(robot.actions) >= STEPS


def test_the_loop_sends_the_rows_that_were_not_executed_at_the_observation(drive: Callable[..., Robot]) -> None:
    server = Server()
    drive(server)
    first, *others = server.asked
    assert not any(key in first for key in CHUNKING_KEYS)
    assert len(others) > 2
    for asked in others:
        assert asked["prev_actions"][0, 0] == asked["state"][0]
        assert 0 <= asked["inference_delay"] <= asked["execution_horizon"] == 10


def test_the_loop_holds_when_a_call_takes_longer_than_the_chunk(drive: Callable[..., Robot]) -> None:
    server = Server(slow=True)
    robot = drive(server)
    assert [int(action[0]) for action in robot.actions] == list(range(len(robot.actions)))
    assert robot.held > 0


def test_the_loop_runs_on_a_server_that_knows_nothing_of_it(drive: Callable[..., Robot]) -> None:
    server = Server()
    robot = drive(server, relay=False)
    assert [int(action[0]) for action in robot.actions] == list(range(len(robot.actions)))
    assert not any(key in asked for asked in server.asked for key in CHUNKING_KEYS)


def test_the_tables_name_the_keys_and_the_schedules() -> None:
    named = re.findall(r"^\| `([a-z_]+)`( \(default\))? \|", PAGE, re.MULTILINE)
    assert [name for name, _ in named] == [*CHUNKING_KEYS, *SCHEDULES]
    assert [name for name, default in named if default] == [Chunking().schedule]
    assert f"`--rtc-max-guidance-weight` (default {Chunking().max_weight})" in PAGE


def test_the_page_has_one_block() -> None:
    assert len(BLOCKS) == 1
