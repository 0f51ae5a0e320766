"""What is answered before a connection is a WebSocket: health, metrics, refusals, and the headers of an upgrade.

Knows no listener, and counts no connections.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from http import HTTPStatus
from weakref import WeakKeyDictionary

from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from relay.protocol.direct_route import INSTANCE_HEADER, read_direct_url
from relay.protocol.limits import MAX_MESSAGE_BYTES, SUBPROTOCOL
from relay.server.admission import Admission, Rejection
from relay.server.connection import peer_name
from relay.server.dialects import VLLM_PATH, is_health_check, is_metrics, is_vllm
from relay.server.direct_route import Guest, Invitation, Tickets
from relay.server.log_limit import LimitedLog
from relay.server.metrics_page import MetricsPage
from relay.server.options import option_keys
from relay.server.policies import NotServed, Policies
from relay.server.settings import ServerSettings

IMAGE_FORMATS = ("jpeg", "png", "webp")
"""What an image slot may hold instead of an array, told by its first bytes."""

logger = logging.getLogger(__name__)


class Upgrades:
    """The answers of one server to HTTP requests, most of which ask for an upgrade to WebSocket.

    Args:
        settings: who is let in, and what is told of the direct route.
        policies: what the paths lead to, and whether it is ready.
        metrics: the page that may be asked for here.

    Attributes:
        instance_id: of this process, by which clients tell it from others.
        tickets: those of this process.
        guests: who opened a connection, of those that were let in.
        direct_cert_sha256: what clients are told of the certificate at the direct route's end; may be replaced.
    """

    def __init__(self, settings: ServerSettings, policies: Policies, metrics: MetricsPage) -> None:
        self._direct_url = settings.direct_url
        self._policies = policies
        self._metrics = metrics
        self.instance_id = secrets.token_hex(8)
        self.tickets = Tickets(self.instance_id, most=4 * settings.max_connections)
        self.guests: WeakKeyDictionary[ServerConnection, Guest] = WeakKeyDictionary()
        self.direct_cert_sha256 = settings.direct_cert_sha256
        self._admission = Admission(
            settings.api_keys, self.tickets, settings.allowed_origins, _answered_hosts(settings)
        )
        self._turned_away = LimitedLog(logger, "upgrades that were turned away")

    def answer(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer what is plain HTTP; None lets the upgrade go on (and refuses with 426 what asks for none)."""
        if is_health_check(request.path):
            status = self._policies.status
            if status.ready:
                return connection.respond(HTTPStatus.OK, "".join(f"{line}\n" for line in ("OK", *status.remarks)))
            text = f"loading\n{status.phase} {status.share:.0%}\n" if len(self._policies) else "no policy\n"
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, text)
        guest = self._admission.admit(request.headers)
        if isinstance(guest, Guest) and is_metrics(request.path):
            return self._metrics.on_main_port(connection, request)
        return self._welcome(connection, request, guest)

    def answer_direct(self, connection: ServerConnection, request: Request) -> Response | None:
        """The same for the direct route's own port, where there is nothing without a ticket."""
        guest = self._admission.admit(request.headers, tickets_only=True)
        return self._welcome(connection, request, guest)

    def _welcome(self, connection: ServerConnection, request: Request, guest: Guest | Rejection) -> Response | None:
        if isinstance(guest, Rejection):
            self._turned_away.log(logging.WARNING, "turned %s away: %s", peer_name(connection), guest.text.strip())
            return connection.respond(guest.status, guest.text)
        try:
            self._policies.at(request.path)
        except NotServed as error:
            return connection.respond(HTTPStatus.NOT_FOUND, f"{error}\n")
        self.guests[connection] = guest
        return None

    def add_headers(self, connection: ServerConnection, request: Request, response: Response) -> None:
        """Tell a relay client whom it speaks to and what it may send: OpenPI's metadata have no place for that."""
        if getattr(request, "method", "GET") == "HEAD":  # before version 17, websockets took no other method than GET
            response.body = b""
        if response.status_code == HTTPStatus.UNAUTHORIZED:
            response.headers["WWW-Authenticate"] = "Bearer"
        if response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            return
        relay_client = connection.subprotocol == SUBPROTOCOL
        guest = self.guests[connection]
        if relay_client or is_vllm(request.path):
            guest.invitation = self._invitation(connection, request.path, guest)
        if relay_client:
            response.headers["Relay-Codecs"] = ", ".join(IMAGE_FORMATS)
            response.headers["Relay-Max-Payload"] = str(MAX_MESSAGE_BYTES)
            response.headers[INSTANCE_HEADER] = self.instance_id
            if guest.invitation is not None and not is_vllm(request.path):
                response.headers.update(guest.invitation.headers())
            policy = self._policies.at(request.path)
            engine = policy.worker.engine if policy is not None else None
            if engine is not None:  # nothing is known of a policy that is still loading
                response.headers["Relay-Options"] = option_keys(engine.spec)

    def _invitation(self, connection: ServerConnection, path: str, guest: Guest) -> Invitation | None:
        """What this client is told of the direct route; no ticket if it is there already."""
        policy = self._policies.at(path)
        if self._direct_url is None or policy is None:
            return None
        name = f"/{policy.name}" if len(self._policies) > 1 else ""
        base = self._direct_url.rstrip("/").removesuffix(VLLM_PATH)
        url = f"{base}{name}{VLLM_PATH if is_vllm(path) else ''}"
        if guest.ticket is not None:
            return Invitation(url, None, None)
        return Invitation(url, self.tickets.issue(guest.tenant, connection), self.direct_cert_sha256)


def _answered_hosts(settings: ServerSettings) -> Sequence[str]:
    """The names to answer under: where there is a list of them, the direct route's is on it too."""
    if not settings.allowed_hosts or settings.direct_url is None:
        return settings.allowed_hosts
    host = read_direct_url(settings.direct_url).hostname or ""
    return (*settings.allowed_hosts, f"[{host}]" if ":" in host else host)


def select_subprotocol(_: ServerConnection, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    """Ours, where a client offers it."""
    return Subprotocol(SUBPROTOCOL) if SUBPROTOCOL in offered else None
