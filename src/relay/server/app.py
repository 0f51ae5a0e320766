"""The server: its listeners, the connections and policies behind them, how it drains, and with which code it ends.

One process serves one policy, or several that share its port. The port is bound before they are loaded: clients connect
at once, get pongs, and wait for the metadata frame. Knows no model.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, cast

from websockets.asyncio.server import Server as Listener
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as listen

from relay.engine.worker import DeviceFault, DeviceFull, LoadEngine, LoadFailed, WorkerStatus
from relay.protocol.kept_memory import keep_freed_memory
from relay.protocol.limits import CLOSE_TIMEOUT_S, MAX_MESSAGE_BYTES, SUBPROTOCOL
from relay.server.admission import Exposed, bound_addresses, check_exposure, log_direct_route, log_terms
from relay.server.connection import Goodbye, serve_connection
from relay.server.credentials import read_again
from relay.server.dialects import NO_POLICY, dialect_for
from relay.server.direct_route import Guest
from relay.server.door import Entrance
from relay.server.log_limit import leave_out_bad_requests
from relay.server.metrics_page import MetricsPage
from relay.server.policies import Offer, Policies
from relay.server.process import exit_without_unwinding, freeze_memory, look_again_on_hangup, run, stop_on_signals
from relay.server.settings import ServerSettings
from relay.server.upgrade import Upgrades, select_subprotocol

FAULT_SECONDS = 2.0
"""How long clients may take to read why their requests failed when the device is lost."""

logger = logging.getLogger(__name__)


def serve(policies: LoadEngine | Mapping[str, Offer], settings: ServerSettings | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return; a second signal ends the process at once.

    Args:
        policies: how the one policy is loaded, or several by the first path segment that selects them.
        settings: address, bounds and defaults.

    Raises:
        SystemExit: with a message and code 1, if the address cannot be bound or a policy cannot be loaded; with code
            2, if the settings would let strangers drive the policy.

    A lost device ends the process with code 1 without unwinding.
    """
    keep_freed_memory()
    leave_out_bad_requests()
    server = Server(policies, settings)
    failure = run(_serve_until_signal(server))
    if isinstance(failure, DeviceFault) or not server.released:
        # A lost device, a load or a batch that is still running can hang or crash the interpreter's own way out.
        exit_without_unwinding(0 if failure is None else 1)
    if isinstance(failure, Exposed):
        print(f"relay: {failure}", file=sys.stderr)
        raise SystemExit(2)
    if failure is not None:
        raise SystemExit(f"relay: {failure}")


class Server:
    """A listener and what is behind it: for each policy a scheduler and a worker; use it from one event loop.

    Args:
        policies: loads the one policy, in the worker's thread; or several offers by name, as in `Policies`.
        settings: address, bounds and defaults.
    """

    def __init__(self, policies: LoadEngine | Mapping[str, Offer], settings: ServerSettings | None = None) -> None:
        self._settings = settings or ServerSettings()
        offers = {"policy": Offer(policies, self._settings)} if callable(policies) else policies
        self._policies = Policies(offers, self._on_fatal)
        self._metrics = MetricsPage(self._settings, self._policies, lambda: len(self._connections))
        self._upgrades = Upgrades(self._settings, self._policies, self._metrics)
        self._connections: dict[ServerConnection, asyncio.Task[Any]] = {}
        self._failure: LoadFailed | DeviceFault | None = None
        self._entrances: list[Entrance] = []
        self._rereading = asyncio.Lock()
        self._listeners: list[Listener] = []
        self._stopping: asyncio.Future[Goodbye]
        self._drain: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind the port, accept connections and begin to load.

        Raises:
            OSError: the address cannot be bound.
            Exposed: it is no loopback address, and nothing would keep strangers out.
        """
        self._stopping = asyncio.get_running_loop().create_future()
        settings = self._settings
        try:
            bound = await self._bind(settings.host, settings.port, settings.tls)
            check_exposure((address for address, _ in bound), settings.api_keys, settings.insecure)
            direct_tls = settings.direct_tls or settings.tls
            if settings.direct_port is None:
                direct_bound = ()
            else:
                direct_host = settings.direct_host or settings.host
                direct_bound = await self._bind(direct_host, settings.direct_port, direct_tls, tickets_only=True)
            await self._metrics.listen()
        except (Exposed, OSError):
            for listener in self._listeners:
                listener.close()
                await listener.wait_closed()
            raise
        for listener in self._listeners:
            await listener.start_serving()
        self._port: int = bound[0][1]
        self._direct_port = direct_bound[0][1] if direct_bound else None
        self._policies.start()
        log_terms(bound, settings.api_keys, tls=settings.tls is not None)
        if settings.direct_url is not None:
            log_direct_route(settings.direct_url, direct_bound, tls=direct_tls is not None)

    @property
    def port(self) -> int:
        """The port that was bound."""
        return self._port

    @property
    def direct_port(self) -> int | None:
        """The port that opens to tickets only; None if there is none."""
        return self._direct_port

    @property
    def status(self) -> WorkerStatus:
        """How far the loading is."""
        return self._policies.status

    @property
    def connections(self) -> Sequence[ServerConnection]:
        """The open connections, oldest first."""
        return tuple(self._connections)

    @property
    def outstanding(self) -> int:
        """How many observations are in preparation, waiting or on a device."""
        return self._policies.held

    @property
    def released(self) -> bool:
        """Whether the workers' threads have ended; only ever true after a drain or a failed load."""
        return self._policies.released

    @property
    def metrics_port(self) -> int | None:
        """The port that serves the metrics and nothing else; None if there is none."""
        return self._metrics.port

    async def ready(self) -> None:
        """Wait until observations can be served.

        Raises:
            LoadFailed: they never will be.
            DeviceFault: they could be, but the device is lost.
        """
        await self._policies.ready()

    async def rescan_adapters(self) -> None:
        """Bring the adapters in line with their folders; requests go on, and what cannot be loaded is logged."""
        try:
            await self._policies.rescan_adapters()
        except Exception:
            logger.exception("the adapters' folders could not be looked through")

    async def reread_credentials(self) -> None:
        """Take API keys and certificates from their files for whoever comes from now on; faults are logged."""
        settings = self._settings
        if settings.reread is None:
            return
        async with self._rereading:
            fresh = await read_again(settings.reread, keys=bool(settings.api_keys), tls=settings.tls is not None)
            if fresh is None:
                return
            settings.api_keys.replace(fresh.api_keys)
            self._upgrades.direct_cert_sha256 = fresh.direct_cert_sha256
            contexts = (fresh.tls, fresh.direct_tls or fresh.tls)
            for entrance, tls in zip(self._entrances, contexts, strict=False):  # the second port need not be there
                entrance.tls = tls

    async def drain(self, reason: str = "the server is stopping") -> None:
        """Stop accepting, answer the requests already taken, close every connection with 1012, release the devices."""
        await self._stop(Goodbye(1012, reason), self._settings.drain_seconds)

    async def serve_forever(self) -> None:
        """Wait until the server has drained.

        Raises:
            LoadFailed: it stopped because the policy could not be loaded.
            DeviceFault: it stopped because the device is lost.
        """
        await asyncio.wait({self._stopping})
        assert self._drain is not None
        await asyncio.shield(self._drain)
        if self._failure is not None:
            raise self._failure

    async def _bind(
        self, host: str, port: int, tls: ssl.SSLContext | None, *, tickets_only: bool = False
    ) -> Sequence[tuple[str, int]]:
        """Take a port, without answering on it yet; returns the addresses."""
        entrance = Entrance(tls)
        upgrades = self._upgrades
        listening = listen(
            self._accept,
            host,
            port,
            select_subprotocol=select_subprotocol,
            compression=None,  # as openpi: deflating camera frames takes longer than sending them
            process_request=upgrades.answer_direct if tickets_only else upgrades.answer,
            process_response=upgrades.add_headers,
            server_header="relay",
            ping_interval=None,  # see keepalive.py
            close_timeout=CLOSE_TIMEOUT_S,
            max_size=MAX_MESSAGE_BYTES,
            max_queue=1,  # what lies beyond the outstanding requests stays in the peer's socket
            create_connection=cast(Any, entrance),
            start_serving=False,
        )  # asyncio and uvloop set TCP_NODELAY on every connection
        listener = cast(Listener, await listening)
        self._entrances.append(entrance)
        self._listeners.append(listener)
        return bound_addresses(listener.sockets)

    async def _accept(self, websocket: ServerConnection) -> None:
        guest = self._upgrades.guests[websocket]
        full = self._full(guest)
        if full is not None:
            await websocket.close(1013, f"server is full: {full}")
            return
        assert websocket.request is not None
        path = websocket.request.path
        policy = self._policies.at(path)
        if policy is None:
            await websocket.send(NO_POLICY)
            return
        relay_client = websocket.subprotocol == SUBPROTOCOL
        invitation = guest.invitation
        dialect = dialect_for(
            path,
            policy.settings,
            relay_client=relay_client,
            instance_id=self._upgrades.instance_id,
            direct=invitation.keys() if invitation else {},
        )

        def begin_ticket() -> None:
            if invitation is not None and invitation.ticket is not None:
                self._upgrades.tickets.begin(invitation.ticket)

        task = asyncio.current_task()
        assert task is not None
        self._connections[websocket] = task
        try:
            await serve_connection(
                websocket, dialect, policy.worker, policy.scheduler, self._stopping, policy.metrics, begin_ticket
            )
        finally:
            del self._connections[websocket]

    def _full(self, guest: Guest) -> str | None:
        """Which limit a newcomer would exceed; one that comes by ticket takes the place of its earlier connection."""
        others = len(self._connections) - (guest.predecessor in self._connections)
        if others >= self._settings.max_connections:
            return f"{others} connections"
        most = self._settings.max_connections_per_key
        if most is None or not guest.tenant:
            return None
        guests = self._upgrades.guests
        own = sum(guests[other].tenant == guest.tenant for other in self._connections if other is not guest.predecessor)
        return f"{own} connections with this API key" if own >= most else None

    def _on_fatal(self, failure: LoadFailed | DeviceFault) -> None:
        self._failure = self._failure or failure
        refused = _is_sentence(failure.__cause__)
        logger.critical("%s", failure, exc_info=None if refused else failure)
        if refused:
            logger.debug("where it was noticed", exc_info=failure)
        if isinstance(failure, LoadFailed):
            self._stop(Goodbye(1011, "the policy could not be loaded"), FAULT_SECONDS)
        elif isinstance(failure, DeviceFull):
            self._stop(Goodbye(1012, "the device is out of memory; the server restarts"), self._settings.drain_seconds)
        else:
            self._stop(Goodbye(1012, "the device is lost; the server must be restarted"), FAULT_SECONDS)

    def _stop(self, goodbye: Goodbye, seconds: float) -> asyncio.Task[None]:
        """Begin to stop, once: the first reason holds."""
        if self._drain is None:
            self._stopping.set_result(goodbye)
            self._drain = asyncio.create_task(self._close_all(goodbye, seconds))
        return self._drain

    async def _close_all(self, goodbye: Goodbye, seconds: float) -> None:
        """Let every connection finish by itself, then close those that could not in time, then free the devices."""
        logger.info("stopping: %s; %d connections open", goodbye.reason, len(self._connections))
        for listener in self._listeners:
            listener.close(close_connections=False)
        self._metrics.close()
        for entrance in self._entrances:
            entrance.close()
        if self._connections:
            _, late = await asyncio.wait(self._connections.values(), timeout=seconds)
            closing = [asyncio.create_task(ws.close(goodbye.code, goodbye.reason)) for ws in self._connections]
            if late or closing:
                await asyncio.wait({*late, *closing}, timeout=2 * CLOSE_TIMEOUT_S)
        await self._policies.close()


def _is_sentence(error: BaseException | None) -> bool:
    """Whether an error says all there is to say: a ValueError that code of ours raised about what it was given."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)] if isinstance(error, ValueError) else []
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).startswith("relay.")


async def _serve_until_signal(server: Server) -> LoadFailed | DeviceFault | Exposed | OSError | None:
    try:
        await server.start()
    except (Exposed, OSError) as error:
        return error
    stop_on_signals(server.drain)
    looks = look_again_on_hangup(server.reread_credentials, server.rescan_adapters)
    freezing = asyncio.create_task(_freeze_when_ready(server))
    try:
        await server.serve_forever()
    except (LoadFailed, DeviceFault) as failure:
        return failure
    finally:
        freezing.cancel()
        for look in looks:
            look.cancel()
    return None


async def _freeze_when_ready(server: Server) -> None:
    with contextlib.suppress(LoadFailed, DeviceFault):
        await server.ready()
        logger.info("ready: observations are answered")
        freeze_memory()
