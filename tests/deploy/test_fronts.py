"""Clients through a real nginx and a real HAProxy, with the configurations that are shipped."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from echo_engine import EchoEngine
from running_fronts import front
from stock_environment import STOCK_PYTHON, needs_stock, variables
from threaded_server import serving
from websockets.exceptions import ConnectionClosed, InvalidStatus

import fronts
from free_ports import free_port
from relay import Codec, Policy, PolicyClient
from relay.client import direct_route as client_side
from relay.server.api_keys import read_api_keys
from relay.server.tls import certificate_sha256

KEY = "robot-7-0123456789"
HEADERS = {"Authorization": f"Api-Key {KEY}"}
STATE = np.arange(3, dtype=np.float32)

STOCK_CLIENT = """\
import json, sys
import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

policy = WebsocketClientPolicy(sys.argv[1], api_key=sys.argv[2])
frame = np.zeros((480, 640, 3), np.uint8)
replies = [policy.infer({"state": np.full(3, i, np.float32), "image": {"front": frame}}) for i in range(5)]
print(json.dumps([reply["actions"].tolist() for reply in replies]))
"""


@pytest.fixture(params=["nginx", "haproxy"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which front; tests of one that is missing are left out."""
    if fronts.program(request.param) is None:
        pytest.skip(f"{request.param} is not here; `make fronts` fetches Debian's")
    return request.param


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ca_file(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("authority") / "ca.pem"
    authority.cert_pem.write_to_path(str(file))
    return file


@pytest.fixture(scope="module")
def certificate(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The front's certificate and key in one file, as HAProxy wants them."""
    file = tmp_path_factory.mktemp("front") / "both.pem"
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(file))
    return file


@pytest.fixture
def url(kind: str, certificate: Path, tmp_path: Path) -> Iterator[str]:
    """A front with TLS before a server that wants a key."""
    keys = read_api_keys(environment={"RELAY_API_KEYS": KEY})
    with serving(EchoEngine(), api_keys=keys) as server, front(kind, [_port(server)], certificate, tmp_path) as address:
        _wait_for_health(address, certificate)
        yield address


def test_policy_speaks_relays_own_protocol_through_tls(url: str, ca_file: Path) -> None:
    with Policy(url, headers=HEADERS, ca_file=ca_file) as policy:
        assert policy.infer({"state": STATE})["actions"].tolist() == [[0.0, 1.0, 2.0]]
        assert policy.codec is Codec.JPEG_Q90
        assert policy.last is not None
        assert policy.last.session_fresh is True
        assert "queue_ms" in policy.infer({"state": STATE})["server_timing"]
        policy.reset()


def test_large_messages_pass(url: str, ca_file: Path) -> None:
    frames = {f"camera_{index}": np.zeros((2000, 2000, 3), np.uint8) for index in range(2)}  # 24 MB
    with Policy(url, Codec.RAW, HEADERS, ca_file=ca_file) as policy:
        assert policy.infer({"state": STATE, "image": frames})["actions"].tolist() == [[0.0, 1.0, 2.0]]


def test_policy_client_is_answered(url: str, ca_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WALLE_URL", url)
    with PolicyClient("echo", headers=HEADERS, ca_file=ca_file) as client:
        assert np.asarray(client.infer({"state": STATE})).tolist() == [[0.0, 1.0, 2.0]]
        assert client.route == "proxied"
        client.reset()


@needs_stock
def test_the_stock_client_is_answered(url: str, ca_file: Path) -> None:
    command = [str(STOCK_PYTHON), "-W", "ignore", "-c", STOCK_CLIENT, url, KEY]
    environment = variables() | {"SSL_CERT_FILE": str(ca_file)}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout) == [[[float(index)] * 3] for index in range(5)]


def test_a_missing_key_is_refused_by_the_server_behind(url: str, ca_file: Path) -> None:
    with pytest.raises(InvalidStatus) as refused:
        Policy(url, ca_file=ca_file)
    assert refused.value.response.status_code == 401


def test_health_is_passed_on_and_the_numbers_for_prometheus_are_not(url: str, ca_file: Path) -> None:
    assert _get(url, "/healthz", ca_file) == 200
    for path in ("/metrics", "/metrics/", "//metrics", "/metrics?all"):
        assert _get(url, path, ca_file) == 404


def test_policy_client_moves_on_to_the_servers_own_address(
    kind: str,
    authority: trustme.CA,
    certificate: Path,
    ca_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client_side.failed_addresses.clear()
    monkeypatch.delenv("WALLE_DIRECT", raising=False)
    port = free_port()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    keys = read_api_keys(environment={"RELAY_API_KEYS": KEY})
    settings: dict[str, Any] = {
        "direct_url": f"wss://127.0.0.1:{port}",
        "direct_port": port,
        "direct_tls": context,
        "direct_cert_sha256": certificate_sha256(certificate),
    }
    with (
        serving(EchoEngine(), api_keys=keys, **settings) as server,
        front(kind, [_port(server)], certificate, tmp_path) as url,
    ):
        _wait_for_health(url, certificate)
        monkeypatch.setenv("WALLE_URL", url)
        with PolicyClient("echo", headers=HEADERS, ca_file=ca_file) as client:
            assert client.route == "direct"
            assert np.asarray(client.infer({"state": STATE})).tolist() == [[0.0, 1.0, 2.0]]


def test_a_policy_waits_until_there_is_a_server_behind(kind: str, tmp_path: Path) -> None:
    port = free_port()
    with front(kind, [port], None, tmp_path) as url, ExitStack() as stack:
        answers: list[Any] = []

        def drive() -> None:
            with Policy(url, connect_timeout=60) as policy:
                answers.append(policy.infer({"state": STATE})["actions"].tolist())

        robot = threading.Thread(target=drive)
        robot.start()
        time.sleep(0.5)
        stack.enter_context(serving(EchoEngine(), port=port))
        robot.join(60)
        assert answers == [[[0.0, 1.0, 2.0]]]


def test_a_server_that_drains_answers_says_so_and_is_left_out(kind: str, tmp_path: Path) -> None:
    with ExitStack() as first, serving(EchoEngine()) as staying:
        leaving = first.enter_context(serving(EchoEngine()))
        with front(kind, [_port(leaving), _port(staying)], None, tmp_path) as url:
            _wait_for_health(url, None)
            time.sleep(1.5)  # until both have been asked for their health
            with ExitStack() as stack:
                robots = [stack.enter_context(Policy(url)) for _ in range(4)]
                answers: list[Any] = []
                waiting = [threading.Thread(target=_ask_slowly, args=(robot, answers)) for robot in robots]
                for thread in waiting:
                    thread.start()
                time.sleep(0.2)
                first.close()
                for thread in waiting:
                    thread.join(30)
                assert answers == [[[0.0, 1.0, 2.0]]] * 4  # those of the draining server too
                codes = sorted(_code_of_next(robot) for robot in robots)
                assert codes == [0, 0, 1012, 1012]
            with Policy(url, connect_timeout=20) as policy:
                assert policy.infer({"state": STATE})["actions"].tolist() == [[0.0, 1.0, 2.0]]


def _ask_slowly(robot: Policy, answers: list[Any]) -> None:
    answers.append(robot.infer({"state": STATE, "sleep": 0.5})["actions"].tolist())


def _code_of_next(robot: Policy) -> int:
    """The close code that the next call meets; 0 where it is answered."""
    try:
        robot.infer({"state": STATE})
    except ConnectionClosed as closed:
        return closed.rcvd.code if closed.rcvd else 1006
    return 0


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _wait_for_health(url: str, ca_file: Path | None) -> None:
    """HAProxy asks its servers before it sends anybody there."""
    deadline = time.monotonic() + 20
    while _get(url, "/healthz", ca_file, verify=False) != 200:
        assert time.monotonic() < deadline, "the front finds no healthy server"
        time.sleep(0.1)


def _get(url: str, path: str, ca_file: Path | None, *, verify: bool = True) -> int:
    context = ssl.create_default_context(cafile=ca_file) if ca_file and verify else ssl._create_unverified_context()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(url.replace("ws", "http", 1) + path, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        refused.close()
        return refused.code
