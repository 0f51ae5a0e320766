"""The unmodified OpenPI server on loopback, port argv[1]; runs in the stock environment.

Its policy answers with what it saw of the first camera: the pixels' sum, their sum of squares, and the first state.
"""

import sys
import time
from typing import Any

import numpy as np
from openpi_client.base_policy import BasePolicy
from openpi_server import WebsocketPolicyServer


class Looking(BasePolicy):
    def infer(self, obs: dict[str, Any]) -> dict[str, Any]:
        time.sleep(obs.get("sleep", 0.0))
        frame = obs["image"]["base_0_rgb"]
        if frame.dtype != np.uint8 or obs["state"].shape != (3,):
            raise ValueError(f"state has {obs['state'].shape[0]} values; expected 3")
        pixels = frame.astype(np.float64)
        return {"actions": np.array([[pixels.sum(), (pixels**2).sum(), obs["state"][0]]])}


WebsocketPolicyServer(
    Looking(), host="127.0.0.1", port=int(sys.argv[1]), metadata={"reset_pose": [0.0, 1.0]}
).serve_forever()
