"""Ending the opening of a connection from another thread, wherever it stands: look-up, TCP, proxy, TLS or upgrade.

Knows no address and no protocol.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Final

LOOK_S: Final = 0.1
"""How long a wait that nothing can wake goes on before it looks whether it is in vain."""


class Abandoned(Exception):
    """Nobody waits for the connection any more."""


class Cutoff:
    """Whether a connection is still wanted; `cut` may come from any thread, and stays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._guarded: socket.socket | None = None

    @property
    def is_cut(self) -> bool:
        """Whether it was ended."""
        return self._event.is_set()

    def cut(self) -> None:
        """End the opening that is under way, and any later one at its beginning."""
        with self._lock:
            self._event.set()
            if self._guarded is not None:
                with suppress(OSError):  # the peer was faster
                    self._guarded.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise `Abandoned` if it was ended."""
        if self._event.is_set():
            raise Abandoned

    def sleep(self, seconds: float) -> None:
        """Wait; raise `Abandoned` as soon as that is in vain."""
        if self._event.wait(seconds):
            raise Abandoned

    @contextmanager
    def guarding(self, sock: socket.socket) -> Generator[None]:
        """Within the block `cut` ends this TCP connection, so that whoever reads from it goes on at once.

        Raises:
            Abandoned: it was ended before; the socket is closed then.
        """
        try:
            guarded = sock.dup()  # TLS takes the socket itself over
        except BaseException:
            sock.close()
            raise
        try:
            with self._lock:
                self._guarded = guarded
            if self._event.is_set():
                sock.close()
                raise Abandoned
            yield
        finally:
            with self._lock:
                self._guarded = None
                guarded.close()
