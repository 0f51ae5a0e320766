"""`PolicyClient` against tiny servers with vLLM-Omni's framing."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_servers import ACTIONS, VLLM_METADATA, LoopbackServers, openpi_server, vllm_server
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidMessage, InvalidStatus, InvalidURI
from websockets.http11 import Request, Response

from free_ports import free_port
from relay import Codec, PolicyClient
from relay.client import cold_start
from relay.protocol import msgpack_numpy

FRAME = np.random.default_rng(0).integers(0, 255, (32, 48, 3), dtype=np.uint8)
OBSERVATION = {"images": {"base_0_rgb": FRAME}, "state": np.zeros(3, np.float32), "prompt": "pick up the fork"}
ENDPOINT = "/v1/realtime/robot/openpi"

Opener = Callable[..., PolicyClient]


@pytest.fixture
def opened(servers: LoopbackServers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """Start a server that behaves as told and connect to it; by default one with the framing of vLLM-Omni."""
    clients: list[PolicyClient] = []

    def open_client(
        policy: Any = lambda _: ACTIONS, *, behave: Any = None, server: Any = None, **options: Any
    ) -> PolicyClient:
        url = servers.start(behave or vllm_server(policy), **(server or {}))
        monkeypatch.setenv("WALLE_URL", url + "/{model}")
        clients.append(PolicyClient("pi05", **options))
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()


class Witness:
    """A policy that keeps the observations it was sent."""

    def __init__(self, *answers: Any) -> None:
        self.seen: list[dict[str, Any]] = []
        self.answers = list(answers)

    def __call__(self, observation: dict[str, Any]) -> Any:
        self.seen.append(observation)
        answer = self.answers.pop(0) if self.answers else ACTIONS
        if isinstance(answer, Exception):
            raise answer
        return answer


def echo(observation: dict[str, Any]) -> Any:
    time.sleep(observation.get("sleep", 0.0))
    return np.asarray(observation["state"], np.float32)


def jpeg_of(frame: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "JPEG", quality=95)
    return file.getvalue()


# ---- connecting


def test_the_model_is_asked_for_on_the_endpoints_path(opened: Opener) -> None:
    paths: list[str] = []

    def note_path(websocket: ServerConnection, request: Request) -> None:
        paths.append(request.path)

    opened(server={"process_request": note_path})
    assert paths == [f"/pi05{ENDPOINT}"]


def test_without_walle_url_it_is_a_key_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WALLE_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyError, match="WALLE_URL is not set"):
        PolicyClient("pi05")


def test_a_dotenv_file_above_says_where_the_server_is_unless_the_environment_does(
    servers: LoopbackServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, exported = (
        servers.start(vllm_server(lambda _: ACTIONS, {"action_horizon": horizon})) for horizon in (1, 2)
    )
    (tmp_path / ".env").write_text(f"WALLE_URL={written}/{{model}}\n")
    (tmp_path / "arm").mkdir()
    monkeypatch.chdir(tmp_path / "arm")
    monkeypatch.delenv("WALLE_URL", raising=False)
    horizons: list[int] = []
    for _ in range(2):
        with PolicyClient("pi05") as client:
            horizons.append(client.get_server_metadata()["action_horizon"])
        monkeypatch.setenv("WALLE_URL", exported)
    assert horizons == [1, 2]


def test_an_address_that_is_no_websocket_url_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WALLE_URL", "http://127.0.0.1:8000")
    with pytest.raises(InvalidURI):
        PolicyClient("pi05")


@pytest.mark.parametrize("status", [401, 404, 429, 503])
def test_another_http_status_raises_at_once(opened: Opener, status: int) -> None:
    def refuse(websocket: ServerConnection, request: Request) -> Response:
        return websocket.respond(HTTPStatus(status), "")

    with pytest.raises(InvalidStatus) as error:
        opened(server={"process_request": refuse})
    assert error.value.response.status_code == status


def test_a_refused_connection_raises_at_once_and_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("WALLE_URL", f"ws://127.0.0.1:{port}")
    with pytest.raises(ConnectionRefusedError, match=f"ws://127.0.0.1:{port}{ENDPOINT}"):
        PolicyClient("pi05")


def test_an_unknown_host_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any, **kwargs: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setenv("WALLE_URL", "ws://robot.example")
    with pytest.raises(OSError, match=r"Name or service not known: ws://robot\.example"):
        PolicyClient("pi05")


def test_a_port_that_hangs_up_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        hang_up = threading.Thread(target=lambda: listener.accept()[0].close())
        hang_up.start()
        monkeypatch.setenv("WALLE_URL", f"ws://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(OSError, match=r"ws://127\.0\.0\.1"):
            PolicyClient("pi05")
        hang_up.join()


@pytest.mark.parametrize(
    "error",
    [InvalidMessage("did not receive a valid HTTP response"), EOFError("hung up"), ConnectionClosedError(None, None)],
    ids=lambda error: type(error).__name__,
)
def test_however_a_handshake_is_cut_short_it_is_an_os_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(cold_start, "open_websocket", fail)
    monkeypatch.setenv("WALLE_URL", "ws://robot.example")
    with pytest.raises(ConnectionError, match=r"ws://robot\.example/.* did not answer as a WebSocket server does"):
        PolicyClient("pi05")


def test_a_port_that_says_nothing_ends_with_the_connect_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        monkeypatch.setenv("WALLE_URL", f"ws://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(TimeoutError, match=r"no answer from ws://127\.0\.0\.1:\d+/.* within 0\.3 s"):
            PolicyClient("pi05", connect_timeout=0.3)


async def load_first(websocket: ServerConnection) -> None:
    await asyncio.sleep(0.5)
    await vllm_server(lambda _: ACTIONS)(websocket)


def test_a_server_that_is_still_loading_is_waited_for(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cold_start, "PATIENCE_S", 0.05)
    monkeypatch.setattr(cold_start, "HANDSHAKE_TIMEOUT_S", 0.2)
    assert opened(behave=load_first).get_server_metadata() == VLLM_METADATA
    assert caplog.text.count("to be ready") == 1


def test_a_proxy_that_holds_the_upgrade_back_is_waited_for(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start_first(websocket: ServerConnection, request: Request) -> None:
        await asyncio.sleep(0.5)

    monkeypatch.setattr("relay.client.connection.HANDSHAKE_TIMEOUT_S", 0.2)
    assert opened(server={"process_request": start_first}).get_server_metadata() == VLLM_METADATA


def test_the_connect_timeout_also_bounds_the_wait_for_metadata(opened: Opener) -> None:
    with pytest.raises(TimeoutError, match=r"within 0\.2 s"):
        opened(behave=load_first, connect_timeout=0.2)


def test_a_server_that_hangs_up_before_its_metadata_raises_connection_closed(opened: Opener) -> None:
    async def full(websocket: ServerConnection) -> None:
        await websocket.close(1013, "full")

    with pytest.raises(ConnectionClosed, match="full"):
        opened(behave=full)


def test_an_endpoint_without_a_policy_says_so(opened: Opener) -> None:
    async def refuse(websocket: ServerConnection) -> None:
        await websocket.send('{"type": "error", "error": "Robot policy not available", "code": "unsupported"}')

    with pytest.raises(RuntimeError, match=r"^Robot policy not available$"):
        opened(behave=refuse)


def test_the_callers_headers_are_sent(opened: Opener) -> None:
    keys: list[str | None] = []

    def note_key(websocket: ServerConnection, request: Request) -> None:
        keys.append(request.headers.get("Authorization"))

    opened(server={"process_request": note_key}, headers={"Authorization": "Bearer k"})
    assert keys == ["Bearer k"]


def test_a_codec_of_another_type_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"Codec\.JPEG_Q95"):
        PolicyClient("pi05", codec="JPEG_Q95")  # type: ignore[arg-type]


# ---- actions


def test_actions_come_back_as_a_read_only_array(opened: Opener) -> None:
    actions = opened().infer(OBSERVATION)
    assert isinstance(actions, np.ndarray)
    np.testing.assert_array_equal(actions, ACTIONS)
    assert actions.dtype == np.float32
    assert not actions.flags.writeable
    assert not actions.flags.owndata


def test_action_groups_come_back_as_read_only_arrays(opened: Opener) -> None:
    groups = {"eef_9d": ACTIONS[None], "gripper_position": ACTIONS[None, :, :1]}
    actions = opened(lambda _: groups).infer(OBSERVATION)
    assert isinstance(actions, dict)
    np.testing.assert_equal(actions, groups)
    assert not any(group.flags.writeable for group in actions.values())


def test_an_openpi_map_comes_back_as_its_actions(opened: Opener) -> None:
    actions = opened(behave=openpi_server(lambda _: {"actions": ACTIONS, "policy_timing": {"infer_ms": 1.0}})).infer({})
    np.testing.assert_array_equal(actions, ACTIONS)


def test_a_refused_observation_is_returned_and_the_next_one_answered(opened: Opener) -> None:
    client = opened(Witness(ValueError("state has 7 values; pi05 expects 32"), ACTIONS))
    assert client.infer(OBSERVATION) == {"type": "error", "message": "state has 7 values; pi05 expects 32"}
    np.testing.assert_array_equal(client.infer(OBSERVATION), ACTIONS)


def test_an_error_map_always_has_a_message(opened: Opener) -> None:
    client = opened(lambda _: {"type": "error", "error": "no"})
    assert client.infer(OBSERVATION) == {"type": "error", "error": "no", "message": "no"}


@pytest.mark.parametrize(
    ("answer", "says"),
    [("Robot policy not available", "^Robot policy not available$"), (b"\xc1", "decoded"), (b"\x90", "a list")],
    ids=["text", "not MessagePack", "a list"],
)
def test_what_is_neither_actions_nor_an_error_raises(opened: Opener, answer: Any, says: str) -> None:
    async def behave(websocket: ServerConnection) -> None:
        await websocket.send(msgpack_numpy.pack(VLLM_METADATA))
        await websocket.recv()
        await websocket.send(answer)
        await websocket.wait_closed()

    with pytest.raises(RuntimeError, match=says):
        opened(behave=behave).infer(OBSERVATION)


def test_a_late_reply_is_never_taken_for_the_next_one(opened: Opener) -> None:
    client = opened(echo)
    with pytest.raises(TimeoutError):
        client.infer({"state": [1.0], "sleep": 0.5}, timeout=0.1)
    assert client.infer({"state": [2.0]}) == 2.0
    assert client.last is not None
    assert client.last.late_replies == 1


def test_a_second_thread_is_told_the_rule(opened: Opener) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(observation: dict[str, Any]) -> Any:
        entered.set()
        assert leave.wait(10)
        return ACTIONS

    client = opened(slow)
    busy = threading.Thread(target=client.infer, args=(OBSERVATION,))
    busy.start()
    try:
        assert entered.wait(10)
        with pytest.raises(RuntimeError, match="one thread at a time"):
            client.infer(OBSERVATION)
    finally:
        leave.set()
        busy.join()


# ---- frames


def test_frames_are_sent_as_arrays_by_default(opened: Opener) -> None:
    witness = Witness()
    client = opened(witness, server={"relay": True})
    client.infer(OBSERVATION)
    assert client.codec is Codec.RAW
    np.testing.assert_array_equal(witness.seen[0]["images"]["base_0_rgb"], FRAME)


def test_a_codec_is_used_with_a_relay_server(opened: Opener) -> None:
    witness = Witness()
    client = opened(witness, server={"relay": True}, codec=Codec.JPEG_Q90)
    client.infer(OBSERVATION)
    assert client.codec is Codec.JPEG_Q90
    assert witness.seen[0]["images"]["base_0_rgb"].startswith(b"\xff\xd8\xff")


def test_a_codec_gives_way_to_arrays_on_a_vllm_omni_server(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    witness = Witness()
    client = opened(witness, codec=Codec.JPEG_Q90)
    client.infer(OBSERVATION)
    assert client.codec is None
    assert "a vLLM-Omni server: frames are sent as arrays" in caplog.text
    np.testing.assert_array_equal(witness.seen[0]["images"]["base_0_rgb"], FRAME)


def test_the_callers_jpeg_passes_through_to_a_relay_server(opened: Opener) -> None:
    witness, jpeg = Witness(), jpeg_of(FRAME)
    opened(witness, server={"relay": True}).infer({**OBSERVATION, "images": {"base_0_rgb": jpeg}})
    assert witness.seen[0]["images"]["base_0_rgb"] == jpeg


def test_the_callers_jpeg_is_decoded_for_a_vllm_omni_server(opened: Opener) -> None:
    witness, jpeg = Witness(), jpeg_of(FRAME)
    opened(witness).infer({**OBSERVATION, "images": {"base_0_rgb": jpeg}})
    np.testing.assert_array_equal(witness.seen[0]["images"]["base_0_rgb"], np.asarray(Image.open(io.BytesIO(jpeg))))


# ---- sessions and the connection's life


def test_reset_is_confirmed_and_makes_the_next_observation_fresh(opened: Opener) -> None:
    client = opened()
    fresh: list[bool | None] = []
    for turn in range(3):
        if turn == 2:
            client.reset()
        client.infer(OBSERVATION)
        assert client.last is not None
        fresh.append(client.last.session_fresh)
    assert fresh == [True, False, True]


def test_two_arms_share_a_connection(opened: Opener) -> None:
    witness = Witness()
    client = opened(witness)
    fresh: list[bool | None] = []
    for arm in ("left", "right", "left"):
        client.infer({**OBSERVATION, "session_id": arm})
        assert client.last is not None
        fresh.append(client.last.session_fresh)
    assert fresh == [True, True, False]
    assert [observation["session_id"] for observation in witness.seen] == ["left", "right", "left"]


def test_a_refused_observation_leaves_last_and_the_session_alone(opened: Opener) -> None:
    client = opened(Witness(ValueError("no"), ACTIONS))
    client.infer(OBSERVATION)
    assert client.last is None
    client.infer(OBSERVATION)
    assert client.last is not None
    assert client.last.session_fresh is True


def test_changing_the_returned_metadata_changes_nothing(opened: Opener) -> None:
    client = opened()
    client.get_server_metadata().clear()
    assert client.get_server_metadata() == VLLM_METADATA


def test_any_call_after_close_raises_connection_closed(opened: Opener) -> None:
    client = opened()
    client.close()
    client.close()
    with pytest.raises(ConnectionClosed):
        client.infer(OBSERVATION)
    with pytest.raises(ConnectionClosed):
        client.reset()


def test_a_connection_closed_for_idleness_says_so(opened: Opener) -> None:
    async def close_soon(websocket: ServerConnection) -> None:
        await websocket.send(msgpack_numpy.pack(VLLM_METADATA))
        await websocket.close(1000, "idle timeout of 30 s")

    client = opened(behave=close_soon)
    with pytest.raises(ConnectionClosed, match="idle timeout of 30 s"):
        client.infer(OBSERVATION)


def test_leaving_the_with_block_closes_the_connection(opened: Opener) -> None:
    with opened() as client:
        client.infer(OBSERVATION)
    with pytest.raises(ConnectionClosed):
        client.infer(OBSERVATION)
