"""The unmodified OpenPI client calls the policy at argv[1] once; runs in the stock environment, prints JSON."""

import json
import sys
import time

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

started = time.monotonic()
policy = WebsocketClientPolicy(sys.argv[1])
connected = time.monotonic()
actions = policy.infer({"state": np.full(3, 5, np.float32)})["actions"]
print(
    json.dumps(
        {
            "connect_s": connected - started,
            "infer_s": time.monotonic() - connected,
            "actions": actions.tolist(),
        }
    )
)
