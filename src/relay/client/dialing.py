"""TCP to a host by its name, within a deadline that counts the look-up too.

Knows no WebSocket, no TLS and no proxy.
"""

from __future__ import annotations

import ipaddress
import os
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from time import monotonic
from typing import TypeVar

from relay.client.cutoff import LOOK_S, Cutoff

T = TypeVar("T")


def dialled(host: str, port: int, deadline: float, cutoff: Cutoff) -> socket.socket:
    """A connection to the first of the host's addresses that answers.

    Raises:
        TimeoutError: none did before the deadline of `time.monotonic()`.
        OSError: the host is unknown, or none of its addresses can be connected to.
        Abandoned: it was cut off.
    """
    failure: OSError = OSError(f"no address for {host}")
    addresses = _addresses(host, port, deadline, cutoff)
    for number, address in enumerate(addresses):
        try:
            return connected(address, port, share_of(deadline, len(addresses) - number), cutoff)
        except OSError as error:
            failure = error
    raise failure


def connected(address: str, port: int, deadline: float, cutoff: Cutoff) -> socket.socket:
    """A connection to an IP address, as `socket.create_connection` makes it, but for the cutoff."""
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    family, kind, protocol, _, end = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        with suppress(BlockingIOError):
            sock.connect(end)
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_WRITE)
            while not selector.select(min(LOOK_S, _remaining(deadline))):
                cutoff.check()
        failure = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            raise OSError(failure, os.strerror(failure))
        sock.settimeout(_remaining(deadline))
    except BaseException:
        sock.close()
        raise
    return sock


def resolve(host: str, port: int) -> Sequence[str]:
    """The IP addresses of a host, the preferred one first."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def in_background(look_up: Callable[[], T]) -> Future[T]:
    """The result of a look-up in a thread of its own: the system's resolver can be neither hurried nor stopped."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(look_up())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="relay-resolve", daemon=True).start()
    return future


def share_of(deadline: float, left: int) -> float:
    """The deadline for TCP to one address when `left` of them, this one included, are to be tried."""
    return monotonic() + (deadline - monotonic()) / left


def _addresses(host: str, port: int, deadline: float, cutoff: Cutoff) -> Sequence[str]:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return [host]  # needs no look-up, and no thread
    looking = in_background(lambda: resolve(host, port))
    while monotonic() < deadline:
        if wait((looking,), min(LOOK_S, deadline - monotonic())).done:
            return looking.result()
        cutoff.check()
    raise TimeoutError(f"the look-up of {host} took too long")


def _remaining(deadline: float) -> float:
    seconds = deadline - monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out while opening the connection")
    return seconds
