"""The direct route: leave the proxy between robot and server for the server's own address, where it offers one.

Decides for all clients whether an offer is taken, and makes the blocking ones' change. A hostile server could write any
address into its offer, so the rules here say which are tried at all; and nothing of the caller's goes there. The
connection that works is given up only for one that has proved to lead to the same process.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, Protocol, cast

from websockets.exceptions import InvalidStatus, InvalidURI

from relay.client.access import Access, address_of, shown
from relay.client.connection import Greeting, WebSocketConnection, remaining, upgrade
from relay.client.dialing import in_background, resolve, share_of
from relay.client.peer import on_vllm_path, read_metadata
from relay.client.pinned_tls import trusting_only
from relay.protocol.direct_route import (
    CERT_KEY,
    INSTANCE_KEY,
    RESPONSE_HEADERS,
    TICKET_HEADER,
    TICKET_KEY,
    URL_KEY,
    is_sha256,
    read_direct_url,
)
from relay.protocol.wording import quoted
from relay.protocol.wording import shown as worded

logger = logging.getLogger("relay.client")

BUDGET_S: Final = 2.0
"""For DNS, TCP, TLS, upgrade and first frame together."""

FAILED_FOR_S: Final = 300.0
"""How long an address that failed is not tried again, so that a client which reconnects does not pay each time."""

MOST_FAILED: Final = 64
LONGEST_TICKET: Final = 1_024
LONGEST_INSTANCE_ID: Final = 256


class NoDirectRoute(Exception):
    """The direct route is not taken; the text says why."""


@dataclass(frozen=True, slots=True)
class DirectOffer:
    """The direct route as a server offers it.

    Attributes:
        url: its address.
        ticket: opens it, once; None if the server gave none.
        cert_sha256: digest of the certificate to be met there; None has an authority vouch for it.
        instance_id: of the process that is to be met there.
    """

    url: str
    ticket: str | None = field(repr=False)
    cert_sha256: str | None
    instance_id: str

    @property
    def headers(self) -> Mapping[str, str]:
        """All that is sent there, beside what belongs to the protocol."""
        return {} if self.ticket is None else {TICKET_HEADER: self.ticket}

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = address_of(self.url)
        return parts.host, parts.port

    def access(self, access: Access) -> Access:
        """Which certificates are trusted there: the one that was announced, else those that the caller trusts."""
        return access if self.cert_sha256 is None else Access(trusting_only(self.cert_sha256))


class HasGreeting(Protocol):
    """A connection of either kind, greeted."""

    @property
    def greeting(self) -> Greeting: ...

    @property
    def peer_address(self) -> str:
        """The IP address at its other end."""
        ...


class FailedAddresses:
    """Addresses that led nowhere, for a while; safe to use from any thread."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._until: dict[tuple[str, int], float] = {}
        self._lock = threading.Lock()

    def add(self, address: tuple[str, int]) -> None:
        """Remember that this one failed just now."""
        with self._lock:
            self._until.pop(address, None)
            self._until[address] = self._clock() + FAILED_FOR_S
            if len(self._until) > MOST_FAILED:
                del self._until[next(iter(self._until))]

    def __contains__(self, address: object) -> bool:
        with self._lock:
            return self._clock() < self._until.get(cast("tuple[str, int]", address), 0.0)

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            self._until.clear()


failed_addresses: Final = FailedAddresses()
"""Those of this process."""


def moved(connection: WebSocketConnection, access: Access, timeout: float | None) -> WebSocketConnection:
    """The same connection, or a direct one to the same process in its place, which is closed then.

    To be called before the first observation, so that no session has to move. Does not fail: what goes wrong on the
    direct route is logged in one line, and the connection that was given stays.

    Args:
        connection: greeted.
        timeout: seconds that are left for connecting, if fewer than the budget; None for no limit.
    """
    try:
        offer = direct_offer(connection, access)
        if offer is None:
            return connection
        with Attempt(offer, connection, timeout) as attempt:
            direct = _open(offer, connection.peer_address, access, attempt.deadline)
    except NoDirectRoute as reason:
        log_staying(connection, reason)
        return connection
    except BaseException:  # Ctrl-C
        connection.close()
        raise
    log_moved(direct, connection)
    close_behind(connection)
    return direct


def direct_offer(connection: HasGreeting, access: Access) -> DirectOffer | None:
    """What a greeted connection's server offers; None if it offers nothing, or the caller does not want it.

    Raises:
        NoDirectRoute: it is not to be tried.
    """
    greeting = connection.greeting
    if not access.direct:
        return None
    told = _told(greeting)
    if told.get(URL_KEY) is None:
        return None
    offer = _checked(told, greeting.url)
    if access.proxy is not None:
        raise NoDirectRoute(f"an HTTP proxy was asked for, which {shown(offer.url)} would pass by")
    if offer.address in failed_addresses:
        raise NoDirectRoute(f"{shown(offer.url)} failed less than {FAILED_FOR_S / 60:g} minutes ago")
    return offer


class Attempt:
    """One try of an offer: its time, and one sentence for whatever goes wrong, after which it is not tried again soon.

    Raises:
        NoDirectRoute: in the place of any error within its block.
    """

    def __init__(self, offer: DirectOffer, connection: HasGreeting, timeout: float | None) -> None:
        self._offer = offer
        self._began = monotonic()
        self._budget = BUDGET_S if timeout is None else min(BUDGET_S, timeout)
        self.deadline = self._began + self._budget

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, Exception):
            return
        late = isinstance(error, (TimeoutError, FutureTimeoutError)) or monotonic() >= self.deadline
        if not late or self._budget == BUDGET_S:  # else it was the caller who had no time
            failed_addresses.add(self._offer.address)
        reason = f"no answer within {self._budget:g} s" if late else _reason(error)
        raise NoDirectRoute(f"{shown(self._offer.url)}: {reason}") from error


def check_instance(offer: DirectOffer, greeting: Greeting) -> None:
    """Make sure that the offer led to the process that made it, and that this one serves.

    Raises:
        NoDirectRoute: it did not.
    """
    try:
        found = _told(greeting, refusing=True).get(INSTANCE_KEY)
    except RuntimeError as error:
        raise NoDirectRoute(f"its first frame is no metadata: {quoted(str(error), 200)}") from None
    if not isinstance(found, str) or found != offer.instance_id:
        raise NoDirectRoute(f"another process answers there: instance_id is {worded(found)}, not {offer.instance_id}")


def resolving(offer: DirectOffer) -> Future[Sequence[str]]:
    """The offer's IP addresses, the preferred one first, when they are known."""
    return in_background(lambda: resolve(*offer.address))


def permitted(addresses: Sequence[str], peer: str) -> Sequence[str]:
    """Those of an offer's IP addresses that may be tried: public ones, and neighbours of the server known so far.

    A server elsewhere must not have the client connect to what only the client's own network can reach, such as a
    router's page or a cloud's metadata service.

    Args:
        peer: the IP address of the connection over which the offer came.

    Raises:
        NoDirectRoute: none may.
    """
    near = address_class(peer)
    allowed = [address for address in addresses if (kind := address_class(address)) == "public" or kind == near]
    if not allowed:
        kinds = ", ".join(f"{address} ({address_class(address)})" for address in addresses[:4]) or "no address at all"
        raise NoDirectRoute(f"it leads to {kinds}, and the server it came from is {peer} ({near})")
    return allowed


def address_class(address: str) -> str:
    """loopback, link-local, private, multicast, unspecified or public; of an IPv4 address within IPv6, that one's."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        embedded = ip.ipv4_mapped or ip.sixtofour or (_last_32_bits(ip) if ip in _NAT64 else None)
        ip = embedded or ip
    if ip.is_unspecified:
        return "unspecified"
    if ip.is_multicast:
        return "multicast"
    if ip.is_loopback:
        return "loopback"
    if ip.is_link_local:
        return "link-local"
    local = ip.is_private or ip.is_reserved or not ip.is_global or getattr(ip, "is_site_local", False)
    return "private" if local else "public"


def log_moved(direct: HasGreeting, proxied: HasGreeting) -> None:
    """Say that the direct route is in use."""
    logger.info("took the direct route %s, offered by %s", shown(direct.greeting.url), shown(proxied.greeting.url))


def log_staying(connection: HasGreeting, reason: NoDirectRoute) -> None:
    """Say that it is not, and why."""
    logger.warning("no direct route, staying with %s: %s", shown(connection.greeting.url), reason)


def close_behind(connection: WebSocketConnection) -> None:
    """Close a connection that nobody waits for, whose peer may take its time."""
    threading.Thread(target=connection.close, name="relay-leave", daemon=True).start()


def _open(offer: DirectOffer, peer: str, access: Access, deadline: float) -> WebSocketConnection:
    addresses = permitted(resolving(offer).result(remaining(deadline)), peer)
    sock = _connected_socket(addresses, offer.address[1], deadline)
    websocket = upgrade(sock, offer.url, offer.headers, deadline, offer.access(access))
    connection = WebSocketConnection(websocket, offer.url, direct=True)
    try:
        connection.read_greeting(remaining(deadline))
        check_instance(offer, connection.greeting)
    except BaseException:
        close_behind(connection)
        raise
    return connection


def _connected_socket(addresses: Sequence[str], port: int, deadline: float) -> socket.socket:
    failure: OSError = OSError("no address")
    for number, address in enumerate(addresses):
        try:
            until = share_of(deadline, len(addresses) - number)
            return socket.create_connection((address, port), timeout=remaining(until))
        except OSError as error:
            failure = error
    raise failure


def _told(greeting: Greeting, *, refusing: bool = False) -> Mapping[str, Any]:
    """What the server says of itself: in the metadata map on vLLM-Omni's path, in the response's headers elsewhere.

    Raises:
        RuntimeError: if `refusing`, the first frame is no metadata; without it, nothing is told then.
    """
    try:
        metadata = read_metadata(greeting)
    except RuntimeError:
        if refusing:
            raise
        return {}
    if on_vllm_path(greeting):
        return metadata
    return {key: greeting.headers.get(name.lower()) for key, name in RESPONSE_HEADERS.items()}


def _checked(told: Mapping[str, Any], first_url: str) -> DirectOffer:
    """The offer in what a server says of itself, which may be anything."""
    try:
        url = read_direct_url(told[URL_KEY]).geturl()
        secure = address_of(url).secure
    except (ValueError, InvalidURI) as error:
        raise NoDirectRoute(str(error)) from None
    if address_of(first_url).secure and not secure:
        raise NoDirectRoute(f"{shown(url)} is not encrypted, and {shown(first_url)} is")
    ticket, digest = told.get(TICKET_KEY), told.get(CERT_KEY)
    instance_id: Any = told.get(INSTANCE_KEY)
    if ticket is not None and not _is_word(ticket, LONGEST_TICKET):
        raise NoDirectRoute("direct_ticket is nothing that a header could carry")
    if digest is not None and not (secure and is_sha256(digest)):
        raise NoDirectRoute(f"direct_cert_sha256 is {worded(digest)}; expected 64 hexadecimal digits, and wss://")
    if not _is_word(instance_id, LONGEST_INSTANCE_ID):
        raise NoDirectRoute(f"instance_id is {worded(instance_id)}; the server could not be known again by that")
    return DirectOffer(url, ticket, digest, instance_id)


def _is_word(value: object, longest: int) -> bool:
    """Whether this is text in printable ASCII without spaces."""
    return isinstance(value, str) and 0 < len(value) <= longest and all("!" <= letter <= "~" for letter in value)


def _reason(error: Exception) -> str:
    for status in (error, error.__cause__, error.__context__):
        if isinstance(status, InvalidStatus):
            return f"HTTP {status.response.status_code}"  # redirects too, which are not followed here
    if isinstance(error, socket.gaierror):
        return f"unknown host: {error.strerror}"
    if isinstance(error, (OSError, NoDirectRoute)):
        return quoted(getattr(error, "strerror", None) or str(error), 300)[1:-1]
    return quoted(f"{type(error).__name__}: {error}", 300)[1:-1]


def _last_32_bits(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address:
    return ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)


_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
