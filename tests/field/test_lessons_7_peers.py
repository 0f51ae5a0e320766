"""What servers of other kinds say, and what they must not be told."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_servers import LoopbackServers
from websockets.asyncio.server import ServerConnection

import relay
from field.loopback import PATHS, robot, serving, state

ACTIONS = np.arange(8, dtype=np.float32).reshape(4, 2)
GROUPS = {"arm": ACTIONS[None, :, :1].copy(), "gripper": ACTIONS[None, :, 1:].copy()}


def packed(value: Any) -> bytes:
    """MessagePack as openpi's and vLLM-Omni's packers write it, byte for byte, without ours."""
    return msgpack.packb(value, default=marker)


def marker(array: NDArray[Any]) -> dict[bytes, Any]:
    return {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": array.dtype.str, b"shape": array.shape}


OPENPI_METADATA = packed({"reset_pose": [0.0, 1.0]})
VLLM_METADATA = packed(
    {"image_resolution": [224, 224], "needs_session_id": False, "action_space": "joint_position", "action_horizon": 4}
)
TIMINGS = {"server_timing": {"infer_ms": 3.5}, "policy_timing": {"infer_ms": 3.1}}

STREAMS: dict[str, tuple[str, list[bytes], Any]] = {
    "openpi": ("/", [OPENPI_METADATA, packed({"actions": ACTIONS, **TIMINGS})], ACTIONS),
    "dreamzero": (PATHS[1], [VLLM_METADATA, packed(ACTIONS)], ACTIONS),
    "dreamzero on its own path": ("/", [OPENPI_METADATA, packed(ACTIONS)], ACTIONS),
    "groot": (PATHS[1], [VLLM_METADATA, packed(GROUPS)], GROUPS),
}
"""Server kinds: their path, the frames they send, the actions in them."""

ERROR = {"type": "error", "message": "Invalid request payload"}
NOT_AVAILABLE = json.dumps({"type": "error", "error": "Robot policy not available", "code": "unsupported"})


class Recorded:
    """Sends recorded frames, the first on connecting and one for each message; keeps what it gets."""

    def __init__(self, frames: list[Any]) -> None:
        self.frames = frames
        self.got: list[Any] = []

    async def __call__(self, websocket: ServerConnection) -> None:
        await websocket.send(self.frames[0])
        for frame in self.frames[1:]:
            self.got.append(msgpack.unpackb(await websocket.recv(), strict_map_key=False))
            await websocket.send(frame)
        async for message in websocket:
            self.got.append(message)


def assert_same(actions: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert actions.keys() == expected.keys()
    for name in expected if isinstance(expected, dict) else [...]:
        np.testing.assert_array_equal(actions[name], expected[name])
        assert actions[name].dtype == np.float32


# ---- 7.5: three shapes of a reply, two forms of an error


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("name", ["Policy", "AsyncPolicy"])
def test_lesson_7_5_policies_find_the_actions_of_every_server_kind(name: str, kind: str, servers: LoopbackServers):
    """vllm-project/vllm-omni#3673 (review)."""
    path, frames, expected = STREAMS[kind]
    with robot(name, servers.start(Recorded(frames)) + path) as infer:
        assert_same(infer(state(0)), expected)


@pytest.mark.parametrize("kind", STREAMS)
def test_lesson_7_5_policy_client_finds_the_actions_of_every_server_kind(kind: str, servers: LoopbackServers):
    """vllm-project/vllm-omni#3673 (review). It speaks the endpoint's path to all of them."""
    _, frames, expected = STREAMS[kind]
    with robot("PolicyClient", servers.start(Recorded(frames))) as infer:
        assert_same(infer(state(0)), expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["Policy", "AsyncPolicy"])
def test_lesson_7_5_policies_raise_an_error_map_instead_of_returning_it(name: str, path: str, servers: LoopbackServers):
    """vllm-project/vllm-omni 0.30.0: errors come as an ordinary map."""
    url = servers.start(Recorded([VLLM_METADATA, packed(ERROR), packed(ACTIONS)])) + path
    with robot(name, url) as infer:
        with pytest.raises(RuntimeError, match=r"^Invalid request payload$"):
            infer(state(0))
        assert_same(infer(state(0)), ACTIONS)


def test_lesson_7_5_policy_client_returns_an_error_map(servers: LoopbackServers):
    """vllm-project/vllm-omni 0.30.0."""
    with robot("PolicyClient", servers.start(Recorded([VLLM_METADATA, packed(ERROR), packed(ACTIONS)]))) as infer:
        assert infer(state(0)) == ERROR
        assert_same(infer(state(0)), ACTIONS)


@pytest.mark.parametrize("name", ["Policy", "PolicyClient", "AsyncPolicy"])
def test_lesson_7_5_an_endpoint_without_a_policy_says_so(name: str, servers: LoopbackServers):
    """vllm-project/vllm-omni 0.30.0: in place of the metadata, a text frame of JSON."""
    url = servers.start(Recorded([NOT_AVAILABLE]))
    with pytest.raises(RuntimeError, match=r"^Robot policy not available$"), robot(name, url):
        pass


@pytest.mark.parametrize("name", ["Policy", "PolicyClient", "AsyncPolicy"])
def test_lesson_7_5_a_text_frame_in_place_of_actions_is_raised_in_its_own_words(name: str, servers: LoopbackServers):
    """openpi: src/openpi/serving/websocket_policy_server.py sends its traceback as text."""
    text = "Traceback (most recent call last):\n  File \"policy.py\", line 1\nKeyError: 'state'"
    with robot(name, servers.start(Recorded([OPENPI_METADATA, text]))) as infer:
        with pytest.raises(RuntimeError) as error:
            infer(state(0))
        assert str(error.value) == text


# ---- 7.6: reset


@pytest.mark.parametrize("path", PATHS)
def test_lesson_7_6_reset_is_confirmed_by_our_server(path: str):
    """vllm-project/vllm-omni#2162 (review)."""
    with serving() as server, relay.Policy(server.url + path) as policy:
        policy.infer(state(1))
        policy.reset()
        policy.infer(state(2))
        assert policy.last is not None
        assert policy.last.session_fresh is True


async def test_lesson_7_6_an_async_reset_is_confirmed_by_our_server():
    """vllm-project/vllm-omni#2162 (review)."""
    with serving() as server:
        async with relay.AsyncPolicy(server.url) as policy:
            await policy.reset()
            assert (await policy.infer(state(2)))["actions"][0, 0] == 2


def test_lesson_7_6_reset_is_confirmed_by_a_vllm_omni_server(servers: LoopbackServers, monkeypatch: pytest.MonkeyPatch):
    """vllm-project/vllm-omni#2162 (review)."""
    recorded = Recorded([VLLM_METADATA, packed({"status": "reset successful"}), packed(ACTIONS)])
    monkeypatch.setenv("WALLE_URL", servers.start(recorded))
    with relay.PolicyClient("dreamzero") as client:
        client.reset()
        assert_same(client.infer(state(0)), ACTIONS)
    assert recorded.got[0] == {"endpoint": "reset"}


def test_lesson_7_6_reset_sends_nothing_to_a_plain_openpi_server(servers: LoopbackServers):
    """vllm-project/vllm-omni#2162 (review): it would take the message for an observation."""
    recorded = Recorded([OPENPI_METADATA, packed({"actions": ACTIONS})])
    with relay.Policy(servers.start(recorded)) as policy:
        policy.reset()
        policy.infer(state(0))
        policy.reset()
    assert [list(message) for message in recorded.got] == [["state"]]
