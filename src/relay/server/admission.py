"""Who may open a connection: keys, tickets, the Origin of web pages, the Host asked for, and where the port is bound.

Decides from the request's headers alone, before the upgrade. Knows no path, no policy and no limit.

About the Host header: it is compared wherever `--allowed-host` is given, and nowhere else. DNS rebinding, which it is
there to stop, needs a browser, and a browser states the page's Origin whenever it opens a WebSocket; that is refused
unless it is listed. So a loopback server needs no list of hosts, which a proxy in front of it, passing on the public
name, would fail.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from websockets.datastructures import Headers

from relay.protocol.direct_route import TICKET_HEADER
from relay.server.api_keys import ApiKeys
from relay.server.direct_route import Guest, Tickets

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rejection:
    """An HTTP answer instead of the upgrade, in words that are safe for any reader."""

    status: HTTPStatus
    text: str


class Admission:
    """The conditions of one server.

    Args:
        api_keys: one of them must come with each upgrade, if there are any, or a ticket in its place.
        tickets: those of this process.
        allowed_origins: web pages that may connect, as `scheme://host[:port]`; requests without an Origin always may.
        allowed_hosts: names under which the server answers, without ports; empty for any name.
    """

    def __init__(
        self, api_keys: ApiKeys, tickets: Tickets, allowed_origins: Iterable[str], allowed_hosts: Iterable[str]
    ) -> None:
        self._api_keys = api_keys
        self._tickets = tickets
        self._origins = frozenset(allowed_origins)
        self._hosts = frozenset(map(_host, allowed_hosts))

    def admit(self, headers: Headers, *, tickets_only: bool = False) -> Guest | Rejection:
        """Who asks for this upgrade, or why it is refused. A ticket that comes is used up, and has to be right.

        Args:
            tickets_only: a key does not do.
        """
        if self._hosts and not self._is_known_host(headers.get_all("Host")):
            return Rejection(HTTPStatus.MISDIRECTED_REQUEST, "This server does not answer under that host name.\n")
        if any(origin not in self._origins for origin in headers.get_all("Origin")):
            return Rejection(HTTPStatus.FORBIDDEN, "Web pages of that origin may not connect to this server.\n")
        if tickets_only or TICKET_HEADER in headers:
            return self._with_ticket(headers.get_all(TICKET_HEADER))
        tenant = self._tenant(headers.get_all("Authorization")) if self._api_keys else ""
        if tenant is None:
            return Rejection(
                HTTPStatus.UNAUTHORIZED,
                "An API key of this server is needed, as 'Authorization: Api-Key <key>' or 'Bearer <key>'.\n",
            )
        return Guest(tenant)

    def _with_ticket(self, values: Sequence[str]) -> Guest | Rejection:
        ticket = self._tickets.redeem(values[0]) if len(values) == 1 else None
        if ticket is None or not self._api_keys.still_hold(ticket.tenant):
            text = f"A ticket of this server is needed, as '{TICKET_HEADER}: <ticket>'; it holds once, for 30 s.\n"
            return Rejection(HTTPStatus.UNAUTHORIZED, text)
        return Guest(ticket.tenant, ticket)

    def _is_known_host(self, hosts: Sequence[str]) -> bool:
        return len(hosts) == 1 and _host(hosts[0]) in self._hosts

    def _tenant(self, values: Sequence[str]) -> str | None:
        if len(values) != 1:
            return None
        scheme, _, key = values[0].strip().partition(" ")
        return self._api_keys.tenant(key.strip()) if scheme.lower() in ("api-key", "bearer") else None


class Exposed(RuntimeError):
    """The port would be open to other machines, and nothing would keep them out."""


def check_exposure(addresses: Iterable[str], api_keys: ApiKeys, insecure: bool) -> None:
    """Make sure that a port beyond loopback has a key, or the operator's word that none is needed.

    Args:
        addresses: IP addresses that were really bound.

    Raises:
        Exposed: naming the address and both remedies.
    """
    beyond = [address for address in addresses if not is_loopback(address)]
    if beyond and not api_keys and not insecure:
        raise Exposed(
            f"on {beyond[0]} every machine that reaches this port could drive the policy: give API keys "
            "(--api-keys-file FILE or RELAY_API_KEYS), or --insecure if the network itself keeps strangers out"
        )


def is_loopback(address: str) -> bool:
    """Whether an IP address, with or without an IPv6 zone, can be reached from this machine only."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def bound_addresses(sockets: Iterable[socket.socket]) -> list[tuple[str, int]]:
    """Address and port of each listening socket."""
    return [sock.getsockname()[:2] for sock in sockets]


def log_terms(bound: Sequence[tuple[str, int]], api_keys: ApiKeys, *, tls: bool) -> None:
    """Say where the server listens and who may come; warn of what an operator may not be aware of.

    Args:
        bound: addresses and ports that were really bound.
        tls: clients connect with TLS.
    """
    for address, port in bound:
        host = f"[{address}]" if ":" in address else address
        logger.info("listening on %s://%s:%d", "wss" if tls else "ws", host, port)
    if api_keys:
        logger.info("clients need one of %d API keys", len(api_keys))
    if all(is_loopback(address) for address, _ in bound):
        return
    if not api_keys:
        logger.warning("no API key is asked for: every machine that reaches this port can drive the policy")
    elif not tls:
        logger.warning("API keys reach this port in clear text: use --tls-cert and --tls-key, or a proxy that ends TLS")


def log_direct_route(url: str, bound: Sequence[tuple[str, int]], *, tls: bool) -> None:
    """Say what clients are told of the direct route, and where its own port is, if it has one."""
    ports = ", ".join(f"{f'[{address}]' if ':' in address else address}:{port}" for address, port in bound)
    logger.info("clients are told of the direct route %s%s", url, f", which opens on {ports}" if ports else "")
    if not tls and not all(is_loopback(address) for address, _ in bound):
        logger.warning("tickets reach this port in clear text: use --direct-tls-cert and --direct-tls-key")


def checked_origin(origin: str) -> str:
    """An origin to allow, as browsers write it.

    Raises:
        ValueError: it is none, and would never match.
    """
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/A-Z]+", origin):
        raise ValueError(
            f"allowed_origin is {origin!r}; expected scheme://host or scheme://host:port in lower case, without a path"
        )
    return origin


def checked_host(host: str) -> str:
    """A host name or address to allow.

    Raises:
        ValueError: it has a port or a path, and would never match.
    """
    if not re.fullmatch(r"[\w.-]+|\[[0-9a-fA-F:.]+\]", host):
        raise ValueError(f"allowed_host is {host!r}; expected a name or an address without a port, IPv6 in brackets")
    return host


def _host(header: str) -> str:
    """The host of `name:port`, `1.2.3.4:port` or `[::1]:port`, for comparison."""
    return re.sub(r":\d*$", "", header.strip()).lower()
