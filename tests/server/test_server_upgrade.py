"""What a server answers before a connection is a WebSocket: health, paths, refusals, and the headers of an upgrade."""

from __future__ import annotations

import pytest
from fake_policy import FakeEngine, ask, client, dial, get, observation, running
from websockets.exceptions import InvalidStatus


async def test_health_tells_what_a_ready_policy_does_without():
    engine = FakeEngine()
    engine.remarks = ["prepared shapes are off: no memory"]  # pyright: ignore
    async with running(engine) as server:
        await server.ready()
        assert await get(server, "/healthz") == (200, "OK\nprepared shapes are off: no memory\n")


@pytest.mark.parametrize(
    ("path", "status"),
    [("/", 426), ("/v1/models", 404), ("/v1/", 404), ("/m/v1/realtime/robot/openpi", 426)],
)
async def test_a_plain_get_elsewhere_is_refused(path: str, status: int):
    async with running() as server:
        assert (await get(server, path))[0] == status


@pytest.mark.parametrize("path", ["/v1/realtime/robot", "/v1/x?y"])
async def test_a_reserved_path_is_404_before_the_upgrade(path: str):
    async with running() as server:
        with pytest.raises(InvalidStatus) as caught:
            await dial(server.port, path)
        assert caught.value.response.status_code == 404


@pytest.mark.parametrize("path", ["/", "/some/prefix", "/v10/x", "/?model=pi05"])
async def test_every_other_path_is_served(path: str):
    async with running() as server, client(server, path) as websocket:
        assert "actions" in await ask(websocket, observation())


async def test_a_web_page_is_refused():
    async with running() as server:
        with pytest.raises(InvalidStatus) as caught:
            await dial(server.port, origin="http://evil.example")
        assert caught.value.response.status_code == 403


async def test_a_relay_client_reads_what_it_may_send_in_the_response_headers():
    async with running() as server, client(server, subprotocols=["relay.v1"]) as websocket:
        assert websocket.subprotocol == "relay.v1"
        assert websocket.response is not None
        assert websocket.response.headers["Relay-Codecs"] == "jpeg, png, webp"
        assert websocket.response.headers["Relay-Max-Payload"] == str(64 * 1024 * 1024)
        assert websocket.response.headers["Relay-Options"] == "deadline_ms, noise, num_steps, seed"


async def test_a_stock_client_gets_no_subprotocol_and_no_compression():
    async with running() as server, client(server, compression="deflate") as websocket:
        assert websocket.response is not None
        headers = websocket.response.headers
        for name in ("Relay-Codecs", "Sec-WebSocket-Protocol", "Sec-WebSocket-Extensions"):
            assert name not in headers


async def test_a_foreign_subprotocol_is_ignored():
    async with running() as server, client(server, subprotocols=["other"]) as websocket:
        assert websocket.subprotocol is None
        assert "actions" in await ask(websocket, observation())
