"""Published clients, unmodified, drive our server: openpi-client under old and new `websockets`, inspect-robots-franka.

They live in an environment of their own, because they pin an older NumPy: `make stock` makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from stock_environment import FRAME, OLDER_WEBSOCKETS, look, needs_stock, run_script
from threaded_server import AnswersWhenPrepared, serving

from relay.engine.base import PolicySpec
from relay.protocol.errors import ObservationError
from relay.protocol.images import decode_images
from relay.protocol.messages import Observation, Options

pytestmark = needs_stock

JOINTS = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])


@dataclass(frozen=True, slots=True)
class Seen:
    """What a looking policy made of an observation."""

    chunk: NDArray[np.float32]
    notes: Sequence[Any] = ()
    ignored: Sequence[str] = ()


class LookingEngine(AnswersWhenPrepared):
    """Answers with what it saw of the first camera, in four equal steps."""

    spec = PolicySpec("looking", ("base_0_rgb",), state_dim=3, action_horizon=4, action_dim=3, num_steps=1)

    def prepare(self, observation: Observation, options: Options) -> Seen:
        if observation["state"].shape != (3,):
            raise ObservationError(f"state has {observation['state'].shape[0]} values; looking expects 3")
        return Seen(np.array([look(decode_images(observation)["image"]["base_0_rgb"])] * 4, np.float32))


def seen(frame: NDArray[np.uint8]) -> list[float]:
    return np.array(look(frame), np.float32).tolist()


class DroidEngine(AnswersWhenPrepared):
    """Takes openpi's DROID observation and answers (15, 8): joints and gripper as they came, in every row."""

    spec = PolicySpec("droid", ("exterior_image_1_left",), state_dim=8, action_horizon=15, action_dim=8, num_steps=1)

    def prepare(self, observation: Observation, options: Options) -> Seen:
        frames = [observation[f"observation/{name}"] for name in ("exterior_image_1_left", "wrist_image_left")]
        assert [(frame.dtype, frame.shape) for frame in frames] == [(np.uint8, (224, 224, 3))] * 2
        assert observation["prompt"] == "open the drawer"
        state = np.concatenate([observation["observation/joint_position"], observation["observation/gripper_position"]])
        return Seen(np.tile(state.astype(np.float32), (15, 1)))


@pytest.fixture(scope="module")
def looking() -> Iterator[str]:
    with serving(LookingEngine()) as url:
        yield url


@pytest.fixture(scope="module", params=[*OLDER_WEBSOCKETS, ""], ids="websockets {}".format)
def saw(looking: str, jpeg: tuple[Path, NDArray[np.uint8]], request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the stock client saw, with this release of `websockets`."""
    saw = run_script("stock_client.py", looking, str(jpeg[0]), websockets=request.param)
    assert saw["websockets"].startswith(request.param)
    return saw


def test_the_stock_client_reads_the_metadata(saw: dict[str, Any]) -> None:
    assert saw["metadata"] == {
        "model": "looking",
        "cameras": ["base_0_rgb"],
        "state_dim": 3,
        "action_horizon": 4,
        "action_dim": 3,
        "num_steps": 1,
    }


def test_the_stock_client_gets_the_actions_of_its_frame(saw: dict[str, Any]) -> None:
    assert saw["actions"] == [seen(FRAME)] * 4
    assert saw["dtype"] == "float32"


def test_the_stock_client_may_send_jpeg(saw: dict[str, Any], jpeg: tuple[Path, NDArray[np.uint8]]) -> None:
    assert saw["encoded_actions"] == [seen(jpeg[1])] * 4


def test_the_broker_hands_out_one_action_at_a_time_across_chunks(saw: dict[str, Any]) -> None:
    assert saw["steps"] == [seen(FRAME)] * 5


def test_the_first_reply_holds_the_timings_of_its_own_request(saw: dict[str, Any]) -> None:
    assert saw["policy_timing"].keys() == {"infer_ms"}
    assert saw["server_timing"].keys() == {"infer_ms", "parse_ms"}


def test_the_timings_of_later_replies_make_columns_of_equal_length(saw: dict[str, Any]) -> None:
    columns = {key: [timing[key] for timing in saw["later_timings"]] for key in saw["later_timings"][0]}
    assert columns.keys() == {"infer_ms", "parse_ms", "prev_total_ms"}
    assert all(timing.keys() == columns.keys() for timing in saw["later_timings"])
    assert all(isinstance(value, float) for column in columns.values() for value in column)


def test_the_stock_client_raises_our_words_and_then_the_connection_is_closed(saw: dict[str, Any]) -> None:
    assert "Traceback (most recent call last)" in saw["failure"]
    assert "state has 7 values; looking expects 3" in saw["failure"]
    assert saw["after_failure"] == "ConnectionClosedError"


def test_the_stock_client_drives_the_vllm_endpoint(looking: str) -> None:
    saw = run_script("stock_vllm_client.py", looking)
    expected = [seen(FRAME)] * 4
    assert saw["metadata"]["action_horizon"] == 4
    assert (saw["actions"], saw["dtype"], saw["last"]) == (expected, "float32", expected)
    assert saw["refused"] == {"type": "error", "message": "state has 7 values; looking expects 3"}
    assert saw["unknown"] == {"type": "error", "message": "Invalid request payload"}
    assert saw["reset"] == {"status": "reset successful"}


def test_the_stock_client_drives_the_demo_policy_a_hundred_times(demo_url: str) -> None:
    saw = run_script("stock_demo_client.py", demo_url)
    assert saw == {"shapes": [[16, 4]], "finite": True, "model": "demo"}


def test_the_franka_policy_gets_a_chunk_of_eight_wide_actions() -> None:
    with serving(DroidEngine()) as url:
        saw = run_script("stock_franka_client.py", url.rpartition(":")[2])
    # DROID's gripper is 0 when open, that client's is 1: it turns 0.75 into 0.25 on the way out and back on the way in.
    expected = [[*np.float32(JOINTS).astype(float).tolist(), 0.75]] * 15
    assert saw == {"chunks": [expected, expected], "num_inferences": 2}
