"""The server's part of the direct route: who is told of it, and what a ticket opens, once and for a short time."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import ssl
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme
from fake_policy import NO_PROXY, SPEC, FakeEngine, ask, client, dial, observation, running
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from relay.engine.base import Engine, Progress
from relay.protocol.msgpack_numpy import unpack
from relay.server import direct_route
from relay.server.api_keys import read_api_keys
from relay.server.app import Server
from relay.server.direct_route import TICKET_S, Ticket, Tickets
from relay.server.policies import Offer
from relay.server.settings import ServerSettings
from relay.server.tls import certificate_sha256

VLLM = "/v1/realtime/robot/openpi"
URL = "wss://gpu-box.example:8443"
ALICE, BOB = "alice-0123456789", "bob-0123456789ab"
RELAY: dict[str, Any] = {"subprotocols": ["relay.v1"]}


class Holder:
    """Stands for a connection."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tickets(clock: Clock) -> Tickets:
    return Tickets("one", most=4, clock=clock)


def test_a_tenant_with_many_tickets_makes_only_its_own_forgotten(tickets: Tickets) -> None:
    holder = Holder()
    hers = tickets.issue("alice", holder)
    tickets.begin(hers)
    for _ in range(10):
        tickets.begin(tickets.issue("bob", holder))
    assert len(tickets) == 4
    assert tickets.redeem(hers.text) is hers


def begun(tickets: Tickets, tenant: str = "alice") -> Ticket:
    ticket = tickets.issue(tenant, Holder())
    tickets.begin(ticket)
    return ticket


# ---- tickets


def test_a_ticket_opens_once_and_carries_its_tenant(tickets: Tickets) -> None:
    ticket = begun(tickets)
    assert tickets.redeem(ticket.text) is ticket
    assert ticket.tenant == "alice"
    assert tickets.redeem(ticket.text) is None


def test_a_ticket_holds_for_thirty_seconds_from_its_beginning(tickets: Tickets, clock: Clock) -> None:
    first, second, waiting = tickets.issue("a", Holder()), tickets.issue("a", Holder()), tickets.issue("a", Holder())
    clock.now += 600  # loading
    assert tickets.redeem(waiting.text) is None
    for ticket in (first, second, waiting):
        tickets.begin(ticket)
    clock.now += TICKET_S - 0.001
    assert tickets.redeem(first.text) is first
    assert tickets.redeem(waiting.text) is waiting
    clock.now += 0.001
    assert tickets.redeem(second.text) is None
    assert TICKET_S == 30.0


def test_a_ticket_with_a_flipped_bit_opens_nothing_and_uses_nothing_up(tickets: Tickets) -> None:
    ticket = begun(tickets)
    for position in range(len(ticket.text)):
        flipped = bytearray(ticket.text.encode())
        flipped[position] ^= 1
        assert tickets.redeem(flipped.decode("latin-1")) is None
    assert tickets.redeem(ticket.text) is ticket


@pytest.mark.parametrize("text", ["", ".", "\udcff", "\xff.\xff", "a" * 8_000])
def test_what_is_no_ticket_opens_nothing(tickets: Tickets, text: str) -> None:
    begun(tickets)
    assert tickets.redeem(text) is None


def test_no_other_process_takes_a_ticket(tickets: Tickets, clock: Clock) -> None:
    other = Tickets("one", most=4, clock=clock)
    begun(other)
    assert other.redeem(begun(tickets).text) is None


def test_the_same_nonce_under_another_tenant_is_signed_otherwise(tickets: Tickets) -> None:
    ticket = begun(tickets)
    ticket.tenant = "bob"
    assert tickets.redeem(ticket.text) is None


def test_the_oldest_ticket_makes_room(tickets: Tickets) -> None:
    all_of_them = [begun(tickets) for _ in range(5)]
    assert len(tickets) == 4
    assert [tickets.redeem(ticket.text) is ticket for ticket in all_of_them] == [False, True, True, True, True]


def test_expired_tickets_are_not_kept(tickets: Tickets, clock: Clock) -> None:
    for _ in range(3):
        begun(tickets)
    clock.now += TICKET_S
    begun(tickets)
    assert len(tickets) == 1


def test_a_ticket_is_not_printed(tickets: Tickets) -> None:
    ticket = begun(tickets)
    nonce, _, signature = ticket.text.partition(".")
    assert nonce not in repr(ticket)
    assert signature not in repr(ticket)
    assert "alice" not in repr(ticket)


# ---- who is told


def told(websocket: ClientConnection) -> dict[str, str]:
    assert websocket.response is not None
    headers = websocket.response.headers
    return {name: headers[name] for name in headers if name.lower().startswith("relay-direct")}


async def test_relay_clients_read_it_in_the_headers_of_openpis_path() -> None:
    async with running(direct_url=URL, direct_cert_sha256="ab" * 32) as server, dial(server.port, **RELAY) as websocket:
        said = {name.lower(): value for name, value in told(websocket).items()}
        assert said.pop("relay-direct-ticket")
        assert said == {"relay-direct-url": URL, "relay-direct-cert-sha256": "ab" * 32}
        metadata = unpack(await websocket.recv())
        assert not any("direct" in key for key in metadata)


async def test_every_client_of_vllms_path_reads_it_in_the_map() -> None:
    async with running(direct_url=f"{URL}/", direct_cert_sha256="ab" * 32) as server:
        async with dial(server.port, f"/any{VLLM}") as websocket:
            metadata = unpack(await websocket.recv())
            assert told(websocket) == {}
        assert metadata["direct_url"] == URL + VLLM
        assert metadata["direct_cert_sha256"] == "ab" * 32
        assert metadata["instance_id"]
        assert metadata["direct_ticket"]


@pytest.mark.parametrize("handshake", ["openpi", "roboarena"])
async def test_stock_clients_of_openpis_path_are_told_nothing(handshake: str) -> None:
    async with running(direct_url=URL, handshake=handshake) as server, running(handshake=handshake) as plain:
        async with dial(server.port) as websocket, dial(plain.port) as other:
            assert told(websocket) == {}
            assert await websocket.recv() == await other.recv()
        assert len(server._upgrades.tickets) == 0


async def test_without_a_direct_url_nobody_is_told() -> None:
    async with running() as server:
        async with dial(server.port, **RELAY) as websocket:
            assert told(websocket) == {}
        async with dial(server.port, VLLM) as websocket:
            assert not any("direct" in key for key in unpack(await websocket.recv()))


async def test_each_connection_gets_a_ticket_of_its_own() -> None:
    async with running(direct_url=URL) as server:
        assert len({await ticket_of(server) for _ in range(3)}) == 3


async def test_whoever_came_by_ticket_is_told_the_address_and_gets_no_other() -> None:
    async with running(direct_url=URL) as server:
        options = with_ticket(await ticket_of(server))
        async with dial(server.port, VLLM, **options) as websocket:
            metadata = unpack(await websocket.recv())
        assert metadata["direct_url"] == URL + VLLM
        assert "direct_ticket" not in metadata


async def test_an_address_that_ends_in_the_endpoint_is_the_same_address() -> None:
    async with running(direct_url=URL + VLLM) as server:
        async with dial(server.port, VLLM) as websocket:
            assert unpack(await websocket.recv())["direct_url"] == URL + VLLM
        async with dial(server.port, **RELAY) as websocket:
            assert dict(told(websocket))["Relay-Direct-Url".lower()] == URL


async def ticket_of(server: Server, **options: Any) -> str:
    async with dial(server.port, VLLM, **options) as websocket:
        return unpack(await websocket.recv())["direct_ticket"]


def with_ticket(ticket: str, **headers: str) -> dict[str, Any]:
    return {"additional_headers": {"X-Relay-Ticket": ticket, **headers}}


# ---- what a ticket opens


async def status(port: int, path: str = "/", **options: Any) -> int:
    with pytest.raises(InvalidStatus) as caught:
        await dial(port, path, **options)
    return caught.value.response.status_code


def keys(*names: str) -> Any:
    return read_api_keys(environment={"RELAY_API_KEYS": ",".join(names)})


def with_key(key: str) -> dict[str, Any]:
    return {"additional_headers": {"Authorization": f"Api-Key {key}"}}


async def test_a_ticket_takes_the_place_of_the_key_on_the_same_port_once() -> None:
    async with running(direct_url=URL, api_keys=keys(ALICE)) as server:
        options = with_ticket(await ticket_of(server, **with_key(ALICE)))
        async with client(server, **options) as websocket:
            assert "actions" in await ask(websocket, observation())
        assert await status(server.port, **options) == 401


@pytest.mark.parametrize("ticket", ["", "no-ticket", "a.b"])
async def test_a_wrong_ticket_is_401_even_beside_a_right_key(ticket: str) -> None:
    async with running(direct_url=URL, api_keys=keys(ALICE)) as server:
        assert await status(server.port, **with_ticket(ticket, Authorization=f"Api-Key {ALICE}")) == 401
        assert server.connections == ()


async def test_two_tickets_are_none() -> None:
    async with running(direct_url=URL) as server:
        ticket = await ticket_of(server)
        two = [("X-Relay-Ticket", ticket), ("X-Relay-Ticket", ticket)]
        assert await status(server.port, additional_headers=two) == 401


async def test_a_tickets_time_begins_with_the_metadata_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_route, "TICKET_S", 0.25)
    loaded = threading.Event()

    def load(progress: Progress) -> Engine:
        assert loaded.wait(20)
        return FakeEngine()

    async with running(load, direct_url=URL) as server:
        async with dial(server.port, **RELAY) as websocket:
            ticket = dict(told(websocket))["relay-direct-ticket"]
            await asyncio.sleep(0.5)
            loaded.set()
            await websocket.recv()
            async with dial(server.port, **with_ticket(ticket)):
                pass
        late = await ticket_of(server)
        await asyncio.sleep(0.3)
        assert await status(server.port, **with_ticket(late)) == 401


async def test_a_ticket_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="relay")
    async with running(direct_url=URL, direct_port=0) as server:
        ticket = await ticket_of(server)
        async with dial(server.direct_port or 0, **with_ticket(ticket)) as websocket:
            await websocket.recv()
            await ask(websocket, observation(do="raise"))
        await status(server.direct_port or 0, **with_ticket(ticket))
    assert "turned 127.0.0.1" in caplog.text
    assert ticket not in caplog.text
    assert ticket.partition(".")[0] not in caplog.text


# ---- a port of its own


@asynccontextmanager
async def running_apart(**settings: Any) -> AsyncIterator[tuple[Server, int]]:
    async with running(**{"direct_url": URL, "direct_port": 0, **settings}) as server:
        assert server.direct_port is not None
        yield server, server.direct_port


async def test_the_direct_port_opens_to_a_ticket() -> None:
    async with running_apart() as (server, port):
        ticket = await ticket_of(server)
        async with dial(port, VLLM, **with_ticket(ticket)) as websocket:
            await websocket.recv()
            assert (await ask(websocket, observation(2.0)))[0, 0] == 2.0


@pytest.mark.parametrize("path", ["/", VLLM, "/healthz", "/metrics", "/v1/models"])
@pytest.mark.parametrize("headers", [{}, {"Authorization": f"Api-Key {ALICE}"}, {"X-Relay-Ticket": "a.b"}], ids=str)
async def test_the_direct_port_opens_to_nothing_else(path: str, headers: dict[str, str]) -> None:
    async with running_apart(api_keys=keys(ALICE)) as (_, port):
        assert await status(port, path, additional_headers=headers) == 401


async def test_the_refusal_says_what_is_needed() -> None:
    async with running_apart() as (_, port):
        with pytest.raises(InvalidStatus) as caught:
            await dial(port)
        body = (caught.value.response.body or b"").decode()
        assert body == "A ticket of this server is needed, as 'X-Relay-Ticket: <ticket>'; it holds once, for 30 s.\n"


async def test_metrics_are_not_to_be_had_for_a_ticket() -> None:
    async with running_apart() as (server, port):
        ticket = await ticket_of(server)
        async with dial(port, "/metrics", **with_ticket(ticket)) as websocket:
            assert unpack(await websocket.recv())["model"] == "fake"  # a path like any other


async def test_a_drain_closes_the_direct_port_and_its_connections() -> None:
    async with running_apart() as (server, port), contextlib.AsyncExitStack() as stack:
        websocket = await stack.enter_async_context(dial(port, **with_ticket(await ticket_of(server))))
        await websocket.recv()
        await server.drain()
        with pytest.raises(ConnectionClosed) as closed:
            await websocket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
        with pytest.raises(OSError, match="Connect"):
            await dial(port)


async def test_the_direct_port_may_be_open_to_the_network_without_keys() -> None:
    async with running_apart(direct_host="0.0.0.0") as (server, port):
        assert [listener.sockets[0].getsockname() for listener in server._listeners][1] == ("0.0.0.0", port)


async def test_a_direct_port_in_use_leaves_no_port_open() -> None:
    async with running_apart() as (_, port):
        server = Server(lambda progress: FakeEngine(), ServerSettings(port=0, direct_url=URL, direct_port=port))
        with pytest.raises(OSError, match="in use"):
            await server.start()
        assert all(not listener.is_serving() for listener in server._listeners)


async def test_tickets_in_clear_text_beyond_this_machine_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="relay")
    async with running_apart(direct_host="0.0.0.0") as (_, port):
        assert f"clients are told of the direct route {URL}, which opens on 0.0.0.0:{port}" in caplog.text
        assert "tickets reach this port in clear text" in caplog.text


async def test_the_direct_port_has_tls_of_its_own(tmp_path: Path) -> None:
    issued = trustme.CA().issue_cert("gpu-box.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued.configure_cert(context)
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    async with running_apart(direct_tls=context) as (server, port):
        assert await ticket_of(server)  # over the main port, in clear
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.transport.abort()
        issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
        assert hashlib.sha256(shown).hexdigest() == certificate_sha256(tmp_path / "cert.pem")


# ---- several policies, several hosts, several tenants


@asynccontextmanager
async def serving(offers: Mapping[str, Offer], **settings: Any) -> AsyncIterator[Server]:
    server = Server(offers, ServerSettings(port=0, **settings))
    await server.start()
    try:
        yield server
    finally:
        await server.drain()


def offer(name: str) -> Offer:
    return Offer(lambda progress: FakeEngine(spec=replace(SPEC, model=name)), ServerSettings())


@pytest.mark.parametrize(("path", "name"), [("/leg", "leg"), ("/arm", "arm"), ("", "arm")])
async def test_the_address_leads_to_the_policy_that_was_asked_for(path: str, name: str) -> None:
    async with serving({"arm": offer("arm"), "leg": offer("leg")}, direct_url=URL) as server:
        async with dial(server.port, path + VLLM) as websocket:
            assert unpack(await websocket.recv())["direct_url"] == f"{URL}/{name}{VLLM}"
        async with dial(server.port, f"{path}/", **RELAY) as websocket:
            assert dict(told(websocket))["relay-direct-url"] == f"{URL}/{name}"


async def test_the_direct_routes_host_is_answered_under_beside_the_listed_ones() -> None:
    async with running_apart(allowed_hosts=("127.0.0.1",)) as (server, port):
        there: dict[str, Any] = {"host": "127.0.0.1", "port": port, **with_ticket(await ticket_of(server))}
        with pytest.raises(InvalidStatus, match="421"):
            await connect("ws://other.example:8443", **NO_PROXY, **there)
        async with connect("ws://gpu-box.example:8443", **NO_PROXY, **there) as websocket:
            await websocket.recv()


async def test_a_page_with_a_ticket_is_still_a_page() -> None:
    async with running_apart() as (server, port):
        ticket = await ticket_of(server)
        assert await status(port, **with_ticket(ticket, Origin="https://evil.example")) == 403


async def test_a_tickets_tenant_counts_for_the_limit_of_its_key() -> None:
    settings = {"api_keys": keys(ALICE, BOB), "max_connections_per_key": 2}
    async with running_apart(**settings) as (server, port), contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(dial(server.port, VLLM, **with_key(ALICE)))
        ticket = unpack(await first.recv())["direct_ticket"]
        second = await stack.enter_async_context(dial(server.port, VLLM, **with_key(ALICE)))
        spare = unpack(await second.recv())["direct_ticket"]
        moved = await stack.enter_async_context(dial(port, VLLM, **with_ticket(ticket)))
        await moved.recv()  # it takes the first one's place
        await first.close()
        await second.close()
        again = await stack.enter_async_context(dial(server.port, VLLM, **with_key(ALICE)))
        await again.recv()
        for one_too_many in (dial(server.port, VLLM, **with_key(ALICE)), dial(port, VLLM, **with_ticket(spare))):
            refused = await stack.enter_async_context(one_too_many)
            with pytest.raises(ConnectionClosed) as closed:
                await refused.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1013
            assert closed.value.rcvd.reason == "server is full: 2 connections with this API key"
        other = await stack.enter_async_context(dial(server.port, VLLM, **with_key(BOB)))
        await other.recv()


async def test_clients_without_keys_have_no_limit_of_their_own() -> None:
    async with running(max_connections_per_key=1) as server, client(server), client(server) as second:
        assert "actions" in await ask(second, observation())


async def test_a_full_server_lets_its_clients_change_to_the_direct_route() -> None:
    async with running_apart(max_connections=1) as (server, port), dial(server.port, VLLM) as first:
        ticket = unpack(await first.recv())["direct_ticket"]
        async with dial(port, **with_ticket(ticket)) as websocket:
            await websocket.recv()
            assert "actions" in await ask(websocket, observation())


async def test_tenants_read_no_tracebacks_over_the_direct_route_either() -> None:
    async with running_apart(api_keys=keys(ALICE, BOB)) as (server, port):
        ticket = await ticket_of(server, **with_key(ALICE))
        async with dial(port, **with_ticket(ticket)) as websocket:
            await websocket.recv()
            assert "Traceback" not in await ask(websocket, observation(do="raise"))


# ---- settings


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"direct_url": "http://gpu-box.example"}, "expected ws://host"),
        ({"direct_url": "wss://"}, "expected ws://host"),
        ({"direct_url": "wss://robot:secret@gpu-box.example"}, "holds a user or a password"),
        ({"direct_url": "wss://gpu-box.example:0"}, "nothing listens on port 0"),
        ({"direct_url": "wss://gpu-box.example:99999"}, "direct_url cannot be read"),
        ({"direct_url": "wss://gpu-box.example/?a=b"}, "a path is appended, so it takes no query"),
        ({"direct_url": "wss://gpu-box.example/#a"}, "expected ws://host"),
        ({"direct_url": "wss://" + "a" * 3_000}, "direct_url has 3,006 characters"),
        ({"direct_port": 8443}, "direct_port is given without direct_url"),
        ({"direct_cert_sha256": "ab" * 32}, "direct_cert_sha256 is given without direct_url"),
        ({"direct_url": URL, "direct_host": "0.0.0.0"}, "direct_host is given without direct_port"),
        ({"direct_url": URL, "direct_port": 70_000}, "direct_port must be between 0"),
        ({"direct_url": URL, "direct_port": 1, "direct_host": "a\0"}, "direct_host must be a host name"),
        ({"direct_url": URL, "direct_cert_sha256": "ab"}, "expected 64 hexadecimal digits"),
        ({"direct_url": "ws://a", "direct_cert_sha256": "ab" * 32}, "but there is TLS at its end; expected wss://"),
        ({"max_connections_per_key": 0}, "max_connections_per_key must be at least 1, got 0"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_with_its_name(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        ServerSettings(**wrong)
    assert "secret" not in str(caught.value)


def test_a_file_without_a_certificate_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("-----BEGIN PRIVATE KEY-----\n")
    with pytest.raises(ValueError, match="holds no certificate in PEM form"):
        certificate_sha256(tmp_path / "key.pem")
