"""The asyncio twin of `direct_route`: the same rules, over asyncio connections.

Its own module, so that programs that never ask for it never load asyncio.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from relay.client.access import Access
from relay.client.async_connection import AsyncWebSocketConnection, connected_socket, upgrade, within
from relay.client.connection import remaining
from relay.client.dialing import share_of
from relay.client.direct_route import (
    Attempt,
    DirectOffer,
    NoDirectRoute,
    check_instance,
    direct_offer,
    log_moved,
    log_staying,
    permitted,
    resolving,
)

_leaving: set[asyncio.Task[None]] = set()


async def moved(
    connection: AsyncWebSocketConnection, access: Access, timeout: float | None
) -> AsyncWebSocketConnection:
    """The same connection, or a direct one to the same process in its place; as `direct_route.moved`."""
    try:
        offer = direct_offer(connection, access)
        if offer is None:
            return connection
        with Attempt(offer, connection, timeout) as attempt:
            direct = await _open(offer, connection.peer_address, access, attempt.deadline)
    except NoDirectRoute as reason:
        log_staying(connection, reason)
        return connection
    except BaseException:  # cancelled
        await connection.close()
        raise
    log_moved(direct, connection)
    close_behind(connection)
    return direct


def close_behind(connection: AsyncWebSocketConnection) -> None:
    """Close a connection that nobody waits for, whose peer may take its time."""
    leaving = asyncio.create_task(connection.close())
    _leaving.add(leaving)
    leaving.add_done_callback(_leaving.discard)


async def _open(offer: DirectOffer, peer: str, access: Access, deadline: float) -> AsyncWebSocketConnection:
    found = await within(remaining(deadline), asyncio.wrap_future(resolving(offer)))
    sock = await _connected_socket(permitted(found, peer), offer.address[1], deadline)
    websocket = await upgrade(sock, offer.url, offer.headers, deadline, offer.access(access))
    connection = AsyncWebSocketConnection(websocket, offer.url, direct=True)
    try:
        await connection.read_greeting(remaining(deadline))
        check_instance(offer, connection.greeting)
    except BaseException:
        close_behind(connection)
        raise
    return connection


async def _connected_socket(addresses: Sequence[str], port: int, deadline: float) -> socket.socket:
    failure: OSError = OSError("no address")
    for number, address in enumerate(addresses):
        try:
            until = share_of(deadline, len(addresses) - number)
            return await within(remaining(until), connected_socket(address, port))
        except OSError as error:
            failure = error
    raise failure
