"""The change to a direct route: which offers are taken, what is sent there, and that a bad one costs only time."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from tiny_servers import (
    METADATA,
    STATE,
    VLLM_METADATA,
    Behaviour,
    LoopbackServers,
    echo_state,
    openpi_server,
    vllm_server,
)
from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from free_ports import free_port
from relay import AsyncPolicy, Policy, PolicyClient
from relay.client import direct_route
from relay.client.direct_route import FailedAddresses, NoDirectRoute, address_class, permitted
from relay.client.peer import VLLM_PATH
from relay.protocol import msgpack_numpy
from relay.protocol.direct_route import RESPONSE_HEADERS, read_direct_url
from relay.server.tls import certificate_sha256

SECRETS = {"Authorization": "Api-Key robot-7", "Modal-Key": "robot-7", "X-API-Key": "robot-7", "Robot": "robot-7"}
TICKET = "a-ticket.0123"
BUDGET_S = direct_route.BUDGET_S
SENT_ANYWAY = {
    "host",
    "upgrade",
    "connection",
    "sec-websocket-key",
    "sec-websocket-version",
    "sec-websocket-protocol",
    "sec-websocket-extensions",
    "user-agent",
}
"""Headers of any WebSocket handshake."""


@pytest.fixture(autouse=True)
def _unburdened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No address has failed yet, a busy machine has its time, and no setting of this one counts."""
    direct_route.failed_addresses.clear()
    monkeypatch.setattr(direct_route, "BUDGET_S", 10.0)
    monkeypatch.delenv("WALLE_DIRECT", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not answer is not waited for at length."""
    monkeypatch.setattr(direct_route, "BUDGET_S", 0.4)


# ---- three clients, and what they found


@dataclass
class Visit:
    """One client's stay: connected, asked one observation, left."""

    route: str
    seconds: float
    metadata: dict[str, Any]


Client = Callable[..., Awaitable[Visit]]


async def _policy(url: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Visit:
    def visit() -> Visit:
        began = time.monotonic()
        with Policy(url, **{"direct": True, **options}) as policy:
            seconds = time.monotonic() - began
            np.testing.assert_array_equal(policy.infer({"state": STATE})["actions"], STATE)
            return Visit(policy.route, seconds, policy.get_server_metadata())

    return await asyncio.to_thread(visit)


async def _policy_client(url: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Visit:
    monkeypatch.setenv("WALLE_URL", url)

    def visit() -> Visit:
        began = time.monotonic()
        with PolicyClient("pi05", **options) as client:
            seconds = time.monotonic() - began
            np.testing.assert_array_equal(client.infer({"state": STATE}), STATE)
            return Visit(client.route, seconds, client.get_server_metadata())

    return await asyncio.to_thread(visit)


async def _async_policy(url: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Visit:
    began = time.monotonic()
    async with AsyncPolicy(url, **{"direct": True, **options}) as policy:
        seconds = time.monotonic() - began
        np.testing.assert_array_equal((await policy.infer({"state": STATE}))["actions"], STATE)
        return Visit(policy.route, seconds, policy.get_server_metadata())


@pytest.fixture(params=[_policy, _async_policy, _policy_client], ids=["Policy", "AsyncPolicy", "PolicyClient"])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Client:
    """Each of the three clients with the direct route on, which sends `STATE` and checks the answer."""

    async def visit(url: str, **options: Any) -> Visit:
        return await request.param(url, monkeypatch, **options)

    return visit


# ---- servers that offer, and what they heard


@dataclass
class Heard:
    """What a server heard, in order."""

    requests: list[Request] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def check_headers(self) -> None:
        """Nothing of the caller's may have come, under any name or in any value."""
        for request in self.requests:
            names = {name.lower() for name, _ in request.headers.raw_items()}
            assert names <= SENT_ANYWAY | {"x-relay-ticket"}
            assert "robot-7" not in str(request.headers)
            assert TICKET not in request.path


class Servers:
    """Starts servers of one process: each says what it offers, in headers or in the map, as its path has it."""

    def __init__(self, servers: LoopbackServers) -> None:
        self._servers = servers
        self.heard = Heard()
        self.proxied = Heard()

    def start(
        self, offer: dict[str, Any], heard: Heard, name: str, behaviour: Behaviour | None = None, **options: Any
    ) -> str:
        async def behave(websocket: ServerConnection) -> None:
            assert websocket.request is not None
            vllm = websocket.request.path.endswith(VLLM_PATH)
            heard.events.append(f"{name} opened")
            try:
                if vllm:
                    await vllm_server(echo_state, {**VLLM_METADATA, **offer})(websocket)
                else:
                    await openpi_server(echo_state, METADATA)(websocket)
            finally:
                await websocket.wait_closed()
                heard.events.append(f"{name} closed {websocket.protocol.close_code}")

        def note(websocket: ServerConnection, request: Request) -> Response | None:
            heard.requests.append(request)
            return None

        def add_headers(websocket: ServerConnection, request: Request, response: Response) -> None:
            for key, header in RESPONSE_HEADERS.items():
                if isinstance(offer.get(key), str) and not request.path.endswith(VLLM_PATH):
                    response.headers[header] = offer[key]

        options = {"process_request": note, **options}
        return self._servers.start(behaviour or behave, relay=True, process_response=add_headers, **options)

    def direct(self, instance_id: str | None = "one", **options: Any) -> str:
        """Where the direct route leads; what it hears is kept in `heard`."""
        offer = {} if instance_id is None else {"instance_id": instance_id}
        return self.start(offer, self.heard, "direct", **options)

    def offering(self, url: Any, **changes: Any) -> str:
        """The address that is given to the client, whose server offers `url`."""
        offer = {"instance_id": "one", "direct_url": url, "direct_ticket": TICKET, **changes}
        return self.start({k: v for k, v in offer.items() if v is not None}, self.proxied, "proxied")


@pytest.fixture
def tiny(servers: LoopbackServers) -> Servers:
    return Servers(servers)


def for_path(url: str, client: Client, request: pytest.FixtureRequest) -> str:
    return url + VLLM_PATH if "PolicyClient" in request.node.name else url


# ---- a direct route that works


async def test_the_direct_route_is_taken_and_the_ticket_is_all_that_goes_there(
    client: Client, tiny: Servers, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="relay.client")
    url = tiny.offering(for_path(tiny.direct(), client, request))
    visit = await client(url, headers=SECRETS)
    assert visit.route == "direct"
    [arrived] = tiny.heard.requests
    assert arrived.headers.get_all("X-Relay-Ticket") == [TICKET]
    tiny.heard.check_headers()
    assert tiny.proxied.requests[0].headers["X-API-Key"] == "robot-7"
    assert len(re.findall("took the direct route", caplog.text)) == 1
    assert TICKET not in caplog.text


async def test_the_first_connection_is_closed_when_the_direct_one_has_proved_itself(
    client: Client, servers: LoopbackServers, request: pytest.FixtureRequest
) -> None:
    tiny = Servers(servers)
    tiny.proxied = tiny.heard  # one list for both
    await client(tiny.offering(for_path(tiny.direct(), client, request)))
    deadline = time.monotonic() + 10
    while "proxied closed 1000" not in tiny.heard.events and time.monotonic() < deadline:  # a goodbye takes its time
        await asyncio.sleep(0.01)
    servers.stop()
    assert tiny.heard.events[:2] == ["proxied opened", "direct opened"]
    assert "proxied closed 1000" in tiny.heard.events


async def test_the_ticket_is_not_among_the_metadata(
    client: Client, tiny: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WALLE_DIRECT", "0")
    visit = await client(tiny.offering("ws://127.0.0.1:9"))
    assert "direct_ticket" not in visit.metadata
    assert visit.route == "proxied"


async def test_the_address_that_was_resolved_is_the_one_connected_to(
    client: Client, tiny: Servers, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    monkeypatch.setattr(direct_route, "resolve", resolve)
    port = tiny.direct().rpartition(":")[2]
    visit = await client(tiny.offering(for_path(f"ws://gpu-box.example:{port}", client, request)))
    assert visit.route == "direct"
    assert asked == ["gpu-box.example"]
    assert tiny.heard.requests[0].headers["Host"] == f"gpu-box.example:{port}"


async def test_of_several_addresses_the_first_that_answers_is_taken(
    client: Client, tiny: Servers, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_route, "resolve", lambda host, port: ["127.0.0.2", "127.0.0.1"])
    port = tiny.direct().rpartition(":")[2]
    assert (await client(tiny.offering(for_path(f"ws://gpu-box.example:{port}", client, request)))).route == "direct"


# ---- direct routes that do not work


def test_the_change_may_take_two_seconds() -> None:
    assert BUDGET_S == 2.0


def refused(tiny: Servers) -> str:
    return f"ws://127.0.0.1:{free_port()}"


@contextmanager
def silent_port(backlog: int, accept: bool) -> Iterator[int]:
    """A port that never says anything: with a full backlog SYNs are dropped, without accepting they wait."""
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(backlog)
        waiting = [socket.socket() for _ in range(0 if accept else 4)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        try:
            yield listener.getsockname()[1]
        finally:
            for sock in waiting:
                sock.close()


def _answer(status: HTTPStatus, **headers: str) -> dict[str, Any]:
    def respond(websocket: ServerConnection, request: Request) -> Response:
        response = websocket.respond(status, "")
        for name, value in headers.items():
            response.headers[name] = value
        return response

    return {"process_request": respond}


BAD_ROUTES: dict[str, tuple[Callable[[Servers], Any], str]] = {
    "refused": (refused, r"refused"),
    "not the same process": (lambda tiny: tiny.direct("two"), "another process answers there: instance_id is 'two'"),
    "a process without a name": (lambda tiny: tiny.direct(None), "instance_id is nil, not one"),
    "a ticket that does not open": (lambda tiny: tiny.direct(**_answer(HTTPStatus.UNAUTHORIZED)), "HTTP 401"),
    "a redirect": (lambda tiny: tiny.direct(**_answer(HTTPStatus.FOUND, Location="ws://127.0.0.1:9/")), "HTTP 302"),
    "not a WebSocket server": (lambda tiny: tiny.direct(**_answer(HTTPStatus.OK)), "HTTP 200"),
    "a user in the URL": (
        lambda tiny: tiny.direct().replace("//", "//robot-7:x@"),
        "direct_url holds a user or a password",
    ),
    "another scheme": (lambda tiny: tiny.direct().replace("ws:", "http:"), "expected ws://host"),
    "port 0": (lambda tiny: "ws://127.0.0.1:0/", "nothing listens on port 0"),
    "a URL without end": (lambda tiny: "ws://127.0.0.1/" + "a" * 2_048, "at most 2,048 are taken"),
    "a line break": (lambda tiny: "ws://127.0.0.1/\tX-Header:1", "printable ASCII without spaces"),
    "a private address": (lambda tiny: "ws://10.1.2.3:9/", r"it leads to 10.1.2.3 \(private\)"),
    "a cloud's metadata service": (lambda tiny: "ws://169.254.169.254/", r"169.254.169.254 \(link-local\)"),
    "no address at all": (lambda tiny: "ws://0.0.0.0:9/", r"0.0.0.0 \(unspecified\)"),
}


@pytest.mark.parametrize("case", BAD_ROUTES)
async def test_a_route_that_does_not_work_leaves_the_client_where_it_was(
    client: Client, tiny: Servers, request: pytest.FixtureRequest, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, reason = BAD_ROUTES[case]
    url = make(tiny)
    visit = await client(tiny.offering(for_path(url, client, request)), headers=SECRETS)
    assert visit.route == "proxied"
    [line] = [record.getMessage() for record in caplog.records if "no direct route" in record.getMessage()]
    assert re.search(reason, line)
    assert "robot-7" not in line
    assert TICKET not in line
    assert len(line) < 600
    tiny.heard.check_headers()


@pytest.mark.parametrize(
    ("scheme", "backlog", "accept"),
    [("ws", 0, False), ("ws", 16, True), ("wss", 16, True)],
    ids=["packets that are dropped", "accepts and never answers", "never answers TLS"],
)
async def test_a_silent_route_costs_its_budget_and_no_more(
    client: Client, tiny: Servers, scheme: str, backlog: int, accept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_route, "BUDGET_S", 0.6)
    with silent_port(backlog, accept) as port:
        visit = await client(tiny.offering(f"{scheme}://127.0.0.1:{port}"))
    assert visit.route == "proxied"
    assert 0.55 < visit.seconds < 2.1


@pytest.mark.usefixtures("hurry")
async def test_a_server_without_tls_is_not_spoken_to_in_clear(client: Client, tiny: Servers) -> None:
    assert (await client(tiny.offering(tiny.direct().replace("ws:", "wss:")))).route == "proxied"
    assert tiny.heard.requests == []


@pytest.mark.usefixtures("hurry")
async def test_a_route_whose_metadata_do_not_come_is_left(client: Client, tiny: Servers, servers: Any) -> None:
    left = threading.Event()

    async def say_nothing(websocket: ServerConnection) -> None:
        websocket.transport.pause_reading()  # nor hear anything, such as a goodbye
        await asyncio.to_thread(left.wait, 20)
        websocket.transport.abort()

    visit = await client(tiny.offering(servers.start(say_nothing)))
    left.set()
    assert visit.route == "proxied"
    assert visit.seconds < 1.9  # 0.4 for the route, and none for saying goodbye there, which takes 2


@pytest.mark.usefixtures("hurry")
async def test_an_unknown_name_leaves_the_client_where_it_was(client: Client, tiny: Servers) -> None:
    assert (await client(tiny.offering("ws://nope.invalid:1/"))).route == "proxied"


@pytest.mark.usefixtures("hurry")
async def test_a_resolver_that_takes_too_long_is_not_waited_for(
    client: Client, tiny: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def resolve(host: str, port: int) -> list[str]:
        released.wait(20)
        return ["127.0.0.1"]

    monkeypatch.setattr(direct_route, "resolve", resolve)
    visit = await client(tiny.offering("ws://gpu-box.example"))
    released.set()
    assert visit.route == "proxied"
    assert visit.seconds < 10


@pytest.mark.usefixtures("hurry")
def test_a_program_ends_while_the_resolver_still_hangs(tiny: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(direct_route, "resolve", lambda host, port: released.wait(20) and [])
    url = tiny.offering("ws://gpu-box.example")

    async def main() -> str:
        async with AsyncPolicy(url, direct=True) as policy:
            return policy.route

    began = time.monotonic()
    assert asyncio.run(main()) == "proxied"
    assert time.monotonic() - began < 15  # asyncio waits for threads of its own at the end
    released.set()


async def test_a_public_server_may_not_send_its_client_into_private_networks(
    client: Client, tiny: Servers, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (direct_route.WebSocketConnection, _async_connection()):
        monkeypatch.setattr(kind, "peer_address", property(lambda self: "8.8.8.8"))
    visit = await client(tiny.offering(for_path(tiny.direct(), client, request)))
    assert visit.route == "proxied"
    assert tiny.heard.requests == []


def _async_connection() -> type:
    from relay.client.async_connection import AsyncWebSocketConnection

    return AsyncWebSocketConnection


@pytest.mark.parametrize(
    "offer",
    [
        {"direct_url": 5},
        {"direct_url": [1, 2]},
        {"direct_url": np.arange(3)},
        {"direct_url": "ws://"},
        {"direct_url": ""},
        {"direct_url": "ws://[::1"},
        {"direct_url": "ws://127.0.0.1:99999"},
        {"direct_url": "ws://127.0.0.1#here"},
        {"direct_url": "ws://good.example\\@127.0.0.1"},
        {"direct_ticket": 5},
        {"direct_ticket": "a\r\nX-Header: b"},
        {"direct_ticket": "a" * 5_000},
        {"direct_ticket": np.arange(3)},
        {"direct_cert_sha256": "0" * 63},
        {"direct_cert_sha256": "0" * 64},
        {"direct_cert_sha256": np.arange(3)},
        {"instance_id": None},
        {"instance_id": ""},
        {"instance_id": 7},
        {"instance_id": np.arange(3)},
        {"instance_id": "a b\nc"},
    ],
    ids=str,
)
def test_an_offer_of_another_form_is_not_taken(
    tiny: Servers, offer: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = tiny.offering(
        **{"url": tiny.direct() + VLLM_PATH, **offer} if "direct_url" not in offer else {"url": offer["direct_url"]}
    )
    monkeypatch.setenv("WALLE_URL", url)
    with PolicyClient("pi05") as policy:
        np.testing.assert_array_equal(policy.infer({"state": STATE}), STATE)
        assert policy.route == "proxied"
    assert "no direct route" in caplog.text
    assert tiny.heard.requests == []


def test_a_program_that_ends_at_once_leaves_no_connection_behind(tiny: Servers, servers: LoopbackServers) -> None:
    ended, left = threading.Event(), threading.Event()

    async def hard_of_hearing(websocket: ServerConnection) -> None:
        await websocket.send(msgpack_numpy.pack(METADATA))
        websocket.transport.pause_reading()
        await asyncio.to_thread(ended.wait, 20)  # so that the goodbye is not answered before
        websocket.transport.resume_reading()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(websocket.wait_closed(), 5)
            left.set()
        websocket.transport.abort()

    offer = {"instance_id": "one", "direct_url": tiny.direct(), "direct_ticket": TICKET}
    asyncio.run(_opened_and_closed(tiny.start(offer, tiny.proxied, "proxied", hard_of_hearing)))
    ended.set()
    assert left.wait(10)


async def _opened_and_closed(url: str) -> None:
    async with AsyncPolicy(url, direct=True) as policy:
        assert policy.route == "direct"


# ---- what is remembered, and what starts anew


async def test_an_address_that_failed_is_not_tried_again_for_a_while(
    client: Client, tiny: Servers, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(direct_route, "failed_addresses", FailedAddresses(lambda: now))
    url = tiny.offering(for_path(tiny.direct("two"), client, request))
    await client(url)
    await client(url)
    assert len(tiny.heard.requests) == 1
    now += 299
    await client(url)
    assert len(tiny.heard.requests) == 1
    now += 2
    await client(url)
    assert len(tiny.heard.requests) == 2


async def test_each_connection_begins_at_the_address_that_was_given(
    client: Client, tiny: Servers, request: pytest.FixtureRequest
) -> None:
    url = tiny.offering(for_path(tiny.direct(), client, request))
    assert [(await client(url)).route for _ in range(2)] == ["direct", "direct"]
    assert len(tiny.proxied.requests) == 2


@pytest.mark.usefixtures("hurry")
def test_an_address_is_not_blamed_for_a_caller_in_a_hurry(tiny: Servers) -> None:
    with silent_port(16, accept=True) as port:
        url = tiny.offering(f"ws://127.0.0.1:{port}")
        with Policy(url, direct=True, connect_timeout=0.2) as policy:
            assert policy.route == "proxied"
        assert ("127.0.0.1", port) not in direct_route.failed_addresses
        with Policy(url, direct=True) as policy:
            assert policy.route == "proxied"
        assert ("127.0.0.1", port) in direct_route.failed_addresses


def test_no_more_than_some_failed_addresses_are_remembered() -> None:
    failed = FailedAddresses()
    for port in range(1_000):
        failed.add(("gpu-box", port))
    assert ("gpu-box", 0) not in failed
    assert sum(("gpu-box", port) in failed for port in range(1_000)) == direct_route.MOST_FAILED


# ---- who wants it


@pytest.mark.parametrize("make", [Policy, PolicyClient], ids=["Policy", "PolicyClient"])
def test_only_policy_client_changes_without_being_asked(
    make: Any, tiny: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = VLLM_PATH if make is PolicyClient else ""
    url = tiny.offering(tiny.direct() + vllm)
    monkeypatch.setenv("WALLE_URL", url)
    with make("pi05" if vllm else url) as policy:
        assert policy.route == ("direct" if vllm else "proxied")


@pytest.mark.parametrize("where", ["environment", "file"])
async def test_walle_direct_0_keeps_every_client_where_it_is(
    client: Client, tiny: Servers, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "environment":
        monkeypatch.setenv("WALLE_DIRECT", "0")
    else:
        Path(".env").write_text("WALLE_DIRECT=0\n")
    visit = await client(tiny.offering(tiny.direct()))
    assert visit.route == "proxied"
    assert tiny.heard.requests == []


async def test_another_word_for_no_is_not_guessed_at(
    client: Client, tiny: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WALLE_DIRECT", "off")
    with pytest.raises(ValueError, match="WALLE_DIRECT is 'off'; expected 0 to stay away from direct routes, or 1"):
        await client(tiny.offering(tiny.direct()))


async def test_a_server_without_a_direct_route_is_left_alone(
    client: Client, tiny: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await client(tiny.offering(None))).route == "proxied"
    assert "direct route" not in caplog.text


# ---- over TLS


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@dataclass(frozen=True)
class Certificate:
    file: Path
    context: ssl.SSLContext

    @property
    def sha256(self) -> str:
        return certificate_sha256(self.file)


def certificate(authority: trustme.CA, tmp_path: Path, name: str) -> Certificate:
    issued = authority.issue_cert(name)
    file = tmp_path / f"{name}.pem"
    for blob in issued.cert_chain_pems:
        blob.write_to_path(str(file), append=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued.configure_cert(context)
    return Certificate(file, context)


async def test_the_announced_certificate_needs_no_authority_and_no_name(
    client: Client, tiny: Servers, authority: trustme.CA, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    self_signed = certificate(authority, tmp_path, "unknown.example")
    url = for_path(tiny.direct(ssl=self_signed.context), client, request)
    visit = await client(tiny.offering(url, direct_cert_sha256=self_signed.sha256))
    assert visit.route == "direct"


async def test_another_certificate_than_the_announced_one_never_sees_the_ticket(
    client: Client, tiny: Servers, authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = tiny.direct(ssl=certificate(authority, tmp_path, "127.0.0.1").context)
    visit = await client(tiny.offering(url, direct_cert_sha256="0" * 64))
    assert visit.route == "proxied"
    assert tiny.heard.requests == []
    assert "the certificate's SHA-256 is" in caplog.text


async def test_without_a_digest_an_authority_has_to_vouch_for_the_name(
    client: Client, tiny: Servers, authority: trustme.CA, tmp_path: Path, request: Any, monkeypatch: Any
) -> None:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    url = for_path(tiny.direct(ssl=certificate(authority, tmp_path, "gpu-box.example").context), client, request)
    monkeypatch.setattr(direct_route, "resolve", lambda host, port: ["127.0.0.1"])
    named = url.replace("127.0.0.1", "gpu-box.example")
    assert (await client(tiny.offering(named))).route == "proxied"
    assert tiny.heard.requests == []
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    direct_route.failed_addresses.clear()
    assert (await client(tiny.offering(url.replace("127.0.0.1", "other.example")))).route == "proxied"
    assert (await client(tiny.offering(named))).route == "direct"


async def test_what_began_encrypted_stays_encrypted(
    client: Client, tiny: Servers, authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    offer = {"instance_id": "one", "direct_url": tiny.direct(), "direct_ticket": TICKET}
    tls = certificate(authority, tmp_path, "127.0.0.1").context
    url = tiny.start(offer, tiny.proxied, "proxied", ssl=tls)
    visit = await client(url, ca_file=tmp_path / "ca.pem", headers=SECRETS)
    assert visit.route == "proxied"
    assert tiny.heard.requests == []
    assert re.search(r"ws://127.* is not encrypted, and wss://127.* is", caplog.text)


# ---- the rules by themselves


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("8.8.8.8", "public"),
        ("2606:4700::1111", "public"),
        ("127.0.0.1", "loopback"),
        ("127.8.8.8", "loopback"),
        ("::1", "loopback"),
        ("::ffff:127.0.0.1", "loopback"),
        ("10.0.0.1", "private"),
        ("172.16.0.1", "private"),
        ("192.168.1.1", "private"),
        ("100.64.0.1", "private"),
        ("198.18.0.1", "private"),
        ("240.0.0.1", "private"),
        ("255.255.255.255", "private"),
        ("fd00::1", "private"),
        ("fec0::1", "private"),
        ("::ffff:192.168.1.1", "private"),
        ("64:ff9b::192.168.1.1", "private"),
        ("64:ff9b::8.8.8.8", "public"),
        ("2002:c0a8:0101::1", "private"),
        ("::127.0.0.1", "private"),
        ("169.254.169.254", "link-local"),
        ("fe80::1%eth0", "link-local"),
        ("::ffff:169.254.169.254", "link-local"),
        ("224.0.0.1", "multicast"),
        ("ff02::1", "multicast"),
        ("0.0.0.0", "unspecified"),
        ("::", "unspecified"),
    ],
)
def test_addresses_are_told_apart_by_who_can_reach_them(address: str, kind: str) -> None:
    assert address_class(address) == kind


@pytest.mark.parametrize(
    ("addresses", "peer", "allowed"),
    [
        (["8.8.8.8"], "1.1.1.1", ["8.8.8.8"]),
        (["8.8.8.8"], "10.0.0.1", ["8.8.8.8"]),
        (["192.168.1.1"], "10.0.0.1", ["192.168.1.1"]),
        (["10.0.0.7", "8.8.8.8"], "1.1.1.1", ["8.8.8.8"]),
        (["127.0.0.1"], "127.0.0.1", ["127.0.0.1"]),
        (["169.254.7.7"], "169.254.1.1", ["169.254.7.7"]),
    ],
)
def test_public_addresses_and_neighbours_of_the_server_may_be_tried(
    addresses: list[str], peer: str, allowed: list[str]
) -> None:
    assert permitted(addresses, peer) == allowed


@pytest.mark.parametrize(
    ("addresses", "peer"),
    [
        (["10.0.0.7"], "1.1.1.1"),
        (["127.0.0.1"], "1.1.1.1"),
        (["127.0.0.1"], "10.0.0.1"),
        (["10.0.0.7"], "127.0.0.1"),
        (["169.254.169.254"], "10.0.0.1"),
        (["::1", "fd00::1"], "2606:4700::1111"),
        (["224.0.0.1"], "8.8.8.8"),
        (["0.0.0.0"], "8.8.8.8"),
        ([], "8.8.8.8"),
    ],
)
def test_addresses_that_only_the_client_could_reach_may_not(addresses: list[str], peer: str) -> None:
    with pytest.raises(NoDirectRoute, match="it leads to"):
        permitted(addresses, peer)


@pytest.mark.parametrize(
    "url", ["ws://a", "wss://gpu-box.example:8443/pi05", "WSS://[2606:4700::1111]:1/", "ws://a:1?b"]
)
def test_these_addresses_can_be_read(url: str) -> None:
    assert read_direct_url(url).geturl().lower() == url.lower()


@pytest.mark.parametrize("headers", [SECRETS])
def test_a_proxy_that_was_asked_for_is_not_passed_by(
    tiny: Servers, headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with _tunnel() as proxy, Policy(tiny.offering(tiny.direct()), direct=True, proxy=proxy, headers=headers) as policy:
        assert policy.route == "proxied"
    assert tiny.heard.requests == []
    assert "an HTTP proxy was asked for" in caplog.text


@contextmanager
def _tunnel() -> Iterator[str]:
    """An HTTP proxy for one connection."""

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def run() -> None:
        with closing(listener.accept()[0]) as client:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += client.recv(1)
            host, _, port = head.split()[1].decode().rpartition(":")
            with closing(socket.create_connection((host, int(port)))) as server:
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                back = threading.Thread(target=pump, args=(server, client))
                back.start()
                pump(client, server)
                back.join(10)

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


async def test_a_cancelled_change_closes_both_connections(servers: LoopbackServers) -> None:
    tiny = Servers(servers)
    with silent_port(16, accept=True) as port:
        opening = asyncio.ensure_future(_opened(tiny.offering(f"ws://127.0.0.1:{port}")))
        while not tiny.proxied.events:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
    await asyncio.to_thread(servers.stop)
    assert tiny.proxied.events == ["proxied opened", "proxied closed 1000"]


async def _opened(url: str) -> AsyncPolicy:
    return await AsyncPolicy(url, direct=True)
