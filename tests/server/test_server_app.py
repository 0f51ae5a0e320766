"""The life of a server: loading, keepalive, drain, device loss."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_policy import FakeEngine, ask, client, dial, get, observation, running
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from relay.engine.base import Progress
from relay.engine.worker import DeviceFault, LoadFailed
from relay.protocol.msgpack_numpy import unpack
from relay.server import connection as connection_module
from relay.server import keepalive
from relay.server.admission import checked_host
from relay.server.app import Server
from relay.server.settings import ServerSettings


class SlowLoad:
    """A loader that stands at 40 % until it is let go."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, progress: Progress) -> FakeEngine:
        progress("loading weights", 0.4)
        self.reached.set()
        assert self.go_on.wait(20)
        return self.engine


async def goodbye(websocket: ClientConnection) -> tuple[int, str]:
    with pytest.raises(ConnectionClosed) as caught:
        await asyncio.wait_for(websocket.recv(), 5)
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, caught.value.rcvd.reason


async def test_while_it_loads_upgrades_and_pings_are_answered_and_the_metadata_is_held():
    load = SlowLoad()
    async with running(load) as server, dial(server.port) as websocket:
        await asyncio.to_thread(load.reached.wait, 5)
        await asyncio.wait_for(await websocket.ping(), 5)
        first_frame = asyncio.create_task(websocket.recv())
        assert await get(server, "/healthz") == (503, "loading\nloading weights 40%\n")
        assert not first_frame.done()
        load.go_on.set()
        assert unpack(await asyncio.wait_for(first_frame, 5))["model"] == "fake"
        assert await get(server, "/healthz/?verbose=1") == (200, "OK\n")


async def test_a_request_sent_before_the_metadata_is_answered_after_it():
    load = SlowLoad()
    async with running(load) as server, dial(server.port) as websocket:
        await websocket.send(observation(4))
        load.go_on.set()
        assert "model" in unpack(await websocket.recv())
        assert unpack(await websocket.recv())["actions"][0, 0] == 4


async def test_health_answers_while_the_engine_runs():
    engine = FakeEngine()
    async with running(engine) as server, client(server) as websocket:
        engine.open.clear()
        await websocket.send(observation())
        await asyncio.to_thread(engine.began.wait, 5)
        assert (await get(server, "/healthz"))[0] == 200
        engine.open.set()
        await websocket.recv()


async def test_a_port_that_is_taken_is_an_error_of_start():
    async with running() as server:
        with pytest.raises(OSError, match=str(server.port)):
            await Server(lambda progress: FakeEngine(), ServerSettings(port=server.port)).start()


async def test_drain_answers_every_request_taken_then_closes_with_1012():
    engine = FakeEngine()
    async with running(engine) as server, client(server) as busy, client(server) as queued, client(server) as quiet:
        engine.open.clear()
        await busy.send(observation(1))
        await asyncio.to_thread(engine.began.wait, 5)
        for value in (2, 3, 4):
            await queued.send(observation(value))
        while server.outstanding < 4:
            await asyncio.sleep(0.005)
        drain = asyncio.create_task(server.drain("moving to another host"))
        assert await goodbye(quiet) == (1012, "moving to another host")
        assert not drain.done()
        engine.open.set()
        assert unpack(await busy.recv())["actions"][0, 0] == 1
        assert [unpack(await queued.recv())["actions"][0, 0] for _ in range(3)] == [2, 3, 4]
        assert await goodbye(busy) == (1012, "moving to another host")
        assert await goodbye(queued) == (1012, "moving to another host")
        await drain
        await server.serve_forever()
        assert server.released


async def test_drain_under_load_loses_no_reply():
    async def robot(websocket: ClientConnection, number: int) -> tuple[int, int, int]:
        sent = received = 0
        try:
            while True:
                await websocket.send(observation(number))
                sent += 1
                assert unpack(await websocket.recv())["actions"][0, 0] == number
                received += 1
        except ConnectionClosed as error:
            return sent, received, error.rcvd.code if error.rcvd else 0

    async with running() as server:
        sockets = [await dial(server.port) for _ in range(8)]
        for websocket in sockets:
            await websocket.recv()
        robots = [asyncio.create_task(robot(websocket, number)) for number, websocket in enumerate(sockets)]
        await asyncio.sleep(0.1)
        await server.drain()
        for sent, received, code in await asyncio.gather(*robots):
            assert received > 0
            assert sent - received <= 1  # one may cross the close frame
            assert code == 1012


async def test_a_request_on_its_way_when_the_drain_begins_is_answered():
    async def answered() -> bool:
        async with running() as server, client(server) as websocket:
            drain = asyncio.create_task(server.drain())
            await asyncio.sleep(0.01)
            try:
                return (await ask(websocket, observation(1)))["actions"][0, 0] == 1
            except ConnectionClosed:
                return False
            finally:
                await drain

    # A busy machine may hold one up for longer than a stopping server waits.
    assert any([await answered() for _ in range(3)])


async def test_while_draining_new_connections_are_refused():
    engine = FakeEngine()
    async with running(engine) as server, client(server) as websocket:
        engine.open.clear()
        await websocket.send(observation())
        await asyncio.to_thread(engine.began.wait, 5)
        drain = asyncio.create_task(server.drain())
        await asyncio.sleep(0.02)
        with pytest.raises(OSError, match=str(server.port)):
            await dial(server.port)
        engine.open.set()
        await drain


async def test_drain_gives_up_on_an_engine_that_hangs():
    engine = FakeEngine()
    async with running(engine, drain_seconds=0.1) as server, client(server) as websocket:
        engine.open.clear()
        await websocket.send(observation())
        await asyncio.to_thread(engine.began.wait, 5)
        await asyncio.wait_for(server.drain(), 5)
        assert (await goodbye(websocket))[0] == 1012
        assert not server.released
        engine.open.set()


async def test_drain_while_loading_closes_at_once():
    load = SlowLoad()
    async with running(load) as server, dial(server.port) as websocket:
        await websocket.send(observation())
        await asyncio.wait_for(server.drain(), 5)
        assert (await goodbye(websocket))[0] == 1012
        load.go_on.set()


async def test_a_load_that_fails_ends_the_server_and_tells_who_waits():
    load = SlowLoad()

    def failing(progress: Progress) -> Any:
        load(progress)
        raise FileNotFoundError("no model.safetensors in 'pi05'")

    async with running(failing) as server, dial(server.port) as websocket:
        load.go_on.set()
        assert await goodbye(websocket) == (1011, "the policy could not be loaded")
        with pytest.raises(LoadFailed, match=r"no model\.safetensors in 'pi05'"):
            await server.serve_forever()


async def test_a_lost_device_answers_with_an_error_and_ends_the_server():
    async with running() as server, client(server) as other, client(server) as websocket:
        assert "Internal inference error" in await ask(websocket, observation(do="lose device"))
        assert (await goodbye(websocket))[0] == 1011
        assert (await goodbye(other))[0] == 1012
        with pytest.raises(DeviceFault):
            await server.serve_forever()


async def test_a_peer_that_leaves_pings_unanswered_is_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection_module, "keep_alive", lambda peer: keepalive.keep_alive(peer, 0.02, 0.1))
    async with running() as server, client(server) as lively:
        async with client(server) as silent:
            silent.transport.pause_reading()
            await until_connections(server, 1)
            silent.transport.abort()
        assert "actions" in await ask(lively, observation())


async def test_a_peer_that_is_not_read_from_is_not_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection_module, "keep_alive", lambda peer: keepalive.keep_alive(peer, 0.02, 0.1))
    engine = FakeEngine()
    async with running(engine) as server, client(server) as websocket:
        engine.open.clear()
        for value in range(8):
            await websocket.send(observation(value))
        await asyncio.sleep(0.4)
        assert not server.connections[0].transport.is_reading()
        engine.open.set()
        assert [unpack(await websocket.recv())["actions"][0, 0] for _ in range(8)] == list(range(8))


async def test_a_peer_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch):
    async def impatient(websocket: Any, frame: str | bytes) -> None:
        await keepalive.send_promptly(websocket, frame, 0.1)

    monkeypatch.setattr(connection_module, "send_promptly", impatient)
    async with running() as server, client(server) as websocket:
        websocket.transport.pause_reading()
        await websocket.send(observation(do="huge"))
        await until_connections(server, 0)
        websocket.transport.abort()


async def until_connections(server: Server, count: int) -> None:
    for _ in range(1_000):
        if len(server.connections) == count:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{len(server.connections)} connections are open")


@pytest.mark.parametrize(
    ("load", "traced"),
    [(lambda _: checked_host("a b"), False), (lambda _: int("a b"), True), (lambda _: os.stat("nowhere"), True)],
    ids=["a sentence of ours", "a ValueError of others", "another error"],
)
async def test_only_an_error_that_is_no_sentence_of_ours_is_logged_with_its_traceback(
    load: Callable[[Progress], Any], traced: bool, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", logger="relay.server.app")
    async with running(load) as server:
        with pytest.raises(LoadFailed):
            await server.serve_forever()
    (record,) = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert "the policy could not be loaded: " in record.getMessage()
    assert bool(record.exc_info) is traced
