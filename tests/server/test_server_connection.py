"""One client of a running server: greeting, replies, order, errors, goodbye."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_policy import DIM, HORIZON, FakeEngine, ask, client, dial, observation, running
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from relay.protocol.limits import MAX_OUTSTANDING_REQUESTS
from relay.protocol.messages import Infer
from relay.protocol.msgpack_numpy import pack, unpack
from relay.server import keepalive
from relay.server.scheduler import Answer, Scheduler
from relay.server.sessions import Session

STOCK_REASON = "Internal server error. Traceback included in previous frame."


async def closed(websocket: ClientConnection) -> tuple[int, str]:
    with pytest.raises(ConnectionClosed) as caught:
        await asyncio.wait_for(websocket.recv(), 5)
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, caught.value.rcvd.reason


async def until(condition: Any) -> None:
    for _ in range(400):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never became true")


async def test_the_first_frame_is_the_metadata_with_the_checkpoints_own_merged_in():
    async with running() as server, dial(server.port) as websocket:
        assert unpack(await websocket.recv()) == {
            "model": "fake",
            "cameras": ["front", "wrist"],
            "state_dim": 3,
            "action_horizon": 4,
            "action_dim": 3,
            "num_steps": 10,
            "reset_pose": [0.0, 1.0],
        }


async def test_a_reply_holds_actions_and_timings_only():
    async with running() as server, client(server) as websocket:
        reply = await ask(websocket, observation(2.0))
        assert list(reply) == ["actions", "policy_timing", "server_timing"]
        assert reply["actions"].dtype == np.float32
        assert np.array_equal(reply["actions"], np.full((HORIZON, DIM), 2.0))
        assert list(reply["policy_timing"]) == ["infer_ms"]
        assert set(reply["server_timing"]) == {"infer_ms", "parse_ms"}


async def test_from_the_second_reply_on_the_previous_total_is_there():
    async with running() as server, client(server) as websocket:
        await ask(websocket, observation())
        for _ in range(2):
            timing = (await ask(websocket, observation()))["server_timing"]
            assert set(timing) == {"infer_ms", "parse_ms", "prev_total_ms"}


async def test_pipelined_replies_have_the_same_timing_keys():
    async with running() as server, client(server) as websocket:
        for value in range(3):
            await websocket.send(observation(value))
        replies = [unpack(await websocket.recv()) for _ in range(3)]
        assert ["prev_total_ms" in reply["server_timing"] for reply in replies] == [False, True, True]


async def test_server_infer_ms_covers_policy_infer_ms():
    async with running() as server, client(server) as websocket:
        reply = await ask(websocket, observation())
        assert reply["server_timing"]["infer_ms"] >= reply["policy_timing"]["infer_ms"] > 0


async def test_a_relay_client_gets_timings_per_stage_from_the_first_reply():
    async with running() as server, client(server, subprotocols=["other", "relay.v1"]) as websocket:
        timing = (await ask(websocket, observation()))["server_timing"]
        assert set(timing) == {"infer_ms", "parse_ms", "prepare_ms", "queue_ms", "model_ms", "encode_ms"}
        assert all(isinstance(value, float) and value >= 0 for value in timing.values())


async def test_action_groups_are_a_map_of_arrays():
    async with running() as server, client(server) as websocket:
        actions = (await ask(websocket, observation(1.0, do="groups")))["actions"]
        assert {name: part.shape for name, part in actions.items()} == {"arm": (4, 2), "gripper": (4, 1)}


async def test_notes_are_in_the_reply_when_there_are_any():
    async with running() as server, client(server) as websocket:
        assert (await ask(websocket, observation(do="note")))["notes"] == ["prompt cut", "slow"]


async def test_a_note_is_told_once_per_session_and_again_after_reset():
    async with running() as server, client(server) as websocket:
        told = ["notes" in await ask(websocket, observation(do="note", session_id=name)) for name in "aaba"]
        await ask(websocket, pack({"endpoint": "reset"}))
        told.append("notes" in await ask(websocket, observation(do="note", session_id="a")))
        assert told == [True, False, True, False, True]


async def test_a_note_that_must_be_told_refuses_a_request_whose_reply_cannot_carry_it():
    async with running() as server, client(server) as websocket:
        reply = await ask(websocket, observation(do="note", endpoint="infer"))
        assert isinstance(reply, str)
        assert "prompt cut" in reply


async def test_keys_that_the_policy_ignores_are_logged_once_per_connection(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", logger="relay")
    async with running() as server, client(server) as websocket:
        for _ in range(3):
            await ask(websocket, observation(promt="pick"))
    assert sum("ignores: 'promt'" in record.getMessage() for record in caplog.records) == 1


async def test_a_key_that_is_nearly_an_option_is_noted_once_per_session():
    async with running() as server, client(server) as websocket:
        told = [(await ask(websocket, observation(adapter="fold", session_id=name))).get("notes") for name in "aab"]
    note = ["'adapter' is not known; did you mean 'adapter_dir'?"]
    assert told == [note, None, note]


async def test_where_no_note_can_travel_it_is_logged(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", logger="relay")
    async with running() as server, client(server) as websocket:
        for _ in range(2):
            reply = await ask(websocket, observation(1.0, adapter="fold", endpoint="infer"))
            assert np.array_equal(reply, np.full((HORIZON, DIM), 1.0))
    assert sum("did you mean 'adapter_dir'?" in record.getMessage() for record in caplog.records) == 1


async def test_a_message_that_names_its_endpoint_gets_the_bare_actions():
    async with running() as server, client(server) as websocket:
        reply = await ask(websocket, observation(3.0, endpoint="infer", session_id="x"))
        assert np.array_equal(reply, np.full((HORIZON, DIM), 3.0))


async def test_reset_is_answered_in_text_and_the_connection_goes_on():
    async with running() as server, client(server) as websocket:
        assert await ask(websocket, pack({"endpoint": "reset"})) == "reset successful"
        assert "actions" in await ask(websocket, observation())


async def test_pipelined_replies_come_in_the_order_of_the_requests():
    engine = FakeEngine()
    async with running(engine, prepare_threads=3) as server, client(server) as websocket:
        sent = [
            observation(0, key="a"),
            pack({"endpoint": "reset"}),
            observation(1, key="b"),
            observation(2, key="a"),
        ]
        for message in sent * 5:
            await websocket.send(message)
        for _ in range(5):
            replies = [await websocket.recv() for _ in sent]
            assert replies[1] == "reset successful"
            values = [unpack(replies[i])["actions"][0, 0] for i in (0, 2, 3)]
            assert values == [0, 1, 2]


async def test_no_more_than_four_requests_of_a_connection_are_outstanding():
    engine = FakeEngine()
    async with running(engine) as server, client(server) as websocket:
        engine.open.clear()
        for value in range(30):
            await websocket.send(observation(value))
        await asyncio.to_thread(engine.began.wait, 5)
        await asyncio.sleep(0.05)
        assert server.outstanding == 4
        engine.open.set()
        values = [unpack(await websocket.recv())["actions"][0, 0] for _ in range(30)]
        assert values == list(range(30))


async def test_a_fragmented_message_is_one_request():
    async with running() as server, client(server) as websocket:
        message = observation(5.0)
        await websocket.send([message[:7], message[7:20], message[20:]])
        assert unpack(await websocket.recv())["actions"][0, 0] == 5.0


async def test_one_slow_client_does_not_hold_up_pings_or_handshakes():
    engine = FakeEngine()
    async with running(engine) as server, client(server) as slow:
        engine.open.clear()
        await slow.send(observation())
        await asyncio.to_thread(engine.began.wait, 5)
        async with client(server) as other:
            for websocket in (slow, other):
                await asyncio.wait_for(await websocket.ping(), 5)
        engine.open.set()
        assert "actions" in unpack(await slow.recv())


FAILURES = {
    "text frame": ("observation", "text frame; a request is one binary MessagePack message"),
    "empty frame": (b"", "empty frame; a request is one binary MessagePack message"),
    "three random bytes": (b"\x93\xc1\x07", "byte "),
    "cut short": (observation()[:-4], "byte"),
    "not a map": (pack([1, 2]), "the message is a list of 2 items; a request is a map"),
    "wrong endpoint": (pack({"endpoint": "train"}), "endpoint is 'train'; expected 'infer' or 'reset'"),
    "wrong keys": (pack({"stat": [1.0]}), "state is missing; fake takes (3,)"),
    "bad seed": (observation(seed="x"), "seed"),
    "unknown adapter": (observation(adapter_dir="x"), "adapter 'x' is not loaded; this server holds: none"),
    "executed actions": (observation(executed_actions=np.zeros((1, 3), np.float32)), "is not an option of fake"),
    "row fails": (observation(do="fail"), "state[0] is out of reach"),
    "engine raises": (observation(do="raise"), "Internal inference error"),
    "preparation raises": (observation(do="stop iteration"), "Internal inference error"),
    "not finite": (observation(do="nan"), "actions[2, 1] is not finite"),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_failed_request_is_told_and_closes_while_others_go_on(name: str):
    message, says = FAILURES[name]
    async with running() as server, client(server) as other, client(server) as websocket:
        text = await ask(websocket, message)
        assert isinstance(text, str)
        assert "Traceback (most recent call last)" in text
        last = text.splitlines()[-1]
        assert says in last
        assert re.search(r" \[error [0-9a-f]{8}\]$", last)
        assert await closed(websocket) == (1011, STOCK_REASON)
        assert "actions" in await ask(other, observation())


async def test_the_text_of_an_engine_failure_names_frames_and_reason_but_no_path():
    async with running() as server, client(server) as websocket:
        text = await ask(websocket, observation(do="raise"))
        assert re.search(r"^  relay/engine/worker\.py:\d+ \w+$", text, re.M)
        assert re.search(r"^  fake_policy\.py:\d+ _row$", text, re.M)
        assert "RuntimeError: cannot read weights.bin" in text
        assert not re.search(r"[\s'\"]/\w", text)
        assert str(Path.cwd()) not in text


async def test_the_log_holds_the_full_traceback_under_the_clients_id(caplog: pytest.LogCaptureFixture):
    async with running() as server, client(server) as websocket:
        text = await ask(websocket, observation(do="raise"))
    (error_id,) = re.findall(r"\[error ([0-9a-f]{8})\]", text)
    (record,) = [record for record in caplog.records if error_id in record.getMessage()]
    assert record.levelno == logging.ERROR
    assert "/home/robot/secret/weights.bin" in caplog.text


async def test_without_tracebacks_the_text_is_sentence_and_id_only():
    async with running(tracebacks=False) as server, client(server) as websocket:
        text = await ask(websocket, observation(do="raise"))
        assert re.fullmatch(r"Internal inference error \[error [0-9a-f]{8}\]", text)
        assert (await closed(websocket))[0] == 1011


async def test_requests_before_a_failed_one_are_answered_first():
    async with running() as server, client(server) as websocket:
        for message in (observation(1), observation(2, key="b"), b"\xc1", observation(3)):
            await websocket.send(message)
        assert [unpack(await websocket.recv())["actions"][0, 0] for _ in range(2)] == [1, 2]
        assert "Traceback" in str(await websocket.recv())
        assert (await closed(websocket))[0] == 1011


async def test_a_full_queue_closes_with_1013():
    engine = FakeEngine()
    async with running(engine, max_queue=1) as server, client(server) as first, client(server) as second:
        engine.open.clear()
        await first.send(observation())
        await asyncio.to_thread(engine.began.wait, 5)
        assert "the server is full: 1 requests are waiting" in await ask(second, observation())
        assert await closed(second) == (1013, "server is full")
        engine.open.set()
        assert "actions" in unpack(await first.recv())


async def test_a_failing_row_does_not_hurt_its_batch():
    engine = FakeEngine()
    async with running(engine) as server, client(server) as first, client(server) as bad, client(server) as good:
        engine.open.clear()
        await first.send(observation(9))
        await asyncio.to_thread(engine.began.wait, 5)
        await bad.send(observation(1, do="raise"))
        await good.send(observation(2))
        await until(lambda: server.outstanding == 3)
        await asyncio.sleep(0.05)
        engine.open.set()
        assert unpack(await good.recv())["actions"][0, 0] == 2
        assert "Traceback" in str(await bad.recv())
        assert sorted(engine.batches[1]) == [1, 2]


@pytest.mark.parametrize("requests", [2, 4, 5, 12])
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_a_client_that_vanishes_takes_its_queued_requests_with_it(
    requests: int, reset: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(keepalive, "GONE_CHECK_S", 0.05)
    engine = FakeEngine()
    async with running(engine) as server, client(server) as stays:
        async with client(server) as leaves:
            engine.open.clear()
            await stays.send(observation(1))
            await asyncio.to_thread(engine.began.wait, 5)
            for value in range(requests):
                await leaves.send(observation(2 + value))
            await until(lambda: server.outstanding == 1 + min(requests, MAX_OUTSTANDING_REQUESTS))
            if reset:
                sock = leaves.transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            leaves.transport.abort()
            await until(lambda: server.outstanding == 1 and len(server.connections) == 1)
        engine.open.set()
        assert "actions" in unpack(await stays.recv())
        assert "actions" in await ask(stays, observation(4))
        assert engine.batches == [[1], [4]]


async def test_a_message_beyond_64_mib_closes_with_1009():
    async with running() as server, client(server) as other, client(server) as websocket:
        masked_binary_frame = b"\x82\xff" + (64 * 1024 * 1024 + 1).to_bytes(8, "big") + bytes(4)
        websocket.transport.write(masked_binary_frame)
        assert (await closed(websocket))[0] == 1009
        assert "actions" in await ask(other, observation())


async def test_the_server_sends_without_delay():
    async with running() as server, client(server):
        (connection,) = server.connections
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_beyond_the_connection_limit_the_server_says_1013_and_no_metadata():
    async with (
        running(max_connections=1) as server,
        client(server),
        dial(server.port) as websocket,
    ):
        assert await closed(websocket) == (1013, "server is full: 1 connections")


async def test_sessions_of_two_connections_are_apart(monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[str, bool]] = []
    submit = Scheduler.submit

    async def recording(self: Scheduler, request: Infer, session: Session, client: Any, **options: Any) -> Answer:
        seen.append((session.id, session.fresh))
        return await submit(self, request, session, client, **options)

    monkeypatch.setattr(Scheduler, "submit", recording)
    async with running() as server, client(server) as first, client(server) as second:
        for websocket in (first, first, second):
            await ask(websocket, observation())
        await ask(first, pack({"endpoint": "reset"}))
        await ask(first, observation())
    assert seen == [("default", True), ("default", False), ("default", True), ("default", True)]
