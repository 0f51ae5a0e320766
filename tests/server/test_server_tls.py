"""TLS: a real client over wss, the versions that are refused, and files that are not what they should be."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import ssl
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from fake_policy import DIM, NO_PROXY, ask, observation, running
from websockets.asyncio.client import connect

import relay
from relay.server import door
from relay.server.app import Server
from relay.server.tls import tls_context

# Python 3.10 leaves the transport of a failed TLS handshake to the collector, which then complains.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function _SSLProtocolTransport:pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def collect() -> Iterator[None]:
    """Now, not in the middle of another module's test."""
    yield
    gc.collect()


@dataclass(frozen=True)
class Files:
    """A private CA, and a certificate of it for localhost and 127.0.0.1."""

    ca: Path
    cert: Path
    key: Path

    @property
    def context(self) -> ssl.SSLContext:
        context = tls_context(self.cert, self.key)
        assert context is not None
        return context

    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca))


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return issue(authority, tmp_path_factory.mktemp("tls"))


def issue(authority: trustme.CA, folder: Path) -> Files:
    files = Files(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    issued = authority.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(str(files.ca))
    for blob in issued.cert_chain_pems:
        blob.write_to_path(str(files.cert), append=True)
    issued.private_key_pem.write_to_path(str(files.key))
    return files


async def test_the_relay_client_over_wss(files: Files, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(files.ca))
    await one_observation(files)


async def test_a_client_that_does_not_know_the_authority_gives_up_at_once(files: Files):
    async with running(tls=files.context) as server:
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.to_thread(relay.Policy, f"wss://localhost:{server.port}", connect_timeout=10)


async def test_a_message_of_many_records_arrives_whole(files: Files):
    async with running(tls=files.context) as server:
        url = f"wss://127.0.0.1:{server.port}"
        async with connect(url, ssl=files.client(), **NO_PROXY) as websocket:
            await websocket.recv()
            for value in range(3):
                reply = await ask(websocket, observation(value, filling=bytes(2_000_000)))
                assert reply["actions"][0, 0] == value


async def test_the_log_says_wss(files: Files, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="relay")
    async with running(tls=files.context) as server:
        assert f"listening on wss://127.0.0.1:{server.port}" in caplog.text


async def test_health_answers_over_https(files: Files):
    async with running(tls=files.context) as server:
        await server.ready()
        reader, writer = await asyncio.open_connection("localhost", server.port, ssl=files.client())
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 200 ")
        writer.transport.abort()


async def shake(server: Server, context: ssl.SSLContext) -> str | None:
    """The TLS version agreed upon."""

    def shake() -> str | None:
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            return secured.version()

    return await asyncio.to_thread(shake)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio's TLS takes its bytes in another way")
async def test_bytes_that_come_before_tls_is_set_up_are_not_lost(files: Files, monkeypatch: pytest.MonkeyPatch):
    start_tls = door.Door._start_tls

    async def late(self: door.Door, tls: ssl.SSLContext) -> None:  # as it happens on uvloop
        while not self._head:
            await asyncio.sleep(0.01)
        await start_tls(self, tls)

    monkeypatch.setattr(door.Door, "_start_tls", late)
    async with running(tls=files.context) as server:
        assert await shake(server, files.client())


def test_the_relay_client_over_wss_on_uvloop(files: Files, monkeypatch: pytest.MonkeyPatch):
    uvloop = pytest.importorskip("uvloop")
    monkeypatch.setenv("SSL_CERT_FILE", str(files.ca))
    loop = uvloop.new_event_loop()
    loop.run_until_complete(one_observation(files))
    loop.close()


async def one_observation(files: Files) -> None:
    def infer() -> Any:
        with relay.Policy(f"wss://localhost:{server.port}", connect_timeout=10) as policy:
            return policy.infer({"state": np.full(DIM, 2, np.float32)})["actions"]

    async with running(tls=files.context) as server:
        assert (await asyncio.to_thread(infer))[0, 0] == 2


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_tls_of_these_versions_is_taken(files: Files, version: ssl.TLSVersion):
    context = files.client()
    context.minimum_version = context.maximum_version = version
    async with running(tls=files.context) as server:
        assert await shake(server, context) == version.name.replace("_", ".")


def test_nothing_older_is_taken(files: Files):
    assert files.context.minimum_version == ssl.TLSVersion.TLSv1_2


async def test_a_client_without_tls_is_dropped_and_others_are_served(files: Files):
    async with running(tls=files.context) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP" not in await asyncio.wait_for(reader.read(), 5)
        writer.close()
        assert await shake(server, files.client())


async def test_tls_that_is_never_begun_is_dropped_in_time(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(door, "HANDSHAKE_S", 0.3)
    async with running(tls=files.context) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await asyncio.wait_for(_rest(reader), 5) == b""
        writer.transport.abort()
    gc.collect()  # when asyncio tells of errors that nobody looked at
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x00\xee\x01\x00", b"\x16\x03\x01" + bytes(400)])
async def test_peers_that_leave_during_tls_leave_nothing_behind(
    files: Files, sent: bytes, caplog: pytest.LogCaptureFixture
):
    async with running(tls=files.context) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        await asyncio.sleep(0.05)
        writer.transport.abort()
        await asyncio.sleep(0.05)
        assert await shake(server, files.client())
        for _ in range(500):
            if not server._entrances[0].doors:
                break
            await asyncio.sleep(0.01)
        assert not server._entrances[0].doors
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_half_done_tls_counts_as_a_half_done_handshake(files: Files, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(door, "MAX_HALF_DONE", 2)
    async with running(tls=files.context) as server:
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        assert await asyncio.wait_for(_rest(silent[2][0]), 5) == b""
        for _, writer in silent:
            writer.transport.abort()


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


def test_without_files_there_is_no_tls():
    assert tls_context(None, None) is None


def test_one_file_without_the_other_is_refused(files: Files):
    with pytest.raises(ValueError, match="TLS takes a certificate and its key: --tls-key is missing"):
        tls_context(files.cert, None)
    with pytest.raises(ValueError, match="TLS takes a certificate and its key: --tls-cert is missing"):
        tls_context(None, files.key)


def test_a_missing_file_is_named(files: Files, tmp_path: Path):
    with pytest.raises(ValueError, match=r"--tls-key '.*nokey\.pem' cannot be read: No such file"):
        tls_context(files.cert, tmp_path / "nokey.pem")


def test_the_key_of_another_certificate_is_refused(files: Files, authority: trustme.CA, tmp_path: Path):
    other = issue(authority, tmp_path)
    with pytest.raises(ValueError, match=r"--tls-key '.*' is not the key of --tls-cert '.*'"):
        tls_context(files.cert, other.key)


def test_a_key_with_a_password_is_refused_without_asking_for_it(files: Files, tmp_path: Path):
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ValueError, match=r"--tls-key '.*locked\.pem' is protected by a password"):
        tls_context(files.cert, locked)


def test_files_that_are_no_pem_are_refused(files: Files, tmp_path: Path):
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("hello")
    with pytest.raises(ValueError, match="are not a PEM certificate and its key"):
        tls_context(wrong, files.key)
    with pytest.raises(ValueError, match="are not a PEM certificate and its key"):
        tls_context(files.cert, wrong)
