"""A seed decides the bytes of a reply, whatever else the server does meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import relay

FRAME = np.random.default_rng(3).integers(0, 255, (224, 224, 3), dtype=np.uint8)
OBSERVATION: dict[str, Any] = {
    "image": {"base_0_rgb": FRAME},
    "state": np.zeros(4, np.float32),
    "prompt": "put the red cube on the yellow plate",
}


def seeded(policy: relay.Policy) -> bytes:
    return policy.infer({**OBSERVATION, "seed": 7})["actions"].tobytes()


def test_the_same_seed_gives_the_same_bytes_among_other_traffic(demo_url: str) -> None:
    finished = threading.Event()

    def others() -> None:
        with relay.Policy(demo_url) as policy:
            for seed in range(1_000):
                policy.infer({**OBSERVATION, "prompt": "put the blue cube on the purple plate", "seed": seed})
                if finished.is_set():
                    return

    with relay.Policy(demo_url) as policy:
        alone = seeded(policy)
        robots = [threading.Thread(target=others) for _ in range(3)]
        for robot in robots:
            robot.start()
        try:
            crowded = {seeded(policy) for _ in range(10)}
        finally:
            finished.set()
            for robot in robots:
                robot.join()
    assert crowded == {alone}


def test_the_same_seed_gives_the_same_bytes_after_a_reset_and_on_both_paths(
    demo_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WALLE_URL", demo_url)
    with relay.Policy(demo_url, codec=relay.Codec.RAW) as policy, relay.PolicyClient("demo") as client:
        first = seeded(policy)
        policy.infer(OBSERVATION)
        policy.reset()
        assert seeded(policy) == first
        actions = client.infer({**OBSERVATION, "seed": 7})
        assert isinstance(actions, np.ndarray)
        assert actions.tobytes() == first
