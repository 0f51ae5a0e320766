"""`AsyncPolicy` over real connections."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine
from contextlib import closing
from http import HTTPStatus
from typing import Any

import numpy as np
import pytest
from tiny_servers import ACTIONS, METADATA, LoopbackServers, echo_state, openpi_server, vllm_server
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus, InvalidURI, SecurityError
from websockets.http11 import Request, Response

from relay import AsyncPolicy, Codec
from relay.client import async_connection, cold_start
from relay.protocol import msgpack_numpy

FRAME = np.random.default_rng(0).integers(0, 255, (32, 48, 3), dtype=np.uint8)


def state(value: float, **more: Any) -> dict[str, Any]:
    return {"state": np.full(3, value, np.float32), **more}


def first_action(reply: dict[str, Any]) -> float:
    return float(reply["actions"][0])


@pytest.fixture
def url(servers: LoopbackServers) -> str:
    """A server of ours whose policy echoes the state."""
    return servers.start(openpi_server(echo_state, METADATA), relay=True)


# ---- opening and closing


async def test_async_with_opens_and_closes(url: str) -> None:
    async with AsyncPolicy(url) as policy:
        assert policy.get_server_metadata() == METADATA
    with pytest.raises(ConnectionClosed):
        await policy.infer(state(1))


async def test_awaiting_opens(url: str) -> None:
    policy = await AsyncPolicy(url)
    assert first_action(await policy.infer(state(3))) == 3
    await policy.close()


async def test_an_opened_policy_may_be_entered_too(url: str) -> None:
    policy = await AsyncPolicy(url)
    async with policy as entered:
        assert entered is policy
        assert first_action(await policy.infer(state(3))) == 3


async def in_a_fork(work: Callable[[], Coroutine[Any, Any, object]]) -> str:
    """What becomes of work that a forked child does on an event loop of its own: "done", or the error's text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(asyncio.wait_for(work(), 10))
            said = "done"
        except BaseException as error:
            said = str(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        said = await asyncio.to_thread(pipe.read)
    os.waitpid(child, 0)
    return said


forking = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@forking
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
async def test_a_policy_does_not_cross_a_fork(url: str) -> None:
    async with AsyncPolicy(url) as policy:
        for use in (lambda: policy.infer(state(1)), policy.reset, policy.__aenter__):
            assert "before a fork" in await in_a_fork(use)
        assert first_action(await policy.infer(state(2))) == 2


@forking
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
async def test_closing_a_forks_copy_leaves_the_connection_to_the_process_that_opened_it(url: str) -> None:
    async with AsyncPolicy(url) as policy:
        assert await in_a_fork(policy.close) == "done"
        assert first_action(await policy.infer(state(2))) == 2


@forking
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
async def test_a_policy_that_was_not_open_may_be_opened_in_a_fork(url: str) -> None:
    policy = AsyncPolicy(url)

    async def use() -> None:
        async with policy:
            await policy.infer(state(1))

    assert await in_a_fork(use) == "done"


async def test_opening_an_opened_policy_makes_no_second_connection(servers: LoopbackServers) -> None:
    connections = itertools.count()

    async def count(websocket: ServerConnection) -> None:
        next(connections)
        await openpi_server(echo_state)(websocket)

    policy = AsyncPolicy(servers.start(count))
    assert await policy is policy
    assert await policy is policy
    await policy.close()
    assert next(connections) == 1


async def test_two_tasks_that_open_a_policy_at_once_are_told_to_share_it(servers: LoopbackServers) -> None:
    connections = itertools.count()

    async def count(websocket: ServerConnection) -> None:
        next(connections)
        await openpi_server(echo_state)(websocket)

    policy = AsyncPolicy(servers.start(count))
    answers = await asyncio.gather(policy.__aenter__(), policy.__aenter__(), return_exceptions=True)
    await policy.close()
    assert [type(answer) for answer in answers] == [AsyncPolicy, RuntimeError]
    assert "another task is opening this policy" in str(answers[1])
    assert next(connections) == 1


async def test_a_policy_can_be_opened_after_its_opening_failed(servers: LoopbackServers, unused_port: int) -> None:
    policy = AsyncPolicy(f"ws://127.0.0.1:{unused_port}", connect_timeout=0.2)
    with pytest.raises(TimeoutError):
        await policy
    servers.start(openpi_server(echo_state), port=unused_port)
    async with policy:
        assert first_action(await policy.infer(state(3))) == 3


async def test_a_policy_that_is_not_open_says_how_to_open_it(url: str) -> None:
    policy = AsyncPolicy(url)
    with pytest.raises(RuntimeError, match=r"not connected: use `async with AsyncPolicy"):
        await policy.infer(state(1))
    await policy.close()


async def test_every_call_after_close_raises_connection_closed(url: str) -> None:
    policy = await AsyncPolicy(url)
    await policy.close()
    await policy.close()
    for _ in range(6):  # more than may be under way at once
        with pytest.raises(ConnectionClosed):
            await policy.infer(state(1))
    with pytest.raises(ConnectionClosed):
        await policy.reset()


async def test_closing_ends_the_calls_that_wait(servers: LoopbackServers) -> None:
    async def never_answer(websocket: ServerConnection) -> None:
        await websocket.send(b"\x80")
        await websocket.recv()
        received.set()
        await websocket.wait_closed()

    received = threading.Event()
    policy = await AsyncPolicy(servers.start(never_answer, relay=True))
    waiting = [asyncio.create_task(policy.infer(state(value))) for value in range(6)]
    await asyncio.to_thread(received.wait, 10)
    await policy.close()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(answer) for answer in answers if not isinstance(answer, ConnectionClosed)] == []


async def test_nothing_is_left_on_the_loop_and_no_warning_reaches_the_user(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with AsyncPolicy(url) as policy:
            await policy.infer(state(1))
        with pytest.raises(ConnectionClosed):
            await policy.infer(state(1))
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert [str(warning.message) for warning in caught] == []
    assert caplog.records == []


async def test_a_refusal_in_place_of_metadata_says_why(servers: LoopbackServers) -> None:
    async def refuse(websocket: ServerConnection) -> None:
        await websocket.send('{"type": "error", "error": "Robot policy not available"}')
        await websocket.wait_closed()
        hung_up.set()

    hung_up = threading.Event()
    with pytest.raises(RuntimeError, match=r"^Robot policy not available$"):
        await AsyncPolicy(servers.start(refuse))
    assert await asyncio.to_thread(hung_up.wait, 10)


@pytest.mark.parametrize("codec", ["JPEG_Q95"])
def test_a_codec_of_another_type_is_refused_before_connecting(codec: Any) -> None:
    with pytest.raises(TypeError, match=r"Codec\.JPEG_Q95"):
        AsyncPolicy("ws://robot.example", codec)


async def test_loading_relay_does_not_load_the_asyncio_client() -> None:
    code = "import relay, sys; print('websockets.asyncio.client' in sys.modules)"
    answer = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "False"


# ---- waiting for a server


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start, "FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(cold_start, "LONGEST_DELAY_S", 0.05)
    monkeypatch.setattr(cold_start, "PATIENCE_S", 0.05)


@pytest.mark.usefixtures("hasty")
async def test_a_server_that_is_not_up_yet_is_waited_for(
    servers: LoopbackServers, caplog: pytest.LogCaptureFixture
) -> None:
    left = itertools.count()

    def unavailable_at_first(websocket: ServerConnection, request: Request) -> Response | None:
        return websocket.respond(HTTPStatus(503), "") if next(left) < 2 else None

    async with AsyncPolicy(servers.start(openpi_server(echo_state), process_request=unavailable_at_first)):
        assert caplog.text.count("waiting for a policy server") == 1


@pytest.mark.usefixtures("hasty")
async def test_the_metadata_is_waited_for_as_long_as_it_takes(
    servers: LoopbackServers, caplog: pytest.LogCaptureFixture
) -> None:
    async def load_first(websocket: ServerConnection) -> None:
        await asyncio.sleep(0.3)
        await openpi_server(echo_state, METADATA)(websocket)

    async with AsyncPolicy(servers.start(load_first, relay=True)) as policy:
        assert first_action(await policy.infer(state(3))) == 3
    assert caplog.text.count("waiting for its policy to be ready") == 1


@pytest.mark.usefixtures("hasty")
async def test_the_connect_timeout_bounds_all_waits_and_says_for_what(servers: LoopbackServers) -> None:
    async def say_nothing(websocket: ServerConnection) -> None:
        await websocket.wait_closed()

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:  # accepts in the kernel and says nothing
        silent = f"ws://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(TimeoutError, match=r"no policy server at ws://127\.0\.0\.1:\d+ within 0\.3 s: no answer"):
            await AsyncPolicy(silent, connect_timeout=0.3)
    with pytest.raises(TimeoutError, match="Connection refused"):
        await AsyncPolicy(silent, connect_timeout=0.3)
    with pytest.raises(TimeoutError, match=r"within 0\.3 s: no answer"):
        await AsyncPolicy(servers.start(say_nothing), connect_timeout=0.3)


async def test_another_http_status_raises_at_once(servers: LoopbackServers) -> None:
    def refuse(websocket: ServerConnection, request: Request) -> Response:
        return websocket.respond(HTTPStatus(401), "")

    with pytest.raises(InvalidStatus):
        await AsyncPolicy(servers.start(openpi_server(echo_state), process_request=refuse))


async def test_what_is_no_websocket_address_is_refused_at_once() -> None:
    with pytest.raises(InvalidURI):
        await AsyncPolicy("http://127.0.0.1:8000")


async def test_a_connection_that_is_being_opened_can_be_cancelled(servers: LoopbackServers) -> None:
    async def say_nothing(websocket: ServerConnection) -> None:
        connected.set()
        await websocket.wait_closed()
        hung_up.set()

    connected, hung_up = threading.Event(), threading.Event()

    async def connect() -> None:
        await AsyncPolicy(servers.start(say_nothing))

    opening = asyncio.create_task(connect())
    await asyncio.to_thread(connected.wait, 10)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert await asyncio.to_thread(hung_up.wait, 10)


# ---- redirects and proxies


async def test_a_redirect_to_another_origin_strips_all_of_the_callers_headers(servers: LoopbackServers) -> None:
    seen: list[Request] = []

    def note(websocket: ServerConnection, request: Request) -> None:
        seen.append(request)

    end = servers.start(openpi_server(echo_state, METADATA), process_request=note)

    def redirect(websocket: ServerConnection, request: Request) -> Response:
        response = websocket.respond(HTTPStatus(307), "")
        response.headers["Location"] = end.replace("ws", "http", 1) + "/end"
        return response

    url = servers.start(openpi_server(echo_state), process_request=redirect)
    async with AsyncPolicy(url, headers={"Authorization": "Bearer k", "X-Api-Key": "k"}) as policy:
        assert policy.get_server_metadata() == METADATA
    assert [request.path for request in seen] == ["/end"]
    assert "Authorization" not in seen[0].headers
    assert "X-Api-Key" not in seen[0].headers
    assert seen[0].headers["Sec-WebSocket-Protocol"] == "relay.v1"
    assert "Sec-WebSocket-Extensions" not in seen[0].headers


async def test_endless_redirects_are_refused(servers: LoopbackServers) -> None:
    def redirect(websocket: ServerConnection, request: Request) -> Response:
        response = websocket.respond(HTTPStatus(302), "")
        response.headers["Location"] = "/again"
        return response

    with pytest.raises(SecurityError, match="more than 5 redirects"):
        await AsyncPolicy(servers.start(openpi_server(echo_state), process_request=redirect))


async def test_proxies_of_the_environment_are_not_used(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "socks_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    async with AsyncPolicy(url, connect_timeout=60) as policy:
        assert policy.get_server_metadata() == METADATA


# ---- requests and replies


async def test_actions_are_a_read_only_view(url: str) -> None:
    async with AsyncPolicy(url) as policy:
        actions = (await policy.infer(state(3)))["actions"]
    np.testing.assert_array_equal(actions, np.full(3, 3, np.float32))
    assert not actions.flags.writeable
    assert not actions.flags.owndata


async def test_frames_are_sent_as_jpeg_to_our_server_and_as_arrays_to_a_stock_one(servers: LoopbackServers) -> None:
    seen: list[Any] = []

    def note(observation: dict[str, Any]) -> dict[str, Any]:
        seen.append(observation["image"]["base_0_rgb"])
        return {"actions": ACTIONS}

    for relay_server in (True, False):
        async with AsyncPolicy(servers.start(openpi_server(note), relay=relay_server)) as policy:
            await policy.infer({"image": {"base_0_rgb": FRAME}})
            assert policy.codec is (Codec.JPEG_Q90 if relay_server else None)
    assert seen[0].startswith(b"\xff\xd8\xff")
    np.testing.assert_array_equal(seen[1], FRAME)


async def test_an_error_raises_its_traceback_and_then_the_connection_is_closed(servers: LoopbackServers) -> None:
    def fail(observation: dict[str, Any]) -> None:
        raise ValueError("state has 3 values")

    async with AsyncPolicy(servers.start(openpi_server(fail), relay=True)) as policy:
        with pytest.raises(RuntimeError, match=r"(?s)^Traceback \(most recent call last\).*state has 3 values"):
            await policy.infer(state(1))
        for _ in range(6):
            with pytest.raises(ConnectionClosed, match="1011"):
                await policy.infer(state(1))


async def test_an_error_map_raises_and_the_connection_stays_usable(servers: LoopbackServers) -> None:
    def refuse_negative(observation: dict[str, Any]) -> Any:
        if observation["state"][0] < 0:
            raise ValueError("state is negative")
        return ACTIONS

    url = servers.start(vllm_server(refuse_negative)) + "/v1/realtime/robot/openpi"
    async with AsyncPolicy(url) as policy:
        with pytest.raises(RuntimeError, match=r"^state is negative$"):
            await policy.infer(state(-1))
        np.testing.assert_array_equal((await policy.infer(state(1)))["actions"], ACTIONS)


async def test_an_option_that_a_stock_server_would_ignore_is_refused(servers: LoopbackServers) -> None:
    async with AsyncPolicy(servers.start(openpi_server(echo_state))) as policy:
        with pytest.raises(ValueError, match="'seed' would be ignored"):
            await policy.infer(state(1, seed=7))


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
async def test_a_timeout_must_be_positive(url: str, timeout: float) -> None:
    async with AsyncPolicy(url) as policy:
        with pytest.raises(ValueError, match="timeout must be a positive number"):
            await policy.infer(state(1), timeout=timeout)


async def test_a_late_reply_is_never_taken_for_the_next_one(url: str) -> None:
    async with AsyncPolicy(url) as policy:
        with pytest.raises(TimeoutError, match=r"no reply from ws://127\.0\.0\.1:\d+ within 0\.1 s"):
            await policy.infer(state(1, sleep=0.6), timeout=0.1)
        assert first_action(await policy.infer(state(2), timeout=10)) == 2
        assert policy.last is not None
        assert policy.last.late_replies == 1


async def test_the_reply_to_a_cancelled_call_is_dropped(url: str) -> None:
    async with AsyncPolicy(url) as policy:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(policy.infer(state(1, sleep=0.4)), 0.1)
        assert first_action(await policy.infer(state(2))) == 2
        assert policy.last is not None
        assert policy.last.late_replies == 1


async def test_a_call_cancelled_before_it_is_sent_does_no_harm(url: str) -> None:
    async with AsyncPolicy(url) as policy:
        call = asyncio.create_task(policy.infer(state(1)))
        await asyncio.sleep(0)
        call.cancel()
        assert first_action(await policy.infer(state(2))) == 2


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.timeout came with Python 3.11")
async def test_a_call_ended_by_asyncio_timeout_leaves_the_next_ones_in_step(url: str) -> None:
    async with AsyncPolicy(url) as policy:
        for value in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):  # pyright: ignore[reportAttributeAccessIssue]
                    await policy.infer(state(value, sleep=0.2))
        assert [first_action(await policy.infer(state(value))) for value in (7, 8)] == [7, 8]
        assert policy.last is not None
        assert policy.last.late_replies == 3


async def test_a_call_is_in_step_however_early_the_one_before_was_cancelled(url: str) -> None:
    async with AsyncPolicy(url) as policy:
        for turns in range(40):
            call = asyncio.create_task(policy.infer(state(-1)))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            assert first_action(await policy.infer(state(turns))) == turns


async def test_an_upload_that_stops_ends_with_its_timeout(servers: LoopbackServers) -> None:
    async def read_later(websocket: ServerConnection) -> None:
        await websocket.send(msgpack_numpy.pack(METADATA))
        released.wait(20)  # the loop is blocked: nothing is read from the socket
        while True:
            await websocket.recv()
            await websocket.send(msgpack_numpy.pack({"actions": ACTIONS}))

    released = threading.Event()
    async with AsyncPolicy(servers.start(read_later, relay=True)) as policy:
        with pytest.raises(TimeoutError, match=r"no reply from .* within 0\.3 s"):
            await policy.infer({"state": np.zeros(48 * 1024 * 1024, np.uint8)}, timeout=0.3)
        released.set()
        assert (await policy.infer(state(1)))["actions"].shape == ACTIONS.shape  # sending went on meanwhile
        assert policy.last is not None
        assert policy.last.late_replies == 1


async def test_a_late_error_is_logged(servers: LoopbackServers, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "relay.client")

    def fail_late(observation: dict[str, Any]) -> None:
        echo_state(observation)
        raise ValueError("state has 3 values")

    async with AsyncPolicy(servers.start(openpi_server(fail_late))) as policy:
        with pytest.raises(TimeoutError):
            await policy.infer(state(1, sleep=0.4), timeout=0.1)
        with pytest.raises(ConnectionClosed):
            await policy.infer(state(1))
    assert "ValueError: state has 3 values" in caplog.text


# ---- several tasks


async def test_tasks_that_share_a_policy_get_their_own_replies(url: str) -> None:
    async with AsyncPolicy(url) as policy:
        replies = await asyncio.gather(*[policy.infer(state(value)) for value in range(20)])
    assert [first_action(reply) for reply in replies] == list(range(20))


async def test_four_requests_are_under_way_at_most(servers: LoopbackServers) -> None:
    most_unanswered = 0

    async def answer_when_quiet(websocket: ServerConnection) -> None:
        nonlocal most_unanswered
        await websocket.send(b"\x80")
        unanswered = 0
        while True:
            try:
                await asyncio.wait_for(websocket.recv(), 0.1)
                unanswered += 1
                most_unanswered = max(most_unanswered, unanswered)
            except asyncio.TimeoutError:
                for _ in range(unanswered):
                    await websocket.send(msgpack_numpy.pack({"actions": ACTIONS}))
                unanswered = 0

    async with AsyncPolicy(servers.start(answer_when_quiet, relay=True)) as policy:
        await asyncio.gather(*[policy.infer(state(value)) for value in range(10)])
    assert 1 <= most_unanswered <= 4


# ---- sessions


async def is_fresh(policy: AsyncPolicy, session_id: str | None = None) -> bool | None:
    await policy.infer(state(1, session_id=session_id))
    assert policy.last is not None
    return policy.last.session_fresh


async def test_reset_is_confirmed_and_makes_the_next_observation_fresh(servers: LoopbackServers) -> None:
    def answer(message: dict[str, Any]) -> Any:
        return "reset successful" if message.get("endpoint") == "reset" else {"actions": ACTIONS}

    async with AsyncPolicy(servers.start(openpi_server(answer), relay=True)) as policy:
        assert [await is_fresh(policy, name) for name in ("left", "right", "left")] == [True, True, False]
        await policy.reset()
        assert await is_fresh(policy, "left") is True


@pytest.fixture
def on_request(servers: LoopbackServers) -> tuple[str, Callable[[int], None]]:
    """A server that answers only when it is told how many more requests to answer."""

    async def answer(websocket: ServerConnection) -> None:
        await websocket.send(msgpack_numpy.pack(METADATA))
        while True:
            message = msgpack_numpy.unpack(await websocket.recv())  # pyright: ignore[reportArgumentType]
            await asyncio.to_thread(allowed.acquire, timeout=10)
            reset = message.get("endpoint") == "reset"
            await websocket.send("reset successful" if reset else msgpack_numpy.pack({"actions": ACTIONS}))

    allowed = threading.Semaphore(0)
    return servers.start(answer, relay=True), allowed.release


async def test_a_call_that_was_never_sent_leaves_its_session_fresh(
    on_request: tuple[str, Callable[[int], None]],
) -> None:
    url, answer = on_request
    async with AsyncPolicy(url) as policy:
        under_way = [asyncio.create_task(policy.infer(state(1))) for _ in range(4)]
        await asyncio.sleep(0)  # they send
        with pytest.raises(TimeoutError):  # four are under way: it waits for its turn
            await policy.infer(state(1, session_id="left"), timeout=0.1)
        answer(5)
        await asyncio.gather(*under_way)
        assert await is_fresh(policy, "left") is True


async def test_a_call_that_was_sent_and_given_up_has_opened_its_session(
    on_request: tuple[str, Callable[[int], None]],
) -> None:
    url, answer = on_request
    async with AsyncPolicy(url) as policy:
        with pytest.raises(TimeoutError):
            await policy.infer(state(1, session_id="left"), timeout=0.2)
        answer(2)
        assert await is_fresh(policy, "left") is False


async def test_a_reset_that_was_never_sent_leaves_the_sessions_known(
    on_request: tuple[str, Callable[[int], None]],
) -> None:
    url, answer = on_request
    async with AsyncPolicy(url) as policy:
        answer(1)
        assert await is_fresh(policy, "left") is True
        under_way = [asyncio.create_task(policy.infer(state(1))) for _ in range(4)]
        await asyncio.sleep(0)  # they send
        with pytest.raises(TimeoutError):
            await policy.reset(timeout=0.1)
        answer(5)
        await asyncio.gather(*under_way)
        assert await is_fresh(policy, "left") is False


async def test_a_refused_reset_is_an_error(servers: LoopbackServers) -> None:
    async with AsyncPolicy(servers.start(openpi_server(lambda _: {}), relay=True)) as policy:
        with pytest.raises(RuntimeError, match="did not confirm"):
            await policy.reset()


async def test_reset_sends_nothing_to_a_stock_server(servers: LoopbackServers) -> None:
    seen: list[Any] = []

    def note(observation: dict[str, Any]) -> dict[str, Any]:
        seen.append(observation)
        return {"actions": ACTIONS}

    async with AsyncPolicy(servers.start(openpi_server(note))) as policy:
        await policy.reset()
        assert await is_fresh(policy) is None
    assert len(seen) == 1


# ---- silence


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_connection, "WATCH_PERIOD_S", 0.02)
    monkeypatch.setattr(async_connection, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(async_connection, "PING_TIMEOUT_S", 1.0)


@pytest.mark.usefixtures("impatient")
async def test_a_server_of_ours_that_answers_no_ping_is_given_up(url: str) -> None:
    async with AsyncPolicy(url) as policy:
        with pytest.raises(ConnectionClosed) as error:
            await policy.infer(state(1, sleep=3.0))  # on the event loop, which our server never does
    assert "answered no ping" in str(error.value.__cause__)


@pytest.mark.usefixtures("impatient")
async def test_a_stock_server_may_be_silent_while_a_reply_is_pending(servers: LoopbackServers) -> None:
    async with AsyncPolicy(servers.start(openpi_server(echo_state))) as policy:
        assert first_action(await policy.infer(state(1, sleep=1.4))) == 1
        await asyncio.sleep(1.2)  # and its pings are answered again
        assert first_action(await policy.infer(state(2))) == 2


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no TCP_USER_TIMEOUT")
@pytest.mark.parametrize(("relay_server", "milliseconds"), [(True, 60_000), (False, 0)])
async def test_an_upload_to_our_server_may_not_stand_still(
    servers: LoopbackServers, relay_server: bool, milliseconds: int
) -> None:
    websocket = await async_connection.open_websocket(
        servers.start(openpi_server(echo_state), relay=relay_server), {}, 10
    )
    sock = websocket._websocket.transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == milliseconds
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    await websocket.close()
