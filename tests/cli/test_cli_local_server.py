"""The background server of a command: found on whatever port it took, and gone afterwards."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from relay.cli.local_server import LocalServer, ServerFailed

STUB = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Answer.asked += 1
        self.send_response(200 if Answer.asked > 2 else 503)
        self.end_headers()
        self.wfile.write(b"loading\\nwarming up 40%\\n")
server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
print(f"INFO listening on ws://127.0.0.1:{server.server_port}", file=sys.stderr, flush=True)
server.serve_forever()
"""


@pytest.fixture
def stub(tmp_path: Path) -> LocalServer:
    return running(tmp_path, STUB)


def running(folder: Path, script: str) -> LocalServer:
    file = folder / "server.py"
    file.write_text(script)
    server = LocalServer([])
    server.command = [sys.executable, str(file)]
    return server


def test_it_waits_until_the_server_is_ready_and_says_what_for(stub: LocalServer) -> None:
    phases: list[str] = []
    with stub as server:
        server.wait_until_ready(phases.append)
        assert server.url.startswith("ws://127.0.0.1:")
    assert phases == ["loading warming up 40%"] * 2


def test_the_server_is_gone_afterwards(stub: LocalServer) -> None:
    with stub as server:
        server.wait_until_ready(lambda phase: None)
    assert_gone(server)


def test_the_server_is_gone_after_an_interrupt_too(stub: LocalServer) -> None:
    def be_interrupted(phase: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), stub as server:
        server.wait_until_ready(be_interrupted)
    assert_gone(stub)


def assert_gone(server: LocalServer) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=5):
        pass


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    script = "import sys; print('loading', file=sys.stderr); sys.exit('relay: no weights in this folder')"
    with (
        running(tmp_path, script) as server,
        pytest.raises(ServerFailed, match="code 1: relay: no weights in this folder"),
    ):
        server.wait_until_ready(lambda phase: None)


def test_it_starts_relay_serve_on_a_free_loopback_port() -> None:
    command = LocalServer(["demo", "--max-batch", "1"]).command
    assert command[1:5] == ["-m", "relay.cli.main", "serve", "demo"]
    assert command[-4:] == ["--host", "127.0.0.1", "--port", "0"]
