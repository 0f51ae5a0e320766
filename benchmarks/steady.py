"""Whether requests cost the same whatever they hold: CPU time of each, with states and prompts that vary.

    python benchmarks/steady.py        1,000 requests to the demo policy, once eagerly and once in prepared shapes

States are drawn anew for every request, so that the numbers in the prompt have other lengths, and twenty instructions
take turns. The engine works in this process, after its warm-up; what is compared is the process's CPU time for one
request, all threads together, which other programs on the machine disturb less than they do the clock. A shape that
was compiled, captured or allocated in the middle would stand out. Results go to benchmarks/results/ as JSON.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

import record
import wire
from relay.demo.robot import PROMPTS
from relay.engine.base import Work
from relay.models import registry
from relay.protocol.images import Codec, encode_images
from relay.protocol.messages import Options

GOAL = 3.0
"""No request may take more than so many times the median."""

INSTRUCTIONS = tuple(f"{PROMPTS[number % len(PROMPTS)]}{' the' * (number // 2)}" for number in range(20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0, help="of the states and frames (default 0)")
    parser.add_argument("--results", type=Path, default=wire.HERE / "results", help="folder for the JSON file")
    chosen = parser.parse_args()
    if busy := record.how_busy():
        print(f"warning: {busy}; even CPU times will be rough")
    rows: list[dict[str, Any]] = []
    print(f"{'CPU time per request':24}{'median':>12}{'p99':>12}{'slowest':>12}{'to median':>12}")
    for name, shapes in (("eager", False), ("prepared shapes", True)):
        milliseconds = cpu_times(prepared_shapes=shapes, requests=chosen.requests, seed=chosen.seed)
        median, p99, slowest = np.percentile(milliseconds, (50, 99, 100))
        rows.append({"engine": name, "median_ms": median, "p99_ms": p99, "slowest_ms": slowest})
        print(f"  {name:22}{median:9.2f} ms{p99:9.2f} ms{slowest:9.2f} ms{slowest / median:12.2f}")
    print(f"goal: at most {GOAL:g} times the median")
    record.write("steady", {"rows": rows}, vars(chosen), folder=chosen.results, packages=("torch", "numpy"))


def cpu_times(*, prepared_shapes: bool, requests: int, seed: int) -> list[float]:
    """Milliseconds of CPU time of each request, from the packed observation's values to actions."""
    engine: Any = registry.load("demo", checkpoint=None, device="cpu", max_batch=1)
    engine._graphs = prepared_shapes  # no option asks for them on a CPU, where they gain nothing
    engine.warm_up(lambda phase, share: None)
    random = np.random.default_rng(seed)
    frames = wire.camera_frames(seed)
    spent: list[float] = []
    for number in range(requests):
        observation = encode_images(
            {
                "image": dict(zip(engine.spec.cameras[:2], frames[number % len(frames)], strict=False)),
                "state": random.uniform(-1, 1, engine.model.config.state_dim).astype(np.float32),
                "prompt": INSTRUCTIONS[number % len(INSTRUCTIONS)],
            },
            Codec.JPEG_Q90,
        )
        started = time.process_time()
        prepared = engine.prepare(observation, Options())
        engine.infer([Work(prepared, Options())])
        spent.append((time.process_time() - started) * 1e3)
        assert not any(note.must_be_told for note in prepared.notes), "the instructions are too long"
    return spent


if __name__ == "__main__":
    main()
