"""A `relay serve` of our own in the background, for commands that need one for as long as they run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

_LISTENING = re.compile(r"listening on ws://[^\s:]+:(\d+)")
_API_KEYS = "RELAY_API_KEYS"  # they are for others: the server is ours alone
_POLL_S = 0.05
_STOP_S = 5.0


class ServerFailed(RuntimeError):
    """The server ended before it was ready; the text holds the last lines it wrote."""


class LocalServer:
    """A server process on a free loopback port; leaving the `with` block ends it.

    Args:
        arguments: the command line after `relay serve`, without host and port.

    Attributes:
        command: what is run.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.command = [
            *(sys.executable, "-m", "relay.cli.main", "serve", *arguments),
            *("--host", "127.0.0.1", "--port", "0"),
        ]
        self._log: deque[str] = deque(maxlen=40)
        self._port: int | None = None

    def __enter__(self) -> LocalServer:
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != _API_KEYS},
        )
        self._reader = threading.Thread(target=self._read_log, name="server log", daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_STOP_S)
        if self._process.stderr is not None:
            self._process.stderr.close()

    @property
    def url(self) -> str:
        """Where policies connect; known once the server is ready."""
        return f"ws://127.0.0.1:{self._port}"

    @property
    def last_words(self) -> str:
        """Why the server ended, if it said so; otherwise the last lines that it wrote."""
        reason = next((line for line in self._log if line.startswith("relay")), None)
        return reason or "\n".join(self._log)

    def wait_until_ready(self, progress: Callable[[str], None]) -> None:
        """Return when the policy is loaded; `progress` gets what the server is doing until then.

        Raises:
            ServerFailed: it ended instead.
        """
        while True:
            if self._process.poll() is not None:
                self._reader.join(_STOP_S)
                raise ServerFailed(f"the server ended with code {self._process.returncode}: {self.last_words}")
            if self._port is not None:
                phase = _health(self._port)
                if phase is None:
                    return
                progress(phase)
            time.sleep(_POLL_S)

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = line.decode("utf-8", "replace").rstrip()
            self._log.append(text)
            found = _LISTENING.search(text)
            if found:
                self._port = int(found[1])


def _health(port: int) -> str | None:
    """What `/healthz` says the server is doing; None when it is ready."""
    try:
        # No proxy: an environment that has one rarely excepts a loopback port.
        with _OPENER.open(f"http://127.0.0.1:{port}/healthz", timeout=2.0):
            return None
    except urllib.error.HTTPError as busy:
        return " ".join(busy.read().decode("utf-8", "replace").split())
    except OSError:
        return "starting"


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
