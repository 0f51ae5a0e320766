"""The unmodified OpenPI client calls the demo policy at argv[1] a hundred times; runs in the stock environment."""

import json
import sys

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

policy = WebsocketClientPolicy(sys.argv[1])
random = np.random.default_rng(0)
shapes = set()
finite = True
for _ in range(100):
    frame = random.integers(0, 256, (224, 224, 3), dtype=np.uint8)
    observation = {
        "image": {"base_0_rgb": frame, "left_wrist_0_rgb": frame[::-1]},
        "state": random.uniform(-1, 1, 4),
        "prompt": "put the red cube on the yellow plate",
    }
    actions = policy.infer(observation)["actions"]
    shapes.add(actions.shape)
    finite = finite and bool(np.isfinite(actions).all())
print(json.dumps({"shapes": sorted(shapes), "finite": finite, "model": policy.get_server_metadata()["model"]}))
