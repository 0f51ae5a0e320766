"""How long calls take: in process by batch and steps, by stage, over a WebSocket, and with requests that vary."""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import relay
from gpu_parts.networks import Case, batch, floor_ms, observation
from relay.engine.base import Progress, Work
from relay.models.pi0.assemble import assemble
from relay.models.pi0.engine import Pi0Engine
from relay.models.pi0.model import Pi0
from relay.models.pi0.shapes import Shape
from relay.protocol.messages import Options
from relay.server.app import Server
from relay.server.settings import ServerSettings


def in_process(engine: Pi0Engine, case: Case, rows: int, steps: int, rounds: int) -> dict[str, float]:
    """Milliseconds of `infer`, every round with other frames, and their ratio to the least possible."""
    batches = [batch(engine, case, rows, steps, seed=100 * r) for r in range(min(rounds, 4))]
    engine.infer(batches[0])
    asked = [batches[r % len(batches)] for r in range(rounds)]
    times = [1e3 * seconds(lambda b=b: engine.infer(b)) for b in asked]
    floor = floor_ms(engine.model.config, case, rows, steps)
    median = statistics.median(times)
    return {"p50_ms": median, "worst_ms": max(times), "floor_ms": floor, "ratio": median / floor}


@torch.inference_mode()
def stages(engine: Pi0Engine, case: Case, rows: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each prepared part by itself, of the way in and out, and of preparing one observation."""
    fixed, device = engine.fixed, engine.model.action_in.weight.device
    assert fixed is not None
    work = batch(engine, case, rows, 1)
    shape = fixed.plan.fit([w.prepared for w in work])
    assert isinstance(shape, Shape)
    engine.infer(work)

    def replayed(key: object, times: int = 10) -> float:
        def run() -> None:
            for _ in range(times):
                fixed.graphs.replay(key)
            synchronize(device)

        return 1e3 * statistics.median(seconds(run) for _ in range(rounds)) / times

    parts = {
        "tower_ms": replayed(("images", case.cameras * rows)),
        "prefix_ms": replayed(("prefix", shape)),
        "step_ms": replayed(("step", shape)),
    }
    whole = in_process(engine, case, rows, 1, rounds)["p50_ms"]
    parts["rest_ms"] = whole - sum(parts.values())
    observed = observation(case, 0)
    options = work[0].options
    parts["prepare_ms"] = 1e3 * statistics.median(
        seconds(lambda: engine.prepare(observed, options)) for _ in range(rounds)
    )
    return parts


def reuse(plain: Pi0Engine, engine: Pi0Engine, case: Case, rounds: int) -> dict[str, float]:
    """Milliseconds of one-step calls, from an observation as it came to actions, with and without reuse.

    With frames that are all new, with none that is new but in another combination, and with nothing new but the noise.
    """
    new = [observation(case, 1000 + r) for r in range(2 * rounds)]
    one, other = new[0], new[1]
    last = list(one["image"])[-1]
    mixed = one | {"image": one["image"] | {last: other["image"][last]}}

    def median(engine: Pi0Engine, asked: list[dict[str, Any]]) -> float:
        return 1e3 * statistics.median(seconds(lambda o=o: _call(engine, o)) for o in asked)

    _call(plain, one)
    return {
        "new_frames_without_reuse_ms": median(plain, new[:rounds]),
        "new_frames_ms": median(engine, new[rounds:] + new[:rounds]),
        "known_frames_ms": median(engine, [one, mixed] * rounds),
        "same_observation_ms": median(engine, [one] * rounds),
    }


def _call(engine: Pi0Engine, observation: dict[str, Any]) -> None:
    options = Options(seed=0, num_steps=1)
    engine.infer([Work(engine.prepare(observation, options), options)])


def launches(model: Pi0, engine: Pi0Engine, case: Case, steps: int) -> dict[str, float]:
    """Operations dispatched in one plain call, and kernels and graph launches where a profiler counts them."""
    work = batch(engine, case, 1, steps)
    prepared = [w.prepared for w in work]
    noise = torch.zeros(1, model.config.action_horizon, model.config.action_dim)
    inputs = assemble(model, prepared, noise)
    counts: dict[str, float] = {"dispatched": dispatched(model, inputs)}
    if model.action_in.weight.device.type == "cuda":
        counts["kernels_plain"] = kernels(lambda: model.sample_actions(inputs))
        counts["kernels_prepared"] = kernels(lambda: engine.infer(work))
    return counts


def dispatched(model: Pi0, inputs: Any) -> int:
    """All ATen calls of one call, views included, counted under `no_grad` so that composite ones are taken apart."""
    sample = Pi0.sample_actions.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]  # without inference mode
    with torch.no_grad():
        sample(model, inputs)  # tables are made
        with CountingMode() as mode:
            sample(model, inputs)
    return mode.count


class CountingMode(TorchDispatchMode):
    """Counts dispatched operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def kernels(work: Callable[[], object]) -> int:
    """Kernels and graph launches on the GPU."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        work()
        torch.cuda.synchronize()
    return sum(event.count for event in profiled.key_averages() if event.device_type != torch.autograd.DeviceType.CPU)


def over_websocket(engine: Pi0Engine, case: Case, robots: int, calls: int) -> dict[str, float]:
    """Round trips of robots that ask again as soon as they are answered, through a server on loopback."""
    with _serving(engine) as port:

        def robot(number: int) -> list[float]:
            observations = [observation(case, 1000 * number + call) for call in range(min(calls, 8))]
            with relay.Policy(f"ws://127.0.0.1:{port}") as policy:
                asked = [observations[call % len(observations)] for call in range(calls)]
                return [1e3 * seconds(lambda o=o: policy.infer(o)) for o in asked]

        started = perf_counter()
        with ThreadPoolExecutor(robots) as pool:
            times = [time for one in pool.map(robot, range(robots)) for time in one]
        elapsed = perf_counter() - started
    ordered = sorted(times)
    return {
        "first_ms": times[0],
        "p50_ms": statistics.median(times),
        "p99_ms": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "requests_per_s": len(times) / elapsed,
    }


def varying(engine: Pi0Engine, case: Case, calls: int) -> dict[str, float]:
    """Calls of changing prompt lengths and step counts: their worst time against the median of equally many steps.

    The step count changes what a call costs, so times are divided by the median of their own count.
    """
    ratios: list[float] = []
    prepared_before, unprepared_before = len(engine.fixed.graphs) if engine.fixed else 0, engine.unprepared
    for steps in (4, 5, 10):
        times: list[float] = []
        for call in range(calls // 3):
            options = Options(seed=call, num_steps=steps)
            prepared = engine.prepare(observation(case, call % 8, prompt=33 + call % 31), options)
            times.append(seconds(lambda p=prepared, o=options: engine.infer([Work(p, o)])))
        median = statistics.median(times[1:])
        ratios += [time / median for time in times]
    ordered = sorted(ratios)
    return {
        "p99_ratio": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "worst_ratio": ordered[-1],
        "prepared_meanwhile": (len(engine.fixed.graphs) if engine.fixed else 0) - prepared_before,
        "unprepared": engine.unprepared - unprepared_before,
    }


class _Warm:
    """An engine that is warm already; the server's worker warms up whatever it loads."""

    def __init__(self, engine: Pi0Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def warm_up(self, progress: Progress) -> None:
        progress("warm already", 1.0)


@contextmanager
def _serving(engine: Pi0Engine) -> Iterator[int]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    server = Server(lambda progress: _Warm(engine), ServerSettings(port=0, max_batch=engine.spec.max_batch))
    try:
        run(server.start())
        run(server.ready())
        yield server.port
        run(server.drain())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def memory(device: torch.device, engine: Pi0Engine) -> Mapping[str, float]:
    """Gigabytes on the device."""
    if device.type != "cuda":
        return {}
    graphs = engine.fixed.graphs.memory_bytes if engine.fixed else 0
    return {
        "allocated_gb": torch.cuda.memory_allocated(device) / 1e9,
        "reserved_gb": torch.cuda.memory_reserved(device) / 1e9,
        "most_reserved_gb": torch.cuda.max_memory_reserved(device) / 1e9,
        "graphs_gb": graphs / 1e9,
    }


def seconds(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
