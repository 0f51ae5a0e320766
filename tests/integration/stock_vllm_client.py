"""The unmodified OpenPI client on vLLM-Omni's endpoint at argv[1], as that project's examples use it; prints JSON."""

import json
import sys

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

frame = np.arange(24 * 32 * 3, dtype=np.uint8).reshape(24, 32, 3)
observation = {"image": {"base_0_rgb": frame}, "state": np.array([1, 2, 3], np.float32), "prompt": "pick"}

policy = WebsocketClientPolicy(sys.argv[1] + "/v1/realtime/robot/openpi")
first = policy.infer({**observation, "endpoint": "infer", "session_id": "left"})
refused = policy.infer({**observation, "state": np.zeros(7, np.float32)})
unknown = policy.infer({"endpoint": "train"})
reset = policy.infer({"endpoint": "reset"})
last = policy.infer(observation)

print(
    json.dumps(
        {
            "metadata": policy.get_server_metadata(),
            "actions": first.tolist(),
            "dtype": str(first.dtype),
            "refused": refused,
            "unknown": unknown,
            "reset": reset,
            "last": last.tolist(),
        }
    )
)
