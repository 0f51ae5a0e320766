"""One end of the wire in a process of its own: a server, or a robot that calls when told to.

    process.py server STACK --port N --milliseconds M [--batch N] [--row-milliseconds M] [--keep-encoded]
    process.py robot STACK URL FRAMES [--codec NAME]

Runs in the environment of its STACK (`relay` or `stock`), so it imports NumPy and that stack only. A robot prints one
line of JSON when it is connected; then each line on its input, a number of calls, is answered with their latencies and,
where both ends are ours, with what the server spent around the model.
Both roles end with their input, so that nothing outlives the benchmark.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import threading
import time
from itertools import cycle, islice
from typing import Any

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser()
    roles = parser.add_subparsers(dest="role", required=True)
    server = roles.add_parser("server")
    server.add_argument("stack", choices=["relay", "stock"])
    server.add_argument("--port", type=int, required=True)
    server.add_argument("--milliseconds", type=float, required=True)
    server.add_argument("--batch", type=int, default=1)
    server.add_argument("--row-milliseconds", type=float, help="of each further row; by default a seventh of the first")
    server.add_argument("--keep-encoded", action="store_true", help="do not decode the frames (our stack only)")
    robot = roles.add_parser("robot")
    robot.add_argument("stack", choices=["relay", "stock"])
    robot.add_argument("url")
    robot.add_argument("frames")
    robot.add_argument("--codec", default=None)
    chosen = parser.parse_args()
    stack = importlib.import_module(f"{chosen.stack}_peer")
    if chosen.role == "server":
        threading.Thread(target=end_with_input, daemon=True).start()
        ours: dict[str, Any] = {}
        if chosen.stack == "relay":
            row = chosen.milliseconds / 7 if chosen.row_milliseconds is None else chosen.row_milliseconds
            ours = {"row_seconds": row / 1e3, "decode": not chosen.keep_encoded}
        stack.serve(chosen.port, chosen.milliseconds / 1e3, chosen.batch, **ours)
    else:
        drive(stack.Robot(chosen.url, chosen.codec), observations(chosen.frames))


def drive(robot: Any, seen: list[dict[str, Any]]) -> None:
    """Connect, say so, then call as often as each line of the input says; the frames change with every call."""
    print(json.dumps({"request_bytes": robot.request_bytes(seen), "versions": robot.versions()}), flush=True)
    stream = cycle(seen)
    for line in sys.stdin:
        milliseconds: list[float] = []
        for observation in islice(stream, int(line)):
            started = time.perf_counter()
            actions = robot.infer(observation)
            milliseconds.append((time.perf_counter() - started) * 1e3)
            assert actions.shape == (50, 32)
        print(json.dumps({"latencies": milliseconds, "around_model": robot.around_model()}), flush=True)


def end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


def observations(path: str) -> list[dict[str, Any]]:
    """Three cameras, a state and a prompt, in pi0.5's model format; one observation per entry of the file."""
    cameras = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    return [
        {
            "image": dict(zip(cameras, frames, strict=True)),
            "state": np.zeros(32, np.float32),
            "prompt": "pick up the fork",
        }
        for frames in np.load(path)  # (observations, cameras, height, width, 3) uint8
    ]


if __name__ == "__main__":
    main()
