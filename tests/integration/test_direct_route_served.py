"""All three clients and a real server with a proxy between them: they leave it, or stay where their ticket fails."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from echo_engine import EchoEngine
from threaded_server import serving

from fault_proxy import FaultProxy, in_thread
from free_ports import free_port
from relay import AsyncPolicy, Policy, PolicyClient
from relay.client import direct_route as client_side
from relay.protocol.direct_route import TICKET_KEY
from relay.server import direct_route as server_side
from relay.server.api_keys import read_api_keys
from relay.server.direct_route import Invitation, Tickets
from relay.server.tls import certificate_sha256

KEY = "robot-7-0123456789"
HEADERS = {"Authorization": f"Api-Key {KEY}"}
"""Of every client here; the server wants it, or a ticket."""

STATE = np.arange(3, dtype=np.float32)

Visit = Callable[[FaultProxy], str]


@pytest.fixture(autouse=True)
def _unburdened(monkeypatch: pytest.MonkeyPatch) -> None:
    client_side.failed_addresses.clear()
    monkeypatch.delenv("WALLE_DIRECT", raising=False)


@contextmanager
def proxied(**settings: Any) -> Iterator[FaultProxy]:
    """A server with a direct port, behind a proxy on the way to its main one."""
    port = free_port()
    settings = {"direct_url": f"ws://127.0.0.1:{port}", "direct_port": port, **settings}
    settings["direct_url"] = settings["direct_url"].format(port=port)
    keys = read_api_keys(environment={"RELAY_API_KEYS": KEY})
    with ExitStack() as stack:
        url = stack.enter_context(serving(EchoEngine(), api_keys=keys, **settings))
        yield stack.enter_context(in_thread(FaultProxy(int(url.rpartition(":")[2]))))


def visit_policy(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> str:
    with Policy(proxy.url, headers=HEADERS, direct=True) as policy:
        leave(proxy, policy.route)
        np.testing.assert_array_equal(policy.infer({"state": STATE})["actions"][0], STATE)
        policy.reset()
        return policy.route


def visit_policy_client(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("WALLE_URL", proxy.url)
    with PolicyClient("echo", headers=HEADERS) as client:
        leave(proxy, client.route)
        np.testing.assert_array_equal(client.infer({"state": STATE})[0], STATE)
        client.reset()
        assert client.get_server_metadata()["direct_url"].startswith("ws")
        assert TICKET_KEY not in client.get_server_metadata()
        return client.route


def visit_async_policy(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> str:
    async def visit() -> str:
        async with AsyncPolicy(proxy.url, headers=HEADERS, direct=True) as policy:
            leave(proxy, policy.route)
            np.testing.assert_array_equal((await policy.infer({"state": STATE}))["actions"][0], STATE)
            await policy.reset()
            return policy.route

    return asyncio.run(visit())


def leave(proxy: FaultProxy, route: str) -> None:
    """Whoever says to have left the proxy can do without it."""
    if route == "direct":
        proxy.cut()


@pytest.fixture(
    params=[visit_policy, visit_async_policy, visit_policy_client], ids=["Policy", "AsyncPolicy", "PolicyClient"]
)
def visit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Visit:
    """Connect through the proxy with one of the three clients, ask one observation, and say which route it took."""
    return lambda proxy: request.param(proxy, monkeypatch)


def test_a_client_that_left_the_proxy_is_answered_without_it_and_begins_there_again(visit: Visit) -> None:
    with proxied() as proxy:
        assert visit(proxy) == "direct"
        assert visit(proxy) == "direct"
        assert proxy.accepted == 2


def test_the_main_port_takes_tickets_where_there_is_no_other(visit: Visit) -> None:
    port = free_port()
    with (
        serving(EchoEngine(), port=port, direct_url=f"ws://127.0.0.1:{port}"),
        in_thread(FaultProxy(port)) as proxy,
    ):
        assert visit(proxy) == "direct"


def no_ticket(told: Mapping[str, str]) -> Mapping[str, str]:
    return {key: value for key, value in told.items() if key != TICKET_KEY}


def flipped_bit(told: Mapping[str, str]) -> Mapping[str, str]:
    text = told[TICKET_KEY]
    return {**told, TICKET_KEY: text[:-1] + ("0" if text[-1] != "0" else "1")}


@pytest.mark.parametrize("spoil", [no_ticket, flipped_bit])
def test_a_ticket_that_does_not_open_leaves_the_client_with_the_proxy(
    visit: Visit, spoil: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    offered = Invitation.keys
    monkeypatch.setattr(Invitation, "keys", lambda self: spoil(offered(self)))
    with proxied() as proxy:
        assert visit(proxy) == "proxied"
    assert "HTTP 401" in caplog.text
    assert KEY not in caplog.text


def test_a_used_ticket_leaves_the_client_with_the_proxy(
    visit: Visit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin = Tickets.begin

    def begin_and_use(tickets: Tickets, ticket: Any) -> None:
        begin(tickets, ticket)
        assert tickets.redeem(ticket.text) is ticket

    monkeypatch.setattr(Tickets, "begin", begin_and_use)
    with proxied() as proxy:
        assert visit(proxy) == "proxied"
    assert "HTTP 401" in caplog.text


def test_an_expired_ticket_leaves_the_client_with_the_proxy(
    visit: Visit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_side, "TICKET_S", 0.0)
    with proxied() as proxy:
        assert visit(proxy) == "proxied"
    assert "HTTP 401" in caplog.text


def test_a_self_signed_certificate_is_known_by_its_digest(visit: Visit, tmp_path: Path) -> None:
    issued = trustme.CA().issue_cert("nobody.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued.configure_cert(context)
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    settings: dict[str, Any] = {"direct_url": "wss://127.0.0.1:{port}", "direct_tls": context}
    with proxied(**settings) as proxy:
        assert visit(proxy) == "proxied"
    client_side.failed_addresses.clear()
    settings["direct_cert_sha256"] = certificate_sha256(tmp_path / "cert.pem")
    with proxied(**settings) as proxy:
        assert visit(proxy) == "direct"


def test_a_direct_connection_that_drops_is_made_again_from_the_address_that_was_given() -> None:
    port = free_port()
    with (
        in_thread(FaultProxy(port)) as way,
        proxied(direct_url=way.url, direct_port=port) as proxy,
        Policy(proxy.url, headers=HEADERS, direct=True, reconnect="always") as policy,
    ):
        policy.infer({"state": STATE})
        way.cut()
        policy.infer({"state": STATE})
        assert (policy.route, proxy.accepted) == ("direct", 2)
        way.refuse()
        way.cut()
        policy.infer({"state": STATE})
        assert (policy.route, proxy.accepted) == ("proxied", 3)
