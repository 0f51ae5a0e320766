"""Real-time chunking over the wire: guided where it is known, done without where it is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_servers import Behaviour, LoopbackServers, echo_state, openpi_server, vllm_server

from field.loopback import CLIENTS, PATHS, robot, serving, state
from relay.protocol.images import Codec, encode_frame

LEFT_OVER = np.random.default_rng(0).standard_normal((5, 32)).astype(np.float32)
CHUNKING = {"prev_actions": LEFT_OVER, "inference_delay": 2, "execution_horizon": 4}
FRAME = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
NOTE = "real-time chunking is nothing that this server knows"


@pytest.mark.torch
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("client", CLIENTS)
def test_lesson_6_6_our_server_guides_by_the_fields_of_the_request(client: str, path: str, tiny_url: str):
    """Physical-Intelligence/openpi#636, #891."""
    from field.tiny_policy import observation, tiny_engine
    from relay.engine.base import Work
    from relay.protocol.options import take_options

    usual = observation(num_steps=10, image={"base_0_rgb": encode_frame(FRAME, Codec.JPEG_Q90)})
    asked = {**usual, **CHUNKING}
    with robot(client, tiny_url + path) as infer:
        plain, guided = infer(usual), infer(asked)
    assert np.abs(guided[:2] - LEFT_OVER[:2]).mean() < 0.2 * np.abs(plain[:2] - LEFT_OVER[:2]).mean()
    engine, rest = tiny_engine(), dict(asked)
    options = take_options(rest)
    (expected,) = engine.infer([Work(engine.prepare(rest, options), options)])
    np.testing.assert_allclose(guided, expected.actions, atol=1e-5)  # pyright: ignore


@pytest.mark.parametrize(
    ("path", "behaviour"),
    [("/", openpi_server(echo_state)), (PATHS[1], vllm_server(lambda seen: echo_state(seen)["actions"]))],
    ids=["openpi", "vllm-omni"],
)
@pytest.mark.parametrize("client", CLIENTS)
def test_lesson_6_6_a_server_that_knows_none_of_it_is_asked_without_and_that_is_said_once(
    client: str, path: str, behaviour: Behaviour, servers: LoopbackServers, caplog: pytest.LogCaptureFixture
):
    """Physical-Intelligence/openpi#636, #891."""
    with robot(client, servers.start(behaviour) + path) as infer:
        for value in (1, 2, 3):
            assert infer(state(value, **CHUNKING))[0] == value
    assert caplog.text.count(NOTE) == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("client", CLIENTS)
def test_lesson_6_6_a_policy_of_ours_without_it_is_asked_without_too(
    client: str, path: str, caplog: pytest.LogCaptureFixture
):
    """Physical-Intelligence/openpi#636, #891."""
    with serving() as server:
        with robot(client, server.url + path) as infer:
            infer(state(0))  # from here on the policy is known to be loaded
        with robot(client, server.url + path) as infer:
            answer: Any = infer(state(1, **CHUNKING))
    assert answer[0, 0] == 1
    assert caplog.text.count(NOTE) == 1
