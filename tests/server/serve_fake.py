"""A server process for the signal tests: prints its port, then serves until a signal.

Its argument says how it behaves: `serve`, `load` (never ready), `fail` (cannot load).
"""

from __future__ import annotations

import logging
import sys
import time

from fake_policy import FakeEngine

from relay.engine.base import Progress
from relay.server.app import serve
from relay.server.settings import ServerSettings


def load(progress: Progress) -> FakeEngine:
    if sys.argv[1] == "load":
        time.sleep(60)
    if sys.argv[1] == "fail":
        raise FileNotFoundError("no model.safetensors in 'pi05'")
    engine = FakeEngine()
    engine.infer_seconds = 0.2
    return engine


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    serve(load, ServerSettings(port=int(sys.argv[2])))
    print("returned")
