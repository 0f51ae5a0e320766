"""Many robots on one device: latency, fairness and health under load, against the stock server and without batching.

    python benchmarks/robots.py                    all cases, about six minutes
    python benchmarks/robots.py --rounds 1         a first look
    python benchmarks/robots.py --soak 10          128 robots at 10 Hz for ten minutes, then two minutes with decoding

The policy of most cases waits for 20 ms and for 3 ms more with each further row of a batch, as a GPU would. Servers are
processes of their own; all robots of a run are coroutines of this one, which send messages packed beforehand, so that
two cores suffice. The stock server gets raw frames, as its own client sends them, ours JPEG, which it decodes. Systems
take turns in every round; compare the ratios. Results go to benchmarks/results/ as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from websockets.asyncio.client import ClientConnection, connect

import record
import relay
import stock
import wire
from relay.protocol.images import encode_images
from relay.protocol.msgpack_numpy import pack

OUTSTANDING = 4
"""Requests that the greedy robot keeps in flight in its worse form: as many as a server takes of one connection."""


@dataclass(frozen=True, slots=True)
class System:
    """A server, and what its robots send."""

    name: str
    options: tuple[str, ...]
    codec: relay.Codec = relay.Codec.JPEG_Q90
    state_dim: int = 32


WAITING = ("--milliseconds", "20", "--row-milliseconds", "3")
STOCK = System("stock", ("server", "stock", "--milliseconds", "20"), relay.Codec.RAW)
BATCHING = System("relay, batches of 8", ("server", "relay", *WAITING, "--batch", "8"))
SINGLE = System("relay, no batching", ("server", "relay", *WAITING))
DEMO_BATCHING = System("demo, batches of 8", ("demo", "--max-batch", "8"), state_dim=4)
DEMO_SINGLE = System("demo, no batching", ("demo", "--max-batch", "1"), state_dim=4)
NO_WAIT = System("relay, 0 ms policy", ("server", "relay", "--milliseconds", "0", "--batch", "8", "--keep-encoded"))
DECODING = System("relay, 0 ms policy, frames decoded", ("server", "relay", "--milliseconds", "0", "--batch", "8"))
BRIEF_WAIT = System(
    "relay, 2 ms policy, 0.3 per row, frames decoded",
    ("server", "relay", "--milliseconds", "2", "--row-milliseconds", "0.3", "--batch", "8"),
)

FLEETS = (1, 2, 4, 8, 16, 32)
DEMO_FLEETS = (1, 8)


@dataclass(slots=True)
class Run:
    """What the robots of one system saw, over all rounds; milliseconds."""

    robots: list[list[float]] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: Run) -> None:
        self.robots = self.robots or [[] for _ in other.robots]
        for mine, theirs in zip(self.robots, other.robots, strict=True):
            mine += theirs
        self.health += other.health
        self.seconds += other.seconds

    def percentile(self, share: float) -> float:
        return float(np.percentile(np.concatenate(self.robots), share))

    @property
    def fairness(self) -> float:
        """The slowest robot's p99 over the fastest's."""
        each = [np.percentile(robot, 99) for robot in self.robots]
        return float(max(each) / min(each))

    def summary(self) -> dict[str, Any]:
        return {
            "answers": sum(map(len, self.robots)),
            "answers_per_second": sum(map(len, self.robots)) / self.seconds,
            "p50_ms": self.percentile(50),
            "p99_ms": self.percentile(99),
            "slowest_p99_over_fastest": self.fairness,
            "health_p99_ms": float(np.percentile(self.health, 99)) if self.health else None,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns that each system gets (default 5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn (default 2)")
    parser.add_argument(
        "--soak",
        type=float,
        metavar="MINUTES",
        help="only hold 128 robots at 10 Hz for so long, then a minute each with frames decoded",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic frames (default 0)")
    parser.add_argument("--results", type=Path, default=wire.HERE / "results", help="folder for the JSON file")
    chosen = parser.parse_args()
    if busy := record.how_busy():
        print(f"warning: {busy}; even the ratios will be rough")
    report: dict[str, Any] = {}
    frames = wire.camera_frames(chosen.seed)
    if chosen.soak:
        minutes = ((NO_WAIT, 128, chosen.soak), (DECODING, 32, 1), (DECODING, 128, 1))
        report["soak"] = [asyncio.run(soak(frames, *case)) for case in minutes]
    else:
        stock.ensure()
        report["fleets"] = compare((STOCK, BATCHING, SINGLE), FLEETS, frames, chosen.rounds, chosen.seconds)
        report["demo"] = compare((DEMO_SINGLE, DEMO_BATCHING), DEMO_FLEETS, frames, chosen.rounds, chosen.seconds)
        report["greedy"] = [
            asyncio.run(beside_a_greedy_one(system, frames, chosen.rounds, chosen.seconds))
            for system in (NO_WAIT, BRIEF_WAIT)
        ]
    record.write("robots", report, vars(chosen), folder=chosen.results)


def compare(
    systems: Sequence[System], fleets: Sequence[int], frames: np.ndarray, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Robots that ask back to back, in fleets of each size; ratios are to the first system."""
    rows: list[dict[str, Any]] = []
    headings = (("answers/s", 10), ("ratio", 8), ("p50", 11), ("p99", 11), ("p50 ratio", 11), ("fairness", 10))
    print("\n" + " " * 32 + "".join(f"{name:>{width}}" for name, width in (*headings, ("healthz p99", 13))))
    with ExitStack() as running:
        ports = {system: start_server(running, system) for system in systems}
        for size in fleets:
            runs = {system: Run() for system in systems}
            for turn in range(rounds + 1):
                first = turn % len(systems)
                for system in (*systems[first:], *systems[:first]):
                    done = asyncio.run(back_to_back(ports[system], messages(frames, system), size, seconds))
                    if turn > 0:  # the first turn warms up
                        runs[system].add(done)
            base = runs[systems[0]].percentile(50)
            for system, run in runs.items():
                row = {"robots": size, "system": asdict(system) | {"codec": system.codec.name}} | run.summary()
                row["p50_ratio"] = run.percentile(50) / base
                rows.append(row)
                row["rate_ratio"] = (
                    row["answers_per_second"] / rows[-1 - list(runs).index(system)]["answers_per_second"]
                )
                print(
                    f"  {f'{size} robots: {system.name}':30}{row['answers_per_second']:10.1f}{row['rate_ratio']:8.2f}"
                    f"{row['p50_ms']:8.2f} ms{row['p99_ms']:8.2f} ms{row['p50_ratio']:11.2f}{run.fairness:10.2f}"
                    f"{row['health_p99_ms']:10.2f} ms"
                )
    return rows


async def back_to_back(port: int, sent: Sequence[bytes], robots: int, seconds: float) -> Run:
    async with fleet(port, robots) as websockets:
        started = time.perf_counter()
        end = started + seconds
        health = asyncio.create_task(watch_health(port, end))
        latencies = await asyncio.gather(*(ask_until(end, websocket, sent) for websocket in websockets))
        took = time.perf_counter() - started  # longer than asked for: the last answers come after the end
        return Run(latencies, await health, took)


async def beside_a_greedy_one(system: System, frames: np.ndarray, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """31 robots at 10 Hz alone, beside one that asks back to back, and beside one with four requests in flight."""
    sent = messages(frames, system)
    flights = {"nobody": 0, "one back to back": 1, f"one with {OUTSTANDING} in flight": OUTSTANDING}
    runs = {name: Run() for name in flights}
    with ExitStack() as running:
        port = start_server(running, system)
        for turn in range(rounds + 1):
            first = turn % len(flights)
            for name in (*list(flights)[first:], *list(flights)[:first]):
                done = await beside(port, sent, flights[name], seconds)
                if turn > 0:  # the first turn warms up
                    runs[name].add(done)
    quiet = runs["nobody"].percentile(99)
    print(f"\n  {f'31 robots at 10 Hz: {system.name}':69}{'p50':>8}{'p99':>11}{'p99 to quiet':>14}{'healthz p99':>13}")
    rows: list[dict[str, Any]] = []
    for name, run in runs.items():
        row = {"system": system.name, "beside": name} | run.summary() | {"p99_to_quiet": run.percentile(99) / quiet}
        rows.append(row)
        print(
            f"    beside {name:59}{row['p50_ms']:8.2f} ms{row['p99_ms']:8.2f} ms{row['p99_to_quiet']:14.2f}"
            f"{row['health_p99_ms']:10.2f} ms"
        )
    return rows


async def beside(port: int, sent: Sequence[bytes], flight: int, seconds: float) -> Run:
    """What 31 robots at 10 Hz see beside one that keeps `flight` requests in flight."""
    async with fleet(port, 31) as websockets, fleet(port, 1) as greedy:
        started = time.perf_counter()
        end = started + seconds
        health = asyncio.create_task(watch_health(port, end))
        hog = asyncio.create_task(ask_until(end, greedy[0], sent, flight))
        paced = [ask_at(10, end, websocket, sent, index) for index, websocket in enumerate(websockets)]
        latencies = await asyncio.gather(*paced)
        took = time.perf_counter() - started
        await hog
        return Run(latencies, await health, took)


async def soak(frames: np.ndarray, system: System, robots: int, minutes: float) -> dict[str, Any]:
    """Robots at 10 Hz with JPEG frames, about 31 KB a request; every answer must come."""
    sent, seconds = messages(frames, system), 60 * minutes
    with ExitStack() as running:
        port = start_server(running, system)
        async with fleet(port, robots) as websockets:
            started = time.perf_counter()
            end = started + seconds
            health = asyncio.create_task(watch_health(port, end, period=1.0))
            paced = [ask_at(10, end, websocket, sent, index) for index, websocket in enumerate(websockets)]
            latencies = await asyncio.gather(*paced)
            took = time.perf_counter() - started
            run = Run(latencies, await health, took)
    size = float(np.mean([len(message) for message in sent]))
    row = run.summary() | {"system": system.name, "robots": robots, "seconds": took, "request_bytes": size}
    print(
        f"{robots} robots, {system.name}: {row['answers']} answers to as many requests of {size / 1e3:.1f} KB", end=""
    )
    print(f" ({row['answers_per_second']:.0f}/s), p50 {row['p50_ms']:.2f} ms, p99 {row['p99_ms']:.2f} ms", end="")
    print(f", slowest robot's p99 {run.fairness:.2f} x the fastest's, healthz p99 {row['health_p99_ms']:.2f} ms")
    return row


async def ask_until(end: float, websocket: ClientConnection, sent: Sequence[bytes], flight: int = 1) -> list[float]:
    """Keep `flight` requests in flight until the end; the latency of each, from sending to the answer."""
    latencies: list[float] = []
    begun: list[float] = []
    while flight and (time.perf_counter() < end or begun):
        while len(begun) < flight and time.perf_counter() < end:
            begun.append(time.perf_counter())
            await websocket.send(sent[len(latencies) % len(sent)])
        if begun:
            check(await websocket.recv())
            latencies.append((time.perf_counter() - begun.pop(0)) * 1e3)
    return latencies


async def ask_at(
    hertz: float, end: float, websocket: ClientConnection, sent: Sequence[bytes], index: int
) -> list[float]:
    """Ask on a fixed beat, robots spread over it; an answer that comes late is counted from its beat."""
    latencies: list[float] = []
    beat = time.perf_counter() + (index * 0.618 % 1) / hertz
    while beat < end:
        await asyncio.sleep(beat - time.perf_counter())
        started = time.perf_counter() if not latencies or latencies[-1] < 1e3 / hertz else beat
        await websocket.send(sent[len(latencies) % len(sent)])
        check(await websocket.recv())
        latencies.append((time.perf_counter() - started) * 1e3)
        beat += 1 / hertz
    return latencies


async def watch_health(port: int, end: float, period: float = 0.05) -> list[float]:
    """Ask for `/healthz` on new connections; milliseconds."""
    latencies: list[float] = []
    while time.perf_counter() < end:
        started = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        if b" 200 " not in await reader.readline():
            raise RuntimeError("the server is not healthy")
        latencies.append((time.perf_counter() - started) * 1e3)
        writer.close()
        await asyncio.sleep(period)
    return latencies


@asynccontextmanager
async def fleet(port: int, robots: int) -> AsyncIterator[list[ClientConnection]]:
    """Connections that have been greeted."""
    websockets = [
        await connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None, ping_interval=None, proxy=None)
        for _ in range(robots)
    ]
    try:
        for websocket in websockets:
            await websocket.recv()
        yield websockets
    finally:
        await asyncio.gather(*(websocket.close() for websocket in websockets))


def check(reply: str | bytes) -> None:
    if isinstance(reply, str):
        raise RuntimeError(reply)


def messages(frames: np.ndarray, system: System) -> list[bytes]:
    """Observations as they travel."""
    cameras = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    observations = (
        {
            "image": dict(zip(cameras, views, strict=True)),
            "state": np.zeros(system.state_dim, np.float32),
            "prompt": "pick up the fork",
        }
        for views in frames
    )
    return [pack(encode_images(observation, system.codec)) for observation in observations]


def start_server(running: ExitStack, system: System) -> int:
    port = wire.free_port()
    if system.options[0] == "demo":
        program = "import sys; from relay.cli.main import main; sys.exit(main(sys.argv[1:]))"
        arguments = [sys.executable, "-c", program, "serve", *system.options, "--port", str(port)]
        process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL, env=wire.environment())
        running.callback(process.wait)
        running.callback(process.terminate)
    else:
        wire.start(running, system.options[1], [*system.options, "--port", str(port)])
    wire.wait_until_healthy(port, system.name)
    return port


if __name__ == "__main__":
    main()
