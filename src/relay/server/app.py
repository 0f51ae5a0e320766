"""The program around the listener: start, routes, health, drain and exit codes.

One process serves one policy, or several that share its port. The port is bound before they are loaded: clients connect
at once, get pongs, and wait for the metadata frame. Knows no model.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import secrets
import signal
import ssl
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from websockets.asyncio.server import Server as Listener
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as listen
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from relay.engine.worker import DeviceFault, DeviceFull, LoadEngine, LoadFailed, WorkerStatus
from relay.protocol.direct_route import INSTANCE_HEADER, read_direct_url
from relay.protocol.kept_memory import keep_freed_memory
from relay.protocol.limits import CLOSE_TIMEOUT_S, MAX_MESSAGE_BYTES, SUBPROTOCOL
from relay.server.admission import (
    Admission,
    Exposed,
    Rejection,
    bound_addresses,
    check_exposure,
    log_direct_route,
    log_terms,
)
from relay.server.connection import Goodbye, peer_name, serve_connection
from relay.server.credentials import read_again
from relay.server.dialects import NO_POLICY, VLLM_PATH, dialect_for, is_health_check, is_metrics, is_vllm
from relay.server.direct_route import Guest, Invitation, Tickets
from relay.server.door import Entrance
from relay.server.log_limit import LimitedLog, leave_out_bad_requests
from relay.server.metrics_page import MetricsPage
from relay.server.options import option_keys
from relay.server.policies import NotServed, Offer, Policies
from relay.server.settings import ServerSettings

FAULT_SECONDS = 2.0
"""How long clients may take to read why their requests failed when the device is lost."""

SWITCH_S = 0.000_5
"""How long a thread keeps the interpreter while another wants it. The event loop asks for it again after each system
call, and a policy that launches kernels from Python hardly lets go by itself: at Python's 5 ms a request would wait
so long several times over."""

IMAGE_FORMATS = ("jpeg", "png", "webp")
"""What an image slot may hold instead of an array, told by its first bytes."""

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
    sys.setswitchinterval(SWITCH_S)
    keep_freed_memory()
    leave_out_bad_requests()
    server = Server(policies, settings)
    failure = _run(_serve_until_signal(server))
    if isinstance(failure, DeviceFault) or not server.released:
        # A lost device, a load or a batch that is still running can hang or crash the interpreter's own way out.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if failure is None else 1)
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
        self._instance_id = secrets.token_hex(8)
        self._tickets = Tickets(self._instance_id, most=4 * self._settings.max_connections)
        self._admission = Admission(
            self._settings.api_keys, self._tickets, self._settings.allowed_origins, _answered_hosts(self._settings)
        )
        self._guests: WeakKeyDictionary[ServerConnection, Guest] = WeakKeyDictionary()
        self._turned_away = LimitedLog(logger, "upgrades that were turned away")
        self._connections: dict[ServerConnection, asyncio.Task[Any]] = {}
        self._failure: LoadFailed | DeviceFault | None = None
        self._entrances: list[Entrance] = []
        self._direct_cert_sha256 = self._settings.direct_cert_sha256
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
            self._direct_cert_sha256 = fresh.direct_cert_sha256
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
        listening = listen(
            self._accept,
            host,
            port,
            select_subprotocol=_select_subprotocol,
            compression=None,  # as openpi: deflating camera frames takes longer than sending them
            process_request=self._process_direct_request if tickets_only else self._process_request,
            process_response=self._add_headers,
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
        guest = self._guests[websocket]
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
            instance_id=self._instance_id,
            direct=invitation.keys() if invitation else {},
        )

        def begin_ticket() -> None:
            if invitation is not None and invitation.ticket is not None:
                self._tickets.begin(invitation.ticket)

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
        own = sum(
            self._guests[other].tenant == guest.tenant for other in self._connections if other is not guest.predecessor
        )
        return f"{own} connections with this API key" if own >= most else None

    def _process_request(self, connection: ServerConnection, request: Request) -> Response | None:
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

    def _process_direct_request(self, connection: ServerConnection, request: Request) -> Response | None:
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
        self._guests[connection] = guest
        return None

    def _invitation(self, connection: ServerConnection, path: str, guest: Guest) -> Invitation | None:
        """What this client is told of the direct route; no ticket if it is there already."""
        policy = self._policies.at(path)
        if self._settings.direct_url is None or policy is None:
            return None
        name = f"/{policy.name}" if len(self._policies) > 1 else ""
        base = self._settings.direct_url.rstrip("/").removesuffix(VLLM_PATH)
        url = f"{base}{name}{VLLM_PATH if is_vllm(path) else ''}"
        if guest.ticket is not None:
            return Invitation(url, None, None)
        return Invitation(url, self._tickets.issue(guest.tenant, connection), self._direct_cert_sha256)

    def _add_headers(self, connection: ServerConnection, request: Request, response: Response) -> None:
        """Tell a relay client whom it speaks to and what it may send: OpenPI's metadata have no place for that."""
        if getattr(request, "method", "GET") == "HEAD":  # before version 17, websockets took no other method than GET
            response.body = b""
        if response.status_code == HTTPStatus.UNAUTHORIZED:
            response.headers["WWW-Authenticate"] = "Bearer"
        if response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            return
        relay_client = connection.subprotocol == SUBPROTOCOL
        guest = self._guests[connection]
        if relay_client or is_vllm(request.path):
            guest.invitation = self._invitation(connection, request.path, guest)
        if relay_client:
            response.headers["Relay-Codecs"] = ", ".join(IMAGE_FORMATS)
            response.headers["Relay-Max-Payload"] = str(MAX_MESSAGE_BYTES)
            response.headers[INSTANCE_HEADER] = self._instance_id
            if guest.invitation is not None and not is_vllm(request.path):
                response.headers.update(guest.invitation.headers())
            policy = self._policies.at(request.path)
            engine = policy.worker.engine if policy is not None else None
            if engine is not None:  # nothing is known of a policy that is still loading
                response.headers["Relay-Options"] = option_keys(engine.spec)

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


def _answered_hosts(settings: ServerSettings) -> Sequence[str]:
    """The names to answer under: where there is a list of them, the direct route's is on it too."""
    if not settings.allowed_hosts or settings.direct_url is None:
        return settings.allowed_hosts
    host = read_direct_url(settings.direct_url).hostname or ""
    return (*settings.allowed_hosts, f"[{host}]" if ":" in host else host)


def _is_sentence(error: BaseException | None) -> bool:
    """Whether an error says all there is to say: a ValueError that code of ours raised about what it was given."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)] if isinstance(error, ValueError) else []
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).startswith("relay.")


async def _serve_until_signal(server: Server) -> LoadFailed | DeviceFault | Exposed | OSError | None:
    try:
        await server.start()
    except (Exposed, OSError) as error:
        return error
    drains: list[asyncio.Task[None]] = []

    def on_signal(number: int) -> None:
        if drains:
            os._exit(128 + number)
        drains.append(asyncio.get_running_loop().create_task(server.drain()))

    _on_signals(on_signal)
    hangups = _look_again_on_hangup(server)
    freezing = asyncio.create_task(_freeze_when_ready(server))
    try:
        await server.serve_forever()
    except (LoadFailed, DeviceFault) as failure:
        return failure
    finally:
        freezing.cancel()
        for hangup in hangups:
            hangup.cancel()
    return None


def _look_again_on_hangup(server: Server) -> set[asyncio.Task[None]]:
    """Read credentials and the adapters' folders again on SIGHUP; the set holds what is under way."""
    under_way: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()

    def look_again() -> None:
        for work in (server.reread_credentials(), server.rescan_adapters()):
            task = loop.create_task(work)
            under_way.add(task)
            task.add_done_callback(under_way.discard)

    if hasattr(signal, "SIGHUP"):  # Windows has none
        loop.add_signal_handler(signal.SIGHUP, look_again)
    return under_way


async def _freeze_when_ready(server: Server) -> None:
    """Keep the collector from walking what was loaded, which would stop every thread now and then."""
    with contextlib.suppress(LoadFailed, DeviceFault):
        await server.ready()
        logger.info("ready: observations are answered")
        gc.collect()
        gc.freeze()


def _on_signals(callback: Callable[[int], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, callback, number)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda number, _: loop.call_soon_threadsafe(callback, number))


_Outcome = TypeVar("_Outcome")


def _run(main: Coroutine[Any, Any, _Outcome]) -> _Outcome:
    """`asyncio.run` on uvloop where it is installed (a twentieth less per raw call), without a handler for SIGINT."""
    try:
        loop = cast(asyncio.AbstractEventLoop, importlib.import_module("uvloop").new_event_loop())
    except ImportError:
        loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(_cancel_leftovers())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _cancel_leftovers() -> None:
    leftovers = asyncio.all_tasks() - {asyncio.current_task()}
    for task in leftovers:
        task.cancel()
    await asyncio.gather(*leftovers, return_exceptions=True)


def _select_subprotocol(_: ServerConnection, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    return Subprotocol(SUBPROTOCOL) if SUBPROTOCOL in offered else None
