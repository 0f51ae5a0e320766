"""Several policies on one port: the first path segment tells which, none at all is said in the documented way."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from fake_policy import SPEC, FakeEngine, ask, client, dial, observation
from websockets.exceptions import ConnectionClosedOK, InvalidStatus

from relay.engine.base import Engine, Progress
from relay.engine.worker import DeviceFault
from relay.protocol.msgpack_numpy import unpack
from relay.server.app import Server
from relay.server.policies import NotServed, Offer, Policies
from relay.server.settings import ServerSettings

VLLM = "/v1/realtime/robot/openpi"


def fake(name: str) -> FakeEngine:
    return FakeEngine(spec=replace(SPEC, model=name))


def policies(*names: str) -> Policies:
    offers = {name: Offer(lambda progress: fake("unused"), ServerSettings()) for name in names}
    return Policies(offers, on_fatal=lambda failure: None)


@asynccontextmanager
async def serving(offers: Mapping[str, Offer]) -> AsyncIterator[Server]:
    server = Server(offers, ServerSettings(port=0))
    await server.start()
    try:
        yield server
    finally:
        await server.drain()


def offer(engine: Engine, **settings: Any) -> Offer:
    return Offer(lambda progress: engine, ServerSettings(**settings))


async def model_at(server: Server, path: str) -> str:
    async with dial(server.port, path) as websocket:
        return unpack(await websocket.recv())["model"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/", "arm"),
        ("", "arm"),
        ("/?x=1", "arm"),
        (VLLM, "arm"),
        ("/arm", "arm"),
        ("/hand", "hand"),
        ("/hand/", "hand"),
        ("/hand/any/thing?x=1", "hand"),
        ("/hand" + VLLM, "hand"),
    ],
)
def test_the_first_segment_selects_the_policy(path: str, name: str):
    found = policies("arm", "hand").at(path)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("path", ["/leg", "/leg" + VLLM, "/ARM"])
def test_an_unknown_first_segment_names_those_that_are_served(path: str):
    with pytest.raises(NotServed, match="Served are arm, hand"):
        policies("arm", "hand").at(path)


def test_a_misspelt_name_gets_the_nearest():
    with pytest.raises(NotServed, match=r"No policy is called 'hnad'\. Served are arm, hand\. Did you mean hand\?"):
        policies("arm", "hand").at("/hnad")


def test_a_reserved_path_is_no_policy():
    with pytest.raises(NotServed):
        policies("arm", "hand").at("/v1/models")


def test_a_single_policy_is_served_under_any_prefix():
    found = policies("arm").at("/some/prefix")
    assert found is not None
    assert found.name == "arm"


@pytest.mark.parametrize("name", ["", "a/b", "v1", "healthz", "metrics", "a b", "x" * 65, "é"])
def test_a_name_that_cannot_stand_in_a_path_is_refused(name: str):
    with pytest.raises(ValueError, match="a policy cannot be called"):
        policies(name)


async def test_two_policies_answer_on_one_port_each_with_its_own_settings():
    offers = {"arm": offer(fake("arm")), "hand": offer(fake("hand"), handshake="roboarena")}
    async with serving(offers) as server:
        await server.ready()
        assert await model_at(server, "/") == "arm"
        async with dial(server.port, "/hand") as websocket:
            assert len(unpack(await websocket.recv())) == 6
        async with client(server, "/hand" + VLLM) as websocket:
            assert (await ask(websocket, observation(3.0))).tolist() == [[3.0] * 3] * 4


async def test_an_unknown_policy_is_404_before_the_upgrade():
    async with serving({"arm": offer(fake("arm")), "hand": offer(fake("hand"))}) as server:
        with pytest.raises(InvalidStatus) as caught:
            await dial(server.port, "/leg")
        assert caught.value.response.status_code == 404
        assert b"Served are arm, hand" in (caught.value.response.body or b"")


async def test_a_busy_policy_keeps_nobody_from_the_other():
    arm, hand = fake("arm"), fake("hand")
    arm.open.clear()
    async with (
        serving({"arm": offer(arm), "hand": offer(hand)}) as server,
        client(server, "/arm") as waiting,
        client(server, "/hand") as websocket,
    ):
        await waiting.send(observation())
        await asyncio.to_thread(arm.began.wait, 5)
        assert (await ask(websocket, observation(1.0)))["actions"][0, 0] == 1.0
        arm.open.set()
        await waiting.recv()


async def test_health_is_good_when_all_policies_can_serve():
    go_on = threading.Event()

    def load(progress: Progress) -> Engine:
        progress("loading weights", 0.5)
        assert go_on.wait(20)
        return fake("hand")

    async with serving({"arm": offer(fake("arm")), "hand": Offer(load, ServerSettings())}) as server:
        assert await model_at(server, "/arm") == "arm"  # which is ready, while the other is not
        for _ in range(100):
            status, text = await asyncio.to_thread(health, server.port)
            if "loading weights" in text:
                break
            await asyncio.sleep(0.02)
        assert (status, text) == (503, "loading\nhand: loading weights 50%\n")
        go_on.set()
        await server.ready()
        assert await asyncio.to_thread(health, server.port) == (200, "OK\n")


async def test_a_lost_device_ends_the_server_for_all_policies():
    server = Server({"arm": offer(fake("arm")), "hand": offer(fake("hand"))}, ServerSettings(port=0))
    await server.start()
    async with client(server, "/hand") as websocket:
        await websocket.send(observation(do="lose device"))
        with pytest.raises(DeviceFault):
            await server.serve_forever()


@pytest.mark.parametrize("path", ["/", VLLM, "/pi05" + VLLM])
async def test_without_a_policy_clients_are_told_and_dismissed(path: str):
    async with serving({}) as server, dial(server.port, path) as websocket:
        frame = await websocket.recv()
        assert isinstance(frame, str)
        assert json.loads(frame) == {"type": "error", "error": "Robot policy not available", "code": "unsupported"}
        with pytest.raises(ConnectionClosedOK):
            await websocket.recv()
        assert (await asyncio.to_thread(health, server.port))[0] == 503


def health(port: int) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/healthz")
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


async def test_health_tells_what_runs_otherwise_than_it_could():
    arm, hand = fake("arm"), fake("hand")
    hand.remarks = ("prepared shapes are off: no memory",)  # pyright: ignore
    async with serving({"arm": offer(arm), "hand": offer(hand)}) as server:
        await server.ready()
        assert server.status.remarks == ("hand: prepared shapes are off: no memory",)
