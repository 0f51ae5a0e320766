"""What no decoder may trust, over the wire: refused in each path's own form, and the next client is served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from echo_engine import OPENPI, VLLM, EchoEngine, answered, request
from example_traffic import NO_DEFLATE, connected, read
from threaded_server import serving
from websockets.exceptions import ConnectionClosed


def marker(dtype: Any, shape: Any, data: Any = bytes(12)) -> bytes:
    array = {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}
    return msgpack.packb({"state": array})


def legacy(dtype: str, kind: str, shape: list[int]) -> bytes:
    return msgpack.packb({"state": {"nd": True, "type": dtype, "kind": kind, "shape": shape, "data": bytes(12)}})


REFUSED: dict[str, bytes | str] = {
    "a list of dtypes": marker("f8,O", [1], bytes(16)),
    "objects": marker("|O", [1], bytes(8)),
    "a structured dtype": marker([["a", "<f4"]], [3]),
    "a void dtype": marker("|V12", [1]),
    "a negative length": marker("<f4", [-1]),
    "a length that is a bool": marker("<f4", [True, 3]),
    "a length that is a float": marker("<f4", [3.0]),
    "a shape that wraps around": marker("<f4", [2**62, 4]),
    "too few bytes": marker("<f4", [4]),
    "too many bytes": marker("<f4", [2]),
    "data that is text": marker("<f4", [3], "twelve bytes"),
    "a marker without its shape": msgpack.packb({"state": {b"__ndarray__": True, b"data": b"", b"dtype": "<f4"}}),
    "a scalar that does not fit": msgpack.packb({"state": {b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}}),
    "a legacy structured array": legacy("<f4", "V", [3]),
    "a legacy kind that lies": legacy("<f4", "i", [3]),
    "a key that is a number": msgpack.packb({1: 2}),
    "an extension type": msgpack.packb({"state": msgpack.ExtType(5, b"x")}),
    "a timestamp": msgpack.packb({"state": msgpack.Timestamp(0)}),
    "a hundred levels": b"\x81\xa5state" + b"\x91" * 100 + b"\xc0",
    "a map that promises more than it holds": b"\xdf\xff\xff\xff\xff",
    "bytes after the end": request() + b"\xc0",
    "half a message": request()[:-3],
    "a list": msgpack.packb([1, 2]),
    "nothing": b"",
    "text": '{"state": [0, 0, 0]}',
    "another endpoint": msgpack.packb({"endpoint": "train"}),
}


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    with serving(EchoEngine()) as url:
        yield url


@pytest.mark.parametrize("message", REFUSED.values(), ids=REFUSED)
def test_on_openpis_path_it_is_a_traceback_and_the_end(echo: str, message: bytes | str) -> None:
    with connected(echo + OPENPI, NO_DEFLATE) as websocket:
        websocket.recv(timeout=30)
        websocket.send(message)
        told = websocket.recv(timeout=30)
        assert isinstance(told, str)
        assert "Traceback (most recent call last)" in told
        with pytest.raises(ConnectionClosed) as closed:
            websocket.recv(timeout=30)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1011
    with connected(echo + OPENPI, NO_DEFLATE) as other:
        other.recv(timeout=30)
        other.send(request(1.0))
        assert answered(other.recv(timeout=30)) == 1.0


@pytest.mark.parametrize("message", REFUSED.values(), ids=REFUSED)
def test_on_vllms_path_it_is_one_sentence_and_the_connection_stays(echo: str, message: bytes | str) -> None:
    with connected(echo + VLLM, NO_DEFLATE) as websocket:
        websocket.recv(timeout=30)
        websocket.send(message)
        assert read(websocket.recv(timeout=30)) == {"type": "error", "message": "Invalid request payload"}
        websocket.send(request(1.0))
        assert answered(websocket.recv(timeout=30)) == 1.0


def test_an_observation_that_is_read_but_not_acceptable_is_told_why_on_both_paths(echo: str) -> None:
    sentence = "state has 2 values; echo expects 3"
    with connected(echo + OPENPI, NO_DEFLATE) as openpi, connected(echo + VLLM, NO_DEFLATE) as vllm:
        for websocket in (openpi, vllm):
            websocket.recv(timeout=30)
            websocket.send(msgpack.packb({"state": [0.0, 0.0]}))
        told = openpi.recv(timeout=30)
        assert isinstance(told, str)
        assert sentence in told.splitlines()[-1]
        assert read(vllm.recv(timeout=30)) == {"type": "error", "message": sentence}
