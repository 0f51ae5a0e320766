"""The stock OpenPI client and server, unmodified, at the other end of ours.

They live in an environment of their own, because they pin an older NumPy: `make stock` makes it.
"""

from __future__ import annotations

import asyncio
import io
import json
import queue
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from websockets.exceptions import ConnectionClosed

import relay
from relay.engine.base import Chunk, PolicySpec, Progress, Work
from relay.protocol.errors import ObservationError
from relay.protocol.images import decode_images
from relay.protocol.messages import Observation, Options
from relay.server.app import Server
from relay.server.settings import ServerSettings

HERE = Path(__file__).parent
STOCK_PYTHON = HERE.parent.parent / ".venv-stock/bin/python"

pytestmark = pytest.mark.skipif(
    not STOCK_PYTHON.exists(), reason="the stock OpenPI packages are not here; `make stock` installs them"
)

FRAME = np.arange(24 * 32 * 3, dtype=np.uint8).reshape(24, 32, 3)
OBSERVATION = {"image": {"base_0_rgb": FRAME}, "state": np.array([1, 2, 3], np.float32), "prompt": "pick"}


def look(frame: NDArray[np.uint8]) -> list[float]:
    pixels = frame.astype(np.float64)
    return [pixels.sum(), (pixels**2).sum(), 1.0]


@pytest.fixture
def jpeg(tmp_path: Path) -> tuple[Path, NDArray[np.uint8]]:
    """A JPEG file and the pixels it decodes to."""
    file = io.BytesIO()
    Image.fromarray(FRAME).save(file, "JPEG", quality=95)
    path = tmp_path / "frame.jpg"
    path.write_bytes(file.getvalue())
    return path, np.asarray(Image.open(file))


# ---- the stock client drives our server


@dataclass(frozen=True, slots=True)
class Seen:
    """What a looking policy made of an observation."""

    chunk: NDArray[np.float32]
    notes: Sequence[Any] = ()
    ignored: Sequence[str] = ()


class LookingEngine:
    """Answers with what it saw of the first camera, in four equal steps."""

    spec = PolicySpec("looking", ("base_0_rgb",), state_dim=3, action_horizon=4, action_dim=3, num_steps=1)

    def prepare(self, observation: Observation, options: Options) -> Seen:
        if observation["state"].shape != (3,):
            raise ObservationError(f"state has {observation['state'].shape[0]} values; looking expects 3")
        frame = decode_images(observation)["image"]["base_0_rgb"]
        return Seen(np.tile(np.array(look(frame), np.float32), (4, 1)))

    def batch_key(self, prepared: Seen) -> None:
        return None

    def infer(self, batch: Sequence[Work]) -> Sequence[Chunk]:
        return [Chunk(work.prepared.chunk) for work in batch]

    def warm_up(self, progress: Progress) -> None:
        progress("warming up", 1.0)


@pytest.fixture
def our_server() -> Iterator[str]:
    started: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Event, int]] = queue.SimpleQueue()

    async def main() -> None:
        server = Server(lambda _: LookingEngine(), ServerSettings(port=0))
        await server.start()
        stop = asyncio.Event()
        started.put((asyncio.get_running_loop(), stop, server.port))
        await stop.wait()
        await server.drain()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    loop, stop, port = started.get(timeout=30)
    yield f"ws://127.0.0.1:{port}"
    loop.call_soon_threadsafe(stop.set)
    thread.join()


def test_the_stock_client_drives_our_server(our_server: str, jpeg: tuple[Path, NDArray[np.uint8]]) -> None:
    path, decoded = jpeg
    command = [str(STOCK_PYTHON), "-W", "ignore", str(HERE / "stock_client.py"), our_server, str(path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    saw = json.loads(finished.stdout)
    expected = np.array(look(FRAME), np.float32).tolist()

    assert saw["metadata"] == {
        "model": "looking",
        "cameras": ["base_0_rgb"],
        "state_dim": 3,
        "action_horizon": 4,
        "action_dim": 3,
        "num_steps": 1,
    }
    assert saw["actions"] == [expected] * 4
    assert saw["dtype"] == "float32"
    assert saw["encoded_actions"] == [np.array(look(decoded), np.float32).tolist()] * 4
    assert saw["policy_timing"] == ["infer_ms"]
    assert saw["first_timing"] == ["infer_ms", "parse_ms"]
    assert saw["second_timing"] == ["infer_ms", "parse_ms", "prev_total_ms"]
    assert saw["steps"] == [expected] * 5
    assert "Traceback (most recent call last)" in saw["failure"]
    assert "state has 7 values; looking expects 3" in saw["failure"]
    assert saw["after_failure"] == "ConnectionClosedError"


def test_the_stock_client_drives_the_vllm_endpoint(our_server: str) -> None:
    command = [str(STOCK_PYTHON), "-W", "ignore", str(HERE / "stock_vllm_client.py"), our_server]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    saw = json.loads(finished.stdout)
    expected = [np.array(look(FRAME), np.float32).tolist()] * 4

    assert saw["metadata"]["action_horizon"] == 4
    assert (saw["actions"], saw["dtype"], saw["last"]) == (expected, "float32", expected)
    assert saw["refused"] == {"type": "error", "message": "state has 7 values; looking expects 3"}
    assert saw["unknown"] == {"type": "error", "message": "Invalid request payload"}
    assert saw["reset"] == {"status": "reset successful"}


def test_the_stock_client_drives_the_demo_policy_a_hundred_times(demo_url: str) -> None:
    command = [str(STOCK_PYTHON), "-W", "ignore", str(HERE / "stock_demo_client.py"), demo_url]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout) == {"shapes": [[16, 4]], "finite": True, "model": "demo"}


# ---- our client drives the stock server


@pytest.fixture
def stock_server() -> Iterator[str]:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(STOCK_PYTHON), "-W", "ignore", str(HERE / "stock_server.py"), str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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
