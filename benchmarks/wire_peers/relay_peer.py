"""Our stack: relay's server with an engine that decodes the frames and then only waits, and `relay.Policy`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

import relay
from relay.engine.base import Chunk, PolicySpec, Progress, Work
from relay.protocol.images import decode_images
from relay.protocol.messages import Observation, Options
from relay.server.app import serve as serve_engine
from relay.server.settings import ServerSettings
from relay.side_by_side import side_by_side

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


@dataclass(frozen=True, slots=True)
class Decoded:
    """An observation whose frames are arrays."""

    observation: dict[str, Any]
    notes: Sequence[Any] = ()
    ignored: Sequence[str] = ()


class WaitingEngine:
    """A device on which one row takes `seconds` and each further one `row_seconds`."""

    def __init__(self, seconds: float, max_batch: int, row_seconds: float, decode: bool) -> None:
        self._seconds, self._row_seconds = seconds, row_seconds
        self._decode = decode
        self._actions = np.zeros((50, 32), np.float32)
        self.spec = PolicySpec("waiting", CAMERAS, 32, 50, 32, 10, max_batch=max_batch)

    def prepare(self, observation: Observation, options: Options) -> Decoded:
        return Decoded(decode_images(observation, side_by_side) if self._decode else observation)

    def batch_key(self, prepared: Decoded) -> None:
        return None

    def infer(self, batch: Sequence[Work]) -> Sequence[Chunk]:
        if self._seconds:
            time.sleep(self._seconds + (len(batch) - 1) * self._row_seconds)
        return [Chunk(self._actions) for _ in batch]

    def warm_up(self, progress: Progress) -> None:
        progress("warming up", 1.0)


def serve(port: int, seconds: float, batch: int, row_seconds: float, decode: bool) -> None:
    serve_engine(lambda _: WaitingEngine(seconds, batch, row_seconds, decode), ServerSettings(port=port))


class Robot:
    def __init__(self, url: str, codec: str | None) -> None:
        assert codec is not None
        logging.getLogger("relay.client").setLevel(logging.ERROR)  # that a server is stock is no news here
        self._policy = relay.Policy(url, codec=relay.Codec[codec])
        self._around_model: list[float] = []

    def infer(self, observation: dict[str, Any]) -> np.ndarray:
        reply = self._policy.infer(observation)
        timing = reply["server_timing"]
        if "model_ms" in timing:  # a stock server does not tell
            spent = timing["parse_ms"] + timing["infer_ms"] + timing["encode_ms"]
            self._around_model.append(spent - timing["model_ms"])
        return reply["actions"]

    def around_model(self) -> list[float]:
        """Milliseconds that our server spent on each request beside the model, since this was asked last."""
        taken, self._around_model = self._around_model, []
        return taken

    def request_bytes(self, observations: list[dict[str, Any]]) -> float:
        sizes: list[int] = []
        for observation in observations:
            self._policy.infer(observation)
            assert self._policy.last is not None
            sizes.append(self._policy.last.bytes_sent)
        return float(np.mean(sizes))

    def versions(self) -> dict[str, str]:
        names = ("websockets", "msgpack", "numpy", "pillow", "simplejpeg")
        return {"relay": relay.__version__} | {name: version(name) for name in names}
