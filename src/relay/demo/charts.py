"""The report's charts, as SVG text that takes its colours from the page. Knows nothing of episodes' making."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from relay.demo.episode import Episode
from relay.demo.robot import robot_state

Array = NDArray[np.float64]

_WIDTH = 640
_LEFT, _RIGHT = 52, 8  # beside the plotting area
_ROW, _ROW_GAP = 62, 12
_ROWS = (("x", "cm", 100.0, 6.0), ("y", "cm", 100.0, 6.0), ("z", "cm", 100.0, 6.0), ("gripper", "%", 100.0, 100.0))
"""Per dimension of the state: its name, the unit shown, the factor to it, and the least range shown."""


def chunk_chart(episode: Episode) -> str:
    """What the policy planned at every request, thin, and what the robot did, thick; one row per dimension.

    Args:
        episode: a recorded one.
    """
    done = np.array([robot_state(table) for table in episode.states], float)
    height = len(_ROWS) * (_ROW + _ROW_GAP) + 16
    parts = [_open(height, "planned and executed positions over time")]
    longest = max(episode.steps, *(request.step + 8 for request in episode.requests))
    xs = _LEFT + np.arange(longest + 1) / longest * (_WIDTH - _LEFT - _RIGHT)
    for row, (name, unit, factor, least_range) in enumerate(_ROWS):
        top = row * (_ROW + _ROW_GAP) + 6
        path = done[:, row] * factor
        plans = [request.plan[:, row].astype(float) * factor for request in episode.requests]
        low, high = _range(path, plans, least_range)
        parts.append(_frame(top, name, unit, low, high))
        for request, plan in zip(episode.requests, plans, strict=True):
            # A plan begins where the robot is; its first place is where the robot should be one step later.
            line = np.concatenate([path[request.step : request.step + 1], plan])[: longest + 1 - request.step]
            parts.append(_line(xs[request.step :], line, top, low, high, "plan"))
        parts.append(_line(xs, path, top, low, high, "done"))
        asked = [request.step for request in episode.requests]
        parts += [
            f'<circle class="asked" cx="{xs[step]:.1f}" cy="{_y(path[step], top, low, high):.1f}" r="2.4"/>'
            for step in asked
        ]
    for second in range(0, longest // 10 + 1):
        parts.append(f'<text class="axis" x="{xs[second * 10]:.1f}" y="{height - 4}">{second} s</text>')
    return "".join(parts) + "</svg>"


def latency_chart(round_trip_ms: Sequence[float], server_ms: Sequence[float]) -> str:
    """A histogram of the round trips, and of the server's part of them where it is known."""
    height, base = 210, 180
    server = [value for value in server_ms if not np.isnan(value)]
    slowest = (
        float(np.percentile([*round_trip_ms, *server], 99.5)) * 1.05
    )  # the last half percent would squeeze the rest
    edges = np.linspace(0, slowest, 49)
    most = 1
    counts: list[tuple[str, NDArray[np.int64]]] = []
    for name, values in (("server", server), ("round-trip", list(round_trip_ms))):
        count = np.histogram(np.minimum(values, slowest), edges)[0] if values else np.zeros(48, np.int64)
        most = max(most, int(count.max()))
        counts.append((name, count))
    left_edge = 22
    scale = (_WIDTH - 2 * left_edge) / slowest
    parts = [_open(height, "distribution of latencies in milliseconds")]
    for name, count in counts:
        for left, right, number in zip(edges, edges[1:], count, strict=False):
            if number:
                tall = number / most * (base - 12)
                parts.append(
                    f'<rect class="{name}" x="{left_edge + left * scale:.1f}" y="{base - tall:.1f}"'
                    f' width="{(right - left) * scale - 1:.1f}" height="{tall:.1f}"/>'
                )
    parts.append(f'<line class="frame" x1="{left_edge}" x2="{_WIDTH - left_edge}" y1="{base}" y2="{base}"/>')
    for tick in _ticks(slowest):
        parts.append(f'<text class="axis" x="{left_edge + tick * scale:.1f}" y="{base + 18}">{tick:g} ms</text>')
    for mark in (50, 90, 99):
        x = left_edge + min(slowest, float(np.percentile(round_trip_ms, mark))) * scale
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{base}"/>')
        parts.append(f'<text class="axis" x="{x:.1f}" y="10">p{mark}</text>')
    return "".join(parts) + "</svg>"


def _open(height: int, label: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">'


def _range(path: Array, plans: Sequence[Array], least: float) -> tuple[float, float]:
    """Lowest and highest value shown: all of the path, and plans unless they are far out."""
    everything = np.concatenate([path, *plans])
    low = min(float(path.min()), float(np.percentile(everything, 1)))
    high = max(float(path.max()), float(np.percentile(everything, 99)))
    missing = max(0.0, least - (high - low)) / 2
    return low - missing, high + missing


def _frame(top: float, name: str, unit: str, low: float, high: float) -> str:
    right, bottom = _WIDTH - _RIGHT, top + _ROW
    return (
        f'<rect class="panel" x="{_LEFT}" y="{top}" width="{right - _LEFT}" height="{_ROW}" rx="4"/>'
        f'<text class="name" x="{_LEFT - 8}" y="{top + _ROW / 2 + 4}">{name}</text>'
        f'<text class="limit" x="{_LEFT - 8}" y="{top + 9}">{high:.0f} {unit}</text>'
        f'<text class="limit" x="{_LEFT - 8}" y="{bottom - 2}">{low:.0f}</text>'
    )


def _line(xs: Array, values: Array, top: float, low: float, high: float, kind: str) -> str:
    ys = np.clip(_y(values, top, low, high), top, top + _ROW)
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=False))
    return f'<polyline class="{kind}" points="{points}"/>'


def _y(values: Array, top: float, low: float, high: float) -> Array:
    return top + 5 + (high - values) / (high - low) * (_ROW - 10)


def _ticks(highest: float) -> list[float]:
    """Four to ten round numbers up to the highest."""
    step = 10.0 ** np.floor(np.log10(highest))
    for finer in (1.0, 2.0, 5.0):
        if highest / (step / finer) >= 4:
            break
    return [float(tick) for tick in np.arange(0, highest, step / finer)]
