"""The stock OpenPI server, unmodified, driven by our client; `test_stock_clients.py` has the other direction.

It lives in an environment of its own, because it pins an older NumPy: `make stock` makes it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from stock_environment import FRAME, HERE, STOCK_PYTHON, look, needs_stock, variables
from websockets.exceptions import ConnectionClosed

import relay
from free_ports import free_port

pytestmark = needs_stock

OBSERVATION = {"image": {"base_0_rgb": FRAME}, "state": np.array([1, 2, 3], np.float32), "prompt": "pick"}


@pytest.fixture
def stock_server() -> Iterator[str]:
    port = free_port()
    command = [str(STOCK_PYTHON), "-W", "ignore", str(HERE / "stock_server.py"), str(port)]
    server = subprocess.Popen(command, env=variables(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield f"ws://127.0.0.1:{port}"
    server.terminate()
    server.wait(timeout=10)


@pytest.fixture
def policy(stock_server: str) -> Iterator[relay.Policy]:
    with relay.Policy(stock_server, connect_timeout=30) as policy:
        yield policy


def test_our_client_sends_the_stock_server_exact_pixels(policy: relay.Policy) -> None:
    assert policy.codec is None
    result = policy.infer(OBSERVATION)
    assert result["actions"].tolist() == [look(FRAME)]
    assert "infer_ms" in result["server_timing"]


def test_the_stock_server_is_asked_without_real_time_chunking_and_that_is_said_once(policy: relay.Policy) -> None:
    chunking = {"prev_actions": np.zeros((2, 3), np.float32), "inference_delay": 1, "execution_horizon": 2}
    notes: list[int] = []
    for _ in range(2):
        assert policy.infer({**OBSERVATION, **chunking})["actions"].tolist() == [look(FRAME)]
        assert policy.last is not None
        notes.append(len(policy.last.notes))
    assert notes == [1, 0]


def test_our_client_decodes_jpeg_for_the_stock_server(
    policy: relay.Policy, jpeg: tuple[Path, NDArray[np.uint8]]
) -> None:
    path, decoded = jpeg
    result = policy.infer({**OBSERVATION, "image": {"base_0_rgb": path.read_bytes()}})
    assert result["actions"].tolist() == [look(decoded)]


def test_our_client_reads_the_stock_metadata(policy: relay.Policy) -> None:
    assert policy.get_server_metadata() == {"reset_pose": [0.0, 1.0]}


def test_our_client_raises_the_stock_traceback_and_then_the_connection_is_closed(policy: relay.Policy) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)^Traceback \(most recent call last\).*state has 7 values"):
        policy.infer({**OBSERVATION, "state": np.zeros(7, np.float32)})
    with pytest.raises(ConnectionClosed, match="1011"):
        policy.infer(OBSERVATION)


def test_our_client_resets_nothing_on_the_stock_server(policy: relay.Policy) -> None:
    policy.reset()
    assert policy.infer(OBSERVATION)["actions"].shape == (1, 3)


def test_our_client_drops_a_late_reply_of_the_stock_server(policy: relay.Policy) -> None:
    with pytest.raises(TimeoutError):
        policy.infer({**OBSERVATION, "sleep": 0.5}, timeout=0.1)
    second = policy.infer({**OBSERVATION, "state": np.array([5, 2, 3], np.float32)})
    assert second["actions"][0, 2] == 5


def test_our_client_sends_the_stock_server_no_option(policy: relay.Policy) -> None:
    options: dict[str, Any] = {"num_steps": 5, "adapter_dir": "bus-table", "seed": 7}
    with pytest.raises(ValueError, match="'num_steps', 'seed', 'adapter_dir' would be ignored"):
        policy.infer({**OBSERVATION, **options})
