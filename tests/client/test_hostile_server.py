"""A server that means harm: whatever it sends, the robot's program gets one of the documented errors, soon."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgpack
import numpy as np
import pytest
from tiny_servers import ACTIONS, METADATA, VLLM_METADATA, Behaviour, FakeConnection, LoopbackServers
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, InvalidStatus, InvalidURI, WebSocketException
from websockets.http11 import Response
from websockets.version import version

import relay
from relay.client import async_connection, connection
from relay.client.connection import MAX_UNASKED, Greeting, open_websocket, redirected
from relay.client.conversation import Conversation
from relay.client.exchange import LONGEST_NOTE, MAX_NOTES, as_openpi_map, error_text
from relay.protocol.images import Codec
from relay.protocol.limits import MAX_MESSAGE_BYTES
from relay.protocol.msgpack_numpy import pack

OBSERVATION = {"state": np.zeros(3, np.float32)}
LONGEST_TEXT = 20_000
OBJECT_ARRAY = {b"__ndarray__": True, b"data": b"A" * 8, b"dtype": "|O", b"shape": [1]}


def conversation(answer: Any, metadata: Any = METADATA, path: str = "/", **headers: str) -> Conversation:
    """A client whose server greets with `metadata` and replies with `answer`, both packed unless they are frames."""
    first_frame = metadata if isinstance(metadata, (str, bytes)) else pack(metadata)
    greeting = Greeting(f"ws://robot{path}", True, headers, first_frame)
    return Conversation(FakeConnection(greeting, [answer]), Codec.RAW)


def saying(reply: bytes | str, first_frame: bytes | str | None = None) -> Behaviour:
    """A server that answers every message with the same frame."""

    async def behave(websocket: ServerConnection) -> None:
        await websocket.send(pack(METADATA) if first_frame is None else first_frame)
        async for _ in websocket:
            await websocket.send(reply)

    return behave


# ---- replies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        msgpack.packb({"actions": OBJECT_ARRAY}),
        msgpack.packb({"actions": {**OBJECT_ARRAY, b"dtype": "f8,O"}}),
        msgpack.packb({"actions": {**OBJECT_ARRAY, b"dtype": "<f4", b"shape": [-1]}}),
        b"\x91" * 1_000_000,
        b"\x81\xa1a" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        msgpack.packb(msgpack.ExtType(1, b"x")),
        msgpack.packb({"notes": ["x"] * 65_536}),
        msgpack.packb([{}] * 4096),
        b"",
    ],
    ids=["object", "structured", "shape", "lists", "maps", "length", "extension", "notes", "list", "empty"],
)
def test_a_reply_that_cannot_be_trusted_is_a_runtime_error(reply: bytes):
    with pytest.raises(RuntimeError, match="the server") as caught:
        conversation(reply).infer(OBSERVATION, None)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("field", ["type", "message", "error", "status", "notes", "actions"])
def test_a_reply_may_hold_arrays_where_text_is_expected(field: str):
    reply = {"type": "error", "actions": ACTIONS, field: np.array([1, 2])}
    client = conversation(reply)
    answer = client.infer(OBSERVATION, None)
    assert error_text(answer) is None
    assert isinstance(as_openpi_map(answer, client.exchange.peer), dict)


@pytest.mark.parametrize("message", [np.array([1, 2]), ["x"] * 4096, {}, None, 0, "", b"secret"])
def test_an_error_map_without_text_is_still_an_error(message: Any):
    client = conversation({"type": "error", "message": message})
    answer = client.infer(OBSERVATION, None)
    with pytest.raises(RuntimeError, match="an error without a message, of the keys 'type', 'message'"):
        as_openpi_map(answer, client.exchange.peer)


@pytest.mark.parametrize("status", [np.array(["reset successful"] * 2, object), np.array([1, 2]), None, 1])
def test_a_reset_confirmed_with_anything_else_is_a_runtime_error(status: Any):
    reply = pack(
        {"status": status.astype(np.int64) if isinstance(status, np.ndarray) and status.dtype != object else 1}
    )
    with pytest.raises(RuntimeError, match="the server did not confirm the reset"):
        conversation(reply).reset(None)


# ---- texts --------------------------------------------------------------------------------------------------------

LONG = "Traceback (most recent call last)\n" + "x" * 5_000_000 + "\nKeyError: 'state' [error 0a1b2c3d]"


def longest_texts() -> dict[str, str | bytes]:
    return {
        "text": LONG,
        "json": json.dumps({"type": "error", "message": LONG}),
        "nested json": "[" * 60_000,
        "nested maps": '{"error":' * 6_000,
        "digits": "9" * 60_000,
        "map": pack({"type": "error", "message": "x" * 1_000_000}),
        "map of keys": pack({"type": "error", **{f"{number:0400d}": 1 for number in range(4000)}}),
    }


@pytest.mark.parametrize("kind", longest_texts())
def test_an_error_text_is_cut_to_what_can_be_read(kind: str):
    client = conversation(longest_texts()[kind])
    with pytest.raises(RuntimeError) as caught:
        as_openpi_map(client.infer(OBSERVATION, None), client.exchange.peer)
    assert len(str(caught.value)) < LONGEST_TEXT


def test_of_a_long_traceback_both_ends_are_kept():
    with pytest.raises(RuntimeError) as caught:
        conversation(LONG).infer(OBSERVATION, None)
    text = str(caught.value)
    assert text.startswith("Traceback (most recent call last)")
    assert text.endswith("KeyError: 'state' [error 0a1b2c3d]")
    assert "characters left out" in text


@pytest.mark.parametrize("kind", longest_texts())
def test_the_text_of_a_refused_connection_is_cut_too(kind: str):
    with pytest.raises(RuntimeError) as caught:
        conversation(b"", metadata=longest_texts()[kind])
    assert len(str(caught.value)) < LONGEST_TEXT


def test_of_many_or_long_notes_the_first_are_kept():
    client = conversation({"actions": ACTIONS, "notes": ["x" * 10_000] + ["masked"] * 4_000})
    client.infer(OBSERVATION, None)
    assert client.exchange.last is not None
    notes = client.exchange.last.notes
    assert len(notes) == MAX_NOTES + 1
    assert LONGEST_NOTE <= len(notes[0]) < LONGEST_NOTE + 100
    assert notes[1] == "masked"
    assert notes[-1] == f"{4_001 - MAX_NOTES} further notes left out"


def test_notes_of_other_types_are_named_not_shown():
    client = conversation({"actions": ACTIONS, "notes": [np.zeros(3), ["x"] * 4_000, "masked"]})
    client.infer(OBSERVATION, None)
    assert client.exchange.last is not None
    array, nested, text = client.exchange.last.notes
    assert (array, nested, text) == ("an array of shape (3,) and dtype float64", "a list of 4000 items", "masked")


# ---- the greeting -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metadata",
    [
        msgpack.packb({"model": OBJECT_ARRAY}),
        b"\x91" * 1_000_000,
        msgpack.packb({str(number): [[]] * 4000 for number in range(20)}),
        b"\xc1",
        pack(ACTIONS),
        pack([1, 2]),
    ],
    ids=["object", "nested", "items", "garbage", "array", "list"],
)
def test_metadata_that_cannot_be_trusted_is_a_runtime_error(metadata: bytes):
    with pytest.raises(RuntimeError, match="is no policy server: its first frame is"):
        conversation(b"", metadata=metadata)


@pytest.mark.parametrize("limit", [np.array([1, 2]), "9" * 8_000, "x" * 1_000_000, -1, True, [], 0.5, float("nan")])
def test_a_payload_limit_that_is_none_is_replaced_in_a_few_words(limit: Any, caplog: pytest.LogCaptureFixture):
    client = conversation(b"", metadata={**VLLM_METADATA, "max_payload_bytes": limit}, path="/v1/realtime/robot/openpi")
    assert client.exchange.peer.max_payload == MAX_MESSAGE_BYTES
    assert len(caplog.text) < 1_000


# ---- the connection -----------------------------------------------------------------------------------------------


def test_a_reply_beyond_64_mib_closes_the_connection(servers: LoopbackServers):
    with relay.Policy(servers.start(saying(bytes(MAX_MESSAGE_BYTES + 1)))) as policy:
        with pytest.raises(ConnectionClosed) as caught:
            policy.infer(OBSERVATION)
        assert caught.value.sent is not None
        assert caught.value.sent.code == 1009


async def test_a_reply_beyond_64_mib_closes_the_connection_of_asyncio_programs(servers: LoopbackServers):
    async with relay.AsyncPolicy(servers.start(saying(bytes(MAX_MESSAGE_BYTES + 1)))) as policy:
        with pytest.raises(ConnectionClosed) as caught:
            await policy.infer(OBSERVATION)
        assert caught.value.sent is not None
        assert caught.value.sent.code == 1009


async def babbling(websocket: ServerConnection) -> None:
    await websocket.send(pack(METADATA))
    while True:
        await websocket.send(pack({"actions": ACTIONS}))
        await asyncio.sleep(0)


@pytest.mark.skipif(
    version.startswith("13."),
    reason="websockets 13 hands over one message at a time; the next is never counted",
)
def test_a_server_that_babbles_is_cut_off(servers: LoopbackServers, caplog: pytest.LogCaptureFixture):
    with relay.Policy(servers.start(babbling)) as policy:
        time.sleep(0.2)
        with pytest.raises(ConnectionClosed) as caught:
            _infer_often(policy)
    assert f"has sent more than {MAX_UNASKED} messages without being asked" in str(caught.value.__cause__)
    assert len(caplog.records) <= 2 * MAX_UNASKED


def _infer_often(policy: relay.Policy) -> None:
    for _ in range(100):
        policy.infer(OBSERVATION)


async def test_a_server_that_babbles_is_cut_off_by_asyncio_programs(
    servers: LoopbackServers, caplog: pytest.LogCaptureFixture
):
    async with relay.AsyncPolicy(servers.start(babbling)) as policy:
        await asyncio.sleep(0.5)
        with pytest.raises(ConnectionClosed) as caught:
            await policy.infer(OBSERVATION)
    assert f"has sent more than {MAX_UNASKED} messages without being asked" in str(caught.value.__cause__)
    assert len(caplog.records) <= 2 * MAX_UNASKED


@contextmanager
def raw_server(answer: bytes, *, upgrade: bool = False, flood: bytes = b"") -> Iterator[str]:
    """Answers one connection with these bytes and, after them, with `flood` again and again, and reads nothing more."""
    stop = threading.Event()

    def run() -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                request = b""
                while not request.endswith(b"\r\n\r\n"):
                    request += connection.recv(65_536)
                connection.settimeout(0.5)
                connection.sendall(_accepting(request) + answer if upgrade else answer)
                while not stop.is_set():
                    with suppress(TimeoutError):
                        connection.sendall(flood) if flood else stop.wait(0.5)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stop.set()
            thread.join()


def _accepting(request: bytes) -> bytes:
    from websockets.utils import accept_key

    (key,) = (line[19:] for line in request.decode().split("\r\n") if line.lower().startswith("sec-websocket-key: "))
    return (
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Accept: {accept_key(key)}\r\n\r\n"
    ).encode()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nX: " + b"y" * 3_000_000,
        b"HTTP/1.1 101 Switching Protocols\r\n" + b"X: y\r\n" * 500_000,
        b"HTTP/1.1 200 OK\r\n\r\n" + b"y" * 3_000_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n" + b"y" * 3_000_000,
        b"y" * 3_000_000,
        b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n",
    ],
    ids=["long header", "many headers", "long page", "announced page", "no HTTP", "redirect to a file"],
)
def test_an_upgrade_is_not_answered_at_any_length(answer: bytes):
    with raw_server(answer) as url, pytest.raises((WebSocketException, EOFError, OSError)):
        open_websocket(url, {}, 1.0).close()


def frame(opcode: int, payload: bytes) -> bytes:
    assert len(payload) < 126
    return bytes([0x80 | opcode, len(payload)]) + payload


def test_a_flood_of_pings_holds_up_neither_a_call_nor_close(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "CLOSE_TIMEOUT_S", 0.2)
    with raw_server(frame(2, pack({"model": "x"})), upgrade=True, flood=frame(9, b"p" * 125) * 500) as url:
        policy = relay.Policy(url)
        started = time.monotonic()
        with pytest.raises((TimeoutError, ConnectionClosed)):
            policy.infer(OBSERVATION, timeout=1.0)
        policy.close()
        assert time.monotonic() - started < 15


async def test_a_flood_of_pings_is_not_answered_without_end_by_asyncio_programs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(async_connection, "WATCH_PERIOD_S", 0.1)
    with raw_server(frame(2, pack({"model": "x"})), upgrade=True, flood=frame(9, b"p" * 125) * 500) as url:
        async with relay.AsyncPolicy(url) as policy:
            with pytest.raises(ConnectionClosed) as caught:
                await policy.infer(OBSERVATION, timeout=60.0)
    assert "sends pings and does not read the answers" in str(caught.value.__cause__)


async def test_a_large_observation_is_not_taken_for_pongs(servers: LoopbackServers, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(async_connection, "WATCH_PERIOD_S", 0.01)

    async def slow_reader(websocket: ServerConnection) -> None:
        await websocket.send(pack(METADATA))
        await asyncio.sleep(0.5)
        async for _ in websocket:
            await websocket.send(pack({"actions": ACTIONS}))

    async with relay.AsyncPolicy(servers.start(slow_reader)) as policy:
        answers = await asyncio.gather(*(policy.infer({"blob": bytes(20_000_000)}) for _ in range(3)))
    assert len(answers) == 3


@pytest.mark.parametrize(
    "location", ["ws://[::1", "ws://127.0.0.1:99999/", "ws://127.0.0.1:" + "9" * 5_000, "HTTPS://[", "ftp://127.0.0.1/"]
)
def test_a_redirect_to_what_is_no_address_is_refused_as_such(location: str) -> None:
    moved = InvalidStatus(Response(302, "Found", Headers({"Location": location}), b""))
    with pytest.raises(InvalidURI):
        redirected("ws://127.0.0.1:8000", {}, moved)


def test_a_redirects_scheme_may_be_in_capitals() -> None:
    moved = InvalidStatus(Response(302, "Found", Headers({"Location": "HTTPS://127.0.0.1:8001/a"}), b""))
    assert redirected("ws://127.0.0.1:8000", {"X-Key": "secret"}, moved) == ("wss://127.0.0.1:8001/a", {})


async def test_a_reply_in_too_many_fragments_closes_the_connection_for_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "CLOSE_TIMEOUT_S", 0.2)

    async def answer(websocket: ServerConnection) -> None:
        await websocket.send(pack({}))
        async for _ in websocket:
            with suppress(ConnectionClosed):
                await websocket.send([b"x"] * 5_000)

    async with serve(answer, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with relay.AsyncPolicy(f"ws://127.0.0.1:{port}") as policy:
            for _ in range(2):
                with pytest.raises((ConnectionClosed, RuntimeError)):
                    await policy.infer({"state": np.zeros(2, np.float32)})
