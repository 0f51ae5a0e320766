"""What a run leaves behind: a page that needs nothing else, an animation and the numbers."""

from __future__ import annotations

import html
import json
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from relay.demo.animation import frames_of, gif, webp
from relay.demo.charts import chunk_chart, latency_chart
from relay.demo.episode import Episode
from relay.demo.summary import percentiles, results, summarize
from relay.demo.tabletop import CONTROL_HZ

REPORTED_EPISODES = 10
"""Episodes beyond these are in the numbers only; recording them would cost memory and a long page."""


def write_report(
    folder: Path,
    episodes: Sequence[Episode],
    *,
    options: Mapping[str, Any],
    metadata: Mapping[str, Any],
    first_frame_s: float,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Path:
    """Write `results.json`, `episode.gif` and `report.html`; returns the page's path.

    Args:
        folder: made if it isn't there; files of an earlier run are replaced.
        episodes: all of the run's, at least one; the page shows those that were recorded.
        options: what the run was asked for.
        metadata: what the server said about the policy.
        first_frame_s: from the start of the process to the first step of the robot.
        progress: called with how many episodes are drawn, and of how many.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers = results(episodes, options, metadata, first_frame_s)
    (folder / "results.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")

    recorded = [(number, episode) for number, episode in enumerate(episodes, 1) if episode.states]
    shown = next((episode for _, episode in recorded if episode.success), None)
    cards: list[str] = []
    for number, episode in recorded:
        progress(len(cards), len(recorded))
        frames = frames_of(episode)
        if episode is shown or (shown is None and not cards):
            (folder / "episode.gif").write_bytes(gif(frames))
        cards.append(_card(number, episode, webp(frames)))
    progress(len(recorded), len(recorded))

    page = folder / "report.html"
    page.write_text(_page(episodes, cards, numbers), encoding="utf-8")
    return page


def _page(episodes: Sequence[Episode], cards: Sequence[str], numbers: Mapping[str, Any]) -> str:
    template = files("relay.demo").joinpath("pages").joinpath("report.html").read_text("utf-8")
    requests = [request for episode in episodes for request in episode.requests]
    ablated = numbers["options"].get("ablate")
    return Template(template).substitute(
        tiles=_tiles(episodes, numbers["first_frame_s"]),
        warning=_ABLATED.format(what=html.escape(str(ablated))) if ablated else "",
        latency=latency_chart([r.round_trip_ms for r in requests], [r.server_ms for r in requests]),
        rows="".join(_row(number, episode) for number, episode in enumerate(episodes, 1)),
        cards="".join(cards),
        cards_note=f"the first {len(cards)} of {len(episodes)}" if len(cards) < len(episodes) else "all of them",
        notes=_notes(numbers["notes"]),
        details=html.escape(json.dumps({key: numbers[key] for key in ("options", "policy", "versions")}, indent=2)),
    )


def _tiles(episodes: Sequence[Episode], first_frame_s: float) -> str:
    summary = summarize(episodes)
    times = summary.round_trip_ms
    tiles = (
        ("success", f"{summary.success_rate:.0%}", f"{summary.successes} of {summary.episodes} episodes"),
        ("round trip", _ms(times.p50), f"p90 {_ms(times.p90)}, p99 {_ms(times.p99)}"),
        ("in the engine", _ms(summary.server_ms.p50), f"p90 {_ms(summary.server_ms.p90)}"),
        ("a request", f"{summary.bytes_per_request / 1000:.1f} kB", "two cameras, state and prompt"),
        ("an episode", _seconds(summary.mean_steps), "robot time, of the solved ones"),
        ("first movement", f"{first_frame_s:.1f} s", "after the command was started"),
    )
    return "".join(
        f'<div class="tile"><span>{name}</span><b>{value}</b><small>{more}</small></div>' for name, value, more in tiles
    )


def _row(number: int, episode: Episode) -> str:
    times = percentiles([request.round_trip_ms for request in episode.requests])
    return (
        f"<tr><td>{number}</td><td>{_coloured(episode.prompt)}</td><td>{_outcome(episode)}</td>"
        f"<td>{episode.steps}</td><td>{len(episode.requests)}</td><td>{times.p50:.1f}</td></tr>"
    )


def _card(number: int, episode: Episode, moving: bytes) -> str:
    source = "data:image/webp;base64," + b64encode(moving).decode("ascii")
    return (
        f'<article><h3><span class="number">{number}</span> {_coloured(episode.prompt)} {_outcome(episode)}</h3>'
        f'<img src="{source}" width="688" height="456" alt="the episode from the side, and what the two cameras saw">'
        f"<figure>{chunk_chart(episode)}</figure></article>"
    )


def _coloured(prompt: str) -> str:
    """The prompt with its colour words in colour."""
    words = (html.escape(word) for word in prompt.split())
    return " ".join(f'<i class="{word}">{word}</i>' if word in _COLOUR_WORDS else word for word in words)


_COLOUR_WORDS = {"red", "green", "blue", "yellow", "purple"}


def _outcome(episode: Episode) -> str:
    if episode.success:
        return f'<em class="good">done in {_seconds(episode.steps)}</em>'
    return f'<em class="bad">not done in {_seconds(episode.steps)}</em>'


def _notes(notes: Mapping[str, int]) -> str:
    items = "".join(f"<li>{html.escape(note)} ({count} times)</li>" for note, count in notes.items())
    return f"<h2>Notes from the server</h2><ul>{items}</ul>" if items else ""


def _ms(value: float) -> str:
    return "–" if value != value else f"{value:.1f} ms"


def _seconds(steps: float) -> str:
    return "–" if steps != steps else f"{steps / CONTROL_HZ:.1f} s"


_ABLATED = (
    '<p class="warning">The policy was deprived on purpose: <b>{what}</b>. What it misses in success is what this '
    "input is worth; the pictures below show the scene as it was.</p>"
)
