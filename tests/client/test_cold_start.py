"""Waiting for a server that is not there yet."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_servers import METADATA, LoopbackServers, echo_state, openpi_server
from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosedError, InvalidMessage, InvalidStatus
from websockets.frames import Close
from websockets.http11 import Request, Response

import relay
from free_ports import free_port
from relay.client import cold_start, dialing
from relay.protocol import msgpack_numpy

SERVE = openpi_server(echo_state, METADATA)


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start, "FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(cold_start, "LONGEST_DELAY_S", 0.05)


class FirstThen:
    """Refuses the first handshakes with the given statuses, then lets all through."""

    def __init__(self, *statuses: int) -> None:
        self.left = list(statuses)

    def __call__(self, websocket: ServerConnection, request: Request) -> Response | None:
        return Response(self.left.pop(0), "", Headers([("Content-Length", "0")]), b"") if self.left else None


def connect_and_close(url: str, **options: Any) -> None:
    with relay.Policy(url, **options) as policy:
        assert policy.get_server_metadata() == METADATA


def test_a_refused_connection_is_tried_again_until_the_server_is_up(servers: LoopbackServers) -> None:
    port = free_port()
    later = threading.Timer(0.3, lambda: servers.start(SERVE, port=port))
    later.start()
    connect_and_close(f"ws://127.0.0.1:{port}")
    later.join()


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_or_absent_backend_is_waited_for(servers: LoopbackServers, status: int) -> None:
    connect_and_close(servers.start(SERVE, process_request=FirstThen(status, status)))


@pytest.mark.parametrize("status", [400, 401, 403, 404, 500])
def test_any_other_status_raises_at_once(servers: LoopbackServers, status: int) -> None:
    url = servers.start(SERVE, process_request=FirstThen(status))
    with pytest.raises(InvalidStatus) as error:
        relay.Policy(url)
    assert error.value.response.status_code == status


@pytest.mark.parametrize("code", [1012, 1013])
def test_a_server_that_is_full_or_restarting_is_tried_again(servers: LoopbackServers, code: int) -> None:
    refusals = itertools.count()

    async def behave(websocket: ServerConnection) -> None:
        if next(refusals) < 2:
            await websocket.close(code, "come back later")
        else:
            await SERVE(websocket)

    connect_and_close(servers.start(behave))


def test_another_close_before_the_metadata_raises(servers: LoopbackServers) -> None:
    async def behave(websocket: ServerConnection) -> None:
        await websocket.close(1008, "not you")

    with pytest.raises(ConnectionClosedError, match="1008"):
        relay.Policy(servers.start(behave))


def test_a_connection_lost_before_the_metadata_is_tried_again(servers: LoopbackServers) -> None:
    attempts = itertools.count()

    async def behave(websocket: ServerConnection) -> None:
        if next(attempts) == 0:
            websocket.transport.abort()
        else:
            await SERVE(websocket)

    connect_and_close(servers.start(behave))


def test_the_metadata_is_waited_for_as_long_as_it_takes(
    servers: LoopbackServers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def load_first(websocket: ServerConnection) -> None:
        await asyncio.sleep(0.3)
        await websocket.send(msgpack_numpy.pack(METADATA))
        await websocket.wait_closed()

    monkeypatch.setattr(cold_start, "PATIENCE_S", 0.05)
    connect_and_close(servers.start(load_first, relay=True))
    assert caplog.text.count("waiting for its policy to be ready") == 1


def test_a_port_that_hangs_up_during_the_handshake_is_tried_again(servers: LoopbackServers) -> None:
    port = free_port()
    with listening(port) as listener:
        hang_up = threading.Thread(target=lambda: listener.accept()[0].close())
        hang_up.start()

        def serve_instead() -> None:
            hang_up.join()
            listener.close()
            servers.start(SERVE, port=port)

        later = threading.Thread(target=serve_instead)
        later.start()
        connect_and_close(f"ws://127.0.0.1:{port}")
        later.join()


def test_a_handshake_without_an_answer_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start, "HANDSHAKE_TIMEOUT_S", 0.1)
    port = free_port()
    with listening(port), pytest.raises(TimeoutError, match="no answer"):
        relay.Policy(f"ws://127.0.0.1:{port}", connect_timeout=0.5)


def test_a_name_that_is_not_known_yet_is_tried_again(servers: LoopbackServers, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = dialing.connected
    attempts = itertools.count()

    def unknown_at_first(*args: Any, **kwargs: Any) -> socket.socket:
        if next(attempts) < 2:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return connect(*args, **kwargs)

    monkeypatch.setattr(dialing, "connected", unknown_at_first)
    connect_and_close(servers.start(SERVE))


def test_each_change_of_the_reason_is_logged_once(servers: LoopbackServers, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "relay.client")
    connect_and_close(servers.start(SERVE, process_request=FirstThen(503, 503, 503, 502, 503)))
    waiting = [record.getMessage().rpartition(": ")[2] for record in caplog.records if "waiting" in record.getMessage()]
    assert waiting == ["HTTP 503", "HTTP 502", "HTTP 503"]


def test_a_connect_timeout_ends_the_wait_and_says_for_what() -> None:
    with pytest.raises(
        TimeoutError, match=r"no policy server at ws://127\.0\.0\.1:\d+ within 0\.2 s: Connection refused"
    ):
        relay.Policy(f"ws://127.0.0.1:{free_port()}", connect_timeout=0.2)


def test_a_last_attempt_without_time_does_not_hide_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(cold_start, "time", SimpleNamespace(monotonic=lambda: now))
    waiting = cold_start.Waiting("ws://robot.example", timeout=5.0)
    waiting.begin_attempt()
    waiting.delay_after(ConnectionRefusedError(111, "Connection refused"))
    now = 4.99
    waiting.begin_attempt()
    with pytest.raises(TimeoutError, match="within 5 s: Connection refused"):
        waiting.delay_after(TimeoutError("timed out"))


def test_a_connect_timeout_also_bounds_the_wait_for_metadata(servers: LoopbackServers) -> None:
    async def say_nothing(websocket: ServerConnection) -> None:
        await websocket.wait_closed()

    with pytest.raises(TimeoutError, match=r"within 0\.3 s"):
        relay.Policy(servers.start(say_nothing), connect_timeout=0.3)


def test_delays_grow_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    delays = list(itertools.islice(cold_start._delays(), 40))
    assert 0.125 <= delays[0] <= 0.25
    assert 0.25 <= delays[1] <= 0.5
    assert all(2.5 <= delay <= 5.0 for delay in delays[5:])
    assert len(set(delays)) == 40


@pytest.mark.parametrize(
    "error",
    [
        ssl.SSLCertVerificationError("certificate verify failed"),
        ssl.SSLError("wrong version number"),
        InvalidMessage("did not receive a valid HTTP response"),
        ConnectionClosedError(Close(1011, "broken"), None),
        ValueError("something else"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_waiting_does_not_cure_is_not_waited_for(error: Exception) -> None:
    assert cold_start._passing_reason(error) is None


@contextmanager
def listening(port: int) -> Iterator[socket.socket]:
    """A port that accepts connections in the kernel and says nothing."""
    with closing(socket.socket()) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        yield listener
