"""Ports of 127.0.0.1 that stay free until a test uses them, whatever other tests run beside it."""

from __future__ import annotations

import socket
import sys

_RESERVED: list[socket.socket] = []


def free_port() -> int:
    """A port where nobody listens, reserved for this process; connecting is refused until a test's server is there."""
    port, reservation = reserved_port()
    _RESERVED.append(reservation)
    return port


def reserved_port() -> tuple[int, socket.socket]:
    """A port where nobody listens, and what reserves it until it is closed.

    On Linux no other program is given a port that is bound; a server may still listen there, since both sides set
    SO_REUSEADDR, as asyncio, nginx and HAProxy do. Elsewhere that is not so, and the port is only likely to stay free.
    """
    reservation = socket.socket()
    if sys.platform == "linux":
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    port = reservation.getsockname()[1]
    if sys.platform != "linux":
        reservation.close()
    return port, reservation
