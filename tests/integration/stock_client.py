"""The unmodified OpenPI client against a server at argv[1]; runs in the stock environment, prints JSON."""

import json
import sys

import numpy as np
import websockets.version
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy

url, jpeg_file = sys.argv[1:]
frame = np.arange(24 * 32 * 3, dtype=np.uint8).reshape(24, 32, 3)
observation = {"image": {"base_0_rgb": frame}, "state": np.array([1, 2, 3], np.float32), "prompt": "pick"}

policy = WebsocketClientPolicy(url)
first = policy.infer(observation)
later = [policy.infer(observation) for _ in range(4)]
with open(jpeg_file, "rb") as file:
    encoded = policy.infer({**observation, "image": {"base_0_rgb": file.read()}})
policy.reset()
broker = ActionChunkBroker(policy, action_horizon=4)
steps = [broker.infer(observation)["actions"].tolist() for _ in range(5)]

try:
    policy.infer({**observation, "state": np.zeros(7, np.float32)})
    failure = None
except RuntimeError as error:
    failure = str(error)
try:
    policy.infer(observation)
    after_failure = None
except Exception as error:
    after_failure = type(error).__name__

print(
    json.dumps(
        {
            "websockets": websockets.version.version,
            "metadata": policy.get_server_metadata(),
            "actions": first["actions"].tolist(),
            "dtype": str(first["actions"].dtype),
            "encoded_actions": encoded["actions"].tolist(),
            "policy_timing": first["policy_timing"],
            "server_timing": first["server_timing"],
            "later_timings": [{**reply["policy_timing"], **reply["server_timing"]} for reply in later],
            "steps": steps,
            "failure": failure,
            "after_failure": after_failure,
        }
    )
)
