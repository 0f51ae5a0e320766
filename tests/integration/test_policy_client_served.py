"""`PolicyClient` and `AsyncPolicy` against a real server with the shipped demo policy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import relay

FRAME = np.full((224, 224, 3), 90, np.uint8)
OBSERVATION: dict[str, Any] = {
    "image": {"base_0_rgb": FRAME},
    "state": np.zeros(4, np.float32),
    "prompt": "put the red cube on the yellow plate",
    "seed": 7,
}


@pytest.fixture
def client(demo_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[relay.PolicyClient]:
    monkeypatch.setenv("WALLE_URL", demo_url)
    with relay.PolicyClient("demo") as opened:
        yield opened


def test_the_metadata_describe_the_chunk(client: relay.PolicyClient) -> None:
    metadata = client.get_server_metadata()
    actions = client.infer(OBSERVATION)
    assert isinstance(actions, np.ndarray)
    assert actions.shape == (metadata["action_horizon"], metadata["action_dim"])
    assert actions.dtype == np.float32
    assert isinstance(metadata["needs_session_id"], bool)


def test_both_clients_get_the_same_bytes(client: relay.PolicyClient, demo_url: str) -> None:
    with relay.Policy(demo_url, codec=relay.Codec.RAW) as policy:
        expected = policy.infer(OBSERVATION)["actions"]
    actions = client.infer(OBSERVATION)
    assert isinstance(actions, np.ndarray)
    assert actions.tobytes() == expected.tobytes()


def test_lossless_frames_change_nothing(client: relay.PolicyClient) -> None:
    with relay.PolicyClient("demo", codec=relay.Codec.LOSSLESS) as lossless:
        assert lossless.codec is relay.Codec.LOSSLESS
        np.testing.assert_array_equal(lossless.infer(OBSERVATION), client.infer(OBSERVATION))


def test_a_refusal_names_the_field_and_the_next_observation_is_answered(client: relay.PolicyClient) -> None:
    refused = client.infer({**OBSERVATION, "state": np.zeros(7, np.float32)})
    assert isinstance(refused, dict)
    assert refused["type"] == "error"
    assert "state has 7 values" in refused["message"]
    client.reset()
    assert isinstance(client.infer(OBSERVATION), np.ndarray)


def check_timings(first: dict[str, Any], second: dict[str, Any]) -> None:
    for reply in (first, second):
        assert set(reply["policy_timing"]) == {"infer_ms"}
        assert {"infer_ms", "parse_ms"} <= reply["server_timing"].keys()
        assert all(type(value) is float and value >= 0 for value in reply["server_timing"].values())
        assert not reply["actions"].flags.writeable
    assert "prev_total_ms" not in first["server_timing"]
    assert second["server_timing"]["prev_total_ms"] >= first["server_timing"]["infer_ms"]


def test_policy_gets_the_servers_timings(demo_url: str) -> None:
    with relay.Policy(demo_url) as policy:
        check_timings(policy.infer(OBSERVATION), policy.infer(OBSERVATION))


async def test_async_policy_gets_the_servers_timings(demo_url: str) -> None:
    async with relay.AsyncPolicy(demo_url) as policy:
        check_timings(await policy.infer(OBSERVATION), await policy.infer(OBSERVATION))


async def test_tasks_share_an_async_policy(client: relay.PolicyClient, demo_url: str) -> None:
    observations = [{**OBSERVATION, "seed": seed} for seed in range(6)]
    async with relay.AsyncPolicy(demo_url, codec=relay.Codec.RAW) as policy:
        await policy.reset()
        replies = await asyncio.gather(*[policy.infer(observation) for observation in observations])
    for observation, reply in zip(observations, replies, strict=True):
        np.testing.assert_array_equal(reply["actions"], client.infer(observation))
