"""TCP to a host by its name, within a deadline that counts the look-up too.

Knows no WebSocket, no TLS and no proxy.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from time import monotonic
from typing import TypeVar

T = TypeVar("T")


def dialled(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to the first of the host's addresses that answers.

    Raises:
        TimeoutError: none did before the deadline of `time.monotonic()`.
        OSError: the host is unknown, or none of its addresses can be connected to.
    """
    failure: OSError = OSError(f"no address for {host}")
    addresses = _addresses(host, port, deadline)
    for number, address in enumerate(addresses):
        try:
            until = share_of(deadline, len(addresses) - number)
            return socket.create_connection((address, port), timeout=_remaining(until))
        except OSError as error:
            failure = error
    raise failure


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


def _addresses(host: str, port: int, deadline: float) -> Sequence[str]:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return [host]  # needs no look-up, and no thread
    try:
        return in_background(lambda: resolve(host, port)).result(_remaining(deadline))
    except FutureTimeoutError:  # a class of its own until Python 3.11
        raise TimeoutError(f"the look-up of {host} took too long") from None


def _remaining(deadline: float) -> float:
    seconds = deadline - monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out while opening the connection")
    return seconds
