"""The direct route past a proxy: what a client is told of it, and the tickets that open it.

A client that came through a proxy learns this process's own address and gets a ticket for it. Knows no socket.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from relay.protocol.direct_route import CERT_KEY, RESPONSE_HEADERS, TICKET_KEY, URL_KEY

TICKET_S = 30.0
"""How long a ticket holds, from the metadata frame of the connection that it was given to; loading does not count."""


@dataclass(slots=True, eq=False)
class Ticket:
    """Opens one connection to this process.

    Attributes:
        text: as it travels.
        tenant: whose connection it was given to, and for whom the next one counts.
        holder: that connection, while it is there.
        expires: by the issuer's clock; None before the holder's metadata frame is sent.
    """

    text: str = field(repr=False)
    tenant: str = field(repr=False)
    holder: Callable[[], Any]
    expires: float | None = None


class Tickets:
    """Issues tickets and takes them back, each once; no other process can make or check them.

    Args:
        instance_id: of this process.
        most: how many are kept; beyond that the oldest of the same tenant is forgotten, or the oldest of all if it has
            none. Its client stays where it is.
        clock: seconds, never going back.
    """

    def __init__(self, instance_id: str, most: int, clock: Callable[[], float] = monotonic) -> None:
        self._instance_id = instance_id
        self._most = most
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._issued: dict[str, Ticket] = {}  # by nonce, the oldest first

    def __len__(self) -> int:
        return len(self._issued)

    def issue(self, tenant: str, holder: object) -> Ticket:
        """A ticket for a connection's client, which holds from `begin` on."""
        while self._issued:
            oldest, ticket = next(iter(self._issued.items()))
            if ticket.expires is None or ticket.expires > self._clock():
                break
            del self._issued[oldest]
        if len(self._issued) >= self._most:
            tenants = ((nonce, ticket.tenant) for nonce, ticket in self._issued.items())
            own = (nonce for nonce, its in tenants if its == tenant)  # nobody can have another tenant's forgotten
            del self._issued[next(own, next(iter(self._issued)))]
        nonce = secrets.token_urlsafe(16)
        ticket = Ticket(f"{nonce}.{self._signature(nonce, tenant)}", tenant, weakref.ref(holder))
        self._issued[nonce] = ticket
        return ticket

    def begin(self, ticket: Ticket) -> None:
        """Start a ticket's time: its client is being told that the policy can serve."""
        ticket.expires = self._clock() + TICKET_S

    def redeem(self, text: str) -> Ticket | None:
        """The ticket with this text, which is then used up; None if it is unknown, used, expired, or not begun."""
        nonce = text.partition(".")[0]
        ticket = self._issued.get(nonce)
        if ticket is None or ticket.expires is None:
            return None
        expected = f"{nonce}.{self._signature(nonce, ticket.tenant)}"
        if not hmac.compare_digest(expected.encode(), text.encode(errors="surrogatepass")):
            return None
        del self._issued[nonce]
        return ticket if self._clock() < ticket.expires else None

    def _signature(self, nonce: str, tenant: str) -> str:
        said = "\n".join((self._instance_id, tenant, nonce))  # none of which holds a line break
        return hmac.new(self._key, said.encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Invitation:
    """What one client is told of the direct route.

    Attributes:
        url: the address that leads to the policy and the dialect that it asked for.
        ticket: None for a client that is there already.
        cert_sha256: of the certificate it will meet there, where it is to check that instead of an authority.
    """

    url: str
    ticket: Ticket | None
    cert_sha256: str | None

    def keys(self) -> Mapping[str, str]:
        """For the metadata map of vLLM-Omni's path."""
        ticket = self.ticket.text if self.ticket else None
        told = {URL_KEY: self.url, TICKET_KEY: ticket, CERT_KEY: self.cert_sha256}
        return {key: value for key, value in told.items() if value is not None}

    def headers(self) -> Mapping[str, str]:
        """The same for the response to the upgrade on OpenPI's path."""
        return {RESPONSE_HEADERS[key]: value for key, value in self.keys().items()}


@dataclass(slots=True, eq=False)
class Guest:
    """Who opened a connection, and by which right.

    Attributes:
        tenant: the API key's, also where a ticket took its place; empty on a server without keys.
        ticket: the one that it came with; None for a key, or for nothing.
        invitation: what it is told of the direct route.
    """

    tenant: str = field(repr=False)
    ticket: Ticket | None = None
    invitation: Invitation | None = None

    @property
    def predecessor(self) -> Any:
        """The connection that this one takes the place of, if that is still there."""
        return self.ticket.holder() if self.ticket else None
