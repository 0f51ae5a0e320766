"""A real nginx or HAProxy with the shipped configuration, its addresses and files replaced by those of a test."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import fronts
from free_ports import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
NGINX, HAPROXY = DEPLOY / "nginx/relay.conf", DEPLOY / "haproxy/haproxy.cfg"

NGINX_AROUND = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr warn;
{user}
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{site}
}}
"""


@contextmanager
def front(kind: str, servers: Sequence[int], certificate: Path | None, folder: Path) -> Iterator[str]:
    """Run one before servers on these ports of 127.0.0.1; yields its URL.

    Args:
        certificate: PEM file with certificate and key; None takes TLS out of the configuration.
    """
    port = free_port()
    command = (_nginx if kind == "nginx" else _haproxy)(port, servers, certificate, folder)
    log = folder / f"{kind}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=fronts.environment(), stdout=output, stderr=output)
        try:
            _wait_until_listening(port, process, log)
            yield f"{'wss' if certificate else 'ws'}://localhost:{port}"
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    """With each old text, which must be there, replaced by its new one."""
    for old, new in pairs:
        assert old in text, f"the configuration has no {old!r}"
        text = text.replace(old, new)
    return text


def _nginx(port: int, servers: Sequence[int], certificate: Path | None, folder: Path) -> list[str]:
    line = "server 127.0.0.1:8000 max_fails=1 fail_timeout=2s;"
    site = replaced(
        NGINX.read_text("utf-8"),
        (line, "\n".join(line.replace("8000", str(server)) for server in servers)),
        ("listen 443 ssl;", f"listen 127.0.0.1:{port}{' ssl' if certificate else ''};"),
        ("/etc/nginx/tls/robots.example.pem", str(certificate)),
        ("/etc/nginx/tls/robots.example.key", str(certificate)),
    )
    if certificate is None:
        site = "\n".join(line for line in site.splitlines() if "ssl_certificate" not in line)
    whole = folder / "nginx.conf"
    whole.write_text(NGINX_AROUND.format(folder=folder, site=site, user=_user()))
    program = fronts.program("nginx")
    assert program is not None
    return [str(program), "-p", str(folder), "-e", "stderr", "-c", str(whole)]


def _user() -> str:
    """As root, nginx would give its temporary folders to a user that may not reach the test's."""
    return "user root;" if hasattr(os, "geteuid") and os.geteuid() == 0 else ""


def _haproxy(port: int, servers: Sequence[int], certificate: Path | None, folder: Path) -> list[str]:
    line = "    server gpu1 127.0.0.1:8000 check inter 1s fall 1 rise 1"
    bind = f"bind 127.0.0.1:{port} ssl crt {certificate}" if certificate else f"bind 127.0.0.1:{port}"
    lines = (
        line.replace("gpu1", f"gpu{number}").replace("8000", str(server)) for number, server in enumerate(servers, 1)
    )
    text = replaced(
        HAPROXY.read_text("utf-8"),
        (line, "\n".join(lines)),
        ("bind :443 ssl crt /etc/haproxy/tls/robots.example.pem", bind),
    )
    whole = folder / "haproxy.cfg"
    whole.write_text(text)
    program = fronts.program("haproxy")
    assert program is not None
    return [str(program), "-db", "-f", str(whole)]


def _wait_until_listening(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise TimeoutError(log.read_text())
