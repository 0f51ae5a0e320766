"""A page on this machine that shows the robot while it moves. Standard library only; it listens on loopback."""

from __future__ import annotations

import json
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from io import BytesIO
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from relay.demo.animation import compose
from relay.demo.tabletop import CONTROL_HZ, Tabletop

_BOUNDARY = "picture"
_STILL_S = 1.0  # a picture is sent again after this time, so that a browser that left is noticed


class LivePage:
    """Shows what it is given at `url`, in the robot's own time: a second of the robot takes a second."""

    def __init__(self, port: int = 0) -> None:
        self.status = "waiting for the robot"
        self._picture = b""
        self._number = 0
        self._closed = False
        self._changed = threading.Condition()
        self._viewer = threading.Event()
        self._next_at = 0.0
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _answer_with(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="live page", daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/"

    def wait_for_viewer(self, seconds: float) -> bool:
        """Wait until a browser shows the page; whether it does."""
        return self._viewer.wait(seconds)

    def show(self, table: Tabletop, prompt: str, plan: NDArray[np.float32]) -> None:
        """Show one step, and return when the robot's next one is due."""
        encoded = BytesIO()
        compose(table, prompt, plan).save(encoded, "JPEG", quality=88)
        with self._changed:
            self._picture = encoded.getvalue()
            self._number += 1
            self._changed.notify_all()
        time.sleep(max(0.0, self._next_at - time.monotonic()))
        self._next_at = time.monotonic() + 1 / CONTROL_HZ

    def next_picture(self, after: int) -> tuple[int, bytes] | None:
        """The first picture later than number `after`, or the present one if none comes; None when closed."""
        self._viewer.set()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._number > after, _STILL_S)
            return None if self._closed else (self._number, self._picture)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> LivePage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _answer_with(page: LivePage) -> type[BaseHTTPRequestHandler]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            match self.path:
                case "/":
                    self._send("text/html; charset=utf-8", _page_text())
                case "/status":
                    self._send("application/json", json.dumps({"status": page.status}).encode())
                case "/pictures":
                    self._send_pictures()
                case _:
                    self.send_error(HTTPStatus.NOT_FOUND)

        def _send(self, content_type: str, body: bytes) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def _send_pictures(self) -> None:
            """One endless answer in which each part replaces the one before."""
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", f"multipart/x-mixed-replace; boundary={_BOUNDARY}")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            number = 0
            try:
                while (shown := page.next_picture(number)) is not None:
                    number, picture = shown
                    if picture:
                        head = f"--{_BOUNDARY}\r\nContent-Type: image/jpeg\r\nContent-Length: {len(picture)}\r\n\r\n"
                        self.wfile.write(head.encode() + picture + b"\r\n")
            except OSError:
                pass  # the browser left

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the terminal belongs to the run."""

    return Answer


def _page_text() -> bytes:
    return files("relay.demo").joinpath("pages").joinpath("live.html").read_bytes()
