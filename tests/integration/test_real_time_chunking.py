"""The shipped policy's real-time chunking over both dialects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import relay
from relay.demo.drawing import render_all
from relay.demo.robot import observation as demo_observation
from relay.demo.robot import robot_state, task_prompt
from relay.demo.tabletop import Tabletop

VLLM_PATH = "/v1/realtime/robot/openpi"
LEFT_OVER = np.linspace(-0.5, 0.5, 48, dtype=np.float32).reshape(12, 4)


def observation(**changes: Any) -> dict[str, Any]:
    table = Tabletop(np.random.default_rng(0))
    seen = demo_observation(render_all(table), robot_state(table), task_prompt(table.cube, table.plate))
    return {**seen, "seed": 7, **changes}


def guided(
    left_over: NDArray[np.float32] = LEFT_OVER, delay: int = 3, execution_horizon: int = 8, **changes: Any
) -> dict[str, Any]:
    options = {"prev_actions": left_over, "inference_delay": delay, "execution_horizon": execution_horizon}
    return observation(**options, **changes)


def test_both_dialects_give_the_same_guided_chunk(demo_url: str) -> None:
    with relay.Policy(demo_url) as policy, relay.Policy(demo_url + VLLM_PATH) as other:
        chunk = policy.infer(guided())["actions"]
        assert chunk.tobytes() == other.infer(guided())["actions"].tobytes()
        assert policy.last is not None
        assert not any("not sent" in note for note in policy.last.notes)
        plain = policy.infer(observation())["actions"]
    assert np.abs(chunk[:3] - LEFT_OVER[:3]).mean() < 0.2 * np.abs(plain[:3] - LEFT_OVER[:3]).mean()
    assert np.abs(chunk[8:] - plain[8:]).mean() < np.abs(chunk[8:12] - LEFT_OVER[8:]).mean()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too long": ({"left_over": np.zeros((17, 4), np.float32)}, "prev_actions has 17 rows; a chunk of this policy has"),
    "too wide": ({"left_over": np.zeros((3, 5), np.float32)}, "prev_actions has 5 columns; this policy's actions have"),
    "late": ({"delay": 9}, "inference_delay is 9, more than the execution_horizon of 8"),
    "beyond the chunk": ({"execution_horizon": 17}, "execution_horizon is 17; a chunk of this policy has 16 steps"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_is_refused_by_its_name_on_both_paths(demo_url: str, kind: str) -> None:
    changes, text = REFUSED[kind]
    with relay.Policy(demo_url) as policy, pytest.raises(RuntimeError, match=text):
        policy.infer(guided(**changes))
    with relay.Policy(demo_url + VLLM_PATH) as policy:
        with pytest.raises(RuntimeError, match=f"^{text}"):
            policy.infer(guided(**changes))
        assert policy.infer(guided())["actions"].shape == (16, 4)
