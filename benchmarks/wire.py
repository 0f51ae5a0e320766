"""What a call costs around the model: our client and server against the stock OpenPI pair, in one interleaved run.

    python benchmarks/wire.py               all cases, about six minutes
    python benchmarks/wire.py --rounds 3    a first look

Every system gets the same frames (three cameras, 224x224) and a policy that does nothing or waits for 20 ms. Servers
and robots are processes of their own, each in its own environment. The systems take turns in every round (A B C, B C A,
...), so that whatever else the machine does hits all of them; compare the ratios, not the milliseconds. "by round" is
the middle half of the ratios of p50 within one round: where it is wide, the machine was busy. In the last case a proxy
between robot and server (tests/fault_proxy.py) passes 20 Mbit/s and delays each direction by 10 ms; it is no kernel's
link: TCP's slow start after a pause, which a real one adds, is not in these figures. Two systems mix the
stacks, to show what each end contributes. The stock packages are installed on the first run into .venv-stock. Results
go to benchmarks/results/ as JSON.

"around" is the time that our server spends on a request beside the model: from the unpacking of its message until its
actions are encoded, less the batch's time on the device, to which the check that they are finite belongs. So
unpacking, decoding the frames and both changes of thread count; reading from the socket, counting for `/metrics`,
packing the reply's map and sending do not (0.1 ms more for one robot). `server_timing` tells it to our client
(parse + infer + encode - model); it is shown for one robot, which waits for no other.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import record
import stock
from relay.bench.observations import camera_frames

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests"))

from fault_proxy import FaultProxy, in_thread  # noqa: E402

LINK_DELAY_S = 0.010
LINK_BYTES_PER_SECOND = 20e6 / 8


@dataclass(frozen=True, slots=True)
class System:
    """One pair of client and server."""

    name: str
    server: str
    client: str
    codec: str | None = None
    batch: int = 1


STOCK = System("stock", "stock", "stock")
RAW = System("relay RAW", "relay", "relay", "RAW")
JPEG = System("relay JPEG_Q90", "relay", "relay", "JPEG_Q90")
STOCK_CLIENT = System("stock client, relay server", "relay", "stock")
STOCK_SERVER = System("relay client, stock server", "stock", "relay", "RAW")
BATCHING = System("relay JPEG_Q90, batches of 8", "relay", "relay", "JPEG_Q90", batch=8)


@dataclass(frozen=True, slots=True)
class Case:
    """How long the policy takes, how many robots call at once, how often each calls in one turn, and over what link."""

    milliseconds: float
    robots: int
    calls: int
    systems: tuple[System, ...] = (STOCK, RAW, JPEG, STOCK_CLIENT, STOCK_SERVER)
    slow_link: bool = False


CASES = (
    Case(0, 1, 100),
    Case(0, 8, 25),
    Case(20, 1, 25),
    Case(20, 8, 5, (STOCK, RAW, JPEG, STOCK_CLIENT, STOCK_SERVER, BATCHING)),
    Case(0, 1, 5, (STOCK, RAW, JPEG), slow_link=True),
)


@dataclass(slots=True)
class Row:
    """What one system did in one case; latencies in milliseconds, one list per round.

    `around_model` is what our server spent on each request beside the model, told to clients of ours only.
    """

    system: str
    request_bytes: float
    rounds: list[list[float]] = field(default_factory=list)
    around_model: list[float] = field(default_factory=list)

    def percentile(self, share: float) -> float:
        return float(np.percentile(np.concatenate(self.rounds), share))

    def around_percentile(self, share: float) -> float | None:
        return float(np.percentile(self.around_model, share)) if self.around_model else None

    def ratios_by_round(self, base: Row) -> tuple[float, float]:
        """First and third quartile over the rounds of this system's p50 to that of `base` in the same round."""
        ratios = [np.median(ours) / np.median(theirs) for ours, theirs in zip(self.rounds, base.rounds, strict=True)]
        low, high = np.percentile(ratios, (25, 75))
        return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="turns that each system gets in each case (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic frames (default 0)")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder for the JSON file")
    chosen = parser.parse_args()

    stock.ensure()
    print(f"stock environment: {stock.ENVIRONMENT}")
    if busy := record.how_busy():
        print(f"warning: {busy}; even the ratios will be rough")
    report: dict[str, Any] = {"frames": "3 x 224x224, synthetic", "peers": {}, "cases": []}
    with tempfile.TemporaryDirectory() as folder:
        frames = Path(folder) / "frames.npy"
        np.save(frames, camera_frames(chosen.seed))
        for case in CASES:
            rows = run_case(case, frames, chosen.rounds, report["peers"])
            print_table(case, rows)
            report["cases"].append(summary(case, rows))
    record.write("wire", report, vars(chosen), folder=chosen.results)


def run_case(case: Case, frames: Path, rounds: int, versions: dict[str, Any]) -> list[Row]:
    """Start every system of a case, let them take turns, stop them."""
    with ExitStack() as running:
        teams: list[tuple[Row, list[subprocess.Popen[str]]]] = []
        for system in case.systems:
            url = start_server(running, system, case.milliseconds)
            if case.slow_link:
                url = slowed(running, url)
            robots = [start_robot(running, system, url, frames) for _ in range(case.robots)]
            greetings = [read(robot) for robot in robots]
            versions[system.client] = greetings[0]["versions"]
            teams.append((Row(system.name, greetings[0]["request_bytes"]), robots))
        for turn in range(rounds + 1):
            first = turn % len(teams)
            for row, robots in teams[first:] + teams[:first]:
                for robot in robots:
                    ask(robot, case.calls)
                answers = [read(robot) for robot in robots]
                if turn > 0:  # the first turn warms up
                    row.rounds.append([latency for answer in answers for latency in answer["latencies"]])
                    if case.robots == 1:
                        row.around_model += answers[0]["around_model"]
        return [row for row, _ in teams]


def start_server(running: ExitStack, system: System, milliseconds: float) -> str:
    port = free_port()
    options = ["--port", str(port), "--milliseconds", str(milliseconds), "--row-milliseconds", "3"]
    options += ["--batch", str(system.batch)]
    start(running, system.server, ["server", system.server, *options])
    wait_until_healthy(port, system.name)
    return f"ws://127.0.0.1:{port}"


def slowed(running: ExitStack, url: str) -> str:
    """The same server behind the slow link."""
    proxy = FaultProxy(int(url.rpartition(":")[2]))
    for direction in (proxy.to_server, proxy.to_client):
        direction.latency, direction.bytes_per_second = LINK_DELAY_S, LINK_BYTES_PER_SECOND
    running.enter_context(in_thread(proxy))
    return proxy.url


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_healthy(port: int, name: str) -> None:
    deadline = time.monotonic() + 60
    while not is_healthy(port):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the server of {name} did not come up")
        time.sleep(0.05)


def is_healthy(port: int) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError):
        return False


def start_robot(running: ExitStack, system: System, url: str, frames: Path) -> subprocess.Popen[str]:
    codec = ["--codec", system.codec] if system.codec else []
    return start(running, system.client, ["robot", system.client, url, str(frames), *codec])


def start(running: ExitStack, stack: str, arguments: list[str]) -> subprocess.Popen[str]:
    """A process in the environment of its stack, on one thread per library, ended with the case."""
    interpreter = stock.python() if stack == "stock" else Path(sys.executable)
    process = subprocess.Popen(
        [str(interpreter), "-W", "ignore", str(HERE / "wire_peers/process.py"), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    running.callback(stop, process)
    return process


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.communicate(timeout=30)


def ask(robot: subprocess.Popen[str], calls: int) -> None:
    assert robot.stdin is not None
    robot.stdin.write(f"{calls}\n")
    robot.stdin.flush()


def read(robot: subprocess.Popen[str]) -> Any:
    assert robot.stdout is not None
    line = robot.stdout.readline()
    if not line:
        raise RuntimeError(f"a robot ended with code {robot.wait()}; its error is above")
    return json.loads(line)


def print_table(case: Case, rows: list[Row]) -> None:
    link = ", 20 Mbit/s and 20 ms there and back, by proxy" if case.slow_link else ""
    print(f"\n{case.milliseconds:g} ms policy, {case.robots} robot{'s' if case.robots > 1 else ''}{link}")
    print(f"{'':45}{'ratios to stock':>43}{'around p50, p99':>25}")
    print(f"  {'':30}{'request':>10}{'p50':>11}{'p99':>11}{'bytes':>11}{'p50':>7}{'by round':>13}{'p99':>7}")
    base = rows[0]
    for row in rows:
        p50, p99 = row.percentile(50), row.percentile(99)
        low, high = row.ratios_by_round(base)
        ratios = row.request_bytes / base.request_bytes, p50 / base.percentile(50), p99 / base.percentile(99)
        print(
            f"  {row.system:30}{row.request_bytes / 1e3:7.1f} KB{p50:8.2f} ms{p99:8.2f} ms"
            f"{ratios[0]:11.3f}{ratios[1]:7.2f}{low:8.2f}-{high:.2f}{ratios[2]:7.2f}"
            + (f"{row.around_percentile(50):10.2f}{row.around_percentile(99):6.2f} ms" if row.around_model else "")
        )


def summary(case: Case, rows: list[Row]) -> dict[str, Any]:
    base = rows[0]
    return {
        "policy_ms": case.milliseconds,
        "robots": case.robots,
        "calls_per_turn": case.calls,
        "slow_link": case.slow_link,
        "systems": [asdict(system) for system in case.systems],
        "rows": [
            {
                "system": row.system,
                "samples": sum(map(len, row.rounds)),
                "request_bytes": row.request_bytes,
                "p50_ms": row.percentile(50),
                "p99_ms": row.percentile(99),
                "bytes_ratio": row.request_bytes / base.request_bytes,
                "p50_ratio": row.percentile(50) / base.percentile(50),
                "p50_ratio_quartiles_by_round": row.ratios_by_round(base),
                "p99_ratio": row.percentile(99) / base.percentile(99),
                "around_model_p50_ms": row.around_percentile(50),
                "around_model_p99_ms": row.around_percentile(99),
            }
            for row in rows
        ],
    }


if __name__ == "__main__":
    main()
