"""Where `/metrics` can be read, and by whom: on the main port by this machine, or on a port of its own.

Knows HTTP; `exposition.py` writes the page.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, cast

from websockets.asyncio.server import Server as Listener
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as listen
from websockets.http11 import Request, Response

from relay.server.dialects import is_metrics
from relay.server.exposition import CONTENT_TYPE, can_be_exposed, exposition
from relay.server.policies import Policies
from relay.server.settings import ServerSettings

logger = logging.getLogger(__name__)


class MetricsPage:
    """The page of one server.

    Args:
        settings: its host and port.
        policies: whose numbers are shown.
        connections: how many are open.
    """

    def __init__(self, settings: ServerSettings, policies: Policies, connections: Callable[[], int]) -> None:
        self._host, self._own_port = settings.metrics_host, settings.metrics_port
        self._policies = policies
        self._connections = connections
        self._listener: Listener | None = None

    @property
    def port(self) -> int | None:
        """The port of its own, while it is open; None if there is none."""
        return next(iter(self._listener.sockets)).getsockname()[1] if self._listener else None

    async def listen(self) -> None:
        """Open the page's own port, if it has one.

        Raises:
            OSError: the address cannot be bound.
        """
        if self._own_port == 0:
            return
        if not can_be_exposed():
            logger.info("no /metrics: prometheus-client is not installed")
            return
        if self._own_port is None:
            return
        # websockets' listener, as a small HTTP server: every request is answered before an upgrade.
        listening = listen(
            _refuse, self._host, self._own_port, process_request=self._on_own_port, server_header="relay"
        )
        self._listener = cast(Listener, await listening)
        logger.info("metrics on http://%s:%d/metrics", self._host, self.port)

    def close(self) -> None:
        """Close the page's own port."""
        if self._listener is not None:
            self._listener.close()

    def on_main_port(self, connection: ServerConnection, request: Request) -> Response:
        """Only for this machine, and not through a proxy on it; elsewhere the path does not exist."""
        away = self._own_port is not None or not can_be_exposed()
        forwarded = any(name in request.headers for name in ("Forwarded", "X-Forwarded-For", "X-Real-IP"))
        if away or forwarded or not is_local(connection.remote_address):
            return connection.respond(HTTPStatus.NOT_FOUND, "No policy is served at this path.\n")
        return self._page(connection)

    def _on_own_port(self, connection: ServerConnection, request: Request) -> Response:
        if not is_metrics(request.path):
            return connection.respond(HTTPStatus.NOT_FOUND, "Metrics are at /metrics.\n")
        return self._page(connection)

    def _page(self, connection: ServerConnection) -> Response:
        response = connection.respond(HTTPStatus.OK, exposition(self._policies, self._connections()).decode())
        del response.headers["Content-Type"]
        response.headers["Content-Type"] = CONTENT_TYPE
        return response


async def _refuse(websocket: ServerConnection) -> None:
    await websocket.close(1008, "only metrics are served here")


def is_local(address: Any) -> bool:
    """Whether a peer's address is on the loopback interface."""
    if not isinstance(address, tuple):
        return False
    try:
        ip = ip_address(str(cast("tuple[Any, ...]", address)[0]).partition("%")[0])
    except ValueError:
        return False
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback
