"""The shipped policy over a real connection: what each part of the observation and each option changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import relay
from relay.demo.drawing import render_all
from relay.demo.robot import observation as demo_observation
from relay.demo.robot import robot_state, task_prompt
from relay.demo.tabletop import Tabletop


@pytest.fixture(scope="module")
def policy(demo_url: str) -> Iterator[relay.Policy]:
    with relay.Policy(demo_url) as policy:
        yield policy


def observation(scene: int = 0, **changes: Any) -> dict[str, Any]:
    table = Tabletop(np.random.default_rng(scene))
    prompt = task_prompt(table.cube, table.plate)
    return {**demo_observation(render_all(table), robot_state(table), prompt), "seed": 7, **changes}


def actions(policy: relay.Policy, **changes: Any) -> NDArray[np.float32]:
    return policy.infer(observation(**changes))["actions"]


def test_the_metadata_has_the_documented_keys(policy: relay.Policy) -> None:
    assert policy.get_server_metadata() == {
        "model": "demo",
        "cameras": ["base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"],
        "state_dim": 4,
        "action_horizon": 16,
        "action_dim": 4,
        "num_steps": 10,
    }


def test_a_reply_holds_a_read_only_chunk_and_timings(policy: relay.Policy) -> None:
    policy.infer(observation())
    reply = policy.infer(observation())
    assert reply["actions"].shape == (16, 4)
    assert reply["actions"].dtype == np.float32
    assert not reply["actions"].flags.writeable
    assert reply["policy_timing"].keys() == {"infer_ms"}
    assert {"infer_ms", "parse_ms", "prev_total_ms"} <= reply["server_timing"].keys()


def test_the_same_seed_gives_the_same_bytes(policy: relay.Policy) -> None:
    assert actions(policy).tobytes() == actions(policy).tobytes()


def test_another_seed_gives_another_chunk(policy: relay.Policy) -> None:
    assert not np.array_equal(actions(policy), actions(policy, seed=8))


def test_given_noise_decides_the_chunk(policy: relay.Policy) -> None:
    noise = np.random.default_rng(0).standard_normal((16, 4), dtype=np.float32)
    request = observation(noise=noise)
    del request["seed"]
    assert policy.infer(request)["actions"].tobytes() == policy.infer(request)["actions"].tobytes()


def test_lossless_and_raw_frames_give_the_same_bytes(demo_url: str) -> None:
    chunks: list[bytes] = []
    for codec in (relay.Codec.RAW, relay.Codec.LOSSLESS):
        with relay.Policy(demo_url, codec=codec) as policy:
            chunks.append(actions(policy).tobytes())
    assert chunks[0] == chunks[1]


@pytest.mark.parametrize("height_width", [(480, 640), (720, 1280), (180, 320), (128, 128)])
def test_frames_of_other_sizes_are_taken(policy: relay.Policy, height_width: tuple[int, int]) -> None:
    frame = np.full((*height_width, 3), 127, np.uint8)
    assert np.isfinite(actions(policy, image={"base_0_rgb": frame})).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": "put the blue cube on the purple plate"},
        {"state": np.full(4, 0.5, np.float32)},
        {"image_mask": {"base_0_rgb": False}},
        {"image_mask": {"left_wrist_0_rgb": False}},
        {"num_steps": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_part_of_the_observation_matters(policy: relay.Policy, changes: dict[str, Any]) -> None:
    prompt = "put the red cube on the yellow plate"
    before = actions(policy, prompt=prompt)
    assert np.abs(actions(policy, **{"prompt": prompt, **changes}) - before).max() > 1e-3


def test_more_steps_come_closer_to_the_exact_flow(policy: relay.Policy) -> None:
    exact = actions(policy, num_steps=50)
    distances = [float(np.abs(actions(policy, num_steps=n) - exact).mean()) for n in (1, 2, 4, 10, 25)]
    assert distances == sorted(distances, reverse=True)


def test_the_absent_camera_is_noted_once(demo_url: str) -> None:
    with relay.Policy(demo_url) as policy:
        notes = [policy.infer(observation()).get("notes", []) for _ in range(2)]
    assert notes == [["cameras masked: right_wrist_0_rgb"], []]


def test_two_robots_on_one_connection_get_what_they_get_alone(policy: relay.Policy) -> None:
    alone = [actions(policy, scene=scene) for scene in (1, 2)]
    together = [actions(policy, scene=scene, session_id=f"arm-{scene}") for scene in (1, 2, 1, 2)]
    assert all(np.array_equal(chunk, alone[i % 2]) for i, chunk in enumerate(together))


def test_token_ids_give_the_same_chunk_as_the_text(policy: relay.Policy) -> None:
    from relay.models.pi0.tokenizer import PromptTokenizer, load_vocabulary
    from relay.models.registry import checkpoint_folder

    request = observation()
    tokenizer = PromptTokenizer(load_vocabulary(checkpoint_folder("demo", None) / "tokenizer.json"), 48, True)
    tokens = np.array(tokenizer(request["prompt"], request["state"]).tokens)
    padded = {
        "tokenized_prompt": np.pad(tokens, (0, 48 - len(tokens))),
        "tokenized_prompt_mask": np.arange(48) < len(tokens),
    }
    expected = policy.infer(request)["actions"]
    del request["prompt"]
    assert np.array_equal(policy.infer({**request, **padded})["actions"], expected)
