"""Lost connections: which are made again, which requests are repeated, what is told, and how long it may take."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from each_client import CLIENTS, Handle, each_client
from tiny_servers import METADATA, Behaviour, LoopbackServers
from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Request, Response

import relay
from fault_proxy import FaultProxy, in_thread
from relay.client import cold_start
from relay.client.exchange import Exchange
from relay.protocol import msgpack_numpy

every_client = pytest.mark.parametrize("name", CLIENTS)


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start, "FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(cold_start, "LONGEST_DELAY_S", 0.1)


Fate = Callable[[ServerConnection, int], Any]


class Server:
    """Answers with the state; `fates` says what befalls the requests of each connection instead, by their number."""

    def __init__(self, *fates: Fate | None, metadata: dict[str, Any] | None = None) -> None:
        self.fates = list(fates)
        self.metadata = METADATA if metadata is None else metadata
        self.silent = False
        self.connections = 0
        self.asked: list[float] = []
        self.resets = 0

    async def __call__(self, websocket: ServerConnection) -> None:
        number = self.connections
        self.connections += 1
        if self.silent:
            await websocket.wait_closed()
            return
        fate = self.fates[number] if number < len(self.fates) else None
        await websocket.send(msgpack_numpy.pack(self.metadata))
        for count in itertools.count():
            message = msgpack_numpy.unpack(await websocket.recv())  # pyright: ignore[reportArgumentType]
            if message.get("endpoint") == "reset":
                self.resets += 1
                await websocket.send(msgpack_numpy.pack({"status": "reset successful"}))
                continue
            self.asked.append(float(message["state"][0]))
            if fate is not None and await fate(websocket, count):
                return
            await websocket.send(msgpack_numpy.pack(np.asarray(message["state"], np.float32)))


def lost_at(request: int) -> Fate:
    """The connection breaks in the middle of this request."""

    async def fate(websocket: ServerConnection, count: int) -> bool:
        if count == request:
            websocket.transport.abort()
        return count == request

    return fate


def closed_at(request: int, code: int, reason: str = "") -> Fate:
    async def fate(websocket: ServerConnection, count: int) -> bool:
        if count == request:
            await websocket.close(code, reason)
        return count == request

    return fate


def state(value: float, **fields: Any) -> dict[str, Any]:
    return {"state": np.full(3, value, np.float32), **fields}


def ask(client: Handle, value: float, **options: Any) -> None:
    """Ask, and see that the answer is this request's."""
    assert client.infer(state(value), **options)[0] == value


@contextmanager
def behind_proxy(servers: LoopbackServers, server: Behaviour) -> Iterator[FaultProxy]:
    port = int(servers.start(server, relay=True).rpartition(":")[2])
    with in_thread(FaultProxy(port)) as proxy:
        yield proxy


def cut(proxy: FaultProxy) -> None:
    """Cut, and wait until the client has had the time to see it."""
    proxy.cut()
    time.sleep(0.1)


# ---- what is repeated


@every_client
def test_without_reconnect_a_lost_connection_stays_lost(name: str, servers: LoopbackServers) -> None:
    with behind_proxy(servers, Server()) as proxy, each_client(name, proxy.url) as client:
        ask(client, 1)
        cut(proxy)
        for _ in range(2):
            with pytest.raises(ConnectionClosed):
                client.infer(state(2))
        assert client.reconnects == 0
        assert proxy.accepted == 1


@every_client
def test_a_connection_lost_between_two_calls_is_made_again(name: str, servers: LoopbackServers) -> None:
    server = Server()
    with behind_proxy(servers, server) as proxy, each_client(name, proxy.url, reconnect=True) as client:
        for value in range(3):
            ask(client, value)
            cut(proxy)
        ask(client, 3)
        assert client.reconnects == 3
    assert server.asked == [0, 1, 2, 3]


@every_client
def test_a_request_that_may_have_run_is_not_repeated_and_the_next_call_connects(
    name: str, servers: LoopbackServers
) -> None:
    server = Server(lost_at(1))
    with each_client(name, servers.start(server, relay=True), reconnect=True) as client:
        ask(client, 1)
        with pytest.raises(ConnectionClosed):
            client.infer(state(2))
        ask(client, 3)
        assert client.reconnects == 1
    assert server.asked == [1, 2, 3]


@every_client
def test_always_repeats_a_request_that_may_have_run(name: str, servers: LoopbackServers) -> None:
    server = Server(lost_at(1), lost_at(0))
    with each_client(name, servers.start(server, relay=True), reconnect="always") as client:
        ask(client, 1)
        ask(client, 2)
        assert client.reconnects == 2
    assert server.asked == [1, 2, 2, 2]


@every_client
@pytest.mark.parametrize(
    ("code", "reason"), [(1000, "idle timeout: no message for 30 s"), (1012, "stopping"), (1013, "full")]
)
def test_a_request_that_the_server_would_not_take_is_repeated(
    name: str, code: int, reason: str, servers: LoopbackServers
) -> None:
    with each_client(name, servers.start(Server(closed_at(1, code, reason)), relay=True), reconnect=True) as client:
        ask(client, 1)
        ask(client, 2)
        assert client.reconnects == 1


@every_client
@pytest.mark.parametrize("code", [1001, 1011])
def test_another_close_in_the_middle_of_a_request_is_repeated_only_on_demand(
    name: str, code: int, servers: LoopbackServers
) -> None:
    with each_client(name, servers.start(Server(closed_at(0, code)), relay=True), reconnect=True) as client:
        with pytest.raises(ConnectionClosed, match=str(code)):
            client.infer(state(1))
        ask(client, 2)
    with each_client(name, servers.start(Server(closed_at(0, code)), relay=True), reconnect="always") as client:
        ask(client, 1)


@every_client
@pytest.mark.parametrize("code", [1008, 1009])
def test_what_the_server_objects_to_is_never_repeated(name: str, code: int, servers: LoopbackServers) -> None:
    server = Server(closed_at(0, code))
    with each_client(name, servers.start(server, relay=True), reconnect="always") as client:
        with pytest.raises(ConnectionClosed, match=str(code)):
            client.infer(state(1))
        ask(client, 2)
    assert server.asked == [1, 2]


@every_client
def test_a_request_that_ends_every_connection_is_given_up(name: str, servers: LoopbackServers) -> None:
    server = Server(*[lost_at(0)] * 20)
    with (
        each_client(name, servers.start(server, relay=True), reconnect="always") as client,
        pytest.raises(ConnectionClosed),
    ):
        client.infer(state(1))
    assert len(server.asked) == 6


@every_client
def test_a_message_cut_off_on_its_way_is_repeated(
    name: str, servers: LoopbackServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a message cannot be read, so that the request cannot have run."""
    encode = Exchange.encode

    def encode_and_break_off(*arguments: Any) -> Any:
        request = encode(*arguments)
        if len(request.message) > 1 << 20 and not breaking.is_alive() and not client.reconnects:
            breaking.start()
        return request

    server = Server()
    with behind_proxy(servers, server) as proxy, each_client(name, proxy.url, reconnect=True) as client:
        ask(client, 1)
        proxy.to_server.bytes_per_second = 100_000

        def break_off() -> None:
            proxy.reset()
            proxy.to_server.bytes_per_second = None

        breaking = threading.Timer(0.5, break_off)
        monkeypatch.setattr(Exchange, "encode", encode_and_break_off)
        assert client.infer(state(2, note=np.zeros(32 << 20, np.uint8)))[0] == 2
        breaking.join()
        assert client.reconnects == 1
    assert server.asked == [1, 2]


@pytest.mark.parametrize("name", ["Policy", "AsyncPolicy"])
def test_after_a_failed_request_the_next_one_connects_before_it_is_sent(name: str, servers: LoopbackServers) -> None:
    """An OpenPI server closes after a failure, but perhaps only when the next request is on its way already."""

    async def fail(websocket: ServerConnection, count: int) -> bool:
        if count:
            return False  # no server answers this one; here it would tell that it came
        await websocket.send("Traceback (most recent call last): state has 7 values")
        with suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(websocket.wait_closed(), 0.3)
        await websocket.close(1011, "Internal server error. Traceback included in previous frame.")
        return True

    server = Server(fail, fail)
    with each_client(name, servers.start(server, relay=True), reconnect=True) as client:
        for value in (1, 2):
            with pytest.raises(RuntimeError, match="state has 7 values"):
                client.infer(state(value))
        ask(client, 3)
        assert client.reconnects == 2
    assert server.asked == [1, 2, 3]


# ---- what is told


@every_client
def test_the_restart_of_the_session_is_flagged_once(name: str, servers: LoopbackServers) -> None:
    with behind_proxy(servers, Server()) as proxy, each_client(name, proxy.url, reconnect=True) as client:
        told: list[tuple[bool | None, bool]] = []
        for value in range(4):
            if value == 2:
                cut(proxy)
            ask(client, value)
            told.append((client.last.session_fresh, client.last.reconnected))
    assert told == [(True, False), (False, False), (True, True), (False, False)]


@every_client
def test_a_gap_is_one_log_line(name: str, servers: LoopbackServers, caplog: pytest.LogCaptureFixture) -> None:
    with behind_proxy(servers, Server()) as proxy, each_client(name, proxy.url, reconnect=True) as client:
        ask(client, 1)
        cut(proxy)
        caplog.clear()
        with caplog.at_level(logging.INFO, "relay.client"):
            ask(client, 2)
            ask(client, 3)
    said = [record.getMessage() for record in caplog.records if record.name == "relay.client"]
    assert len(said) == 1
    assert f"connected to ws://127.0.0.1:{proxy.port}" in said[0]
    assert "no close frame received or sent; sessions start fresh" in said[0]


@every_client
def test_last_outlives_the_gap(name: str, servers: LoopbackServers) -> None:
    with each_client(name, servers.start(Server(lost_at(1)), relay=True), reconnect=True) as client:
        ask(client, 1)
        with pytest.raises(ConnectionClosed):
            client.infer(state(2))
        assert not client.last.reconnected
        assert client.client.get_server_metadata() == METADATA


@every_client
def test_the_age_of_the_actions_counts_the_gap(name: str, servers: LoopbackServers) -> None:
    with behind_proxy(servers, Server()) as proxy, each_client(name, proxy.url, reconnect=True) as client:
        ask(client, 1)
        proxy.refuse()
        cut(proxy)
        threading.Timer(0.3, proxy.accept).start()
        ask(client, 2)
        assert client.last.age_ms >= 250
        assert client.last.round_trip_ms < client.last.age_ms - 200


# ---- another server at the same address


@every_client
@pytest.mark.parametrize(
    ("key", "value"),
    [("action_horizon", 16), ("action_dim", 7), ("model", "pi0"), ("cameras", ["wrist"]), ("state_dim", None)],
)
def test_another_policy_at_the_same_address_is_an_error(
    name: str, key: str, value: Any, servers: LoopbackServers
) -> None:
    server = Server()
    with behind_proxy(servers, server) as proxy, each_client(name, proxy.url, reconnect="always") as client:
        ask(client, 1)
        server.metadata = {**METADATA, key: value}
        cut(proxy)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"another policy since the connection was lost: {key} was"):
                client.infer(state(2))
        server.metadata = METADATA
        ask(client, 3)
    assert server.asked == [1, 3]


@every_client
def test_metadata_of_the_connection_may_change(name: str, servers: LoopbackServers) -> None:
    server = Server(metadata={**METADATA, "instance_id": "a", "max_payload_bytes": 1 << 20})
    with behind_proxy(servers, server) as proxy, each_client(name, proxy.url, reconnect=True) as client:
        ask(client, 1)
        server.metadata = {**METADATA, "instance_id": "b"}
        cut(proxy)
        ask(client, 2)


# ---- how long it may take


@every_client
def test_a_timeout_bounds_the_call_with_its_reconnection(name: str, servers: LoopbackServers) -> None:
    with behind_proxy(servers, Server()) as proxy, each_client(name, proxy.url, reconnect=True) as client:
        ask(client, 1)
        proxy.refuse()
        cut(proxy)
        started = time.monotonic()
        with pytest.raises(TimeoutError) as error:
            client.infer(state(2), timeout=0.5)
        assert time.monotonic() - started < 2.5
        assert "no reply within 0.5 s, connecting again included: no policy server at ws://127.0.0.1:" in str(
            error.value
        )
        assert "Connection refused; the connection was lost: no close frame received or sent" in str(error.value)
        proxy.accept()
        ask(client, 3, timeout=10)
        assert client.reconnects == 1


@every_client
def test_a_server_that_is_back_but_silent_is_waited_for_no_longer_than_the_timeout(
    name: str, servers: LoopbackServers
) -> None:
    server = Server()
    with behind_proxy(servers, server) as proxy, each_client(name, proxy.url, reconnect=True) as client:
        ask(client, 1)
        server.silent = True
        cut(proxy)
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="connecting again included"):
            client.infer(state(2), timeout=0.5)
        assert time.monotonic() - started < 2.5
        server.silent = False
        cut(proxy)
        ask(client, 3, timeout=30)


@every_client
def test_the_time_that_connecting_took_is_not_given_to_the_reply_again(name: str, servers: LoopbackServers) -> None:
    async def never(websocket: ServerConnection, count: int) -> bool:
        await websocket.wait_closed()
        return True

    server = Server(None, never)
    with behind_proxy(servers, server) as proxy, each_client(name, proxy.url, reconnect=True) as client:
        ask(client, 1)
        proxy.refuse()
        cut(proxy)
        back = threading.Timer(1.5, proxy.accept)
        back.start()
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="connecting again included"):
            client.infer(state(2), timeout=2.5)
        assert time.monotonic() - started < 3.9  # and not 1.5 s and another 2.5
        back.join()


@every_client
def test_a_look_up_that_hangs_lasts_no_longer_than_the_timeout(
    name: str, servers: LoopbackServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up, hangs, released = socket.getaddrinfo, threading.Event(), threading.Event()

    def getaddrinfo(host: Any, *arguments: Any, **options: Any) -> Any:
        if host == "robot-server.example":
            if hangs.is_set():
                released.wait(20)
            host = "127.0.0.1"
        return look_up(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    try:
        with behind_proxy(servers, Server()) as proxy:
            url = proxy.url.replace("127.0.0.1", "robot-server.example")
            with each_client(name, url, reconnect=True) as client:
                ask(client, 1)
                hangs.set()
                cut(proxy)
                started = time.monotonic()
                with pytest.raises(TimeoutError, match=r"no policy server at ws://robot-server\.example"):
                    client.infer(state(2), timeout=0.5)
                assert time.monotonic() - started < 2.5
    finally:
        released.set()


@every_client
def test_connect_timeout_bounds_each_round(name: str, servers: LoopbackServers) -> None:
    options = {"connect_timeout": 0.4, "reconnect": True}
    with behind_proxy(servers, Server()) as proxy, each_client(name, proxy.url, **options) as client:
        ask(client, 1)
        proxy.refuse()
        cut(proxy)
        for _ in range(2):
            with pytest.raises(TimeoutError, match=r"no policy server at ws://127\.0\.0\.1:\d+\S* within 0\.4 s"):
                client.infer(state(2))
        proxy.accept()
        ask(client, 3)


@every_client
def test_without_a_timeout_a_server_that_is_gone_is_waited_for(name: str, servers: LoopbackServers) -> None:
    with behind_proxy(servers, Server()) as proxy, each_client(name, proxy.url, reconnect=True) as client:
        ask(client, 1)
        proxy.refuse()
        cut(proxy)
        threading.Timer(0.5, proxy.accept).start()
        ask(client, 2)
        assert client.reconnects == 1


@pytest.mark.filterwarnings(
    # websockets 13 starts its reader before it has the attribute in which that notes why a connection was lost.
    r"ignore:(?s)Exception in thread \S+ \(recv_events\)\n.*websockets.sync.connection\.py.*, in set_recv_exc\n"
    r".*AttributeError. 'ClientConnection' object has no attribute 'recv_exc'"
    ":pytest.PytestUnhandledThreadExceptionWarning"
)
@every_client
def test_short_calls_during_a_long_gap_keep_to_the_back_off(
    name: str, servers: LoopbackServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the program asks, the server is dialled at the pace of the back-off, and the reason logged once."""
    monkeypatch.setattr(cold_start, "FIRST_DELAY_S", 0.2)
    monkeypatch.setattr(cold_start, "LONGEST_DELAY_S", 5.0)
    with behind_proxy(servers, Server()) as proxy, each_client(name, proxy.url, reconnect=True) as client:
        ask(client, 1)
        servers.stop()
        cut(proxy)
        began, dialled = time.monotonic(), proxy.accepted
        while time.monotonic() - began < 1.0:
            with pytest.raises(TimeoutError):
                client.infer(state(2), timeout=0.02)
        assert proxy.accepted - dialled <= 6  # 0.1 + 0.2 + 0.4 ... with the shortest of delays


@every_client
@pytest.mark.parametrize("status", [404, 500, 503])
def test_statuses_of_a_front_without_a_backend_are_waited_out(name: str, status: int, servers: LoopbackServers) -> None:
    statuses: list[int] = []

    def answer(websocket: ServerConnection, request: Request) -> Response | None:
        return Response(statuses.pop(), "", Headers([("Content-Length", "0")]), b"") if statuses else None

    port = int(servers.start(Server(), relay=True, process_request=answer).rpartition(":")[2])
    with in_thread(FaultProxy(port)) as proxy, each_client(name, proxy.url, reconnect=True) as client:
        ask(client, 1)
        statuses += [status, status]
        cut(proxy)
        ask(client, 2)


@every_client
def test_a_key_that_is_no_longer_valid_raises_at_once(name: str, servers: LoopbackServers) -> None:
    rejecting = False

    def answer(websocket: ServerConnection, request: Request) -> Response | None:
        return Response(401, "", Headers([("Content-Length", "0")]), b"") if rejecting else None

    port = int(servers.start(Server(), relay=True, process_request=answer).rpartition(":")[2])
    with in_thread(FaultProxy(port)) as proxy, each_client(name, proxy.url, reconnect="always") as client:
        ask(client, 1)
        rejecting = True
        cut(proxy)
        for _ in range(2):
            with pytest.raises(InvalidStatus):
                client.infer(state(2))


# ---- reset, close, misuse


@every_client
def test_a_reset_in_a_gap_is_done_by_the_gap(name: str, servers: LoopbackServers) -> None:
    server = Server()
    with behind_proxy(servers, server) as proxy, each_client(name, proxy.url, reconnect=True) as client:
        ask(client, 1)
        proxy.refuse()
        cut(proxy)
        client.reset()
        client.reset(timeout=0.5)
        proxy.accept()
        ask(client, 2)
        assert client.last.session_fresh
        assert client.reconnects == 1
        client.reset()
    assert server.resets == 1


@every_client
def test_a_closed_client_does_not_connect_again(name: str, servers: LoopbackServers) -> None:
    with behind_proxy(servers, Server()) as proxy, each_client(name, proxy.url, reconnect="always") as client:
        ask(client, 1)
        client.close()
        for call in (lambda: client.infer(state(2)), client.reset):
            with pytest.raises(ConnectionClosed):
                call()
        assert proxy.accepted == 1


@every_client
def test_a_client_closed_in_a_gap_stays_closed(name: str, servers: LoopbackServers) -> None:
    with behind_proxy(servers, Server()) as proxy, each_client(name, proxy.url, reconnect="always") as client:
        ask(client, 1)
        proxy.refuse()
        cut(proxy)
        with pytest.raises(TimeoutError):
            client.infer(state(2), timeout=0.1)
        client.close()
        proxy.accept()
        for call in (lambda: client.infer(state(2)), client.reset):
            with pytest.raises(ConnectionClosed):
                call()


@every_client
@pytest.mark.parametrize("state_of_things", ["refused", "no answer to the upgrade", "no greeting"])
def test_close_ends_the_waiting_of_another_thread(
    name: str, state_of_things: str, servers: LoopbackServers, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server()
    with behind_proxy(servers, server) as proxy, each_client(name, proxy.url, reconnect="always") as client:
        ask(client, 1)
        server.silent = state_of_things == "no greeting"
        proxy.to_server.swallow = state_of_things == "no answer to the upgrade"
        if state_of_things == "refused":
            proxy.refuse()
        cut(proxy)
        closing = threading.Timer(0.3, client.close)
        closing.start()
        began = time.monotonic()
        with pytest.raises(ConnectionClosed):
            client.infer(state(2))
        closing.join()
        assert time.monotonic() - began < 6  # the upgrade alone might take 10 s
        assert client.reconnects == 0
    assert "closed during" not in caplog.text  # which would be our own doing


@pytest.mark.parametrize("name", ["Policy", "PolicyClient"])
def test_a_client_that_connects_again_is_busy(name: str, servers: LoopbackServers) -> None:
    with behind_proxy(servers, Server()) as proxy, each_client(name, proxy.url, reconnect=True) as client:
        ask(client, 1)
        proxy.refuse()
        cut(proxy)
        other = threading.Thread(target=lambda: ask(client, 2))
        other.start()
        time.sleep(0.2)
        with pytest.raises(RuntimeError, match="busy in another thread"):
            client.infer(state(3))
        proxy.accept()
        other.join(10)
        assert client.reconnects == 1


@pytest.mark.parametrize("name", ["Policy", "PolicyClient"])
def test_ctrl_c_while_connecting_again_leaves_the_gap_to_the_next_call(
    name: str, servers: LoopbackServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with behind_proxy(servers, Server()) as proxy, each_client(name, proxy.url, reconnect=True) as client:
        ask(client, 1)
        cut(proxy)
        with monkeypatch.context() as struck:
            struck.setattr(cold_start, "_attempt", interrupt)
            with pytest.raises(KeyboardInterrupt):
                client.infer(state(2))
        ask(client, 3)
        assert client.reconnects == 1


@pytest.mark.parametrize("wrong", ["yes", 1, None, "Always"])
@every_client
def test_reconnect_takes_three_values(name: str, wrong: Any) -> None:
    with (
        pytest.raises(ValueError, match="reconnect must be True, False or 'always', got"),
        each_client(name, "ws://127.0.0.1:1", reconnect=wrong),
    ):
        pass


# ---- asyncio's tasks


async def test_tasks_share_one_reconnection(servers: LoopbackServers) -> None:
    server = Server()
    with behind_proxy(servers, server) as proxy:
        async with relay.AsyncPolicy(proxy.url, reconnect=True) as policy:
            await policy.infer(state(0))
            proxy.cut()
            await asyncio.sleep(0.1)
            replies = await asyncio.gather(*(policy.infer(state(value, session_id=str(value))) for value in range(8)))
            assert [reply["actions"][0] for reply in replies] == list(range(8))
            assert policy.reconnects == 1
    assert server.connections == 2


async def test_a_request_that_shared_the_connection_with_a_failed_one_is_not_taken_for_untouched(
    servers: LoopbackServers,
) -> None:
    """The client closes after the failure, so that the code of the close tells nothing of the other request."""

    async def fail_second(websocket: ServerConnection, count: int) -> bool:
        if count == 0:
            await websocket.recv()  # both requests are here, and the other may be running
            await websocket.send("Traceback (most recent call last): state has 7 values")
            await websocket.wait_closed()
        return count == 0

    url = servers.start(Server(fail_second), relay=True)
    async with relay.AsyncPolicy(url, reconnect=True) as policy:
        first, second = await asyncio.gather(policy.infer(state(1)), policy.infer(state(2)), return_exceptions=True)
        assert isinstance(first, RuntimeError)
        assert isinstance(second, ConnectionClosed)
        await policy.infer(state(3))


async def test_a_cancelled_task_leaves_the_reconnection_to_the_others(servers: LoopbackServers) -> None:
    with behind_proxy(servers, Server()) as proxy:
        async with relay.AsyncPolicy(proxy.url, reconnect=True) as policy:
            await policy.infer(state(0))
            proxy.refuse()
            proxy.cut()
            await asyncio.sleep(0.1)
            first, second = (asyncio.create_task(policy.infer(state(value))) for value in (1, 2))
            await asyncio.sleep(0.1)
            first.cancel()
            proxy.accept()
            assert (await second)["actions"][0] == 2
            with pytest.raises(asyncio.CancelledError):
                await first
            assert policy.reconnects == 1
