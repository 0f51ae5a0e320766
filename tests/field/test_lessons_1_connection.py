"""Connection, timeouts, lost links."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting_policy import CountingEngine
from each_client import each_client
from fake_policy import DIM, HORIZON, NO_PROXY, FakeEngine, client, dial, observation, running
from tiny_servers import LoopbackServers
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import relay
from fault_proxy import FaultProxy, in_thread
from field.loopback import CLIENTS, PATHS, Served, robot, serving, state
from free_ports import free_port
from relay.client import async_connection, cold_start, connection
from relay.engine.base import Progress
from relay.protocol.msgpack_numpy import unpack

HERE = Path(__file__).parent
STOCK_PYTHON = HERE.parents[1] / ".venv-stock/bin/python"

needs_stock = pytest.mark.skipif(
    not STOCK_PYTHON.exists(), reason="the stock OpenPI packages are not here; `make stock` installs them"
)
needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="a process is stopped by a POSIX signal")

PROMPT_S = 1.0
"""How long the rule lets a handshake or a health check take while the engine runs."""


# ---- 1.1: the transport never blocks on the engine


@pytest.mark.parametrize("path", PATHS)
async def test_lesson_1_1_a_long_inference_delays_no_handshake_no_ping_and_no_health(path: str):
    """Physical-Intelligence/openpi#717 (fix proposed in #938). Scaled: the client's keepalive gives up after 1 s."""
    engine = FakeEngine()
    async with (
        running(engine) as server,
        client(server, path, ping_interval=0.1, ping_timeout=1.0) as asks,
    ):
        engine.open.clear()
        await asks.send(observation(3))
        await asyncio.to_thread(engine.began.wait, 5)
        for _ in range(6):
            async with dial(server.port, path) as other:
                await asyncio.wait_for(other.recv(), PROMPT_S)
                await asyncio.wait_for(await other.ping(), PROMPT_S)
            served = Served(server, server.port)
            assert await asyncio.wait_for(asyncio.to_thread(served.health), PROMPT_S) == 200
            await asyncio.sleep(0.3)
        engine.open.set()
        reply = unpack(await asks.recv())
        assert (reply["actions"] if path == "/" else reply)[0, 0] == 3


class FirstIsSlow(FakeEngine):
    """A stub whose first batch takes as long as a compilation."""

    def infer(self, batch: Any) -> Any:
        self.infer_seconds = 60.0 if not self.batches else 0.0
        return super().infer(batch)


@pytest.mark.slow
@needs_stock
def test_lesson_1_1_a_first_inference_of_a_minute_reaches_the_stock_client_and_ours():
    """Physical-Intelligence/openpi#717: at a blocking server, the stock client's own keepalive ends it after 50 s."""
    with serving(FirstIsSlow()) as server, robot("Policy", server.url) as infer:
        stock = stock_robot(server.url)
        time.sleep(3)  # until its request is on the device
        ours = threading.Thread(target=lambda: answers.append(infer(state(4))))
        answers: list[Any] = []
        ours.start()
        while stock.poll() is None:
            started = time.monotonic()
            assert server.health() == 200
            with connect(server.url, **NO_PROXY) as other:
                other.recv()
            assert time.monotonic() - started < 2 * PROMPT_S
            time.sleep(2)
        said = told(stock)
        assert said["infer_s"] >= 55
        assert said["actions"] == [[5.0] * DIM] * HORIZON
        ours.join(10)
        assert answers[0][0, 0] == 4


@pytest.mark.slow
@needs_stock
def test_lesson_1_1_a_load_of_25_seconds_is_waited_for_by_the_stock_client():
    """Physical-Intelligence/openpi#717: clients connect at once and are served when the policy is there."""

    def load(progress: Progress) -> FakeEngine:
        time.sleep(25)
        return FakeEngine()

    with serving(load) as server:
        said = told(stock_robot(server.url))
    assert said["connect_s"] >= 20
    assert said["actions"] == [[5.0] * DIM] * HORIZON


def stock_robot(url: str) -> subprocess.Popen[str]:
    command = [str(STOCK_PYTHON), "-W", "ignore", str(HERE / "stock_robot.py"), url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def told(stock: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = stock.communicate(timeout=120)
    assert stock.returncode == 0, err
    return json.loads(out)


# ---- 1.2: a busy client keeps its connection up to the idle limit


@needs_signals
@pytest.mark.parametrize(
    ("limit", "shorter", "longer"),
    [
        pytest.param(3.0, 1.5, 4.0, id="scaled"),
        pytest.param(30.0, 25.0, 35.0, id="30 s", marks=pytest.mark.slow),
    ],
)
def test_lesson_1_2_a_stopped_client_is_kept_within_the_idle_limit_and_told_of_it_beyond(
    limit: float, shorter: float, longer: float
):
    """XPolicyLab/XPolicyLab#77, #78. The whole process stands still, so that no library of its own can answer pings."""
    with serving(idle_timeout=limit) as server, robot_process(server.url) as kept, robot_process(server.url) as closed:
        for process in (kept, closed):
            assert call(process) == "ok"
            process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        time.sleep(shorter)
        kept.send_signal(signal.SIGCONT)
        assert call(kept) == "ok"
        time.sleep(max(0.0, longer - (time.monotonic() - stopped)))
        closed.send_signal(signal.SIGCONT)
        error = call(closed)
        assert "ConnectionClosed" in error
        assert f"idle timeout: no message for {limit:g} s" in error


@needs_signals
@pytest.mark.parametrize(
    ("limit", "longer"),
    [pytest.param(2.0, 4.0, id="scaled"), pytest.param(30.0, 35.0, id="30 s", marks=pytest.mark.slow)],
)
def test_lesson_1_2_with_reconnect_a_client_stopped_beyond_the_idle_limit_goes_on_and_is_told(
    limit: float, longer: float
):
    """XPolicyLab/XPolicyLab#77, #78."""
    with serving(idle_timeout=limit) as server, robot_process(server.url, "reconnect") as process:
        assert call(process).startswith("ok")
        process.send_signal(signal.SIGSTOP)
        time.sleep(longer)
        process.send_signal(signal.SIGCONT)
        assert call(process) == "ok, session restarted"


@needs_signals
def test_lesson_1_2_without_an_idle_limit_a_stopped_client_is_never_closed_for_it():
    """XPolicyLab/XPolicyLab#77, #78."""
    with serving(idle_timeout=0) as server, robot_process(server.url) as process:
        assert call(process) == "ok"
        process.send_signal(signal.SIGSTOP)
        time.sleep(2)
        process.send_signal(signal.SIGCONT)
        assert call(process) == "ok"


@contextmanager
def robot_process(url: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(HERE / "interruptible_robot.py"), url, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "connected\n"
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def call(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("infer\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


# ---- 1.3: a reply belongs to its request


@pytest.mark.parametrize(
    ("takes", "waits"),
    [pytest.param(0.6, 0.2, id="scaled"), pytest.param(3.0, 1.0, id="3 s", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", CLIENTS)
def test_lesson_1_3_a_late_reply_is_never_taken_for_the_next(name: str, takes: float, waits: float):
    """strands-labs/robots#3321."""
    engine = FakeEngine(infer_seconds=takes)
    with serving(engine) as server, robot(name, server.url) as infer:
        with pytest.raises(TimeoutError, match=rf"no reply from ws://127\.0\.0\.1:\d+\S* within {waits:g} s"):
            infer(state(1), timeout=waits)
        np.testing.assert_array_equal(infer(state(2)), np.full((HORIZON, DIM), 2))
        assert engine.batches == [[1.0], [2.0]]


# ---- 1.4: proxies of the environment, and the address in errors


@pytest.mark.parametrize("name", CLIENTS)
def test_lesson_1_4_a_proxy_in_the_environment_is_not_used_on_loopback(name: str, monkeypatch: pytest.MonkeyPatch):
    """Physical-Intelligence/openpi#579."""
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
        monkeypatch.setenv(variable.upper(), "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving() as server, robot(name, server.url) as infer:
        assert infer(state(1))[0, 0] == 1


@pytest.mark.parametrize("name", CLIENTS)
def test_lesson_1_4_an_error_names_the_address_that_was_dialled(name: str):
    """Physical-Intelligence/openpi#579."""
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(OSError, match=address), robot(name, f"ws://{address}", connect_timeout=0.3):
        pass


# ---- 1.5: a link that goes silent in the middle of a request


@pytest.mark.parametrize("name", CLIENTS)
def test_lesson_1_5_a_link_lost_in_mid_inference_is_an_error_within_the_timeout(name: str):
    """python-websockets/websockets#1527: the deadline is the client's own."""
    engine = FakeEngine(infer_seconds=0.3)
    with serving(engine) as server, in_thread(FaultProxy(server.port)) as proxy, robot(name, proxy.url) as infer:
        threading.Timer(0.1, lambda: go_silent(proxy)).start()
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="no reply from"):
            infer(state(1), timeout=1.0)
        assert time.monotonic() - started < 5.0  # the rule says 3, on a machine that is not overloaded
        proxy.cut()


@pytest.mark.parametrize("name", CLIENTS)
def test_lesson_1_5_with_reconnect_a_lost_link_is_an_error_within_the_timeout_and_then_bridged(
    name: str, quick_pings: None
):
    """python-websockets/websockets#1527."""
    engine = FakeEngine(infer_seconds=0.3)
    with (
        serving(engine) as server,
        in_thread(FaultProxy(server.port)) as proxy,
        each_client(name, proxy.url, reconnect="always") as client,
    ):
        threading.Timer(0.1, lambda: go_silent(proxy)).start()
        for timeout in (1.0, 1.0):  # in the first the link is found dead, in the second no other is there yet
            started = time.monotonic()
            with pytest.raises(TimeoutError, match="no reply"):
                client.infer(state(1), timeout=timeout)
            assert time.monotonic() - started < timeout + 4.0  # the rule says 2, on a machine that is not overloaded
        proxy.to_server.swallow = proxy.to_client.swallow = False
        assert client.infer(state(2), timeout=30)[0, 0] == 2
        assert client.reconnects == 1


@pytest.fixture
def quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ping after 0.1 s that may take 0.5 s; and a handshake likewise."""
    for module in (connection, async_connection):
        monkeypatch.setattr(module, "WATCH_PERIOD_S", 0.05)
        monkeypatch.setattr(module, "PING_INTERVAL_S", 0.1)
        monkeypatch.setattr(module, "PING_TIMEOUT_S", 0.5)
    monkeypatch.setattr(cold_start, "HANDSHAKE_TIMEOUT_S", 0.5)


@pytest.mark.parametrize("name", CLIENTS)
def test_lesson_1_5_without_a_timeout_unanswered_pings_end_the_wait(name: str, quick_pings: None):
    """python-websockets/websockets#1527. Scaled: a ping after 0.1 s that may take 0.5 s."""
    engine = FakeEngine(infer_seconds=0.3)
    with serving(engine) as server, in_thread(FaultProxy(server.port)) as proxy, robot(name, proxy.url) as infer:
        threading.Timer(0.1, lambda: go_silent(proxy)).start()
        rescue = threading.Timer(10, proxy.cut)  # a client that waits for ever fails the test instead of holding it up
        rescue.start()
        with pytest.raises(ConnectionClosed) as error:
            infer(state(1))
        rescue.cancel()
        assert "answered no ping" in str(error.value.__cause__)


@pytest.mark.parametrize("name", CLIENTS)
def test_lesson_1_5_a_link_lost_in_mid_upload_is_an_error_within_the_timeout(name: str):
    """python-websockets/websockets#1527: nothing can be read that would tell, since the message is not out yet."""
    with serving() as server, in_thread(FaultProxy(server.port)) as proxy, robot(name, proxy.url) as infer:
        proxy.to_server.bytes_per_second = 1
        started = time.monotonic()
        with pytest.raises((ConnectionClosed, TimeoutError)):
            infer(state(1, note=np.zeros(32 << 20, np.uint8)), timeout=1.0)
        assert time.monotonic() - started < 5.0  # the rule says 3, on a machine that is not overloaded
        proxy.cut()


def go_silent(proxy: FaultProxy) -> None:
    proxy.to_server.swallow = proxy.to_client.swallow = True


# ---- 1.6: connections are made again, and requests repeated, only where that is asked for


@pytest.mark.parametrize("name", CLIENTS)
def test_lesson_1_6_a_cut_in_mid_inference_raises_at_once_and_the_request_is_not_repeated(name: str):
    """huggingface/lerobot#1485."""
    engine = FakeEngine()
    with serving(engine) as server, in_thread(FaultProxy(server.port)) as proxy:
        with robot(name, proxy.url) as infer:
            infer(state(1))
            engine.began.clear()
            engine.open.clear()
            threading.Thread(target=lambda: (engine.began.wait(10), proxy.cut())).start()
            with pytest.raises(ConnectionClosed):
                infer(state(2))
            engine.open.set()
            with pytest.raises(ConnectionClosed):
                infer(state(3))
        with robot(name, proxy.url) as infer:
            assert infer(state(4))[0, 0] == 4
    assert engine.batches == [[1.0], [2.0], [4.0]]


def test_lesson_1_6_after_a_cut_a_new_connection_says_that_its_session_is_fresh():
    """huggingface/lerobot#1485: session state is never restarted silently."""
    with serving() as server, in_thread(FaultProxy(server.port)) as proxy:
        fresh: list[bool | None] = []
        for _ in range(3):
            with relay.Policy(proxy.url) as policy:
                for value in range(2):
                    policy.infer(state(value))
                    assert policy.last is not None
                    fresh.append(policy.last.session_fresh)
                proxy.cut()
                with pytest.raises(ConnectionClosed):
                    policy.infer(state(9))
        assert fresh == [True, False] * 3


@pytest.mark.parametrize(
    ("seconds", "every", "rate"),
    [
        pytest.param(4.0, 0.5, 50.0, id="scaled"),
        pytest.param(60.0, 5.0, 10.0, id="60 s", marks=pytest.mark.slow),
    ],
)
def test_lesson_1_6_with_reconnect_a_link_that_breaks_again_and_again_raises_nothing(
    seconds: float, every: float, rate: float, caplog: pytest.LogCaptureFixture
):
    """huggingface/lerobot#1485: each gap is counted and told once, and so is the restart of its session."""
    with serving(CountingEngine()) as server, ThreadPoolExecutor(2 * len(CLIENTS)) as robots:
        runs = [
            robots.submit(on_breaking_link, name, server, reconnect, seconds, every, rate)
            for name in CLIENTS
            for reconnect in (True, "always")
        ]
        gaps = [run.result() for run in runs]
    lines = [line for line in caplog.messages if line.startswith("connected to ") and "sessions start fresh" in line]
    assert len(lines) == sum(gaps)
    assert min(gaps) >= 0.5 * seconds / every


def on_breaking_link(
    name: str, server: Served, reconnect: bool | str, seconds: float, every: float, rate: float
) -> int:
    """Ask at this rate while the link breaks, and return how often it did; True meets that between two calls only."""
    calm, over = threading.Lock(), threading.Event()
    cuts = 0

    def break_link() -> None:
        nonlocal cuts
        while not over.wait(every):
            with calm if reconnect is True else nullcontext():
                proxy.cut()
                cuts += 1
                time.sleep(0.5 if reconnect is True else 0)  # until the client can know

    with in_thread(FaultProxy(server.port)) as proxy, each_client(name, proxy.url, reconnect=reconnect) as client:
        breaking = threading.Thread(target=break_link)
        breaking.start()
        expected = 0.0
        try:
            for value in range(round(seconds * rate)):
                before = client.reconnects
                with calm:
                    count, _, answered = client.infer(state(value), timeout=30)[0].tolist()
                last, gaps = client.last, client.reconnects - before  # several, if the machine is slow to answer
                assert answered == value
                assert last.reconnected == (gaps > 0)
                assert last.session_fresh == (gaps > 0 or value == 0)
                assert count == (1 if last.session_fresh else expected)
                expected = count + 1
                time.sleep(1 / rate)
        finally:
            over.set()
            breaking.join()
        client.infer(state(0))  # notices a last cut
        assert 0.5 * cuts <= client.reconnects <= cuts  # two cuts may meet the same gap
        return client.reconnects


# ---- 1.7: a documented timeout against a silent peer

TIMEOUT_S = 0.5


@pytest.mark.parametrize("name", CLIENTS)
def test_lesson_1_7_connecting_to_a_port_that_never_replies_ends_with_the_timeout(name: str):
    """NVIDIA/Isaac-GR00T: gr00t/policy/server_client.py."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        with (
            pytest.raises(TimeoutError, match=r"ws://127\.0\.0\.1:\d+\S* within 0\.5 s"),
            robot(name, f"ws://127.0.0.1:{silent.getsockname()[1]}", connect_timeout=TIMEOUT_S),
        ):
            pass
        assert TIMEOUT_S * 0.9 <= time.monotonic() - started < TIMEOUT_S + 2


@pytest.mark.parametrize("name", CLIENTS)
def test_lesson_1_7_a_server_that_greets_and_then_says_nothing_ends_with_the_timeout(
    name: str, servers: LoopbackServers
):
    """NVIDIA/Isaac-GR00T: gr00t/policy/server_client.py."""

    async def say_nothing(websocket: ServerConnection) -> None:
        await websocket.send(b"\x80")
        await websocket.wait_closed()

    with robot(name, servers.start(say_nothing)) as infer:
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=r"no reply from ws://127\.0\.0\.1:\d+\S* within 0\.5 s"):
            infer(state(1), timeout=TIMEOUT_S)
        assert TIMEOUT_S * 0.9 <= time.monotonic() - started < TIMEOUT_S + 2
