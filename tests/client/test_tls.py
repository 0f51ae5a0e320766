"""All three clients over TLS: API keys arrive, certificates are verified, and what is wrong with one is said."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timezone
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from tiny_servers import STATE, Ask, LoopbackServers, echo_state, openpi_server
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import InvalidStatus
from websockets.http11 import Request, Response

from relay.client import cold_start
from relay.client.access import Access
from relay.client.connection import open_websocket
from relay.client.tls_socket import TurnTakingSocket

KEY = {"Authorization": "Bearer robot-7"}


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """A private authority, which this machine does not trust."""
    return trustme.CA()


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> Path:
    file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(file))
    return file


def tls(certificate: trustme.LeafCert) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    return context


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A port where every connection is answered so, and ended."""

    def run() -> None:
        with suppress(OSError):  # closed below
            while True:
                with closing(listener.accept()[0]) as connection:
                    connection.recv(4096)
                    connection.sendall(answer)

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def check_key(websocket: ServerConnection, request: Request) -> Response | None:
    right = request.headers.get("Authorization") == KEY["Authorization"]
    return None if right else websocket.respond(HTTPStatus.UNAUTHORIZED, "")


@pytest.fixture
def url(servers: LoopbackServers, authority: trustme.CA) -> str:
    """A server of ours that asks for a key, with a certificate of the private authority."""
    certificate = tls(authority.issue_cert("127.0.0.1"))
    return servers.start(openpi_server(echo_state), relay=True, ssl=certificate, process_request=check_key)


# ---- certificates that are trusted


@pytest.mark.parametrize("as_type", [str, Path])
async def test_a_ca_file_makes_a_private_authority_trusted(ask: Ask, url: str, ca_file: Path, as_type: Any) -> None:
    np.testing.assert_array_equal(await ask(url, headers=KEY, ca_file=as_type(ca_file)), STATE)


async def test_ssl_cert_file_does_the_same(ask: Ask, url: str, ca_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(ca_file))
    np.testing.assert_array_equal(await ask(url, headers=KEY), STATE)


# ---- keys


@pytest.mark.parametrize("headers", [None, {"Authorization": "Bearer another"}], ids=["no key", "a wrong key"])
async def test_a_missing_or_wrong_key_raises_at_once(
    ask: Ask, url: str, ca_file: Path, headers: dict[str, str] | None
) -> None:
    with pytest.raises(InvalidStatus) as error:
        await ask(url, headers=headers, ca_file=ca_file)
    assert error.value.response.status_code == 401


@pytest.mark.parametrize("name", ["Authorization", "X-Key\r\nHost"])
async def test_a_header_with_a_line_break_is_refused_without_showing_the_key(ask: Ask, url: str, name: str) -> None:
    with pytest.raises(ValueError, match=r"holds a line break.*strip\(\)") as error:
        await ask(url, headers={name: "Bearer robot-7\n"})
    assert "robot-7" not in str(error.value)


# ---- certificates that are not


async def test_an_unknown_authority_raises_at_once_and_says_how_to_trust_it(ask: Ask, url: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError) as error:
        await ask(url, headers=KEY)
    text = str(error.value)
    assert f"the certificate of {url}" in text
    assert "pass the certificate of the authority that signed it as ca_file=, or name it in SSL_CERT_FILE" in text


async def test_another_authoritys_file_does_not_help(ask: Ask, url: str, tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    with pytest.raises(ssl.SSLCertVerificationError, match="ca_file="):
        await ask(url, headers=KEY, ca_file=tmp_path / "other.pem")


async def test_a_certificate_for_another_name_is_refused(
    ask: Ask, servers: LoopbackServers, authority: trustme.CA, ca_file: Path
) -> None:
    url = servers.start(openpi_server(echo_state), ssl=tls(authority.issue_cert("gpu-box.example")))
    with pytest.raises(ssl.SSLCertVerificationError, match="connect by a name that stands in it"):
        await ask(url, ca_file=ca_file)


async def test_an_expired_certificate_is_refused(
    ask: Ask, servers: LoopbackServers, authority: trustme.CA, ca_file: Path
) -> None:
    expired = authority.issue_cert("127.0.0.1", not_after=datetime(2001, 1, 1, tzinfo=timezone.utc))
    url = servers.start(openpi_server(echo_state), ssl=tls(expired))
    with pytest.raises(ssl.SSLCertVerificationError, match="renew it, or set this machine's clock"):
        await ask(url, ca_file=ca_file)


async def test_an_answer_without_tls_raises_at_once(ask: Ask) -> None:
    says = r"does not answer as a TLS server does .*; without TLS: ws://"
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port, pytest.raises(ssl.SSLError, match=says):
        await ask(f"wss://127.0.0.1:{port}")


@pytest.mark.parametrize(("scheme", "other"), [("ws", "wss"), ("wss", "ws")])
async def test_whoever_hangs_up_on_the_handshake_may_want_the_other_scheme(
    ask: Ask, scheme: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_start, "FIRST_DELAY_S", 60.0)  # so that the first attempt is the last
    with answering(b"") as port, pytest.raises((TimeoutError, OSError), match=rf"with.* TLS: {other}://"):
        await ask(f"{scheme}://127.0.0.1:{port}", connect_timeout=10.0)


# ---- a ca_file that cannot be used


async def test_a_ca_file_that_is_not_there_is_named(ask: Ask, url: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"ca_file: .*missing\.pem"):
        await ask(url, ca_file=tmp_path / "missing.pem")


async def test_a_ca_file_without_certificates_is_named(ask: Ask, url: str, tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("not a certificate\n")
    with pytest.raises(ValueError, match=r"ca_file .*key\.pem holds no certificate in PEM form"):
        await ask(url, ca_file=tmp_path / "key.pem")


async def test_a_ca_file_for_an_unencrypted_connection_is_refused(ask: Ask, ca_file: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match=rf"ca_file is given, but ws://127\.0\.0\.1:{port}.* is not encrypted"):
            await ask(f"ws://127.0.0.1:{port}", ca_file=ca_file)


# ---- two threads, one connection


def test_reads_and_writes_of_a_tls_socket_take_turns(authority: trustme.CA, ca_file: Path) -> None:
    """A read that waits for the network must not keep a write from being sent, nor run beside it."""
    context = ssl.create_default_context(cafile=str(ca_file))
    context.sslsocket_class = TurnTakingSocket
    ours, theirs = socket.socketpair()

    def echo() -> None:
        with tls(authority.issue_cert("127.0.0.1")).wrap_socket(theirs, server_side=True) as peer:
            peer.sendall(peer.recv(100))

    peer = threading.Thread(target=echo)
    peer.start()
    with context.wrap_socket(ours, server_hostname="127.0.0.1") as encrypted:
        encrypted.settimeout(None)
        received: list[bytes] = []
        reader = threading.Thread(target=lambda: received.append(encrypted.recv(100)))
        reader.start()
        encrypted.sendall(b"observation")
        reader.join(10)
        assert received == [b"observation"]
        peer.join(10)
        assert encrypted.recv(100) == b""


def test_a_tls_socket_keeps_its_timeout(authority: trustme.CA, ca_file: Path) -> None:
    context = ssl.create_default_context(cafile=str(ca_file))
    context.sslsocket_class = TurnTakingSocket
    ours, theirs = socket.socketpair()

    def shake_hands() -> None:
        with tls(authority.issue_cert("127.0.0.1")).wrap_socket(theirs, server_side=True):
            done.wait(10)

    done = threading.Event()
    peer = threading.Thread(target=shake_hands)
    peer.start()
    with context.wrap_socket(ours, server_hostname="127.0.0.1") as encrypted:
        encrypted.settimeout(0.1)
        with pytest.raises(TimeoutError):
            encrypted.recv(100)
        done.set()
        peer.join(10)


@pytest.mark.slow
def test_no_connection_of_a_thousand_hangs(url: str, ca_file: Path) -> None:
    context = ssl.create_default_context(cafile=str(ca_file))
    for _ in range(1000):  # one in about a thousand did, when reads and writes could meet
        websocket = open_websocket(url, KEY, 10, Access(context))
        websocket.read_greeting(10)
        websocket.close()
