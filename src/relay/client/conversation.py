"""The blocking clients' common half: one connection, used by one thread at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray
from websockets.exceptions import ConnectionClosed

from relay.client.access import shown
from relay.client.connection import Connection
from relay.client.exchange import RESET, Exchange, check_process, check_reset, check_timeout
from relay.client.reconnect import Call, Gaps, bridge, check_same_policy
from relay.protocol.images import Codec


class Conversation:
    """Questions and answers over an open connection, which it owns.

    Args:
        connection: what it begins with.
        gaps: how lost connections are made again; None leaves them lost.

    Raises:
        RuntimeError: the server serves no policy; the connection is then closed.
    """

    def __init__(self, connection: Connection, codec: Codec, gaps: Gaps | None = None) -> None:
        self._connection = connection
        self._codec = codec
        self._gaps = gaps
        self._closed = False
        try:
            self.exchange = Exchange(connection.greeting, codec)
        except BaseException:
            connection.close()
            raise
        self._in_use = threading.Lock()
        self._process = os.getpid()

    @property
    def reconnects(self) -> int:
        """How many lost connections were made again."""
        return 0 if self._gaps is None else self._gaps.bridged

    def infer(self, observation: Mapping[str, Any], timeout: float | None) -> NDArray[Any] | dict[str, Any]:
        """The reply to one observation, an error map included; raises as `Exchange` and `Connection` do."""
        check_timeout("timeout", timeout)
        self._check_caller()
        with self._in_use:
            call = Call(timeout)
            while True:
                self._bridge_gap(call)
                try:
                    return self._ask(observation, call)
                except ConnectionClosed as loss:
                    self._note_loss(loss).check_repeatable(loss, call, self._connection.unsent)

    def reset(self, timeout: float | None) -> None:
        """Have the server forget this connection's sessions, if it has any."""
        check_timeout("timeout", timeout)
        self._check_caller()
        with self._in_use:
            self.exchange.forget_sessions()
            if self._gaps is not None and self._gaps.loss is not None and not self._closed:
                return  # the sessions ended with their connection
            if self.exchange.peer.resets:
                try:
                    check_reset(self._connection.request(RESET, timeout))
                except ConnectionClosed as loss:
                    self._note_loss(loss)

    def _ask(self, observation: Mapping[str, Any], call: Call) -> NDArray[Any] | dict[str, Any]:
        request = self.exchange.encode(observation, call.began)
        try:
            reply = self._connection.request(request.message, call.remaining)
        except TimeoutError as error:
            self.exchange.give_up(request)
            raise call.overdue(error) from error.__cause__
        if self._gaps is not None:
            self._gaps.settle()
            if self.exchange.closes_after(reply):
                self._connection.close()  # lest the next request is on its way when the server does
        return self.exchange.decode(request, reply, self._connection.late_replies)

    def _bridge_gap(self, call: Call) -> None:
        """Have a connection again, if it is lost."""
        if self._gaps is None or self._gaps.loss is None or self._closed:
            return
        connection = bridge(self._gaps, call)
        server = shown(connection.greeting.url)
        try:
            exchange = Exchange(connection.greeting, self._codec, self.exchange.last, again=True)
            check_same_policy(self.exchange.peer, exchange.peer, server)
        except BaseException:
            connection.close()
            raise
        self._connection, self.exchange = connection, exchange
        self._gaps.close(server)
        if self._closed:  # meanwhile, by another thread
            connection.close()

    def _note_loss(self, loss: ConnectionClosed) -> Gaps:
        """Begin a gap; raises `loss` where the connection is not to be made again."""
        if self._gaps is None or self._closed:
            raise loss
        self._gaps.open(loss)
        self._connection.close()  # what is left of it
        return self._gaps

    def close(self) -> None:
        """Close the connection; may be called from any thread, and again."""
        self._closed = True
        if os.getpid() != self._process:
            return  # the goodbye of a fork's copy would end the connection of the process that opened it
        if self._gaps is not None:
            self._gaps.waiting.abandon()
        self._connection.close()

    def _check_caller(self) -> None:
        """Say so if two threads call at once; should both pass nevertheless, the lock makes them take turns.

        The lock is not taken here: between that and the `with` block, Ctrl-C could leave it taken for ever.
        """
        check_process(self._process)
        if self._in_use.locked():
            raise RuntimeError(
                "this policy is busy in another thread: a policy serves one thread at a time, "
                "so give each thread its own or take turns under a lock"
            )
