"""`relay demo`: a server, a policy and a robot on this machine, and a report of how it went."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from websockets.exceptions import WebSocketException

from relay.cli.local_server import LocalServer
from relay.protocol.images import Codec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from relay.client.policy import Policy
    from relay.demo.episode import Episode
    from relay.demo.live import LivePage
    from relay.demo.tabletop import Tabletop

_IMPORTED_AT = time.monotonic()
_VIEWER_S = 30.0


@dataclass(frozen=True)
class Demo:
    """Watch the built-in policy put cubes on plates, through a real server and the real client."""

    episodes: int = 10
    """Tasks to try."""

    seed: int = 0
    """Chooses scenes, tasks and noise; the same seed repeats the same run."""

    robot: str = "front"
    """The robot to drive: front, or cross, whose base camera stands across the table and which asks for an adapter."""

    adapter: str | None = None
    """LoRA adapter to ask for, the robot's own by default; base asks for the bare policy, none for nothing."""

    prompt: str | None = None
    """Try this task in every scene, such as "put the red cube on the yellow plate"."""

    num_steps: int | None = None
    """Denoising steps; the server's own number by default."""

    replan_every: int = 4
    """Actions to execute from each chunk before asking again."""

    codec: str = Codec.JPEG_Q90.name
    """How camera pictures are sent: RAW, LOSSLESS, or JPEG_Q100, Q98, Q95, Q92, Q90, Q85 or Q50."""

    url: str | None = None
    """Drive a server that is running already, such as ws://robot-server:8000."""

    live: bool = False
    """Show the robot on a local page while it moves, in real time."""

    ablate: Literal["prompt", "cameras", "state"] | None = None
    """Take something from the policy, to see what it is worth."""

    check: bool = False
    """Exit with code 1 if less than the threshold of the episodes succeed."""

    threshold: float = 0.97
    """Share of episodes that --check asks for."""

    output: Path = Path("relay-demo")
    """Folder for report.html, episode.gif and results.json."""

    def run(self) -> int:
        try:
            self._validate()
        except ValueError as error:
            print(f"relay demo: {error}", file=sys.stderr)
            return 2
        signal.signal(signal.SIGTERM, _leave)  # so that the server is ended too
        console = Console(highlight=False)
        try:
            return _run(self, console)
        except KeyboardInterrupt:
            console.print("stopped")
            return 130
        except (RuntimeError, ValueError, OSError, WebSocketException) as error:
            console.print(f"[red]relay demo:[/] {escape(str(error))}", soft_wrap=True)
            return 1

    def _validate(self) -> None:
        from relay.demo.episode import task_of
        from relay.demo.robot import ACTION_HORIZON
        from relay.demo.tabletop import known_robot

        known_robot(self.robot)
        codec_named(self.codec)
        if self.episodes < 1:
            raise ValueError(f"--episodes must be at least 1, got {self.episodes}")
        if self.seed < 0:
            raise ValueError(f"--seed must not be negative, got {self.seed}")
        if not 1 <= self.replan_every <= ACTION_HORIZON:
            raise ValueError(f"--replan-every must be between 1 and {ACTION_HORIZON}, got {self.replan_every}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"--threshold must be between 0 and 1, got {self.threshold}")
        if self.prompt is not None:
            task_of(self.prompt)

    @property
    def wanted_adapter(self) -> str | None:
        """What requests ask for; None leaves it to the server."""
        if self.adapter is None:
            return _ADAPTERS.get(self.robot)
        return None if self.adapter == _NO_ADAPTER else self.adapter


_ADAPTERS = {"cross": "demo-cross"}
"""The adapter that each robot needs; the policy was trained on the others."""

_NO_ADAPTER = "none"


def codec_named(name: str) -> Codec:
    """The codec of a name in either case, such as `JPEG_Q90` or `lossless`.

    Raises:
        ValueError: with the names there are.
    """
    codec = Codec.__members__.get(name.upper().replace("-", "_"))
    if codec is None:
        raise ValueError(f"--codec {name!r} is not known; known are {', '.join(Codec.__members__)}")
    return codec


def _run(options: Demo, console: Console) -> int:
    with ExitStack() as stack:
        url = options.url or _start_server(stack, console)
        policy = _connect(stack, console, url, codec_named(options.codec))
        console.print(f"robot [bold]{options.robot}[/], {_adapter_in_words(options.wanted_adapter)}")
        watcher = _Watcher(console, stack, options.live)
        episodes = _drive(options, policy, console, watcher)
        metadata = policy.get_server_metadata()
    return _conclude(options, console, episodes, metadata, watcher.first_frame_s)


def _start_server(stack: ExitStack, console: Console) -> str:
    server = stack.enter_context(LocalServer(["demo", "--max-batch", "1"]))
    with console.status("starting the server") as status:
        server.wait_until_ready(lambda phase: status.update(f"starting the server: {escape(phase)}"))
    return server.url


def _connect(stack: ExitStack, console: Console, url: str, codec: Codec) -> Policy:
    import relay

    with console.status(f"connecting to {escape(url)}"):
        policy = stack.enter_context(relay.Policy(url, codec=codec))
    console.print(f"connected to [bold]{escape(url)}[/]", soft_wrap=True)
    for key, value in policy.get_server_metadata().items():
        console.print(f"  [dim]{escape(key):<16}[/]{escape(str(value))}", soft_wrap=True)
    return policy


def _adapter_in_words(name: str | None) -> str:
    match name:
        case None:
            return "no adapter asked for"
        case "base":
            return "the bare policy asked for"
        case _:
            return f"adapter [bold]{escape(name)}[/] asked for"


def _drive(options: Demo, policy: Policy, console: Console, watcher: _Watcher) -> list[Episode]:
    from relay.demo.episode import run_episode
    from relay.demo.report import REPORTED_EPISODES

    episodes: list[Episode] = []
    for index in range(options.episodes):
        with watcher.episode(f"{index + 1:>3}/{options.episodes}", episodes):
            episode = run_episode(
                policy,
                (options.seed, index),
                robot=options.robot,
                adapter=options.wanted_adapter,
                prompt=options.prompt,
                replan_every=options.replan_every,
                num_steps=options.num_steps,
                ablate=options.ablate,
                record=index < REPORTED_EPISODES,
                on_step=watcher.on_step,
            )
        episodes.append(episode)
        console.print(_episode_line(f"{index + 1:>3}/{options.episodes}", episode), soft_wrap=True)
    return episodes


class _Watcher:
    """Shows each step while it happens: on the terminal's last line and, if asked for, on the live page."""

    def __init__(self, console: Console, stack: ExitStack, live: bool) -> None:
        self.first_frame_s = math.nan
        self._console = console
        self._status: Status | None = None
        self._number = ""
        self._page: LivePage | None = None
        if live:
            from relay.demo.live import LivePage

            self._page = stack.enter_context(LivePage())
            console.print(f"open [bold]{self._page.url}[/] to watch", soft_wrap=True)
            self._page.wait_for_viewer(_VIEWER_S)

    @contextmanager
    def episode(self, number: str, before: Sequence[Episode]) -> Iterator[None]:
        """Watch one episode; `before` are those that are over."""
        self._number = number
        if self._page is not None:
            done = sum(episode.success for episode in before)
            self._page.status = f"episode {number.strip()}, {done} of {len(before)} done so far"
        with self._console.status("") as self._status:
            yield

    def on_step(self, table: Tabletop, plan: NDArray[np.float32]) -> None:
        from relay.demo.robot import task_prompt
        from relay.demo.tabletop import CONTROL_HZ

        if table.steps > 0 and math.isnan(self.first_frame_s):
            self.first_frame_s = _process_age_s()
        prompt = task_prompt(table.cube, table.plate)
        if self._status is not None:
            self._status.update(f"{self._number}  {prompt}  {table.steps / CONTROL_HZ:.1f} s")
        if self._page is not None:
            self._page.show(table, prompt, plan)


def _episode_line(number: str, episode: Episode) -> str:
    from relay.demo.summary import percentiles
    from relay.demo.tabletop import CONTROL_HZ

    outcome = "[green]done    [/]" if episode.success else "[red]not done[/]"
    p50 = percentiles([request.round_trip_ms for request in episode.requests]).p50
    return (
        f"{number}  {episode.prompt:<40} {outcome} {episode.steps:>4} steps, {episode.steps / CONTROL_HZ:>4.1f} s"
        f"   p50 {p50:>5.1f} ms"
    )


def _conclude(
    options: Demo,
    console: Console,
    episodes: Sequence[Episode],
    metadata: Mapping[str, Any],
    first_frame_s: float,
) -> int:
    """Print the sums, write the report, and give the exit code."""
    from relay.demo.report import write_report
    from relay.demo.summary import summarize

    summary = summarize(episodes)
    trip, server = summary.round_trip_ms, summary.server_ms
    console.print()
    console.print(f"success     [bold]{summary.success_rate:.1%}[/]  ({summary.successes} of {summary.episodes})")
    console.print(f"round trip  p50 {trip.p50:.1f} ms, p90 {trip.p90:.1f} ms, p99 {trip.p99:.1f} ms")
    console.print(f"in engine   p50 {server.p50:.1f} ms, p90 {server.p90:.1f} ms, p99 {server.p99:.1f} ms")
    console.print(f"a request   {summary.bytes_per_request:,} bytes")
    for note, count in summary.notes.items():
        console.print(f"[yellow]note[/]        {escape(note)} ({count} times)", soft_wrap=True)

    with console.status("drawing the report") as status:
        page = write_report(
            options.output,
            episodes,
            options=_as_json(options),
            metadata=metadata,
            first_frame_s=first_frame_s,
            progress=lambda done, of: status.update(f"drawing the report: {done} of {of}"),
        )
    console.print(f"report      {page}", soft_wrap=True)
    if options.check and summary.success_rate < options.threshold:
        console.print(f"[red]success is below the threshold of {options.threshold:.1%}[/]")
        return 1
    return 0


def _as_json(options: Demo) -> dict[str, Any]:
    return asdict(options) | {
        "adapter": options.wanted_adapter,
        "codec": codec_named(options.codec).name,
        "output": str(options.output),
    }


def _process_age_s() -> float:
    """Seconds since this process was started; where the system doesn't say, since this file was imported."""
    try:
        fields = Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of the line, see proc(5)
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED_AT


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
