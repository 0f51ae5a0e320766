"""Who can reach the endpoint, and what it tells."""

from __future__ import annotations

import logging
import re
import socket
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from fake_policy import client, dial, observation, running
from websockets.exceptions import InvalidStatus

from field.loopback import VLLM_PATH, serving
from relay.cli.local_server import LocalServer
from relay.protocol.msgpack_numpy import unpack
from relay.server.api_keys import read_api_keys


def other_local_addresses(bound: str) -> list[str]:
    """Addresses of this machine besides the one bound: on each of them, a server that listened could be reached."""
    candidates = {"127.0.0.1", "127.0.0.2", "::1"}
    candidates |= {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    for family, somewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((somewhere, 9))  # sends nothing, but chooses the address of the network card
                candidates.add(probe.getsockname()[0])
            except OSError:
                pass
    return sorted(address for address in candidates - {bound} if listens(address))


def listens(address: str) -> bool:
    """Whether a server on this address can be reached on it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family) as server:
            socket.create_connection((address, server.getsockname()[1]), timeout=5).close()
    except OSError:
        return False
    return True


def assert_refused(addresses: list[str], port: int) -> None:
    assert addresses
    for address in addresses:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, port), timeout=5)


# ---- 2.1: loopback by default, nothing of the machine in what a client reads


def test_lesson_2_1_without_options_only_loopback_is_served():
    """Physical-Intelligence/openpi#1039."""
    with serving() as server:
        socket.create_connection(("127.0.0.1", server.port), timeout=5).close()
        assert_refused(other_local_addresses("127.0.0.1"), server.port)


async def test_lesson_2_1_an_internal_error_names_modules_and_functions_but_no_path_of_the_machine(
    caplog: pytest.LogCaptureFixture,
):
    """Physical-Intelligence/openpi#1039: the stub fails with a path in its own words."""
    async with running() as server, client(server) as websocket:
        await websocket.send(observation(do="raise"))
        text = await websocket.recv()
    assert isinstance(text, str)
    assert re.search(r"fake_policy\.py:\d+ _row$", text, re.M)
    assert re.search(r"relay/engine/worker\.py:\d+ \w+$", text, re.M)
    for secret in ("/home", "secret", str(Path(__file__).parents[2]), sys.prefix, sys.base_prefix):
        assert secret not in text
    assert not re.search(r"(^|[\s'\"(=])/\w", text)
    error_id = re.search(r"Internal inference error \[error ([0-9a-f]{8})\]$", text)
    assert error_id
    assert f"[error {error_id[1]}]" in caplog.text
    assert "/home/robot/secret/weights.bin" in caplog.text


async def test_lesson_2_1_the_endpoint_that_promises_no_traceback_tells_nothing_of_the_inside():
    """Physical-Intelligence/openpi#1039."""
    async with running() as server, client(server, VLLM_PATH) as websocket:
        await websocket.send(observation(do="raise"))
        assert unpack(await websocket.recv()) == {"type": "error", "message": "Internal inference error"}


async def test_lesson_2_1_a_missing_or_wrong_token_is_401_before_the_upgrade() -> None:
    """Physical-Intelligence/openpi#1039."""
    keys = read_api_keys(environment={"RELAY_API_KEYS": "a-key-of-twenty-chars"})
    async with running(api_keys=keys) as server:
        for headers in ({}, {"Authorization": "Api-Key another-key-of-20-chars"}):
            with pytest.raises(InvalidStatus) as caught:
                await dial(server.port, additional_headers=headers)
            assert caught.value.response.status_code == 401
        async with client(server, additional_headers={"Authorization": "Api-Key a-key-of-twenty-chars"}) as websocket:
            await websocket.send(observation())
            assert isinstance(await websocket.recv(), bytes)


# ---- 2.2: the address asked for is the address bound


@pytest.fixture(scope="module")
def demo() -> Iterator[LocalServer]:
    """`relay serve demo --host 127.0.0.1 --port 0` as a process."""
    if find_spec("torch") is None:
        pytest.skip("serving a policy of ours needs torch")
    with LocalServer(["demo"]) as server:
        assert server.command[-4:] == ["--host", "127.0.0.1", "--port", "0"]
        server.wait_until_ready(lambda phase: None)
        yield server


def test_lesson_2_2_the_command_binds_the_host_asked_for_and_prints_the_port_it_got(demo: LocalServer):
    """NVIDIA/Isaac-GR00T#447."""
    port = int(demo.url.rpartition(":")[2])
    assert port > 0
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    assert_refused(other_local_addresses("127.0.0.1"), port)


@pytest.mark.skipif(not listens("127.0.0.2"), reason="this system has one loopback address")
def test_lesson_2_2_another_host_is_bound_instead_and_not_besides(caplog: pytest.LogCaptureFixture):
    """NVIDIA/Isaac-GR00T#447."""
    caplog.set_level(logging.INFO)
    with serving(host="127.0.0.2") as server:
        socket.create_connection(("127.0.0.2", server.port), timeout=5).close()
        assert_refused(other_local_addresses("127.0.0.2"), server.port)
        assert f"listening on ws://127.0.0.2:{server.port}" in caplog.messages


def test_lesson_2_2_for_a_name_every_address_that_was_bound_is_printed(caplog: pytest.LogCaptureFixture):
    """NVIDIA/Isaac-GR00T#447: `localhost` may stand for more than one address."""
    caplog.set_level(logging.INFO)
    with serving(host="localhost") as server:
        bound = [listening.getsockname() for listening in server.server._listeners[0].sockets]
    for host, port, *_ in bound:
        shown = f"[{host}]" if ":" in host else host
        assert f"listening on ws://{shown}:{port}" in caplog.messages
