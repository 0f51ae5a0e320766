"""An opening that nobody wants any more ends at once, wherever it stands."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from relay.client import dialing
from relay.client.access import DIRECT, Access, read_proxy
from relay.client.connection import open_websocket
from relay.client.cutoff import Abandoned, Cutoff

pytestmark = pytest.mark.filterwarnings("error")


@contextmanager
def silent_port() -> Iterator[int]:
    """Takes TCP connections and says nothing."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield listener.getsockname()[1]


@contextmanager
def full_port() -> Iterator[int]:
    """Does not even answer TCP: its queue of new connections is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(closing(socket.socket()))
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(closing(socket.socket()))
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def seconds_to_end(url: str, access: Access = DIRECT) -> float:
    """How long an opening goes on after it was cut off in the middle."""
    cutoff = Cutoff()
    ended: list[BaseException] = []

    def run() -> None:
        try:
            open_websocket(url, {}, 30, access, cutoff).close()
        except Exception as error:
            ended.append(error)

    opening = threading.Thread(target=run)
    opening.start()
    time.sleep(0.3)
    assert opening.is_alive()
    began = time.monotonic()
    cutoff.cut()
    opening.join(30)
    assert len(ended) == 1
    assert not isinstance(ended[0], TimeoutError)
    return time.monotonic() - began


def test_during_the_upgrade() -> None:
    with silent_port() as port:
        assert seconds_to_end(f"ws://127.0.0.1:{port}") < 10


def test_during_tls() -> None:
    with silent_port() as port:
        assert seconds_to_end(f"wss://127.0.0.1:{port}", Access(ssl.create_default_context())) < 10


def test_while_a_proxy_is_asked() -> None:
    with silent_port() as port:
        access = Access(None, read_proxy(f"http://127.0.0.1:{port}"))
        assert seconds_to_end("ws://robots.example", access) < 8  # a proxy has 10 s


def test_while_tcp_is_not_answered() -> None:
    with full_port() as port:
        assert seconds_to_end(f"ws://127.0.0.1:{port}") < 10


def test_while_the_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(dialing, "resolve", lambda host, port: answer.wait(60) and [])
    try:
        assert seconds_to_end("ws://robots.example") < 10
    finally:
        answer.set()


def test_before_it_began() -> None:
    cutoff = Cutoff()
    cutoff.cut()
    with silent_port() as port, pytest.raises(Abandoned):
        open_websocket(f"ws://127.0.0.1:{port}", {}, 30, DIRECT, cutoff)


def test_a_connection_that_is_open_is_not_ended() -> None:
    cutoff = Cutoff()
    near, far = socket.socketpair()
    with closing(near), closing(far):
        with cutoff.guarding(near):
            pass
        cutoff.cut()
        far.sendall(b"still here")
        assert near.recv(10) == b"still here"
