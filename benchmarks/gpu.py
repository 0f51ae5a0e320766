"""Check and time the engines on a GPU: are they right, how fast are they, how far from the least possible time.

    python benchmarks/gpu.py --json gpu.json                      under five minutes on an H200
    python benchmarks/gpu.py --device cpu --scale tiny            the same on the CPU, small, in a minute

Needs the server's packages and no weights: the tiny networks with recorded outputs are in the repository, the large one
is made of random numbers on the device. Parts are left out when `--minutes` are over; what was measured stands in the
JSON file, which is written after every part. Ends with code 1 if a result is wrong; times fail nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import relay
from gpu_parts import groot, kernels, numerics, times
from gpu_parts.networks import ALOHA, DROID, Case, config, engine, random_network
from relay.engine.fast_path import TOLERANCES
from relay.models.pi0.engine import Pi0Engine

BATCHES, STEPS = (1, 2, 4, 8), (10, 4)


class Run:
    """What was measured so far, and the time that is left."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.path: Path | None = options.json
        self.deadline = time.monotonic() + 60 * options.minutes
        self.rounds = 20 if options.scale == "full" else 2
        self.wrong: list[str] = []
        self.results: dict[str, Any] = {"environment": environment(device, options.scale)}

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """Measure one part, show it and write it down; an error in it is a result like any other."""
        if time.monotonic() > self.deadline:
            self._keep(name, {"left out": "the time was over"})
            return None
        started = time.monotonic()
        try:
            result = measure()
        except Exception as error:
            traceback.print_exc()
            self.wrong.append(f"{name}: {type(error).__name__}: {error}")
            result = {"error": self.wrong[-1]}
        self._keep(name, result)
        print(f"{name}  ({time.monotonic() - started:.1f} s)", flush=True)
        show(result)
        return result

    def _keep(self, name: str, result: Any) -> None:
        self.results[name] = result
        self.results["wrong"] = self.wrong
        if self.path is not None:
            self.path.write_text(json.dumps(self.results, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", choices=["full", "tiny"], default="full")
    parser.add_argument("--minutes", type=float, default=4.5, help="time after which no part is begun")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--no-compile", action="store_true", help="leave compiled functions out")
    options = parser.parse_args()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    compiled = on_gpu and not options.no_compile
    run = Run(options, device)
    print(json.dumps(run.results["environment"]))

    run.part("numerics", lambda: check(run, device, quick=not on_gpu, fuse=compiled))
    sizes = config(options.scale, ALOHA)
    run.part("attention, us a layer", lambda: kernels.attention(sizes, ALOHA, device, run.rounds))
    for case in (DROID, ALOHA):
        model = random_network(config(options.scale, case), device)
        plain = engine(model, 8)
        # Without reuse: the same few requests are sent over and over, which no robot does.
        prepared = run.part(f"{case.name}: warm-up", lambda m=model: warm(m, 8, reuse_bytes=0))
        if not isinstance(prepared, Warmed):
            continue
        time_engine(run, f"{case.name}: prepared", prepared.engine, case)
        run.part(f"{case.name}: plain, batch 1", lambda p=plain, c=case: times.in_process(p, c, 1, 10, run.rounds))
        run.part(f"{case.name}: launches", lambda m=model, e=prepared.engine, c=case: times.launches(m, e, c, 10))
        run.part(f"{case.name}: memory", lambda e=prepared.engine: times.memory(device, e))
        if compiled and case is ALOHA:
            fused = run.part(f"{case.name}: warm-up, compiled", lambda m=model: warm(m, 8, reuse_bytes=0, compile=True))
            if isinstance(fused, Warmed):
                time_engine(run, f"{case.name}: compiled", fused.engine, case, short=True)
        del model, plain, prepared
    time_groot(run, options.scale, device)
    run.part("JPEG", lambda: kernels.jpeg(device, run.rounds))

    for wrong in run.wrong:
        print(f"WRONG: {wrong}")
    return 1 if run.wrong else 0


def check(run: Run, device: torch.device, *, quick: bool, fuse: bool) -> Mapping[str, Any]:
    """All numeric checks; those that fail are noted."""
    results = {}
    for result in numerics.checks(device, quick=quick, fuse=fuse):
        results[result.name] = {"distance": result.distance, "at most": result.gate}
        if not result.passed:
            run.wrong.append(f"{result.name}: {result.distance:.1e}, at most {result.gate:g}")
    return results


class Warmed(dict[str, Any]):
    """What a warm-up took, with the engine that is warm now."""

    engine: Pi0Engine


def warm(model: Any, max_batch: int, **options: Any) -> Warmed:
    """Warm an engine up; a remark on a path that was turned off is an error here."""
    torch.compiler.reset()  # each network may have its own few variants of a compiled function
    started = time.monotonic()
    warmed = Warmed()
    warmed.engine = engine(model, max_batch, graphs=True, **options)
    warmed.engine.warm_up(lambda phase, share: None)
    fixed = warmed.engine.fixed
    if fixed is None or warmed.engine.remarks:
        raise RuntimeError("; ".join(warmed.engine.remarks))
    shapes = len(list(fixed.plan))
    took = time.monotonic() - started
    warmed.update(seconds=took, shapes=shapes, graphs=len(fixed.graphs), seconds_per_shape=took / shapes)
    return warmed


def time_engine(run: Run, name: str, timed: Pi0Engine, case: Case, *, short: bool = False) -> None:
    """Times of one engine, in process and over a WebSocket."""
    for steps in STEPS[:1] if short else STEPS:
        for rows in BATCHES:
            run.part(
                f"{name}, batch {rows}, {steps} steps",
                lambda b=rows, s=steps: times.in_process(timed, case, b, s, run.rounds),
            )
    for rows in (1, 8):
        run.part(f"{name}, batch {rows}: parts", lambda b=rows: times.stages(timed, case, b, run.rounds))
    if short:
        return
    calls = 3 * run.rounds
    run.part(f"{name}: one robot over a WebSocket", lambda: times.over_websocket(timed, case, 1, calls))
    run.part(f"{name}: eight robots over a WebSocket", lambda: times.over_websocket(timed, case, 8, calls))
    run.part(f"{name}: prompts and steps that vary", lambda: times.varying(timed, case, 3 * calls))
    again = f"{name}: frames that come again, 1 step"
    run.part(again, lambda: times.reuse(timed, warm(timed.model, 1).engine, case, run.rounds))


def time_groot(run: Run, scale: str, device: torch.device) -> None:
    """GR00T N1.7 on a DROID robot's observations: one row like another, plain and prepared, launches and memory."""
    model = run.part("GR00T: making the network", lambda: Made(groot.random_network(groot.config(scale), device)))
    if not isinstance(model, Made):
        return
    network = model.network
    agreement = run.part("GR00T: rows of a batch against rows alone", lambda: groot.rows_agree(network, 3, 4))
    if agreement is not None and not agreement.get("distance", 0) <= ROWS_AGREE[device.type == "cuda"]:
        run.wrong.append(f"GR00T: rows of a batch differ from rows alone by {agreement['distance']:.1e}")
    for rows in BATCHES:
        run.part(f"GR00T: plain, batch {rows}, 4 steps", lambda b=rows: groot.in_process(network, b, 4, run.rounds))
    prepared = run.part("GR00T: preparing shapes", lambda: Shapes(network, BATCHES[-1]))
    if not isinstance(prepared, Shapes):
        return
    fixed, tolerance = prepared.fixed, TOLERANCES[network.dtype]
    difference = run.part("GR00T: prepared to plain", lambda: groot.prepared_agrees(network, fixed, 4))
    if difference is not None and not difference.get("distance", 0) <= tolerance:
        run.wrong.append(f"GR00T: prepared differs from plain by {difference['distance']:.1e}, at most {tolerance:g}")
    for rows in BATCHES:
        name = f"GR00T: prepared, batch {rows}, 4 steps"
        run.part(name, lambda b=rows: groot.in_process(network, b, 4, run.rounds, fixed))
    for rows in (1, 8):
        name = f"GR00T: prepared, batch {rows}: parts"
        run.part(name, lambda b=rows: groot.parts(network, fixed, b, run.rounds))
    run.part("GR00T: launches", lambda: groot.launches(network, fixed, 4))
    run.part("GR00T: memory", lambda: groot.memory(device))


ROWS_AGREE = {False: 1e-4, True: 5e-2}
"""In float32 on the CPU and in bfloat16 on a GPU, whose matrix products round otherwise for other batch sizes."""


class Made(dict[str, Any]):
    """What a network weighs, with the network itself."""

    def __init__(self, network: Any) -> None:
        parameters = list(network.parameters())
        super().__init__(
            parameters=sum(parameter.numel() for parameter in parameters),
            gb=sum(parameter.numel() * parameter.element_size() for parameter in parameters) / 1e9,
        )
        self.network = network


class Shapes(dict[str, Any]):
    """What preparing a GR00T network's shapes took, with what was prepared."""

    def __init__(self, network: Any, max_batch: int) -> None:
        started = time.monotonic()
        self.fixed = groot.prepare(network, max_batch)
        if self.fixed.left_out:
            raise RuntimeError(f"{len(self.fixed.left_out)} shapes found no memory for a graph")
        took, graphs = time.monotonic() - started, self.fixed.graphs
        super().__init__(seconds=took, graphs=len(graphs), graphs_gb=graphs.memory_bytes / 1e9)


def environment(device: torch.device, scale: str) -> Mapping[str, Any]:
    """Versions and machine."""
    on_gpu = device.type == "cuda"
    return {
        "relay": relay.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "scale": scale,
        "tf32": {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32},
    }


def show(result: Any) -> None:
    if not isinstance(result, Mapping):
        return
    for key, value in result.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{k} {number(v)}" for k, v in value.items())
        print(f"    {key:<58} {number(value)}")


def number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else f"{value}"


if __name__ == "__main__":
    raise SystemExit(main())
