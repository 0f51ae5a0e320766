"""How much the built-in robot jerks where one chunk follows another, with and without real-time chunking.

    python benchmarks/seams.py                60 scenes each way, about five minutes
    python benchmarks/seams.py --scenes 8     a first look

The robot asks for its next chunk while it executes the present one, and gets it three control steps (300 ms at 10 Hz)
later; it then goes on at the step that is due. The delay is counted in steps of the simulation, so the machine's speed
changes nothing. A seam's jerk is the tool's step onto the first action of the new chunk, over the median of the moving
steps (more than 2 mm) that the robot took in the two chunks it joins; the figure is the median over all seams between
two chunks that move. Both ways see the same scenes and noise seeds. Results go to benchmarks/results/ as JSON.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import relay
from relay.cli.local_server import LocalServer
from relay.demo.drawing import render_all
from relay.demo.robot import (
    ACTION_HORIZON,
    actions_from_model,
    actions_to_model,
    chunk_to_commands,
    observation,
    robot_state,
    task_prompt,
)
from relay.demo.tabletop import MAX_STEPS, Point, Tabletop

HERE = Path(__file__).resolve().parent
MOVING_M = 0.002
DELAY = 3
REPLAN_EVERY = 4
EXECUTION_HORIZON = 6
SEED = 20_000
"""Scenes apart from those of `relay demo` and of the training."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One answer: the actions in model units, and where the tool was when its observation was made."""

    actions: NDArray[np.float32]
    start: Point

    def left_over(self, executed: int, tool: Point) -> NDArray[np.float32]:
        """The actions not executed yet, as the policy would give them from where the tool is now, (n, 4)."""
        places = actions_from_model(self.actions[executed:]) + np.array([*self.start, 0.0], np.float32)
        return actions_to_model(places - np.array([*tool, 0.0], np.float32))


@dataclass(frozen=True, slots=True)
class Run:
    """One attempt.

    Attributes:
        path: the tool's place before the first step and after each one, (steps + 1, 3) in metres.
        seams: the steps that begin a new chunk.
    """

    success: bool
    path: NDArray[np.float64]
    seams: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """One way of asking, over all scenes."""

    guided: bool
    schedule: str
    scenes: int
    successes: int
    seams: int
    median_jerk: float
    p90_jerk: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=60)
    parser.add_argument("--replan-every", type=int, default=REPLAN_EVERY, help="actions executed from each chunk")
    parser.add_argument("--execution-horizon", type=int, default=EXECUTION_HORIZON)
    parser.add_argument("--schedule", default="linear")
    options = parser.parse_args()
    if not DELAY <= options.replan_every <= ACTION_HORIZON - DELAY:
        parser.error(f"--replan-every must be between {DELAY} and {ACTION_HORIZON - DELAY}")
    results: list[Result] = []
    with LocalServer(["demo", "--rtc-schedule", options.schedule]) as server:
        server.wait_until_ready(lambda phase: None)
        with relay.Policy(server.url, codec=relay.Codec.LOSSLESS) as policy:
            for guided in (False, True):
                horizon = options.execution_horizon if guided else None
                runs = [attempt(policy, (SEED, n), options.replan_every, horizon) for n in range(options.scenes)]
                results.append(summed_up(runs, guided, options.schedule))
                print(told(results[-1]), flush=True)
    (HERE / "results").mkdir(exist_ok=True)
    content = {"replan_every": options.replan_every, "execution_horizon": options.execution_horizon, "delay": DELAY}
    (HERE / "results" / "seams.json").write_text(
        json.dumps({**content, "results": [asdict(result) for result in results]}, indent=2) + "\n"
    )


def attempt(policy: relay.Policy, seed: tuple[int, ...], replan_every: int, execution_horizon: int | None) -> Run:
    """Let the policy try one scene, its answers three steps late.

    Args:
        execution_horizon: steps that guide the next chunk; None asks without real-time chunking.
    """
    table = Tabletop(np.random.default_rng(seed))
    noise = np.random.default_rng((*seed, 2))
    prompt = task_prompt(table.cube, table.plate)
    path, seams = [table.tool], list[int]()

    def ask(before: Chunk | None, executed: int) -> Chunk:
        seen = {**observation(render_all(table), robot_state(table), prompt), "seed": int(noise.integers(2**31))}
        if before is not None and execution_horizon is not None:
            seen["prev_actions"] = before.left_over(executed, table.tool)
            seen["inference_delay"] = DELAY
            seen["execution_horizon"] = execution_horizon
        return Chunk(policy.infer(seen)["actions"], table.tool)

    def execute(chunk: Chunk, first: int, stop: int) -> None:
        for command in chunk_to_commands(chunk.actions[first:stop], chunk.start):
            if not table.succeeded and table.steps < MAX_STEPS:
                table.step(command)
                path.append(table.tool)

    chunk, first = ask(None, 0), 0  # the robot waits for the first
    while not table.succeeded and table.steps < MAX_STEPS:
        stop = first + replan_every - DELAY
        execute(chunk, first, stop)
        following = ask(chunk, stop)
        execute(chunk, stop, stop + DELAY)
        seams.append(len(path))
        chunk, first = following, DELAY
    return Run(table.succeeded, np.array(path), tuple(seam for seam in seams if seam < len(path)))


def summed_up(runs: list[Run], guided: bool, schedule: str) -> Result:
    jerks = [jerk for run in runs for jerk in seam_jerks(run)]
    median, p90 = np.percentile(jerks, [50, 90])
    return Result(guided, schedule, len(runs), sum(run.success for run in runs), len(jerks), float(median), float(p90))


def seam_jerks(run: Run) -> list[float]:
    """The tool's step at each seam over the median moving step of the two chunks that it joins."""
    steps = np.linalg.norm(np.diff(run.path, axis=0), axis=1)  # (steps,)
    edges = [0, *(seam - 1 for seam in run.seams), len(steps)]
    jerks: list[float] = []
    for before, seam, after in zip(edges, edges[1:], edges[2:], strict=False):  # the step `seam` begins the new chunk
        own = np.r_[steps[before:seam], steps[seam + 1 : after]]
        moving = own[own > MOVING_M]
        if len(moving):
            jerks.append(float(steps[seam] / np.median(moving)))
    return jerks


def told(result: Result) -> str:
    how = f"with real-time chunking ({result.schedule})" if result.guided else "without real-time chunking"
    return (
        f"{how:40} seam {result.median_jerk:.2f} of a moving step (p90 {result.p90_jerk:.2f}, {result.seams} seams), "
        f"{result.successes} of {result.scenes} scenes succeeded"
    )


if __name__ == "__main__":
    main()
