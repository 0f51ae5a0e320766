"""The policies behind one listener, each with a worker and a queue of its own, and which of them a path means.

Knows no sockets and no model.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from relay.engine.worker import DeviceFault, LoadEngine, LoadFailed, Worker, WorkerStatus
from relay.protocol.wording import quoted
from relay.server.dialects import bare_path, serves
from relay.server.metrics import PolicyMetrics
from relay.server.scheduler import Scheduler, adapts
from relay.server.settings import ServerSettings

WORKER_STOP_S = 0.5
"""How long a device thread may take to notice that it is not needed any more."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_RESERVED = frozenset({"v1", "healthz", "metrics"})


class NotServed(LookupError):
    """No policy answers at a path; its text is safe to show to whoever asked."""


def check_name(name: str) -> None:
    """Raise `ValueError` if a policy cannot have this name, because it cannot stand in a path."""
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise ValueError(
            f"a policy cannot be called {quoted(name)}: clients name it in a path, so it takes letters, "
            f"digits, '.', '_' and '-', and not {', '.join(sorted(_RESERVED))}"
        )


@dataclass(frozen=True, slots=True)
class Offer:
    """One policy to be served: how it is loaded, and the settings of its queue and its greeting."""

    load: LoadEngine
    settings: ServerSettings


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """One policy of a running server."""

    name: str
    settings: ServerSettings
    worker: Worker
    scheduler: Scheduler
    metrics: PolicyMetrics


class Policies:
    """All policies of one process, by name; the first is the one that clients get who name none.

    Args:
        offers: the policies by the first path segment that selects them. A single one is served at every path, as
            openpi's own server does; with several, an unknown first segment is refused. There may be none.
        on_fatal: called on the event loop when a policy cannot be loaded or its device is lost. One process shares
            devices and memory among its policies, so it should end then.

    Raises:
        ValueError: a name that cannot stand in a path.
    """

    def __init__(self, offers: Mapping[str, Offer], on_fatal: Callable[[LoadFailed | DeviceFault], None]) -> None:
        self._served: dict[str, ServedPolicy] = {}
        for name, offer in offers.items():
            check_name(name)
            worker = Worker(offer.load, on_fatal)
            self._served[name] = ServedPolicy(
                name, offer.settings, worker, Scheduler(worker, offer.settings), PolicyMetrics()
            )

    def __iter__(self) -> Iterator[ServedPolicy]:
        return iter(self._served.values())

    def __len__(self) -> int:
        return len(self._served)

    def at(self, path: str) -> ServedPolicy | None:
        """The policy that a path selects; None if this process serves none at all.

        Raises:
            NotServed: the path selects no policy, while there are some.
        """
        if not serves(path):
            raise NotServed("No policy is served at this path.")
        policies = tuple(self)
        if len(policies) < 2:
            return policies[0] if policies else None
        name = bare_path(path).lstrip("/").partition("/")[0]
        if name in ("", "v1"):
            return policies[0]
        if name not in self._served:
            near = get_close_matches(name, self._served, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise NotServed(f"No policy is called {quoted(name)}. Served are {', '.join(self._served)}.{hint}")
        return self._served[name]

    def start(self) -> None:
        """Begin to load all of them; call it once, from the running event loop."""
        for policy in self:
            policy.worker.start()

    @property
    def status(self) -> WorkerStatus:
        """How far the loading is: the first policy that is not ready, or that all are."""
        remarks: list[str] = []
        for policy in self:
            status = policy.worker.status
            remarks += [f"{policy.name}: {remark}" if len(self) > 1 else remark for remark in status.remarks]
            if not status.ready:
                named = f"{policy.name}: {status.phase}" if len(self) > 1 else status.phase
                return WorkerStatus(named, status.share)
        if not len(self):
            return WorkerStatus("no policy")
        return WorkerStatus("ready", 1.0, ready=True, remarks=tuple(remarks))

    @property
    def held(self) -> int:
        """How many observations are in preparation, waiting or on a device."""
        return sum(policy.scheduler.held for policy in self)

    @property
    def released(self) -> bool:
        """Whether every worker's thread has ended."""
        return not any(policy.worker.alive for policy in self)

    async def ready(self) -> None:
        """Wait until all can serve.

        Raises:
            LoadFailed: one never will.
            DeviceFault: they could, but a device is lost.
        """
        for policy in self:
            await policy.worker.ready()

    async def rescan_adapters(self) -> None:
        """Have every policy that holds adapters look through their folders again; requests go on meanwhile."""
        for policy in self:
            engine = policy.worker.engine
            if engine is not None and adapts(engine):
                await asyncio.to_thread(engine.rescan_adapters)

    async def close(self) -> None:
        """Cancel what still waits and let the devices go."""
        await asyncio.gather(*(self._close(policy) for policy in self))

    async def _close(self, policy: ServedPolicy) -> None:
        policy.scheduler.close()
        await policy.worker.stop(WORKER_STOP_S)
