"""The blocking clients' common half: one connection, used by one thread at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from relay.client.connection import Connection
from relay.client.exchange import RESET, Exchange, check_reset, check_timeout
from relay.protocol.images import Codec


class Conversation:
    """Questions and answers over an open connection, which it owns.

    Raises:
        RuntimeError: the server serves no policy; the connection is then closed.
    """

    def __init__(self, connection: Connection, codec: Codec) -> None:
        self._connection = connection
        try:
            self.exchange = Exchange(connection.greeting, codec)
        except BaseException:
            connection.close()
            raise
        self._in_use = threading.Lock()
        self._process = os.getpid()

    def infer(self, observation: Mapping[str, Any], timeout: float | None) -> NDArray[Any] | dict[str, Any]:
        """The reply to one observation, an error map included; raises as `Exchange` and `Connection` do."""
        check_timeout("timeout", timeout)
        self._check_caller()
        with self._in_use:
            request = self.exchange.encode(observation)
            try:
                reply = self._connection.request(request.message, timeout)
            except TimeoutError:
                self.exchange.give_up(request)
                raise
            return self.exchange.decode(request, reply, self._connection.late_replies)

    def reset(self, timeout: float | None) -> None:
        """Have the server forget this connection's sessions, if it has any."""
        check_timeout("timeout", timeout)
        self._check_caller()
        with self._in_use:
            self.exchange.forget_sessions()
            if self.exchange.peer.resets:
                check_reset(self._connection.request(RESET, timeout))

    def close(self) -> None:
        """Close the connection; may be called from any thread, and again."""
        self._connection.close()

    def _check_caller(self) -> None:
        """Say so if two threads call at once; should both pass nevertheless, the lock makes them take turns.

        The lock is not taken here: between that and the `with` block, Ctrl-C could leave it taken for ever.
        """
        if os.getpid() != self._process:
            # Two processes on one connection would read each other's actions.
            raise RuntimeError("this policy was opened before a fork: open one of its own in each process")
        if self._in_use.locked():
            raise RuntimeError(
                "this policy is busy in another thread: a policy serves one thread at a time, "
                "so give each thread its own or take turns under a lock"
            )
