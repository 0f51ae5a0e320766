"""One measurement from beginning to end: connect, compare the codecs, call, sum up."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import relay
from relay.bench.calls import Call, make_calls
from relay.bench.codecs import COMPARED, CodecFigures, compare_codecs, figures
from relay.bench.observations import observations
from relay.bench.parameters import Parameters
from relay.bench.stages import Link, fitted_link
from relay.client.access import shown
from relay.client.peer import VLLM_PATH
from relay.protocol.images import Codec

Progress = Callable[[str], None]

_LONGEST_WAIT_FOR_ROOM_S = 10.0
"""For further connections to a server that has let one in."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a run saw.

    Attributes:
        sent: how frames really went; None where the server takes plain arrays only.
        route: over which way the server was reached.
        metadata: what it said about its policy.
        calls: those that count, in their order.
        compared: by codec, those that were compared.
        bare_replies: the path is vLLM-Omni's, whose replies have no room for timings.
        link: what they say about it; None where the server doesn't tell enough.
        busy: what the machine had to do besides, where that is much.
        started: UTC, ISO 8601.
        environment: versions and machine, at this end.
    """

    parameters: Parameters
    sent: Codec | None
    route: str
    metadata: Mapping[str, Any]
    calls: tuple[Call, ...]
    compared: tuple[CodecFigures, ...]
    bare_replies: bool
    link: Link | None
    busy: str | None
    started: str
    environment: Mapping[str, Any]


def measure(
    parameters: Parameters, *, headers: Mapping[str, str] | None = None, progress: Progress = lambda doing: None
) -> Measurement:
    """Measure a server, one call at a time.

    Args:
        headers: for the connection, such as a key's; no part of the parameters, so that no report holds them.
        progress: told what is being done.

    Raises:
        ValueError: what to send is unclear; see `relay.bench.observations`.
        RuntimeError: the server refused an observation; the text is the server's.
        OSError, websockets.exceptions.WebSocketException: the server cannot be reached, or is gone.
    """
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    busy = _how_busy()
    with ExitStack() as stack:
        progress(f"connecting to {shown(parameters.url)}")
        policy = stack.enter_context(_connect(parameters, parameters.codec, headers, parameters.connect_timeout))
        metadata = policy.get_server_metadata()
        source = observations(
            metadata,
            robot=parameters.robot,
            file=parameters.observation,
            prompt=parameters.prompt,
            size=parameters.frame_size,
            seed=parameters.seed,
        )
        make_calls(
            policy,
            source,
            parameters.warm_up,
            timeout=parameters.timeout,
            on_call=_counted(progress, "warming up", parameters.warm_up),
        )
        compared: dict[Codec, list[Call]] = {}
        if parameters.codec_rounds and policy.codec is not None:
            compared = _compare(parameters, policy, source, headers, progress)
        calls = make_calls(
            policy,
            source,
            parameters.calls,
            interval=parameters.interval,
            timeout=parameters.timeout,
            on_call=_counted(progress, "calling", parameters.calls),
        )
        return Measurement(
            parameters,
            policy.codec,
            policy.route,
            metadata,
            tuple(calls),
            tuple(figures(codec, group) for codec, group in compared.items()),
            urlsplit(parameters.url).path.rstrip("/").endswith(VLLM_PATH),
            fitted_link(list(compared.values())),
            busy,
            started,
            {"versions": _versions(), "machine": _machine()},
        )


def _connect(
    parameters: Parameters, codec: Codec, headers: Mapping[str, str] | None, connect_timeout: float
) -> relay.Policy:
    return relay.Policy(
        parameters.url,
        codec,
        headers,
        connect_timeout=connect_timeout,
        ca_file=parameters.ca_file,
        direct=parameters.direct,
    )


def _compare(
    parameters: Parameters,
    policy: relay.Policy,
    source: Iterator[dict[str, Any]],
    headers: Mapping[str, str] | None,
    progress: Progress,
) -> dict[Codec, list[Call]]:
    with ExitStack() as stack:
        policies = {
            codec: policy if codec is policy.codec else stack.enter_context(_connect_too(parameters, codec, headers))
            for codec in COMPARED
        }
        told = _counted(progress, "comparing codecs", parameters.codec_rounds)
        return compare_codecs(policies, source, parameters.codec_rounds, parameters.timeout, told)


def _connect_too(parameters: Parameters, codec: Codec, headers: Mapping[str, str] | None) -> relay.Policy:
    """Beside the connection that is open. A server that allows no more of them must not be waited for."""
    try:
        return _connect(parameters, codec, headers, min(parameters.connect_timeout, _LONGEST_WAIT_FOR_ROOM_S))
    except TimeoutError as error:
        raise TimeoutError(
            f"{error}; comparing codecs takes a connection for each: --codec-rounds 0 leaves that out"
        ) from error


def _counted(progress: Progress, doing: str, of: int) -> Callable[[int], None]:
    return lambda done: progress(f"{doing}: {done} of {of}")


def _versions() -> dict[str, str | None]:
    names = ("numpy", "msgpack", "websockets", "pillow", "simplejpeg")
    return {"relay": relay.__version__, "python": platform.python_version()} | {name: _version(name) for name in names}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    clock = time.get_clock_info("perf_counter")
    return {
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "clock": f"perf_counter: {clock.implementation}, {clock.resolution:g} s",
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _how_busy() -> str | None:
    """What to say of a machine that has other work to do; None if it has not."""
    if not hasattr(os, "getloadavg"):
        return None
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"the load was {load:.1f} on {cores} cores before the first call" if load > 0.5 * cores else None
