"""One WebSocket: what is offered, what is read, late replies, redirects, silence."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from tiny_servers import ACTIONS, METADATA, LoopbackServers, echo_state, openpi_server
from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, InvalidStatus, InvalidURI, SecurityError
from websockets.http11 import Request, Response

import relay
from relay.client import connection
from relay.client.connection import limit_standstill, open_websocket, shown

OBSERVATION = {"state": np.zeros(3, np.float32)}


def state(value: float, **more: Any) -> dict[str, Any]:
    return {"state": np.full(3, value, np.float32), **more}


class Recorder:
    """Keeps the handshake request and the connection of whoever connects."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __call__(self, websocket: ServerConnection, request: Request) -> None:
        self.requests.append(request)


def redirect(location: Callable[[], str], status: int = 302) -> Callable[[ServerConnection, Request], Response | None]:
    """Redirect every path but `/end`."""

    def process_request(websocket: ServerConnection, request: Request) -> Response | None:
        if request.path == "/end":
            return None
        response = websocket.respond(HTTPStatus(status), "")
        response.headers["Location"] = location()
        return response

    return process_request


# ---- the handshake


def test_our_server_is_known_by_its_subprotocol_and_headers(servers: LoopbackServers) -> None:
    def add_headers(websocket: ServerConnection, request: Request, response: Response) -> None:
        response.headers["Relay-Codecs"] = "jpeg, webp"

    url = servers.start(openpi_server(echo_state, METADATA), relay=True, process_response=add_headers)
    websocket = open_websocket(url, {}, 10)
    try:
        websocket.read_greeting(10)
        assert websocket.greeting.relay
        assert websocket.greeting.headers["relay-codecs"] == "jpeg, webp"
    finally:
        websocket.close()


def test_the_subprotocol_is_offered_and_compression_is_not(servers: LoopbackServers) -> None:
    recorder = Recorder()
    relay.Policy(servers.start(openpi_server(echo_state), process_request=recorder)).close()
    headers = recorder.requests[0].headers
    assert headers["Sec-WebSocket-Protocol"] == "relay.v1"
    assert "Sec-WebSocket-Extensions" not in headers


def test_the_callers_headers_are_sent(servers: LoopbackServers) -> None:
    recorder = Recorder()
    url = servers.start(openpi_server(echo_state), process_request=recorder)
    relay.Policy(url, headers={"Authorization": "Api-Key k", "X-Api-Key": "k"}).close()
    headers = recorder.requests[0].headers
    assert (headers["Authorization"], headers["X-Api-Key"]) == ("Api-Key k", "k")


def test_proxies_of_the_environment_are_not_used(servers: LoopbackServers, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "socks_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with relay.Policy(servers.start(openpi_server(echo_state, METADATA)), connect_timeout=60) as policy:
        assert policy.get_server_metadata() == METADATA


def test_small_messages_are_not_held_back(servers: LoopbackServers) -> None:
    websocket = open_websocket(servers.start(openpi_server(echo_state)), {}, 10)
    try:
        assert websocket._websocket.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    finally:
        websocket.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no TCP_USER_TIMEOUT")
@pytest.mark.parametrize(("relay_server", "milliseconds"), [(True, 60_000), (False, 0)])
def test_an_upload_to_our_server_may_not_stand_still(
    servers: LoopbackServers, relay_server: bool, milliseconds: int
) -> None:
    websocket = open_websocket(servers.start(openpi_server(echo_state), relay=relay_server), {}, 10)
    try:
        option = websocket._websocket.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert option == milliseconds
    finally:
        websocket.close()


def test_no_warning_reaches_the_user(servers: LoopbackServers) -> None:
    url = servers.start(openpi_server(echo_state), relay=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with relay.Policy(url) as policy:
            policy.infer(OBSERVATION)
        with pytest.raises(ConnectionClosed):
            policy.infer(OBSERVATION)
    assert [str(warning.message) for warning in caught] == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "127.0.0.1:8000", "wss://"])
def test_a_url_that_is_no_websocket_address_is_refused_at_once(url: str) -> None:
    with pytest.raises(InvalidURI):
        relay.Policy(url)


def test_a_url_is_shown_without_its_secrets() -> None:
    assert shown("wss://robot:secret@example.org:8000/pi05?key=secret#x") == "wss://example.org:8000/pi05"


# ---- requests and replies


def test_actions_come_back(servers: LoopbackServers) -> None:
    with relay.Policy(servers.start(openpi_server(echo_state), relay=True)) as policy:
        np.testing.assert_array_equal(policy.infer(state(3))["actions"], np.full(3, 3, np.float32))


def test_replies_of_more_than_a_mebibyte_are_read(servers: LoopbackServers) -> None:
    big = np.zeros((1024, 1024), np.float32)
    with relay.Policy(servers.start(openpi_server(lambda _: {"actions": big}))) as policy:
        assert policy.infer(OBSERVATION)["actions"].shape == big.shape


def test_a_late_reply_is_never_taken_for_the_next_one(servers: LoopbackServers) -> None:
    with relay.Policy(servers.start(openpi_server(echo_state), relay=True)) as policy:
        with pytest.raises(TimeoutError, match=r"no reply from ws://127\.0\.0\.1:\d+ within 0\.1 s"):
            policy.infer(state(1, sleep=0.6), timeout=0.1)
        np.testing.assert_array_equal(policy.infer(state(2), timeout=10)["actions"], np.full(3, 2, np.float32))
        assert policy.last is not None
        assert policy.last.late_replies == 1


def test_a_reply_that_is_late_twice_is_still_dropped(servers: LoopbackServers) -> None:
    with relay.Policy(servers.start(openpi_server(echo_state), relay=True)) as policy:
        for value in (1, 2):
            with pytest.raises(TimeoutError):
                policy.infer(state(value, sleep=0.4), timeout=0.05)
        np.testing.assert_array_equal(policy.infer(state(3))["actions"], np.full(3, 3, np.float32))
        assert policy.last is not None
        assert policy.last.late_replies == 2


def test_a_late_error_is_logged(servers: LoopbackServers, caplog: pytest.LogCaptureFixture) -> None:
    def fail_late(observation: dict[str, Any]) -> None:
        time.sleep(0.5)
        raise ValueError("state has 3 values")

    with relay.Policy(servers.start(openpi_server(fail_late))) as policy:
        with pytest.raises(TimeoutError):
            policy.infer(OBSERVATION, timeout=0.1)
        with pytest.raises(ConnectionClosed):
            policy.infer(OBSERVATION)
    assert "ValueError: state has 3 values" in caplog.text


def test_an_error_raises_its_traceback_and_then_the_connection_is_closed(servers: LoopbackServers) -> None:
    def fail(observation: dict[str, Any]) -> None:
        raise ValueError("state has 3 values")

    with relay.Policy(servers.start(openpi_server(fail), relay=True)) as policy:
        with pytest.raises(RuntimeError, match=r"(?s)^Traceback \(most recent call last\).*state has 3 values"):
            policy.infer(OBSERVATION)
        with pytest.raises(ConnectionClosed, match="1011"):
            policy.infer(OBSERVATION)


def test_a_call_after_close_raises_connection_closed(servers: LoopbackServers) -> None:
    policy = relay.Policy(servers.start(openpi_server(echo_state), relay=True))
    policy.close()
    policy.close()
    with pytest.raises(ConnectionClosed):
        policy.infer(OBSERVATION)
    with pytest.raises(ConnectionClosed):
        policy.reset()


def test_close_from_another_thread_ends_a_waiting_call(servers: LoopbackServers) -> None:
    async def never_answer(websocket: ServerConnection) -> None:
        await websocket.send(b"\x80")
        await websocket.recv()
        waiting.set()
        await websocket.wait_closed()

    waiting = threading.Event()
    policy = relay.Policy(servers.start(never_answer, relay=True))

    def close_once_waiting() -> None:
        waiting.wait(10)
        policy.close()

    closer = threading.Thread(target=close_once_waiting)
    closer.start()
    with pytest.raises(ConnectionClosed):
        policy.infer(OBSERVATION)
    closer.join()


def test_reset_is_confirmed_by_the_server(servers: LoopbackServers) -> None:
    def answer(message: dict[str, Any]) -> Any:
        return "reset successful" if message.get("endpoint") == "reset" else {"actions": ACTIONS}

    with relay.Policy(servers.start(openpi_server(answer), relay=True)) as policy:
        policy.reset()
        assert policy.infer(OBSERVATION)["actions"].shape == ACTIONS.shape


# ---- redirects


def test_a_redirect_on_the_same_origin_keeps_the_callers_headers(servers: LoopbackServers) -> None:
    recorder = Recorder()

    def process_request(websocket: ServerConnection, request: Request) -> Response | None:
        recorder(websocket, request)
        return redirect(lambda: "/end")(websocket, request)

    url = servers.start(openpi_server(echo_state, METADATA), process_request=process_request)
    with relay.Policy(url, headers={"X-Api-Key": "k"}) as policy:
        assert policy.get_server_metadata() == METADATA
    assert [request.path for request in recorder.requests] == ["/", "/end"]
    assert recorder.requests[1].headers["X-Api-Key"] == "k"


@pytest.mark.parametrize("scheme", ["ws", "http"])
def test_a_redirect_to_another_origin_strips_all_of_the_callers_headers(servers: LoopbackServers, scheme: str) -> None:
    recorder = Recorder()
    end = servers.start(openpi_server(echo_state, METADATA), process_request=recorder)
    location = end.replace("ws", scheme, 1) + "/end"
    url = servers.start(openpi_server(echo_state), process_request=redirect(lambda: location, 307))
    secrets = {"Authorization": "Bearer k", "Modal-Key": "k", "X-Api-Key": "k"}
    with relay.Policy(url, headers=secrets) as policy:
        assert policy.get_server_metadata() == METADATA
    assert [name for name in secrets if name in recorder.requests[0].headers] == []


def test_endless_redirects_are_refused(servers: LoopbackServers) -> None:
    url = servers.start(openpi_server(echo_state), process_request=redirect(lambda: "/again"))
    with pytest.raises(SecurityError, match="more than 5 redirects"):
        relay.Policy(url)


def test_a_redirect_without_a_location_is_an_error(servers: LoopbackServers) -> None:
    def process_request(websocket: ServerConnection, request: Request) -> Response:
        return websocket.respond(HTTPStatus.FOUND, "")

    with pytest.raises(InvalidStatus):
        relay.Policy(servers.start(openpi_server(echo_state), process_request=process_request))


def test_a_redirect_never_gives_up_tls() -> None:
    response = Response(302, "Found", Headers([("Location", "ws://robot.example/")]), b"")
    with pytest.raises(SecurityError, match=r"from wss to ws://robot\.example/"):
        connection._redirect_target("wss://robot.example/", InvalidStatus(response))


# ---- silence


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WATCH_PERIOD_S", 0.02)
    monkeypatch.setattr(connection, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(connection, "PING_TIMEOUT_S", 1.0)
    monkeypatch.setattr(connection, "CLOSE_TIMEOUT_S", 0.1)


@pytest.mark.usefixtures("impatient")
def test_a_server_of_ours_that_answers_no_ping_is_given_up(servers: LoopbackServers) -> None:
    on_the_loop = servers.start(openpi_server(echo_state), relay=True)  # which our server never does
    with relay.Policy(on_the_loop) as policy, pytest.raises(ConnectionClosed) as error:
        policy.infer(state(1, sleep=3.0))
    assert "answered no ping" in str(error.value.__cause__)


@pytest.mark.usefixtures("impatient")
def test_a_stock_server_may_be_silent_while_a_reply_is_pending(servers: LoopbackServers) -> None:
    with relay.Policy(servers.start(openpi_server(echo_state))) as policy:
        assert policy.infer(state(1, sleep=1.4))["actions"][0] == 1
        time.sleep(1.2)  # and its pings are answered again
        assert policy.infer(state(2))["actions"][0] == 2


@pytest.mark.usefixtures("impatient")
def test_a_slow_server_that_answers_pings_is_waited_for(servers: LoopbackServers) -> None:
    async def slow(websocket: ServerConnection) -> None:
        await websocket.send(b"\x80")
        await websocket.recv()
        await asyncio.sleep(2.0)
        await websocket.send(b"\x80")
        await websocket.wait_closed()

    with relay.Policy(servers.start(slow, relay=True)) as policy:
        assert policy.infer(OBSERVATION) == {}


@pytest.fixture
def unread(servers: LoopbackServers) -> Iterator[Callable[..., str]]:
    """Start servers that read nothing any more once they have sent their metadata."""

    async def stop_reading(websocket: ServerConnection) -> None:
        await websocket.send(b"\x80")
        released.wait(20)  # the loop is blocked

    released = threading.Event()
    yield lambda **options: servers.start(stop_reading, **options)
    released.set()


BIG = {"state": np.zeros(48 * 1024 * 1024, np.uint8)}


@pytest.mark.parametrize("encrypted", [False, True], ids=["ws", "wss"])
def test_an_upload_that_stops_ends_with_its_timeout_and_the_connection_with_it(
    unread: Callable[..., str], tmp_path: Path, encrypted: bool
) -> None:
    server: dict[str, Any] = {}
    client: dict[str, Any] = {}
    if encrypted:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        server["ssl"] = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(server["ssl"])
        client["ca_file"] = tmp_path / "ca.pem"
    with relay.Policy(unread(**server), **client) as policy:
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=r"could not be sent to wss?://127\.0\.0\.1:\d+ within 0\.5 s"):
            policy.infer(BIG, timeout=0.5)
        assert time.monotonic() - started < 2.5  # the promise: its timeout and two seconds
        for _ in range(2):
            with pytest.raises(ConnectionClosed) as error:
                policy.infer(OBSERVATION, timeout=0.5)
            assert "a request could not be sent within its timeout" in str(error.value.__cause__)


def test_an_upload_that_stops_ends_when_the_policy_is_closed(unread: Callable[..., str]) -> None:
    policy = relay.Policy(unread())
    threading.Timer(0.3, policy.close).start()
    with pytest.raises(ConnectionClosed):
        policy.infer(BIG)


def test_a_message_that_nobody_asked_for_is_not_taken_for_a_reply(servers: LoopbackServers) -> None:
    async def talkative(websocket: ServerConnection) -> None:
        await websocket.send(b"greeting")
        await websocket.send(b"unasked")
        async for message in websocket:
            await websocket.send(message)

    websocket = open_websocket(servers.start(talkative), {}, 10)
    websocket.read_greeting(10)
    time.sleep(0.2)  # until the unasked one is here
    assert [websocket.request(message, 10) for message in (b"1", b"2")] == [b"1", b"2"]
    websocket.close()


def test_a_socket_that_is_closed_already_is_no_error_of_its_own() -> None:
    sock = socket.socket()
    sock.close()
    limit_standstill(sock)
