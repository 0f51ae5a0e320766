"""Whatever one client sends, it gets a clear error, and a second client keeps being served."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from PIL import Image
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import relay
from relay.protocol.msgpack_numpy import pack

FRAME = np.full((224, 224, 3), 90, np.uint8)
GOOD: dict[str, Any] = {
    "image": {"base_0_rgb": FRAME},
    "state": np.zeros(4, np.float32),
    "prompt": "put the red cube on the yellow plate",
}


def message(**changes: Any) -> bytes:
    return pack({key: value for key, value in {**GOOD, **changes}.items() if value is not None})


def marker(dtype: str, shape: list[int], data: bytes) -> bytes:
    """An array marker as the stock packer would never write it."""
    state = {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}
    return msgpack.packb({"state": state})


def half_a_jpeg() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, FRAME.shape, dtype=np.uint8)).save(file, "JPEG")
    return file.getvalue()[: len(file.getvalue()) // 2]


def huge_png() -> bytes:
    size = (60_000).to_bytes(4, "big") * 2
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + size + b"\x08\x02\0\0\0abcd"


BAD: dict[str, tuple[Callable[[], str | bytes], str]] = {
    "wrong state length": (lambda: message(state=np.zeros(7, np.float32)), "state has 7 values"),
    "unknown camera": (lambda: message(image={"bse_0_rgb": FRAME}), "did you mean 'base_0_rgb'"),
    "missing prompt": (lambda: message(prompt=None), "'prompt' is missing"),
    "NaN in the state": (lambda: message(state=np.array([0, np.nan, 0, 0], np.float32)), "state[1] is nan"),
    "text frame": (lambda: "hello", "text"),
    "three random bytes": (lambda: b"\x93\xc1\x07", "byte"),
    "object dtype": (lambda: marker("|O", [1], b"\x01\0\0\0\0\0\0\0"), "|O"),
    "object in a list of dtypes": (lambda: marker("f8,O", [1], bytes(16)), "f8,O"),
    "negative shape": (lambda: marker("<f4", [-1], bytes(16)), "shape"),
    "nesting": (lambda: b"\x91" * 100 + b"\xc0", "nest"),
    "half a JPEG": (lambda: message(image={"base_0_rgb": half_a_jpeg()}), "image['base_0_rgb']"),
    "a PNG of 60,000 pixels a side": (lambda: message(image={"base_0_rgb": huge_png()}), "60000"),
    "num_steps of 0": (lambda: message(num_steps=0), "num_steps"),
    "seed and noise": (lambda: message(seed=1, noise=np.zeros((16, 4), np.float32)), "noise"),
    "an adapter": (lambda: message(adapter_dir="fold-towel"), "adapter 'fold-towel' is not loaded"),
    "a path for an adapter": (lambda: message(adapter_dir="../../etc/passwd"), "adapter"),
}


@pytest.fixture(scope="module")
def neighbour(demo_url: str) -> Iterator[relay.Policy]:
    """A second client, connected all the time."""
    with relay.Policy(demo_url) as policy:
        yield policy


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_answered_by_name_and_hurts_nobody_else(demo_url: str, neighbour: relay.Policy, name: str) -> None:
    make, expected = BAD[name]
    with connect(demo_url, proxy=None, compression=None) as websocket:
        websocket.recv()
        websocket.send(make())
        reply = websocket.recv(timeout=30)
        assert isinstance(reply, str)
        assert "Traceback (most recent call last)" in reply
        assert expected.lower() in reply.lower()
        with pytest.raises(ConnectionClosed) as closed:
            websocket.recv(timeout=30)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1011
    assert neighbour.infer(GOOD)["actions"].shape == (16, 4)


def test_our_client_raises_the_servers_words_and_then_connection_closed(demo_url: str) -> None:
    with relay.Policy(demo_url) as policy:
        with pytest.raises(RuntimeError, match="state has 7 values"):
            policy.infer({**GOOD, "state": np.zeros(7, np.float32)})
        with pytest.raises(ConnectionClosed):
            policy.infer(GOOD)
