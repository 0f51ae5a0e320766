"""Who gets through the upgrade: API keys, origins, hosts, and ports beyond loopback."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from typing import Any

import numpy as np
import pytest
from fake_policy import DIM, FakeEngine, ask, client, dial, observation, running
from websockets.exceptions import InvalidStatus

import relay
from free_ports import free_port
from relay.server.admission import Exposed, check_exposure, is_loopback, log_terms
from relay.server.api_keys import ApiKeys, read_api_keys
from relay.server.app import Server
from relay.server.settings import ServerSettings

ALICE, BOB = "alice-0123456789", "bob-0123456789ab"
VLLM = "/v1/realtime/robot/openpi"


def keys(*keys: str) -> ApiKeys:
    return read_api_keys(environment={"RELAY_API_KEYS": ",".join(keys)})


async def turned_away(server: Server, path: str = "/", **options: Any) -> tuple[int, str]:
    """Status and body of a refused upgrade."""
    with pytest.raises(InvalidStatus) as caught:
        await dial(server.port, path, **options)
    response = caught.value.response
    return response.status_code, (response.body or b"").decode()


async def get(server: Server, request: str) -> tuple[str, str]:
    """Head and body of the answer to a raw request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request.replace("\n", "\r\n").encode() + b"\r\n\r\n")
    answer = (await asyncio.wait_for(reader.read(), 5)).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return head, body


@pytest.mark.parametrize("path", ["/", VLLM])
@pytest.mark.parametrize("authorization", [f"Api-Key {ALICE}", f"Bearer {BOB}", f"bearer  {ALICE} ", f"API-KEY {BOB}"])
async def test_any_of_the_keys_opens_either_path_under_either_scheme(path: str, authorization: str):
    async with (
        running(api_keys=keys(ALICE, BOB)) as server,
        client(server, path, additional_headers={"Authorization": authorization}) as websocket,
    ):
        assert not isinstance(await ask(websocket, observation()), str)


@pytest.mark.parametrize("path", ["/", VLLM, "/v1/models"])
@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        ALICE,
        f"Basic {ALICE}",
        f"Api-Key {ALICE}x",
        f"Api-Key {ALICE[:-1]}",
        "Api-Key ",
        f"Bearer {ALICE},{BOB}",
    ],
)
async def test_a_wrong_or_missing_key_is_401_before_the_upgrade(path: str, authorization: str | None):
    headers = {} if authorization is None else {"Authorization": authorization}
    async with running(api_keys=keys(ALICE, BOB)) as server:
        status, body = await turned_away(server, path, additional_headers=headers)
        assert status == 401
        assert body == "An API key of this server is needed, as 'Authorization: Api-Key <key>' or 'Bearer <key>'.\n"
        assert server.connections == ()


async def test_two_authorization_headers_are_none():
    async with running(api_keys=keys(ALICE)) as server:
        two = [("Authorization", f"Bearer {ALICE}"), ("Authorization", f"Bearer {ALICE}")]
        assert (await turned_away(server, additional_headers=two))[0] == 401


async def test_a_key_that_is_no_text_is_401():
    async with running(api_keys=keys(ALICE)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe-0123456789\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 401 ")
        writer.transport.abort()


async def test_the_refusal_names_the_scheme_and_is_plain_text():
    async with running(api_keys=keys(ALICE)) as server:
        head, _ = await get(server, "GET / HTTP/1.1\nHost: x")
        assert head.startswith("HTTP/1.1 401 ")
        assert "WWW-Authenticate: Bearer" in head
        assert "Content-Type: text/plain" in head


async def test_health_needs_no_key_no_host_and_no_origin():
    async with running(
        api_keys=keys(ALICE), allowed_hosts=("robots.example",), allowed_origins=("https://dash.example",)
    ) as server:
        await server.ready()
        head, body = await get(server, "GET /healthz HTTP/1.1\nHost: other\nOrigin: http://evil.example")
        assert head.startswith("HTTP/1.1 200 ")
        assert body == "OK\n"


async def test_without_keys_the_header_is_ignored():
    async with (
        running(api_keys=ApiKeys()) as server,
        client(server, additional_headers={"Authorization": "Api-Key whatever"}) as websocket,
    ):
        assert "actions" in await ask(websocket, observation())


async def test_the_relay_client_gets_in_with_its_key_and_gives_up_at_once_without():
    def infer(headers: dict[str, str]) -> Any:
        with relay.Policy(f"ws://127.0.0.1:{server.port}", headers=headers) as policy:
            return policy.infer({"state": np.full(DIM, 2, np.float32)})["actions"]

    async with running(api_keys=keys(ALICE)) as server:
        actions = await asyncio.to_thread(infer, {"Authorization": f"Api-Key {ALICE}"})
        assert actions[0, 0] == 2
        with pytest.raises(InvalidStatus, match="401"):
            await asyncio.wait_for(asyncio.to_thread(infer, {}), 5)


async def test_keys_are_never_logged(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, logger="relay")
    async with running(api_keys=keys(ALICE)) as server:
        async with client(server, additional_headers={"Authorization": f"Bearer {ALICE}"}) as websocket:
            await ask(websocket, observation(do="raise"))
        await turned_away(server, additional_headers={"Authorization": f"Bearer {ALICE}x"})
    assert "clients need one of 1 API keys" in caplog.text
    assert "turned 127.0.0.1:" in caplog.text
    assert ALICE not in caplog.text


async def test_a_flood_of_refused_upgrades_does_not_fill_the_log(caplog: pytest.LogCaptureFixture):
    async with running(api_keys=keys(ALICE)) as server:
        await asyncio.gather(*(turned_away(server) for _ in range(60)))
    assert caplog.text.count("turned 127.0.0.1:") == 20


async def test_with_two_keys_a_failure_is_sentence_and_id_only():
    async with (
        running(api_keys=keys(ALICE, BOB)) as server,
        client(server, additional_headers={"Authorization": f"Bearer {ALICE}"}) as websocket,
    ):
        text = await ask(websocket, observation(do="raise"))
        assert re.fullmatch(r"Internal inference error \[error [0-9a-f]{8}\]", text)


async def test_with_two_keys_an_unknown_adapter_is_answered_without_names():
    async with (
        running(api_keys=keys(ALICE, BOB)) as server,
        client(server, additional_headers={"Authorization": f"Bearer {ALICE}"}) as websocket,
    ):
        text = await ask(websocket, observation(adapter_dir="fold"))
        assert re.fullmatch(r"adapter 'fold' is not loaded \[error [0-9a-f]{8}\]", text)


async def test_with_one_key_a_failure_has_its_traceback():
    async with (
        running(api_keys=keys(ALICE)) as server,
        client(server, additional_headers={"Authorization": f"Bearer {ALICE}"}) as websocket,
    ):
        assert "Traceback (most recent call last)" in await ask(websocket, observation(do="raise"))


@pytest.mark.parametrize("origin", ["https://dash.example", "http://localhost:3000"])
async def test_a_listed_origin_may_connect(origin: str):
    async with (
        running(allowed_origins=("https://dash.example", "http://localhost:3000")) as server,
        client(server, origin=origin) as websocket,
    ):
        assert "actions" in await ask(websocket, observation())


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "http://dash.example", "https://dash.example:8443", "https://dash.example.evil"]
)
async def test_another_origin_is_403(origin: str):
    async with running(allowed_origins=("https://dash.example",)) as server:
        assert await turned_away(server, origin=origin) == (
            403,
            "Web pages of that origin may not connect to this server.\n",
        )


async def test_one_origin_that_is_not_listed_is_enough_to_refuse():
    async with running(allowed_origins=("https://dash.example",)) as server:
        two = [("Origin", "https://dash.example"), ("Origin", "http://evil.example")]
        assert (await turned_away(server, additional_headers=two))[0] == 403


async def test_where_origins_are_listed_robots_need_none():
    async with running(allowed_origins=("https://dash.example",)) as server, client(server) as websocket:
        assert "actions" in await ask(websocket, observation())


async def upgraded(server: Server, host: str) -> int:
    """Status of an upgrade that asks for this host."""
    lines = ["GET / HTTP/1.1", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
    lines += ["Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==", *([f"Host: {host}"] if host else [])]
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write("\r\n".join([*lines, "", ""]).encode())
    status = (await asyncio.wait_for(reader.readline(), 5)).decode()
    writer.transport.abort()
    return int(status.split()[1])


HOSTS = ("Robots.example", "10.0.0.5", "[fd00::5]")


@pytest.mark.parametrize(
    "host",
    ["robots.example", "ROBOTS.EXAMPLE:8000", "10.0.0.5", "10.0.0.5:8000", "[fd00::5]", "[FD00::5]:8000"],
)
async def test_a_listed_host_is_served_with_or_without_port_in_any_case(host: str):
    async with running(allowed_hosts=HOSTS) as server:
        assert await upgraded(server, host) == 101


@pytest.mark.parametrize(
    "host", ["", "evil.example", "robots.example.evil.example", "10.0.0.50", "fd00::5", "127.0.0.1", "[::1]"]
)
async def test_another_host_is_421(host: str):
    async with running(allowed_hosts=HOSTS) as server:
        assert await upgraded(server, host) == 421


async def test_two_hosts_are_421():
    async with running(allowed_hosts=HOSTS) as server:
        assert await upgraded(server, "robots.example\r\nHost: robots.example") == 421


async def test_the_refusal_of_a_host_is_plain_text():
    async with running(allowed_hosts=HOSTS) as server:
        _, body = await get(server, "GET / HTTP/1.1\nHost: evil.example")
        assert body == "This server does not answer under that host name.\n"


async def test_without_a_list_a_loopback_server_answers_under_a_proxys_name():
    async with running() as server:
        assert await upgraded(server, "robots.example") == 101


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::"])
async def test_beyond_loopback_without_key_the_server_does_not_start(host: str):
    if host == "::" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    server = Server(lambda progress: FakeEngine(), ServerSettings(host=host, port=0, api_keys=ApiKeys()))
    with pytest.raises(Exposed) as caught:
        await server.start()
    assert "--api-keys-file FILE" in str(caught.value)
    assert "--insecure" in str(caught.value)


async def test_a_server_that_does_not_start_leaves_no_port_open():
    port = free_port()
    with pytest.raises(Exposed):
        await Server(lambda progress: FakeEngine(), ServerSettings(host="0.0.0.0", port=port)).start()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("terms", [{"insecure": True}, {"api_keys": keys(ALICE)}])
async def test_beyond_loopback_a_key_or_insecure_lets_it_start(terms: dict[str, Any]):
    async with running(host="0.0.0.0", **terms) as server:
        await dial(server.port, additional_headers={"Authorization": f"Bearer {ALICE}"})


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.9"])
async def test_loopback_needs_nothing(host: str):
    server = Server(lambda progress: FakeEngine(), ServerSettings(host=host, port=0))
    await server.start()
    await server.drain()


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.10", "::1"])
def test_what_is_loopback(address: str):
    assert is_loopback(address)
    check_exposure([address], ApiKeys(), insecure=False)


@pytest.mark.parametrize(
    "address", ["0.0.0.0", "::", "10.0.0.5", "192.168.1.2", "fe80::1%eth0", "fd00::5", "128.0.0.1"]
)
def test_what_is_not(address: str):
    assert not is_loopback(address)
    with pytest.raises(Exposed, match=re.escape(f"on {address} every machine")):
        check_exposure(["127.0.0.1", address], ApiKeys(), insecure=False)


async def test_the_log_says_what_was_really_bound(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="relay")
    async with running(host="localhost") as server:
        assert f"listening on ws://127.0.0.1:{server.port}" in caplog.text


@pytest.mark.parametrize(
    ("api_keys", "tls", "warning"),
    [
        (ApiKeys(), True, "no API key is asked for: every machine that reaches this port can drive the policy"),
        (keys(ALICE), False, "API keys reach this port in clear text"),
        (keys(ALICE), True, None),
    ],
)
def test_the_log_warns_of_what_an_open_port_lacks(
    caplog: pytest.LogCaptureFixture, api_keys: ApiKeys, tls: bool, warning: str | None
):
    caplog.set_level(logging.INFO, logger="relay")
    log_terms([("fd00::5", 8000)], api_keys, tls=tls)
    assert f"listening on {'wss' if tls else 'ws'}://[fd00::5]:8000" in caplog.text
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == (warning is not None)
    assert all(text.startswith(warning or "") for text in warned)


@pytest.mark.parametrize("path", ["/healthz", "/", "/v1/models"])
async def test_the_answer_to_head_has_no_body(path: str):
    async with running() as server:
        await server.ready()
        head, body = await get(server, f"HEAD {path} HTTP/1.1\nHost: x")
        assert body == ""
        if head:  # before version 17, websockets answers no other method than GET
            assert head.startswith("HTTP/1.1 200 " if path == "/healthz" else "HTTP/1.1 4")
