"""A run in numbers: how often it worked, how long an answer took, how much was sent."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import relay
from relay.demo.episode import Episode


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds; NaN when nothing was measured."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to.

    Attributes:
        episodes, successes: how many were tried, and how many ended with the named cube on the named plate.
        mean_steps: steps of a successful episode, 0.1 s each; NaN without any.
        round_trip_ms: from asking the policy to having its answer.
        server_ms: the part of it spent in the server's engine.
        bytes_per_request: mean size of a request.
        notes: the server's remarks and how often each came.
    """

    episodes: int
    successes: int
    mean_steps: float
    round_trip_ms: Percentiles
    server_ms: Percentiles
    bytes_per_request: int
    notes: Mapping[str, int]

    @property
    def success_rate(self) -> float:
        return self.successes / self.episodes


def summarize(episodes: Sequence[Episode]) -> Summary:
    """The numbers of at least one episode."""
    requests = [request for episode in episodes for request in episode.requests]
    solved = [episode.steps for episode in episodes if episode.success]
    return Summary(
        episodes=len(episodes),
        successes=len(solved),
        mean_steps=float(np.mean(solved)) if solved else math.nan,
        round_trip_ms=percentiles([request.round_trip_ms for request in requests]),
        server_ms=percentiles([request.server_ms for request in requests]),
        bytes_per_request=round(float(np.mean([request.bytes_sent for request in requests]))),
        notes=Counter(note for request in requests for note in request.notes),
    )


def percentiles(milliseconds: Sequence[float]) -> Percentiles:
    """The usual three; what is NaN doesn't count."""
    known = [value for value in milliseconds if not math.isnan(value)]
    if not known:
        return Percentiles(math.nan, math.nan, math.nan)
    return Percentiles(*(float(value) for value in np.percentile(known, (50, 90, 99))))


def results(
    episodes: Sequence[Episode], options: Mapping[str, Any], metadata: Mapping[str, Any], first_frame_s: float
) -> dict[str, Any]:
    """Everything for `results.json`; what was not measured is null.

    Args:
        episodes: all of the run's.
        options: what the run was asked for.
        metadata: what the server said about the policy.
        first_frame_s: from the start of the process to the first step of the robot.
    """
    summary = summarize(episodes)
    return _without_nan(
        {
            "success_rate": summary.success_rate,
            "successes": summary.successes,
            "mean_steps": summary.mean_steps,
            "round_trip_ms": asdict(summary.round_trip_ms),
            "server_ms": asdict(summary.server_ms),
            "bytes_per_request": summary.bytes_per_request,
            "first_frame_s": first_frame_s,
            "episodes": [_row(number, episode) for number, episode in enumerate(episodes, 1)],
            "notes": dict(summary.notes),
            "options": dict(options),
            "policy": dict(metadata),
            "versions": versions(),
        }
    )


def versions() -> dict[str, str]:
    """Of what the result may depend on, on this side of the wire."""
    return {
        "relay": relay.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": platform.platform(),
    }


def _row(number: int, episode: Episode) -> dict[str, Any]:
    return {
        "episode": number,
        "seed": list(episode.seed),
        "prompt": episode.prompt,
        "success": episode.success,
        "steps": episode.steps,
        "requests": len(episode.requests),
        "round_trip_p50_ms": percentiles([request.round_trip_ms for request in episode.requests]).p50,
    }


def _without_nan(value: Any) -> Any:
    """NaN as null, because JSON has none; numbers rounded to what was measured."""
    match value:
        case Mapping():
            return {str(key): _without_nan(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_without_nan(entry) for entry in value]
        case float():
            return None if math.isnan(value) else round(value, 4)
        case _:
            return value
