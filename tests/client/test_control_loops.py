"""Every Python block of docs/control-loops.md, run against a tiny server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_servers import LoopbackServers, vllm_server

from relay import PolicyClient

PAGE = (Path(__file__).parents[2] / "docs" / "control-loops.md").read_text("utf-8")
BLOCKS = {
    section.partition("\n")[0]: block
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)
    for block in re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
}
STEPS_PER_EPISODE = 40


class Robot:
    """What the page's reader brings along. An observation's state is the number of actions executed before it."""

    def __init__(self) -> None:
        self.actions: list[np.ndarray] = []
        self.episode_start = 0
        self.held = 0

    def observe(self) -> dict[str, Any]:
        frame = np.zeros((24, 32, 3), np.uint8)
        return {"image": {"base_0_rgb": frame}, "state": np.full(32, len(self.actions), np.float32)}

    def episode_done(self) -> bool:
        done = len(self.actions) - self.episode_start >= STEPS_PER_EPISODE
        if done:
            self.episode_start = len(self.actions)
        return done

    def hold_position(self) -> None:
        self.held += 1

    @property
    def executed(self) -> list[int]:
        return [int(action[0]) for action in self.actions]


def count_on(observation: dict[str, Any]) -> np.ndarray:
    """A chunk (50, 32) whose action for step n of the run is n."""
    return np.asarray(observation["state"], np.float32) + np.arange(50, dtype=np.float32)[:, None]


@pytest.fixture
def robot() -> Robot:
    return Robot()


@pytest.fixture
def page(servers: LoopbackServers, robot: Robot, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that the blocks take for granted, `policy` among them."""
    url = servers.start(vllm_server(count_on), relay=True)
    monkeypatch.setenv("WALLE_URL", url)
    monkeypatch.setenv("ROBOT_KEY", "robot-7")
    names: dict[str, Any] = {
        "URL": url,
        "policy": PolicyClient("pi05"),
        "get_observation": robot.observe,
        "observe_left": robot.observe,
        "observe_right": robot.observe,
        "send_to_robot": robot.actions.append,
        "episode_done": robot.episode_done,
        "hold_position": robot.hold_position,
    }
    opened = names["policy"]
    yield names
    for policy in (opened, names["policy"]):
        policy.close()


def run(section: str, names: dict[str, Any]) -> None:
    code = BLOCKS[section].replace('"ws://gpu-box:8000"', "URL")
    exec(compile(code, f"control-loops.md: {section}", "exec"), names)


@pytest.mark.parametrize("section", BLOCKS)
def test_the_block_runs(section: str, page: dict[str, Any]) -> None:
    run(section, page)


def test_no_section_has_a_second_block_that_would_be_left_out() -> None:
    assert len(BLOCKS) == PAGE.count("```python")


@pytest.mark.parametrize("section", ["A complete loop", "Replanning while the robot moves"])
def test_every_step_of_the_run_is_executed_once_and_in_order(section: str, page: dict[str, Any], robot: Robot) -> None:
    run(section, page)
    assert robot.executed == list(range(len(robot.actions)))
    assert len(robot.actions) >= STEPS_PER_EPISODE


@pytest.mark.parametrize("section", ["A complete loop", "Replanning while the robot moves"])
def test_nothing_is_executed_after_a_refusal(
    section: str, servers: LoopbackServers, page: dict[str, Any], robot: Robot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(observation: dict[str, Any]) -> None:
        raise ValueError("state has 7 values; pi05 expects 32")

    monkeypatch.setenv("WALLE_URL", servers.start(vllm_server(refuse)))
    with pytest.raises(RuntimeError, match="state has 7 values"):
        run(section, page)
    assert robot.actions == []


def test_a_timeout_holds_the_position(page: dict[str, Any], robot: Robot, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_slow(*args: Any, **kwargs: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(page["policy"], "infer", too_slow)
    run("Timeouts", page)
    assert robot.held == 1


def test_a_lost_connection_is_replaced(page: dict[str, Any], robot: Robot) -> None:
    run("Lost connections", page)
    lost = page["policy"]
    lost.close()
    assert page["infer"](robot.observe()).shape == (50, 32)
    assert page["policy"] is not lost
