"""Whether requests cost the same whatever they hold: CPU time of each, with states and prompts that vary.

    python benchmarks/steady.py             1,000 requests to the demo policy, once eagerly and once in prepared shapes
    python benchmarks/steady.py --served    to `relay serve demo` over the WebSocket, one after the other; on Linux

States are drawn anew for every request, so that the numbers in the prompt have other lengths, and twenty instructions
take turns. The engine works in this process, or in a server's, after its warm-up; what is compared is the process's CPU
time for one request, all threads together, which other programs on the machine disturb less than they do the clock. A
shape that was compiled, captured or allocated in the middle would stand out. Results go to benchmarks/results/ as JSON.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import record
import relay
import wire
from relay.demo.robot import PROMPTS
from relay.engine.base import Work
from relay.models import registry
from relay.protocol.images import Codec, encode_images
from relay.protocol.messages import Options

GOAL = 3.0
"""No request may take more than so many times the median."""

WARM_UP = 5
"""Requests to a server that are not counted: it measures what decoding takes before it decides where to do it."""

INSTRUCTIONS = tuple(f"{PROMPTS[number % len(PROMPTS)]}{' the' * (number // 2)}" for number in range(20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0, help="of the states and frames (default 0)")
    parser.add_argument("--served", action="store_true", help="measure a server's process instead of the engine alone")
    parser.add_argument("--results", type=Path, default=wire.HERE / "results", help="folder for the JSON file")
    chosen = parser.parse_args()
    if busy := record.how_busy():
        print(f"warning: {busy}; even CPU times will be rough")
    print(f"{'CPU time per request':24}{'median':>12}{'p99':>12}{'slowest':>12}{'to median':>12}")
    if chosen.served:
        rows = [row("served", served_cpu_times(chosen.requests, chosen.seed))]
    else:
        rows = [
            row(name, cpu_times(prepared_shapes=shapes, requests=chosen.requests, seed=chosen.seed))
            for name, shapes in (("eager", False), ("prepared shapes", True))
        ]
    print(f"goal: at most {GOAL:g} times the median")
    record.write("steady", {"rows": rows}, vars(chosen), folder=chosen.results, packages=("torch", "numpy"))


def row(name: str, milliseconds: list[float]) -> dict[str, Any]:
    """Print one row of the table."""
    median, p99, slowest = np.percentile(milliseconds, (50, 99, 100))
    print(f"  {name:22}{median:9.2f} ms{p99:9.2f} ms{slowest:9.2f} ms{slowest / median:12.2f}")
    return {"engine": name, "median_ms": median, "p99_ms": p99, "slowest_ms": slowest}


def cpu_times(*, prepared_shapes: bool, requests: int, seed: int) -> list[float]:
    """Milliseconds of CPU time of each request, from the packed observation's values to actions."""
    engine = demo_engine()
    engine._graphs = prepared_shapes  # no option asks for them on a CPU, where they gain nothing
    engine.warm_up(lambda phase, share: None)
    spent: list[float] = []
    for observation in observations(engine, requests, seed):
        encoded = encode_images(observation, Codec.JPEG_Q90)
        started = time.process_time()
        prepared = engine.prepare(encoded, Options())
        engine.infer([Work(prepared, Options())])
        spent.append((time.process_time() - started) * 1e3)
        assert not any(note.must_be_told for note in prepared.notes), "the instructions are too long"
    return spent


def served_cpu_times(requests: int, seed: int) -> list[float]:
    """Milliseconds of a server process's CPU time from one reply to the next."""
    program = "import sys; from relay.cli.main import main; sys.exit(main(sys.argv[1:]))"
    port = wire.free_port()
    command = [sys.executable, "-c", program, "serve", "demo", "--device", "cpu", "--port", str(port)]
    spent: list[float] = []
    with ExitStack() as running:
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=wire.environment())
        running.callback(server.wait)
        running.callback(server.terminate)
        wire.wait_until_healthy(port, "served")
        policy = running.enter_context(relay.Policy(f"ws://127.0.0.1:{port}"))
        before = cpu_seconds(server.pid)
        for observation in observations(demo_engine(), WARM_UP + requests, seed):
            policy.infer(observation)
            after = cpu_seconds(server.pid)
            spent.append((after - before) * 1e3)
            before = after
    return spent[WARM_UP:]


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, all its threads; /proc/PID/stat counts in hundredths of a second only."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def demo_engine() -> Any:
    return registry.load("demo", checkpoint=None, device="cpu", max_batch=1)


def observations(engine: Any, requests: int, seed: int) -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(seed)
    frames = wire.camera_frames(seed)
    for number in range(requests):
        yield {
            "image": dict(zip(engine.spec.cameras[:2], frames[number % len(frames)], strict=False)),
            "state": random.uniform(-1, 1, engine.model.config.state_dim).astype(np.float32),
            "prompt": INSTRUCTIONS[number % len(INSTRUCTIONS)],
        }


if __name__ == "__main__":
    main()
