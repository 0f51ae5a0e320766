"""The control loops of the documented interface as they are printed there, against `relay serve demo`.

What they leave to the reader, a robot, is a stub; `WALLE_URL` leads every model id to the demo.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed

import relay
from fault_proxy import FaultProxy, in_thread
from relay.demo.drawing import render_all
from relay.demo.robot import observation, robot_state, task_prompt
from relay.demo.tabletop import Tabletop

A_COMPLETE_LOOP = """
from relay import PolicyClient

REPLAN_EVERY = 10   # actions to execute from each chunk

policy = PolicyClient("pi05")
try:
    for episode in range(10):
        policy.reset()
        while not episode_done():
            actions = policy.infer(get_observation())
            if isinstance(actions, dict) and actions.get("type") == "error":
                raise RuntimeError(actions["message"])
            for action in actions[:REPLAN_EVERY]:
                send_to_robot(action)
finally:
    policy.close()
"""

TWO_ARMS = """
left  = policy.infer(obs_left  | {"session_id": "arm-left"})
right = policy.infer(obs_right | {"session_id": "arm-right"})
"""

RECONNECTING = """
from websockets.exceptions import ConnectionClosed

def infer(obs):
    global policy
    try:
        return policy.infer(obs)
    except ConnectionClosed:
        policy = PolicyClient("pi05")
        return policy.infer(obs)
"""


class Robot:
    """Counts what it is told; an episode lasts 30 actions."""

    def __init__(self) -> None:
        self.actions: list[np.ndarray] = []
        self.episodes = 0
        self._table = Tabletop(np.random.default_rng(0))

    def observe(self) -> dict[str, Any]:
        prompt = task_prompt(self._table.cube, self._table.plate)
        return observation(render_all(self._table), robot_state(self._table), prompt)

    def episode_done(self) -> bool:
        done = len(self.actions) == 30 * (self.episodes + 1)
        self.episodes += done
        return done


@pytest.fixture
def robot() -> Robot:
    return Robot()


@pytest.fixture
def link(demo_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """The way to the demo, which can be cut."""
    with in_thread(FaultProxy(int(demo_url.rpartition(":")[2]))) as proxy:
        monkeypatch.setenv("WALLE_URL", proxy.url + "/{model}")
        yield proxy


@pytest.fixture
def names(robot: Robot, link: FaultProxy) -> Iterator[dict[str, Any]]:
    """What the printed code takes for granted, an open `policy` among it."""
    opened: list[relay.PolicyClient] = []

    class PolicyClient(relay.PolicyClient):
        def __init__(self, model: str) -> None:
            super().__init__(model)
            opened.append(self)

    given = {
        "PolicyClient": PolicyClient,
        "policy": PolicyClient("pi05"),
        "get_observation": robot.observe,
        "obs_left": robot.observe(),
        "obs_right": robot.observe(),
        "send_to_robot": robot.actions.append,
        "episode_done": robot.episode_done,
    }
    yield given
    for policy in opened:
        policy.close()


def test_a_complete_loop_runs_ten_episodes(names: dict[str, Any], robot: Robot) -> None:
    exec(A_COMPLETE_LOOP, names)
    assert robot.episodes == 10
    assert len(robot.actions) == 300
    assert all(action.shape == (4,) and action.dtype == np.float32 for action in robot.actions)
    with pytest.raises(ConnectionClosed):
        names["policy"].infer(robot.observe())


def test_two_arms_share_a_connection(names: dict[str, Any], link: FaultProxy) -> None:
    exec(TWO_ARMS, names)
    assert names["left"].shape == names["right"].shape == (16, 4)
    assert link.accepted == 1


def test_the_reconnecting_infer_outlives_a_cut(names: dict[str, Any], robot: Robot, link: FaultProxy) -> None:
    exec(RECONNECTING, names)
    for connections in range(1, 4):
        actions = names["infer"](robot.observe())
        assert actions.shape == (16, 4)
        assert link.accepted == connections
        assert names["policy"].last.session_fresh
        link.cut()


def test_the_complete_loop_calling_the_reconnecting_infer_outlives_cuts(
    names: dict[str, Any], robot: Robot, link: FaultProxy
) -> None:
    def send_to_robot(action: np.ndarray) -> None:
        robot.actions.append(action)
        if len(robot.actions) in (20, 70, 110):  # never before a reset, which is not caught
            link.cut()

    names["send_to_robot"] = send_to_robot
    exec(RECONNECTING + A_COMPLETE_LOOP.replace("policy.infer(", "infer("), names)
    assert robot.episodes == 10
    assert len(robot.actions) == 300
    assert link.accepted == 5  # the fixture's, the loop's, and one after each cut
