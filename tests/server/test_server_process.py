"""The server as a process: what it imports, how signals and failures end it, how its threads take turns."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fake_policy import FakeEngine, ask, dial, observation
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from relay.protocol.msgpack_numpy import unpack
from relay.server.app import serve
from relay.server.process import SWITCH_S
from relay.server.settings import ServerSettings

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")

HERE = Path(__file__).parent


@asynccontextmanager
async def process(how: str, port: int = 0) -> AsyncIterator[tuple[Process, int]]:
    """A server process and its port, killed if the test leaves it running."""
    server = await asyncio.create_subprocess_exec(
        sys.executable, HERE / "serve_fake.py", how, str(port), stdout=PIPE, stderr=PIPE
    )
    try:
        yield server, await asyncio.wait_for(listening(server), 20)
    finally:
        if server.returncode is None:
            server.kill()
        await server.communicate()


async def listening(server: Process) -> int:
    """The port that the process logs."""
    assert server.stderr is not None
    async for line in server.stderr:
        if found := re.search(r"listening on ws://127\.0\.0\.1:(\d+)", line.decode()):
            return int(found[1])
    raise AssertionError("the server ended without listening")


async def ended(server: Process) -> tuple[int, str, str]:
    out, err = await asyncio.wait_for(server.communicate(), 20)
    assert server.returncode is not None
    return server.returncode, out.decode(), err.decode()


@asynccontextmanager
async def robot(port: int) -> AsyncIterator[ClientConnection]:
    async with dial(port) as websocket:
        yield websocket


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_answers_the_running_request_and_exits_with_0(number: signal.Signals):
    async with process("serve") as (server, port), robot(port) as websocket:
        await websocket.recv()
        await websocket.send(observation(1))
        await asyncio.sleep(0.1)
        server.send_signal(number)
        assert unpack(await websocket.recv())["actions"][0, 0] == 1
        with pytest.raises(ConnectionClosed) as caught:
            await websocket.recv()
        assert caught.value.rcvd is not None
        assert (caught.value.rcvd.code, caught.value.rcvd.reason) == (1012, "the server is stopping")
        code, out, _ = await ended(server)
        assert (code, out) == (0, "returned 1\n")


async def test_a_signal_while_loading_exits_with_0():
    async with process("load") as (server, port), robot(port) as websocket:
        server.send_signal(signal.SIGTERM)
        with pytest.raises(ConnectionClosed):
            await websocket.recv()
        assert (await ended(server))[0] == 0


async def test_a_second_signal_exits_at_once():
    async with process("serve") as (server, port), robot(port) as websocket:
        await websocket.recv()
        for _ in range(4):  # 0.2 s each, one batch after the other
            await websocket.send(observation(key=str(_)))
        await asyncio.sleep(0.1)
        server.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        server.send_signal(signal.SIGTERM)
        assert (await ended(server))[0] == 128 + signal.SIGTERM


async def test_a_load_that_fails_exits_with_1_and_says_why():
    async with process("fail") as (server, _):
        code, _, err = await ended(server)
        assert code == 1
        assert err.splitlines()[-1] == (
            "relay: the policy could not be loaded: FileNotFoundError: no model.safetensors in 'pi05'"
        )


async def test_a_lost_device_exits_with_1():
    async with process("serve") as (server, port), robot(port) as websocket:
        await websocket.recv()
        await websocket.send(observation(do="lose device"))
        assert "Internal inference error" in str(await websocket.recv())
        code, _, err = await ended(server)
        assert code == 1
        assert "the device is lost after RuntimeError: CUDA error" in err


async def test_a_device_that_keeps_running_out_of_memory_answers_drains_and_exits_with_1():
    path = "/v1/realtime/robot/openpi"
    async with process("serve") as (server, port), dial(port, path) as unlucky, dial(port, path) as other:
        await unlucky.recv()
        await other.recv()
        for _ in range(2):
            assert (await ask(unlucky, observation(do="fill memory")))["message"] == "Internal inference error"
        await unlucky.send(observation(do="fill memory"))
        await asyncio.sleep(0.02)
        await other.send(observation(5))
        assert unpack(await unlucky.recv())["message"] == "Internal inference error"
        assert unpack(await other.recv())[0, 0] == 5
        with pytest.raises(ConnectionClosed) as closed:
            await other.recv()
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (
            1012,
            "the device is out of memory; the server restarts",
        )
        code, _, err = await ended(server)
        assert code == 1
        assert "3 requests within a minute found no memory" in err


async def test_a_port_that_is_taken_exits_with_1_and_names_it():
    async with process("serve") as (_, port):
        second = await asyncio.create_subprocess_exec(
            sys.executable, HERE / "serve_fake.py", "serve", str(port), stdout=PIPE, stderr=PIPE
        )
        code, _, err = await ended(second)
        assert code == 1
        assert str(port) in err.splitlines()[-1]


async def test_the_server_imports_no_torch():
    check = "import relay.server.app, sys; print(sorted({'torch', 'prometheus_client'} & set(sys.modules)))"
    checking = await asyncio.create_subprocess_exec(sys.executable, "-W", "error", "-c", check, stdout=PIPE)
    out, _ = await asyncio.wait_for(checking.communicate(), 20)
    assert out.decode() == "[]\n"


def test_a_serving_process_lets_its_threads_take_turns_often(monkeypatch: pytest.MonkeyPatch):
    intervals: list[float] = []
    monkeypatch.setattr(sys, "setswitchinterval", intervals.append)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit):
        serve(lambda progress: FakeEngine(), ServerSettings(port=taken.getsockname()[1]))
    assert intervals == [SWITCH_S]
