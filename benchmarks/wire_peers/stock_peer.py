"""The stock stack: openpi-server 0.1.0 with a policy that only waits, and openpi-client 0.1.2."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import numpy as np
from openpi_client import msgpack_numpy
from openpi_client.base_policy import BasePolicy
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from openpi_server import WebsocketPolicyServer


class Waiting(BasePolicy):
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._actions = np.zeros((50, 32), np.float32)

    def infer(self, obs: dict[str, Any]) -> dict[str, Any]:
        if self._seconds:
            time.sleep(self._seconds)
        return {"actions": self._actions}


def serve(port: int, seconds: float, batch: int) -> None:
    assert batch == 1, "the stock server answers one request at a time"
    WebsocketPolicyServer(Waiting(seconds), host="127.0.0.1", port=port, metadata={}).serve_forever()


class Robot:
    def __init__(self, url: str, codec: str | None) -> None:
        assert codec is None, "the stock client sends arrays"
        self._policy = WebsocketClientPolicy(url)

    def infer(self, observation: dict[str, Any]) -> np.ndarray:
        return self._policy.infer(observation)["actions"]

    def around_model(self) -> list[float]:
        return []

    def request_bytes(self, observations: list[dict[str, Any]]) -> float:
        return float(np.mean([len(msgpack_numpy.packb(observation)) for observation in observations]))

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("openpi-client", "openpi-server", "websockets", "msgpack", "numpy")}
