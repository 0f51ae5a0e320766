"""The shipped adapter over a real connection: two robots on one server, and a bare policy that keeps its bytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import relay
from relay.cli.local_server import LocalServer
from relay.demo.drawing import render_all
from relay.demo.episode import Episode, run_episode
from relay.demo.robot import observation, robot_state, task_prompt
from relay.demo.tabletop import Tabletop

ADAPTER = "demo-cross"


def ask(policy: relay.Policy, robot: str = "front", adapter: str | None = None) -> bytes:
    """The bytes of a seeded chunk for one scene."""
    table = Tabletop(np.random.default_rng(3), robot)
    seen = observation(render_all(table), robot_state(table), task_prompt(table.cube, table.plate))
    wanted = {} if adapter is None else {"adapter_dir": adapter}
    return policy.infer({**seen, "seed": 11, **wanted})["actions"].tobytes()


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The chunk of a server that holds no adapter."""
    nothing = tmp_path_factory.mktemp("adapters")
    with LocalServer(["demo", "--max-batch", "1", "--adapter-root", str(nothing)]) as server:
        server.wait_until_ready(lambda phase: None)
        with relay.Policy(server.url) as policy:
            return ask(policy)


def test_the_bare_policy_gives_the_same_bytes_before_and_after_the_adapter_was_used(demo_url: str, bare: bytes) -> None:
    with relay.Policy(demo_url) as policy:
        assert ask(policy) == bare
        adapted = ask(policy, "cross", ADAPTER)
        assert ask(policy) == ask(policy, adapter="base") == bare
    assert adapted != bare


def test_the_bare_policy_gives_the_same_bytes_beside_a_robot_with_the_adapter(demo_url: str, bare: bytes) -> None:
    with relay.Policy(demo_url) as one, relay.Policy(demo_url) as other, ThreadPoolExecutor(2) as threads:
        mine = threads.submit(lambda: [ask(one) for _ in range(20)])
        theirs = threads.submit(lambda: [ask(other, "cross", ADAPTER) for _ in range(20)])
        assert set(mine.result()) == {bare}
        assert len(set(theirs.result())) == 1


def test_two_robots_at_once_do_what_each_does_alone(demo_url: str) -> None:
    def drive(robot: str, adapter: str | None) -> Episode:
        with relay.Policy(demo_url) as policy:
            return run_episode(policy, (2, 0), robot=robot, adapter=adapter)

    robots = (("front", None), ("cross", ADAPTER))
    alone = [drive(*robot) for robot in robots]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(lambda robot: drive(*robot), robots))
    assert all(episode.success for episode in together)
    for one, other in zip(alone, together, strict=True):
        assert [r.plan.tobytes() for r in one.requests] == [r.plan.tobytes() for r in other.requests]


def test_the_adapter_changes_what_is_done(demo_url: str) -> None:
    with relay.Policy(demo_url) as policy:
        assert ask(policy, "cross", ADAPTER) != ask(policy, "cross")
