"""vLLM-Omni's robot endpoint: greeting, bare replies, failures as maps, the connection that stays open."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_policy import DIM, HORIZON, SPEC, FakeEngine, ask, client, dial, observation, running
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus

from relay.protocol.limits import MAX_MESSAGE_BYTES
from relay.protocol.msgpack_numpy import pack, unpack
from relay.server.app import Server

PATH = "/v1/realtime/robot/openpi"
RESET = pack({"endpoint": "reset"})
CONFIG = {"image_resolution": [180, 320], "needs_session_id": True, "embodiment_tag": "DROID"}
GENERIC = {
    "image_resolution": [224, 224],
    "n_external_cameras": 1,
    "needs_wrist_camera": True,
    "needs_stereo_camera": False,
    "needs_session_id": False,
    "action_space": "joint_position",
}


def robot(server: Server) -> Any:
    return client(server, PATH)


async def greeting(server: Server, path: str = PATH, **options: Any) -> dict[str, Any]:
    async with dial(server.port, path, **options) as websocket:
        return unpack(await websocket.recv())


def failed(message: str) -> dict[str, str]:
    return {"type": "error", "message": message}


@pytest.mark.parametrize("path", [PATH, PATH + "/", PATH + "?key=1", "/pi05" + PATH, "/a/b" + PATH + "//?x=/"])
async def test_a_path_that_ends_in_the_endpoint_is_served_in_its_dialect(path: str):
    async with running() as server, client(server, path) as websocket:
        assert isinstance(await ask(websocket, observation()), np.ndarray)


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/realtime", "/v1/realtime/robot/openpi/x", "/v1/models?x=" + PATH])
async def test_other_paths_under_v1_stay_404(path: str):
    async with running() as server:
        with pytest.raises(InvalidStatus) as caught:
            await dial(server.port, path)
        assert caught.value.response.status_code == 404


@pytest.mark.parametrize("path", ["/", "/pi05", "/pi05/v1", "/openpi", "/x" + PATH + "/more"])
async def test_everything_else_is_openpis(path: str):
    async with running() as server, client(server, path) as websocket:
        assert "actions" in await ask(websocket, observation())


async def test_the_greeting_is_the_familys_config_with_instance_and_payload_limit():
    async with running(FakeEngine(replace(SPEC, handshake=CONFIG))) as server:
        first = await greeting(server)
        assert first == {**CONFIG, "instance_id": first["instance_id"], "max_payload_bytes": MAX_MESSAGE_BYTES}
        assert list(first)[:3] == list(CONFIG)


async def test_a_policy_without_a_config_is_greeted_with_what_its_spec_tells():
    async with running() as server:
        first = await greeting(server)
        assert {key: first[key] for key in GENERIC} == GENERIC
        assert (first["action_horizon"], first["action_dim"]) == (HORIZON, DIM)


async def test_the_instance_is_the_same_for_all_connections_and_paths_of_a_process():
    async with running() as server, running() as other:
        first = (await greeting(server))["instance_id"]
        assert re.fullmatch("[0-9a-f]{16}", first)
        assert (await greeting(server))["instance_id"] == first
        assert (await greeting(other))["instance_id"] != first
        async with client(server, subprotocols=["relay.v1"]) as websocket:
            assert websocket.response is not None
            assert websocket.response.headers["Relay-Instance"] == first


async def test_roboarenas_handshake_has_its_six_keys_for_any_policy():
    async with running(handshake="roboarena") as server:
        assert await greeting(server, "/") == GENERIC


async def test_roboarenas_handshake_takes_the_familys_values():
    async with running(FakeEngine(replace(SPEC, handshake=CONFIG)), handshake="roboarena") as server:
        assert await greeting(server, "/") == {**GENERIC, "image_resolution": [180, 320], "needs_session_id": True}


async def test_roboarenas_handshake_changes_nothing_on_the_vllm_path():
    async with running(handshake="roboarena") as server:
        assert "instance_id" in await greeting(server)


async def test_a_reply_is_a_bare_float32_array():
    async with running() as server, robot(server) as websocket:
        reply = await ask(websocket, observation(2.0))
        assert reply.dtype == np.float32
        assert np.array_equal(reply, np.full((HORIZON, DIM), 2.0))


@pytest.mark.parametrize("subprotocols", [None, ["relay.v1"]])
async def test_action_groups_are_a_map_of_arrays_and_nothing_else(subprotocols: Any):
    async with running() as server, client(server, PATH, subprotocols=subprotocols) as websocket:
        reply = await ask(websocket, observation(1.0, do="groups"))
        assert {name: (part.shape, part.dtype) for name, part in reply.items()} == {
            "arm": ((HORIZON, 2), np.float32),
            "gripper": ((HORIZON, 1), np.float32),
        }


async def test_naming_the_endpoint_changes_nothing():
    async with running() as server, robot(server) as websocket:
        reply = await ask(websocket, observation(3.0, endpoint="infer", session_id="x"))
        assert np.array_equal(reply, np.full((HORIZON, DIM), 3.0))


async def test_reset_is_answered_with_a_status_map_and_its_other_keys_are_ignored():
    async with running() as server, robot(server) as websocket:
        for message in (RESET, pack({"endpoint": "reset", "session_id": 1.5, "seed": "x"})):
            assert await ask(websocket, message) == {"status": "reset successful"}
        assert isinstance(await ask(websocket, observation()), np.ndarray)


FAILURES = {
    "text frame": ("observation", "Invalid request payload"),
    "empty frame": (b"", "Invalid request payload"),
    "three random bytes": (b"\x93\xc1\x07", "Invalid request payload"),
    "cut short": (observation()[:-4], "Invalid request payload"),
    "not a map": (pack([1, 2]), "Invalid request payload"),
    "wrong endpoint": (pack({"endpoint": "train"}), "Invalid request payload"),
    "object array": (
        pack({"state": {"__ndarray__": True, "data": b"", "dtype": "|O", "shape": [0]}}),
        "Invalid request payload",
    ),
    "wrong keys": (pack({"stat": [1.0]}), "state is missing; fake takes (3,)"),
    "bad seed": (observation(seed="x"), "seed is 'x'; expected an integer from -2^63 to 2^64 - 1"),
    "unknown adapter": (observation(adapter_dir="x"), "adapter 'x' is not loaded; this server holds: none"),
    "row fails": (observation(do="fail"), "state[0] is out of reach"),
    "engine raises": (observation(do="raise"), "Internal inference error"),
    "preparation raises": (observation(do="stop iteration"), "Internal inference error"),
    "not finite": (observation(do="nan"), "Internal inference error"),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_failed_request_is_an_error_map_and_the_connection_stays_open(name: str):
    message, says = FAILURES[name]
    async with running() as server, robot(server) as websocket:
        for _ in range(2):
            assert await ask(websocket, message) == failed(says)
        assert isinstance(await ask(websocket, observation()), np.ndarray)


async def test_the_error_id_is_in_the_log_only(caplog: pytest.LogCaptureFixture):
    async with running() as server, robot(server) as websocket:
        assert await ask(websocket, observation(do="raise")) == failed("Internal inference error")
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert re.search(r"\[error [0-9a-f]{8}\]", record.getMessage())
    assert "/home/robot/secret/weights.bin" in caplog.text


async def test_pipelined_requests_are_answered_in_order_failures_included():
    async with running() as server, robot(server) as websocket:
        for message in (observation(1), b"\xc1", RESET, observation(2, do="fail"), observation(3)):
            await websocket.send(message)
        replies = [unpack(await websocket.recv()) for _ in range(5)]
        assert (replies[0][0, 0], replies[4][0, 0]) == (1, 3)
        assert replies[1] == failed("Invalid request payload")
        assert replies[2] == {"status": "reset successful"}
        assert replies[3] == failed("state[0] is out of reach")


async def test_a_full_server_says_so_and_serves_when_there_is_room():
    engine = FakeEngine()
    async with running(engine, max_queue=1) as server, robot(server) as first, robot(server) as second:
        engine.open.clear()
        await first.send(observation())
        await asyncio.to_thread(engine.began.wait, 5)
        assert await ask(second, observation()) == failed(
            "the server is full: 1 requests are waiting; try again in a moment"
        )
        engine.open.set()
        await first.recv()
        assert isinstance(await ask(second, observation()), np.ndarray)


async def test_a_note_that_must_be_told_refuses_the_request():
    async with running() as server, robot(server) as websocket:
        assert await ask(websocket, observation(do="note")) == failed("prompt cut")


async def test_other_notes_are_logged_once_and_not_sent(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", logger="relay")
    async with running() as server, robot(server) as websocket:
        for _ in range(2):
            assert isinstance(await ask(websocket, observation(do="remark")), np.ndarray)
    assert sum("cannot carry: camera masked" in record.getMessage() for record in caplog.records) == 1


async def test_both_dialects_are_served_side_by_side():
    async with running() as server, robot(server) as bare, client(server) as stock:
        asked = [ask(bare, observation(1)), ask(stock, observation(2))]
        array, reply = await asyncio.gather(*asked)
        assert (array[0, 0], reply["actions"][0, 0]) == (1, 2)


async def test_a_stopping_server_answers_what_it_took_and_closes_with_1012():
    engine = FakeEngine()
    async with running(engine) as server, robot(server) as websocket:
        engine.open.clear()
        await websocket.send(observation(4))
        await asyncio.to_thread(engine.began.wait, 5)
        drain = asyncio.create_task(server.drain())
        engine.open.set()
        assert unpack(await websocket.recv())[0, 0] == 4
        assert (await goodbye(websocket))[0] == 1012
        await drain


async def test_a_lost_device_is_an_internal_error_and_then_a_goodbye():
    async with running() as server, robot(server) as websocket:
        assert await ask(websocket, observation(do="lose device")) == failed("Internal inference error")
        assert (await goodbye(websocket))[0] == 1012


async def goodbye(websocket: ClientConnection) -> tuple[int, str]:
    with pytest.raises(ConnectionClosed) as caught:
        await asyncio.wait_for(websocket.recv(), 5)
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, caught.value.rcvd.reason
