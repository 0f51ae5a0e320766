"""A server process for the signal tests: prints its port, then serves until a signal.

Its argument says how it behaves: `serve`, `quick` (5 ms a batch), `load` (never ready), `fail` (cannot load). Its last
line tells how many observations were run.
"""

from __future__ import annotations

import logging
import sys
import time

from fake_policy import FakeEngine

from relay.engine.base import Progress
from relay.server.app import serve
from relay.server.settings import ServerSettings

engine = FakeEngine()


def load(progress: Progress) -> FakeEngine:
    if sys.argv[1] == "load":
        time.sleep(60)
    if sys.argv[1] == "fail":
        raise FileNotFoundError("no model.safetensors in 'pi05'")
    engine.infer_seconds = 0.005 if sys.argv[1] == "quick" else 0.2
    return engine


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    serve(load, ServerSettings(port=int(sys.argv[2])))
    print("returned", sum(map(len, engine.batches)))
