"""The transport's promises on both paths: early accept, pings at all times, fragments, order, and the size limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from echo_engine import OPENPI, PATHS, VLLM, EchoEngine, answered, request
from example_traffic import NO_DEFLATE, connected, read, written
from threaded_server import serving
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

import relay
from relay.engine.base import Progress

LIMIT = 64 * 1024 * 1024


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    with serving(EchoEngine()) as url:
        yield url


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return PATHS[request.param]


# ---- before the policy is there


class GatedLoad:
    """Loads when it is let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def __call__(self, progress: Progress) -> EchoEngine:
        progress("loading weights", 0.1)
        assert self.go_on.wait(30)
        return EchoEngine()


def test_while_the_policy_loads_the_upgrade_is_accepted_and_the_first_frame_held(path: str) -> None:
    load = GatedLoad()
    with serving(load) as url, connected(url + path, {**NO_DEFLATE, "open_timeout": 5}) as websocket:
        assert websocket.ping().wait(5)
        with pytest.raises(TimeoutError):
            websocket.recv(timeout=0.2)
        load.go_on.set()
        assert isinstance(read(websocket.recv(timeout=30)), dict)


def test_what_is_sent_while_the_policy_loads_is_answered_after_the_first_frame(path: str) -> None:
    load = GatedLoad()
    with serving(load) as url, connected(url + path, NO_DEFLATE) as websocket:
        for value in (1, 2):
            websocket.send(request(value))
        load.go_on.set()
        assert isinstance(read(websocket.recv(timeout=30)), dict)
        assert [answered(websocket.recv(timeout=30)) for _ in range(2)] == [1, 2]


# ---- while it infers


def test_pings_are_answered_while_the_policy_infers(echo: str, path: str) -> None:
    with connected(echo + path, NO_DEFLATE) as websocket:
        websocket.recv(timeout=30)
        websocket.send(request(sleep=1.4))
        sent, worst = time.monotonic(), 0.0
        while time.monotonic() < sent + 1.0:
            asked = time.monotonic()
            assert websocket.ping().wait(5)
            worst = max(worst, time.monotonic() - asked)
            time.sleep(0.01)
        assert answered(websocket.recv(timeout=30)) == 0
    # A server that infers on its event loop needs over a second; ours needs under a millisecond on an idle machine.
    assert worst < 0.5


# ---- messages


def test_a_message_may_come_in_many_fragments_with_pings_between_them(echo: str, path: str) -> None:
    message = request(7.0, padding=bytes(1_000))
    pongs: list[threading.Event] = []

    def fragments(websocket: ClientConnection) -> Iterator[bytes]:
        for start in range(0, len(message), 50):
            yield message[start : start + 50]
            pongs.append(websocket.ping())

    with connected(echo + path, NO_DEFLATE) as websocket:
        websocket.recv(timeout=30)
        websocket.send(fragments(websocket))
        assert answered(websocket.recv(timeout=30)) == 7.0
        assert all(pong.wait(5) for pong in pongs)


def test_requests_sent_ahead_are_answered_in_their_order(echo: str, path: str) -> None:
    with connected(echo + path, NO_DEFLATE) as websocket:
        websocket.recv(timeout=30)
        for value in range(20):
            websocket.send(request(value, sleep=0.02 if value % 5 == 0 else 0.0))
        assert [answered(websocket.recv(timeout=30)) for _ in range(20)] == list(range(20))


def test_the_two_paths_are_served_side_by_side(echo: str) -> None:
    with connected(echo + OPENPI, NO_DEFLATE) as openpi, connected(echo + VLLM, NO_DEFLATE) as vllm:
        for value, websocket in enumerate((openpi, vllm)):
            websocket.recv(timeout=30)
            websocket.send(request(value))
        assert read(openpi.recv(timeout=30))["actions"][0, 0] == 0
        assert isinstance(read(vllm.recv(timeout=30)), np.ndarray)
        vllm.send(written({"endpoint": "reset"}))
        assert read(vllm.recv(timeout=30)) == {"status": "reset successful"}


# ---- their size


def padded(size: int) -> bytes:
    """A request of exactly this many bytes."""
    short = len(request(5.0, padding=bytes(100_000)))
    message = request(5.0, padding=bytes(100_000 + size - short))
    assert len(message) == size
    return message


def test_a_message_of_64_mib_is_taken(echo: str, path: str) -> None:
    with connected(echo + path, NO_DEFLATE) as websocket:
        websocket.recv(timeout=30)
        websocket.send(padded(LIMIT))
        assert answered(websocket.recv(timeout=60)) == 5.0


OVERSIZE: dict[str, Callable[[], bytes]] = {
    "one frame": lambda: b"\x82\xff" + (LIMIT + 1).to_bytes(8, "big") + bytes(4),
    "two fragments": lambda: b"\x02\xff" + LIMIT.to_bytes(8, "big") + bytes(4 + LIMIT) + b"\x80\x81" + bytes(5),
}
"""Masked with zeros; of the single frame the head is enough."""


@pytest.mark.parametrize("frames", OVERSIZE.values(), ids=OVERSIZE)
def test_a_byte_more_closes_with_1009_and_hurts_nobody_else(echo: str, path: str, frames: Callable[[], bytes]) -> None:
    with connected(echo, NO_DEFLATE) as neighbour, connected(echo + path, NO_DEFLATE) as websocket:
        for client in (neighbour, websocket):
            client.recv(timeout=30)
        websocket.socket.sendall(frames())
        with pytest.raises(ConnectionClosed) as closed:
            websocket.recv(timeout=60)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        neighbour.send(request(3.0))
        assert answered(neighbour.recv(timeout=30)) == 3.0


@pytest.mark.parametrize("kind", ["Policy", "PolicyClient"])
def test_our_clients_refuse_to_send_it_and_go_on(echo: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WALLE_URL", echo)
    client: Any = relay.Policy(echo) if kind == "Policy" else relay.PolicyClient("echo")
    with client:
        with pytest.raises(ValueError, match="this server takes at most 67,108,864"):
            client.infer({"state": np.zeros(3, np.float32), "padding": np.zeros(LIMIT, np.uint8)})
        answer = client.infer({"state": np.full(3, 4.0, np.float32)})
        actions = answer["actions"] if isinstance(answer, dict) else answer
        assert actions.tolist() == [[4.0, 4.0, 4.0]]
