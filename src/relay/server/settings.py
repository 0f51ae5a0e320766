"""What an operator may choose about a server, checked when it is said."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal, get_args

from relay.protocol.direct_route import is_sha256, read_direct_url
from relay.protocol.wording import quoted
from relay.server.admission import checked_host, checked_origin
from relay.server.api_keys import ApiKeys, read_api_keys
from relay.server.credentials import Credentials

Handshake = Literal["openpi", "roboarena"]
"""The first frame on the OpenPI path: the policy's metadata, or RoboArena's six keys, whose clients take no other."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How one server process listens, queues and stops.

    Attributes:
        host: address to bind; loopback unless others are meant to reach the policy.
        port: TCP port; 0 takes any free one.
        max_batch: most rows in one device batch; None means as many as the policy takes.
        max_queue: most requests in preparation or waiting, over all connections; beyond it they are refused.
        max_connections: most open connections; beyond it they are closed with 1013.
        prepare_threads: threads that decode, resize and tokenize observations.
        handshake: form of the first frame on the OpenPI path.
        idle_timeout: seconds without a message after which a connection to vLLM-Omni's endpoint is closed, not counting
            the time in which an answer is owed; 0 for never. OpenPI's path has no such limit.
        tracebacks: whether OpenPI clients get a traceback (without paths) besides the sentence and the error id.
        drain_seconds: how long a stopping server waits for running requests.
        metrics_host: address of the metrics' own port.
        metrics_port: a port for `/metrics` alone; None leaves them on the main port, for this machine only; 0 for none.
        seed: starting-noise seed of requests that bring neither `seed` nor `noise`; None draws a fresh one for each.
        api_keys: clients must come with one of them, if there are any; by default those in `RELAY_API_KEYS`.
        insecure: listen beyond loopback although there is no API key.
        allowed_origins: web pages that may connect, as `https://host` or `https://host:port`; others are refused.
        allowed_hosts: names under which the server may be asked for, without ports; empty for any.
        tls: clients connect with TLS if given; see `relay.server.tls.tls_context`.
        max_connections_per_key: most open connections of clients with the same API key; None for no limit of its own.
        direct_url: address that leads past any proxy to this very process, as clients elsewhere reach it; None for no
            direct route. The path that selects policy and dialect is appended to it.
        direct_host: address of a port of its own for the direct route; by default `host`.
        direct_port: that port, which opens to tickets only; 0 takes any free one. None leaves it to `port`.
        direct_tls: TLS on that port; by default `tls`.
        direct_cert_sha256: digest of the certificate that clients meet at `direct_url`, which they then check instead
            of an authority's signature; see `relay.server.tls.certificate_sha256`.
        reread: asked on SIGHUP for API keys, contexts and digest that take the place of those above, such as
            `relay.server.credentials.CredentialFiles.read`; None keeps them for as long as the server runs.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_batch: int | None = None
    max_queue: int = 1_024
    max_connections: int = 1_024
    prepare_threads: int = 2
    handshake: Handshake = "openpi"
    idle_timeout: float = 30.0
    tracebacks: bool = True
    drain_seconds: float = 15.0
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    seed: int | None = None
    api_keys: ApiKeys = field(default_factory=read_api_keys, repr=False)
    insecure: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    max_connections_per_key: int | None = None
    direct_url: str | None = None
    direct_host: str | None = None
    direct_port: int | None = None
    direct_tls: ssl.SSLContext | None = field(default=None, repr=False)
    direct_cert_sha256: str | None = None
    reread: Callable[[], Credentials] | None = field(default=None, repr=False)

    @property
    def several_tenants(self) -> bool:
        """Whether clients may be strangers to each other: then failures tell of nothing but the request itself."""
        return self.api_keys.several

    def __post_init__(self) -> None:
        for name in ("host", "metrics_host"):
            _check_address(name, getattr(self, name))
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port must be between 0 (any) and 65535, got {self.port}")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65_535:
            raise ValueError(f"metrics_port must be between 0 (no metrics) and 65535, got {self.metrics_port}")
        if self.metrics_port and self.metrics_port == self.port:
            raise ValueError(f"metrics_port must differ from port, got {self.port} for both")
        for name in ("max_batch", "max_queue", "max_connections", "max_connections_per_key", "prepare_threads"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.handshake not in get_args(Handshake):
            near = get_close_matches(str(self.handshake), get_args(Handshake), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"handshake must be 'openpi' or 'roboarena', got {self.handshake!r}{hint}")
        for name in ("idle_timeout", "drain_seconds"):
            seconds: float = getattr(self, name)
            if not seconds >= 0:
                raise ValueError(f"{name} must not be negative, got {seconds}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must be in [-2^63, 2^64), got {self.seed}")
        for origin in self.allowed_origins:
            checked_origin(origin)
        for host in self.allowed_hosts:
            checked_host(host)
        self._check_direct_route()

    def _check_direct_route(self) -> None:
        for name in ("direct_host", "direct_port", "direct_tls", "direct_cert_sha256"):
            if self.direct_url is None and getattr(self, name) is not None:
                raise ValueError(f"{name} is given without direct_url, the address that clients are told")
        if self.direct_url is None:
            return
        parts = read_direct_url(self.direct_url)
        if parts.query:
            raise ValueError(f"direct_url is {quoted(self.direct_url)}; a path is appended, so it takes no query")
        if self.direct_host is not None:
            _check_address("direct_host", self.direct_host)
        if self.direct_port is None:
            for name in ("direct_host", "direct_tls"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is given without direct_port, the port that it belongs to")
        elif not 0 <= self.direct_port <= 65_535:
            raise ValueError(f"direct_port must be between 0 (any) and 65535, got {self.direct_port}")
        if self.direct_cert_sha256 is not None and not is_sha256(self.direct_cert_sha256):
            raise ValueError(f"direct_cert_sha256 is {quoted(self.direct_cert_sha256)}; expected 64 hexadecimal digits")
        if parts.scheme == "ws" and (self.direct_cert_sha256 or self.direct_tls):
            raise ValueError(f"direct_url is {quoted(self.direct_url)}, but there is TLS at its end; expected wss://")


def _check_address(name: str, address: str) -> None:
    """Refuse what no resolver takes; whether it is an address of this machine shows when it is bound."""
    try:
        address.encode("idna")
    except UnicodeError:
        fits = False
    else:
        fits = "\0" not in address
    if not fits:
        raise ValueError(f"{name} must be a host name or an address, got {quoted(address)}")
