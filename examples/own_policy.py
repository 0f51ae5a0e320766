"""A policy of your own, served to every client that speaks OpenPI's or vLLM-Omni's protocol.

python examples/own_policy.py
"""

import logging

import numpy as np

from relay.server import ObservationError, ServerSettings, serve


class Wave:
    def infer(self, observation):
        if "state" not in observation:
            raise ObservationError("state is missing; Wave takes the joint angles, (7,) float32")
        return observation["state"] + 0.1 * np.sin(np.arange(16) / 4)[:, None]  # (horizon, dim)


logging.basicConfig(level=logging.INFO)
serve(Wave(), settings=ServerSettings(host="127.0.0.1", port=8000))
