"""An object with `infer` behind a real server: what it sees, what of its answers is sent, how it refuses."""

from __future__ import annotations

import asyncio
import logging
import re
import struct
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_policy import ask, client, dial, running
from websockets.exceptions import ConnectionClosed

from relay.protocol.images import Codec, encode_frame
from relay.protocol.msgpack_numpy import pack, unpack
from relay.server import ObservationError, PolicySpec
from relay.server.own_policy import OwnEngine

ROOT = Path(__file__).parents[2]
VLLM = "/v1/realtime/robot/openpi"
ACTIONS = np.arange(6, dtype=np.float32).reshape(2, 3)
SPEC = PolicySpec(
    "own", ("front",), state_dim=3, action_horizon=2, action_dim=3, num_steps=4, supported_options=frozenset({"seed"})
)


class Own:
    """Answers as it is told and keeps what it saw."""

    def __init__(self, answer: Callable[[dict[str, Any]], Any] = lambda observation: ACTIONS, **attributes: Any):
        self.seen: list[dict[str, Any]] = []
        self._answer = answer
        vars(self).update(attributes)

    def infer(self, observation: dict[str, Any]) -> Any:
        self.seen.append(observation)
        return self._answer(observation)


async def reply_of(policy: Own, path: str = "/", metadata: Any = None, **observation: Any) -> Any:
    """What a client reads when it sends one observation."""
    async with running(OwnEngine(policy, metadata)) as server, client(server, path) as websocket:
        return await ask(websocket, pack(observation))


async def greeting_of(policy: Own, path: str = "/", metadata: Any = None) -> dict[str, Any]:
    async with running(OwnEngine(policy, metadata)) as server, dial(server.port, path) as websocket:
        return unpack(await websocket.recv())


# ---- what it sees


async def test_the_policy_gets_what_the_client_sent_without_the_transport_keys():
    policy = Own()
    await reply_of(policy, state=np.ones(3, np.float32), prompt="pick", session_id="left", nested={"a": [1, 2]})
    (seen,) = policy.seen
    assert seen.keys() == {"state", "prompt", "nested"}
    assert seen["nested"] == {"a": [1, 2]}
    np.testing.assert_array_equal(seen["state"], np.ones(3))


async def test_encoded_frames_are_arrays_before_the_policy_sees_them():
    frame = np.arange(24 * 32 * 3, dtype=np.uint8).reshape(24, 32, 3)
    encoded = encode_frame(frame, Codec.LOSSLESS)
    policy = Own()
    await reply_of(policy, image={"front": encoded, "wrist": frame}, video=[encoded, encoded])
    (seen,) = policy.seen
    np.testing.assert_array_equal(seen["image"]["front"], frame)
    np.testing.assert_array_equal(seen["image"]["wrist"], frame)
    np.testing.assert_array_equal(seen["video"], np.stack([frame, frame]))


async def test_frames_that_would_fill_the_memory_are_refused_before_they_are_decoded():
    header = struct.pack(">I4sII5BI", 13, b"IHDR", 4096, 4096, 8, 2, 0, 0, 0, 0)  # 48 MiB of pixels, it says
    huge = b"\x89PNG\r\n\x1a\n" + header + struct.pack(">I4sI", 0, b"IEND", 0)
    policy = Own()
    reply = await reply_of(policy, VLLM, images=[huge] * 6)
    assert reply["message"] == "the encoded frames hold 288 MiB of pixels; at most 256 MiB are taken"
    assert policy.seen == []


async def test_a_damaged_frame_is_refused_by_name():
    frame = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    damaged = encode_frame(frame, Codec.JPEG_Q90)[:2000]
    reply = await reply_of(Own(), VLLM, image={"front": damaged})
    assert reply["message"].startswith("image['front'] is a damaged or truncated JPEG file")


async def test_an_option_that_the_spec_supports_is_a_key_of_the_observation():
    policy = Own(spec=SPEC)
    await reply_of(policy, seed=7)
    assert policy.seen == [{"seed": 7}]


async def test_an_option_that_the_spec_does_not_support_is_refused():
    policy = Own(spec=SPEC)
    reply = await reply_of(policy, VLLM, num_steps=3)
    assert reply["message"] == "num_steps is not an option of own; it takes: deadline_ms, seed"
    assert policy.seen == []


async def test_without_a_spec_options_are_refused():
    reply = await reply_of(Own(), VLLM, seed=7)
    assert reply["message"] == "seed is not an option of Own; it takes: deadline_ms"


async def test_waiting_requests_are_answered_one_by_one_whatever_the_spec_says():
    policy = Own(spec=SPEC)
    engine = OwnEngine(policy)
    async with running(engine) as server, client(server) as first, client(server) as second:
        await asyncio.gather(*(ask(websocket, pack({"x": 1})) for websocket in (first, second)))
    assert SPEC.max_batch > 1
    assert engine.spec.max_batch == 1
    assert policy.seen == [{"x": 1}] * 2


# ---- what it answers


async def test_an_array_is_sent_as_float32():
    reply = await reply_of(Own(lambda observation: ACTIONS.astype(np.float64)))
    assert reply["actions"].dtype == np.float32
    np.testing.assert_array_equal(reply["actions"], ACTIONS)


async def test_lists_of_numbers_are_read_as_an_array():
    reply = await reply_of(Own(lambda observation: [[1, 2], [3, 4]]), VLLM)
    np.testing.assert_array_equal(reply, [[1, 2], [3, 4]])


async def test_groups_of_actions_keep_their_names():
    reply = await reply_of(Own(lambda observation: {"arm": ACTIONS, "gripper": ACTIONS[:, :1]}), VLLM)
    assert {name: part.shape for name, part in reply.items()} == {"arm": (2, 3), "gripper": (2, 1)}


async def test_of_a_reply_like_openpis_the_actions_are_sent_and_the_rest_is_logged_once(
    caplog: pytest.LogCaptureFixture,
):
    policy = Own(lambda observation: {"state": np.ones(3), "actions": ACTIONS, "policy_timing": {"infer_ms": 1.0}})
    with caplog.at_level(logging.INFO, "relay.server.own_policy"):
        async with running(OwnEngine(policy)) as server, client(server, VLLM) as websocket:
            for _ in range(2):
                np.testing.assert_array_equal(await ask(websocket, pack({"x": 1})), ACTIONS)
    messages = [record.getMessage() for record in caplog.records if record.name == "relay.server.own_policy"]
    assert messages == ["only 'actions' is sent of what infer returns; left out: policy_timing, state"]


def test_actions_are_copied_so_that_the_policy_may_use_its_array_again():
    actions = ACTIONS.copy()
    engine = OwnEngine(Own(lambda observation: actions))
    sent = engine._actions(actions)
    actions[:] = 9
    np.testing.assert_array_equal(sent, ACTIONS)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ACTIONS[0], "infer returned actions as an array of shape (3,) and dtype float32"),
        (ACTIONS[:0], "infer returned actions as an array of shape (0, 3) and dtype float32"),
        ("left", "infer returned actions as an array of shape () and dtype <U4"),
        ({"arm": np.array([["a"]])}, "infer returned arm as an array of shape (1, 1) and dtype <U1"),
        (None, "infer returned actions as an array of shape () and dtype object"),
        ({}, "infer returned an empty map; expected actions"),
        (ACTIONS[:, :2], "infer returned actions of shape (2, 2); this policy's spec says (horizon, 3)"),
    ],
)
async def test_an_answer_that_is_no_chunk_is_an_internal_error_that_says_what_came(answer: Any, reason: str):
    reply = await reply_of(Own(lambda observation: answer, spec=SPEC), x=1)
    assert f"TypeError: {reason}" in reply
    assert "Internal inference error" in reply.splitlines()[-1]


async def test_infinite_actions_are_not_sent():
    reply = await reply_of(Own(lambda observation: np.full((2, 3), 1e300)))
    assert "actions[0, 0] is not finite" in reply


# ---- how it fails


async def test_an_observation_error_reaches_the_sender_in_its_own_words():
    def refuse(observation: dict[str, Any]) -> Any:
        raise ObservationError("state is missing; Own takes (3,)")

    assert (await reply_of(Own(refuse), VLLM))["message"] == "state is missing; Own takes (3,)"
    text = await reply_of(Own(refuse))
    assert "state is missing; Own takes (3,)" in text.splitlines()[-1]


async def test_any_other_error_is_internal_and_the_next_request_is_answered():
    policy = Own(lambda observation: observation["table"]["x"] * ACTIONS)
    async with running(OwnEngine(policy)) as server, client(server, VLLM) as websocket:
        failed = await ask(websocket, pack({"x": 1}))
        assert failed == {"type": "error", "message": "Internal inference error"}
        np.testing.assert_array_equal(await ask(websocket, pack({"table": {"x": 2.0}})), 2 * ACTIONS)


# ---- what clients are told


async def test_without_spec_and_metadata_clients_read_its_class_and_nothing_that_nobody_told():
    assert await greeting_of(Own()) == {"model": "Own"}
    config = await greeting_of(Own(), VLLM)
    assert not {"action_horizon", "action_dim"} & config.keys()
    assert "needs_session_id" in config


async def test_metadata_of_the_caller_are_what_clients_read():
    metadata = {"cameras": ["front"], "action_horizon": 2, "reset_pose": [0.0, 1.0]}
    assert await greeting_of(Own(), metadata=metadata) == {"model": "Own", **metadata}
    assert (await greeting_of(Own(), VLLM, metadata))["action_horizon"] == 2


async def test_metadata_of_the_policy_are_taken_where_the_caller_gives_none():
    assert await greeting_of(Own(metadata={"model": "mine"})) == {"model": "mine"}


async def test_a_spec_is_told_in_full():
    greeting = await greeting_of(Own(spec=SPEC))
    assert greeting.keys() == {"model", "cameras", "state_dim", "action_horizon", "action_dim", "num_steps"}
    assert (greeting["model"], greeting["action_horizon"]) == ("own", 2)


@pytest.mark.parametrize(
    ("policy", "metadata", "reason"),
    [
        (object(), None, r"object cannot be served: it has no method infer\(observation\)"),
        (Own(spec={"model": "x"}), None, "Own.spec is a map of 1 items; expected a relay.server.PolicySpec"),
        (Own(spec=SPEC), {"model": "x"}, "Own has a spec"),
        (Own(), ["model"], "metadata is a list of 1 items; expected a map"),
        (Own(), {"action_dim": "7"}, r"metadata\['action_dim'\] is '7'; expected an integer"),
        (Own(), {"cameras": "front"}, r"metadata\['cameras'\] is 'front'; expected a list of names"),
        (Own(), {"hand": object()}, "hand"),
    ],
)
def test_what_cannot_be_served_is_said_before_the_port_is_bound(policy: Any, metadata: Any, reason: str):
    with pytest.raises((TypeError, ValueError), match=reason):
        OwnEngine(policy, metadata)


# ---- the door


def test_importing_relay_server_loads_none_of_it():
    code = (
        "import relay.server, sys; print([m for m in sys.modules if m.startswith(('relay.server.', 'relay.engine'))])"
    )
    answer = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_an_unknown_name_of_relay_server_is_an_attribute_error():
    import relay.server

    assert not hasattr(relay.server, "serv")


PAGE_BLOCK = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/own-policy.md").read_text("utf-8"), re.S | re.M)
EXAMPLE = (ROOT / "examples/own_policy.py").read_text("utf-8")


def test_the_page_shows_the_example_and_it_has_ten_lines():
    (block,) = PAGE_BLOCK
    assert EXAMPLE.endswith(block)
    assert len([line for line in block.splitlines() if line]) == 10


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")
async def test_the_example_serves_until_it_is_stopped():
    assert "port=8000" in EXAMPLE
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", EXAMPLE.replace("port=8000", "port=0"), stdout=PIPE, stderr=PIPE
    )
    try:
        async with dial(await asyncio.wait_for(port_of(server), 20)) as websocket:
            assert unpack(await websocket.recv()) == {"model": "Wave"}
            reply = await ask(websocket, pack({"state": np.ones(7, np.float32)}))
            assert reply["actions"].shape == (16, 7)
            assert "state is missing; Wave takes the joint angles" in await ask(websocket, pack({"x": 1}))
            with pytest.raises(ConnectionClosed):
                await websocket.recv()
        server.terminate()
        assert await asyncio.wait_for(server.wait(), 20) == 0
    finally:
        if server.returncode is None:
            server.kill()
        await server.communicate()


async def port_of(server: asyncio.subprocess.Process) -> int:
    assert server.stderr is not None
    async for line in server.stderr:
        if found := re.search(r"listening on ws://127\.0\.0\.1:(\d+)", line.decode()):
            return int(found[1])
    raise AssertionError("the server ended without listening")
