"""What a bad network does to server and robots: nothing is lost, doubled or crossed, and nothing is left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from counting_policy import CountingEngine, all_closed, count_of
from fake_policy import DIM, HORIZON, FakeEngine, ask, client, dial, observation, running
from websockets.exceptions import ConnectionClosed

import relay
from fault_proxy import FaultProxy, in_thread
from field.loopback import CLIENTS, robot, serving, state
from relay.protocol.msgpack_numpy import unpack
from relay.server import connection as server_connection
from relay.server import keepalive

ROBOTS = 500


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never became true")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's keepalive, a hundred times as fast."""
    monkeypatch.setattr(server_connection, "keep_alive", lambda peer: keepalive.keep_alive(peer, 0.2, 0.6))


# ---- half-open peers


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("swallowed", ["to_server", "to_client"])
async def test_a_half_open_peer_is_freed_with_its_session(swallowed: str):
    """One direction is enough: a ping that does not arrive, or a pong that does not."""
    engine = CountingEngine()
    async with (
        running(engine) as server,
        FaultProxy(server.port) as proxy,
        client(server) as lively,
        dial(proxy.port) as silent,
    ):
        await silent.recv()
        assert [await count_of(lively), await count_of(silent)] == [1, 1]
        getattr(proxy, swallowed).swallow = True
        await until(lambda: len(server.connections) == 1 and len(engine.open) == 1)
        assert await count_of(lively) == 2
        silent.transport.abort()


@pytest.mark.usefixtures("impatient")
async def test_the_requests_of_a_half_open_peer_leave_the_queue():
    engine = FakeEngine()
    async with (
        running(engine, max_batch=1) as server,
        FaultProxy(server.port) as proxy,
        client(server) as lively,
        dial(proxy.port) as silent,
    ):
        await silent.recv()
        engine.open.clear()
        await lively.send(observation(1))
        await asyncio.to_thread(engine.began.wait, 5)
        await silent.send(observation(2))
        await until(lambda: server.outstanding == 2)
        proxy.to_server.swallow = True
        await until(lambda: server.outstanding == 1)
        engine.open.set()
        assert unpack(await lively.recv())["actions"][0, 0] == 1
        silent.transport.abort()
    assert engine.batches == [[1.0]]


async def test_a_peer_whose_program_died_behind_a_dead_link_is_no_news_until_the_link_says_so():
    """The counterpart: no end of the stream reaches the server, so that only its pings can tell."""
    async with running() as server, FaultProxy(server.port) as proxy:
        async with dial(proxy.port) as silent:
            await silent.recv()
            proxy.to_server.swallow = True
            silent.transport.abort()
        await asyncio.sleep(0.2)
        assert len(server.connections) == 1
        proxy.cut()
        await until(lambda: not server.connections)


# ---- slow links


@pytest.mark.parametrize("name", CLIENTS)
def test_a_slow_link_is_slow_and_nothing_else(name: str):
    """A raw frame at 400 kB/s with 50 ms each way takes longer than the idle limit and is answered."""
    with (
        serving(idle_timeout=0.5) as server,
        in_thread(FaultProxy(server.port)) as proxy,
        robot(name, proxy.url) as infer,
    ):
        proxy.to_server.bytes_per_second = 400_000
        proxy.to_server.latency = proxy.to_client.latency = 0.05
        actions = infer(state(7, note=np.zeros(400_000, np.uint8)))
    np.testing.assert_array_equal(actions, np.full((HORIZON, DIM), 7))


# ---- links that break, again and again


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_robot_on_a_link_that_breaks_at_random_gets_its_own_answers_or_an_error(seed: int):
    """Each connection is cut somewhere in its first bytes, in a random direction; the seed replays it."""
    print(f"seed {seed}")
    random = Random(seed)
    answered = broken = 0
    engine = CountingEngine()
    with serving(engine) as server, in_thread(FaultProxy(server.port, seed)) as proxy:
        for attempt in range(40):
            faults = random.choice([proxy.to_server, proxy.to_client])
            faults.cut_after = random.randrange(3_000)
            try:
                with relay.Policy(proxy.url, connect_timeout=0.2) as policy:
                    for value in range(20):
                        count, first, last = policy.infer(state(100 * attempt + value))["actions"][0].tolist()
                        assert (count, first, last) == (value + 1, 100 * attempt, 100 * attempt + value)
                        answered += 1
            except (ConnectionClosed, TimeoutError):
                broken += 1
            finally:
                proxy.to_server.cut_after = proxy.to_client.cut_after = None
        with relay.Policy(proxy.url) as policy:  # and the server is as good as new
            assert policy.infer(state(5))["actions"][0].tolist() == [1, 5, 5]
        deadline = time.monotonic() + 10
        while engine.open and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not engine.open
    assert answered > 0
    assert broken > 0


async def test_a_reset_in_mid_request_frees_the_session():
    engine = CountingEngine()
    async with running(engine) as server, FaultProxy(server.port) as proxy:
        async with dial(proxy.port) as websocket:
            await websocket.recv()
            engine.fake.open.clear()
            await websocket.send(observation(1))
            await asyncio.to_thread(engine.fake.began.wait, 5)
            proxy.reset()
            with pytest.raises(ConnectionClosed):
                await websocket.recv()
            await until(lambda: not server.connections)
            engine.fake.open.set()
        await all_closed(engine, server)


# ---- a reconnect storm


@pytest.mark.parametrize("places", [1_024, 300])
async def test_five_hundred_robots_that_reconnect_at_once_are_served_or_told_to_come_back(places: int):
    """Everyone is answered within seconds: served, or refused with 1013; nobody waits for a timeout."""

    async def come_back(number: int) -> str:
        async with dial(proxy.port, open_timeout=60) as websocket:
            try:
                await websocket.recv()
            except ConnectionClosed as error:
                return str(error.rcvd.code if error.rcvd else 0)
            reply = await ask(websocket, observation(number))
            assert reply["actions"][0, 0] == number
            await everybody.wait()
            return "served"

    async with running(max_connections=places) as server, FaultProxy(server.port) as proxy:
        first = [await dial(proxy.port) for _ in range(min(places, 200))]
        proxy.reset()  # all links break
        await until(lambda: not server.connections)
        everybody = asyncio.Event()
        started = time.monotonic()
        robots = [asyncio.create_task(come_back(number)) for number in range(ROBOTS)]
        served = min(places, ROBOTS)
        await until(lambda: sum(robot.done() for robot in robots) == ROBOTS - served)
        while server.outstanding:
            await asyncio.sleep(0.01)
        everybody.set()
        said = await asyncio.gather(*robots)
        assert time.monotonic() - started < 20  # 2 s on a machine of its own
        assert (said.count("served"), said.count("1013")) == (served, ROBOTS - served)
        for websocket in first:
            await websocket.close()
