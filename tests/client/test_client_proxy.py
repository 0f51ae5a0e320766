"""An HTTP proxy that was asked for: used by all three clients, named when it fails."""

from __future__ import annotations

import base64
import itertools
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from tiny_servers import METADATA, STATE, Ask, LoopbackServers, echo_state, openpi_server
from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from relay import Policy
from relay.client import access, async_connection, cold_start, connection
from relay.client.access import read_proxy

OPEN = b"HTTP/1.1 200 Connection established\r\nVia: test\r\n\r\n"


class TinyProxy:
    """Answers each CONNECT as told and, after a 200, passes bytes on; keeps the requests."""

    def __init__(self, answers: Iterator[bytes]) -> None:
        self._answers = answers
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        for sock in self._open:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for sock in self._open:
            sock.close()

    def _start(self, run: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=run, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client = self._listener.accept()[0]
                self._open.append(client)
                self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError):  # the client may hang up first
            self._answer(client)

    def _answer(self, client: socket.socket) -> None:
        request = b""
        while not request.endswith(b"\r\n\r\n"):
            request += client.recv(1)
        self.requests.append(request)
        answer = next(self._answers)
        client.sendall(answer)
        if answer is OPEN:
            host, _, port = request.split()[1].decode().rpartition(":")
            server = socket.create_connection((host, int(port)))
            self._open.append(server)
            self._start(self._pump, server, client)
            self._pump(client, server)
        elif answer:
            client.shutdown(socket.SHUT_RDWR)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def proxy_answering(*answers: bytes) -> Iterator[TinyProxy]:
    """A proxy that gives these answers in order, the last one for ever."""
    with closing(TinyProxy(itertools.chain(answers, itertools.repeat(answers[-1])))) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start, "FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(cold_start, "LONGEST_DELAY_S", 0.05)


# ---- through the proxy


async def test_observations_and_replies_pass_through_the_proxy(ask: Ask, servers: LoopbackServers) -> None:
    url = servers.start(openpi_server(echo_state), relay=True)
    with proxy_answering(OPEN) as proxy:
        np.testing.assert_array_equal(await ask(url, proxy=proxy.url), STATE)
    server = url.removeprefix("ws://").encode()
    assert proxy.requests == [b"CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n" % (server, server)]


async def test_tls_and_keys_are_for_the_server_not_for_the_proxy(
    ask: Ask, servers: LoopbackServers, tmp_path: Path
) -> None:
    keys: list[str | None] = []

    def note_key(websocket: ServerConnection, request: Request) -> None:
        keys.append(request.headers.get("Authorization"))

    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    url = servers.start(openpi_server(echo_state), ssl=context, process_request=note_key)
    with proxy_answering(OPEN) as proxy:
        headers = {"Authorization": "Bearer robot-7"}
        actions = await ask(url, proxy=proxy.url, ca_file=tmp_path / "ca.pem", headers=headers)
    np.testing.assert_array_equal(actions, STATE)
    assert keys == ["Bearer robot-7"]
    assert b"robot-7" not in proxy.requests[0]


async def test_user_and_password_are_sent_to_the_proxy_alone(ask: Ask, servers: LoopbackServers) -> None:
    seen: list[Request] = []

    def note(websocket: ServerConnection, request: Request) -> None:
        seen.append(request)

    url = servers.start(openpi_server(echo_state), process_request=note)
    with proxy_answering(OPEN) as proxy:
        await ask(url, proxy=proxy.url.replace("http://", "http://robot:p%40ss@"))
    credentials = base64.b64encode(b"robot:p@ss")
    assert b"\r\nProxy-Authorization: Basic " + credentials + b"\r\n" in proxy.requests[0]
    assert "Proxy-Authorization" not in seen[0].headers


async def test_a_redirect_goes_through_the_proxy_too(ask: Ask, servers: LoopbackServers) -> None:
    end = servers.start(openpi_server(echo_state))

    def redirect(websocket: ServerConnection, request: Request) -> Response:
        response = websocket.respond(307, "")  # type: ignore[arg-type]
        response.headers["Location"] = end
        return response

    with proxy_answering(OPEN) as proxy:
        await ask(servers.start(openpi_server(echo_state), process_request=redirect), proxy=proxy.url)
    assert len(proxy.requests) == 2


async def test_a_server_behind_the_proxy_that_is_not_up_yet_is_waited_for(servers: LoopbackServers) -> None:
    url = servers.start(openpi_server(echo_state, METADATA))
    with proxy_answering(b"HTTP/1.1 503 Service Unavailable\r\n\r\n", OPEN) as proxy:
        with Policy(url, proxy=proxy.url) as policy:
            assert policy.get_server_metadata() == METADATA
        assert len(proxy.requests) == 2


async def test_a_wait_names_the_proxy_on_the_way() -> None:
    with proxy_answering(b"HTTP/1.1 502 Bad Gateway\r\n\r\n") as proxy:
        through = rf"gpu-box\.example.* \(through the proxy {proxy.url}\).*'HTTP/1.1 502 Bad Gateway'"
        with pytest.raises(TimeoutError, match=through):
            Policy("ws://gpu-box.example", proxy=proxy.url, connect_timeout=0.3)


# ---- a proxy that fails


async def test_a_proxy_that_is_down_raises_at_once_and_is_named(ask: Ask, unused_port: int) -> None:
    with pytest.raises(OSError, match=rf"the proxy http://127\.0\.0\.1:{unused_port} cannot be reached: Connection"):
        await ask("ws://gpu-box.example:8000", proxy=f"http://robot:secret@127.0.0.1:{unused_port}")


async def test_a_proxy_that_says_nothing_raises_in_bounded_time_and_is_named(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (connection, async_connection, cold_start):
        monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 0.3)
    with proxy_answering(b"") as proxy, pytest.raises(TimeoutError, match=rf"the proxy {proxy.url} did not answer"):
        await ask("ws://gpu-box.example:8000", proxy=proxy.url)


async def test_the_connect_timeout_bounds_the_wait_for_a_proxy(ask: Ask) -> None:
    started = time.monotonic()
    with proxy_answering(b"") as proxy, pytest.raises(TimeoutError, match=rf"the proxy {proxy.url} did not answer"):
        await ask("ws://gpu-box.example:8000", proxy=proxy.url, connect_timeout=0.3)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "answered 'HTTP/1.1 403 Forbidden'"),
        (b"HTTP/1.1 407 Auth\r\n\r\n", "give its user and password as in http://user:password@"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "does not answer as an HTTP proxy does"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 4000, "does not answer as an HTTP proxy does"),
        (b"HTTP/1.1 2", "hung up"),
    ],
    ids=["forbidden", "wants credentials", "no proxy", "endless", "cut short"],
)
async def test_a_proxy_that_refuses_raises_at_once_and_is_named(ask: Ask, answer: bytes, says: str) -> None:
    with proxy_answering(answer) as proxy, pytest.raises(access.ProxyError) as error:
        await ask("ws://gpu-box.example:8000", proxy=proxy.url)
    assert proxy.url in str(error.value)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "url", ["socks5://proxy.example:1080", "https://proxy.example", "proxy.example:3128", "http://", "http://p/x", "["]
)
async def test_what_is_no_http_proxy_is_refused_before_connecting(ask: Ask, url: str) -> None:
    with pytest.raises(ValueError, match=r"proxy must be an HTTP proxy such as 'http://proxy\.example:3128'"):
        await ask("ws://gpu-box.example:8000", proxy=url)


def test_an_ipv6_server_is_asked_for_in_brackets() -> None:
    proxy = read_proxy("http://proxy.example:3128")
    assert proxy.request("::1", 8000).startswith(b"CONNECT [::1]:8000 HTTP/1.1\r\n")


def test_a_proxys_password_is_shown_nowhere() -> None:
    proxy = read_proxy("http://robot:secret@proxy.example:3128")
    assert "secret" not in repr(proxy)
    assert base64.b64encode(b"robot:secret").decode() not in repr(proxy)
