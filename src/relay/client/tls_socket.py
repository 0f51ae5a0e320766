"""A TLS socket that one thread may read while another writes, as `websockets`' blocking client does.

OpenSSL forbids both at once on one connection (its manual, "Thread safety" of SSL objects), and Python does not prevent
it. With TLS 1.3 it happens right at the start: the server's session tickets arrive while the upgrade request is being
sent. One connection in about a thousand then hung for good, with every release of `websockets` from 13 to 17.
"""

from __future__ import annotations

import selectors
import ssl
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")

# Neither limits file descriptors to 1,024 where that can be avoided, nor opens one of its own.
_Selector: type[selectors.BaseSelector] = getattr(selectors, "PollSelector", selectors.SelectSelector)


_LOOK_AGAIN_S: Final = 1.0
"""Another thread may have closed the socket, and another connection got its number, before the waiting began."""


class TurnTakingSocket(ssl.SSLSocket):
    """Reads and writes take turns, and neither waits for the network during its turn."""

    _turn: threading.Lock | None = None  # until the handshake is done
    _patience: float | None = None

    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        self._turn = threading.Lock()

    def settimeout(self, value: float | None) -> None:
        """After the handshake the socket itself never blocks: this class does the waiting."""
        self._patience = value
        super().settimeout(value if self._turn is None else 0.0)

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        return self._in_turn(lambda: super(TurnTakingSocket, self).recv(buflen, flags))

    def send(self, data: Any, flags: int = 0) -> int:
        return self._in_turn(lambda: super(TurnTakingSocket, self).send(data, flags))  # `sendall` comes here too

    def _in_turn(self, call: Callable[[], T]) -> T:
        assert self._turn is not None, "the handshake comes first"
        while True:
            with self._turn:
                try:
                    return call()
                except ssl.SSLWantReadError:
                    awaited = selectors.EVENT_READ
                except ssl.SSLWantWriteError:
                    awaited = selectors.EVENT_WRITE
            with _Selector() as selector:
                selector.register(self, awaited)
                ready = selector.select(_LOOK_AGAIN_S if self._patience is None else self._patience)
            if not ready and self._patience is not None:
                raise TimeoutError("timed out")
