"""The unmodified `OpenpiPolicy` of inspect-robots-franka against port argv[1]; runs in the stock environment.

Prints JSON: what it gave out for each of two observations, and the number of inferences it counted.
"""

import json
import sys

import numpy as np
from inspect_robots.scene import Scene
from inspect_robots.types import Observation
from inspect_robots_franka import STATE_KEY, OpenpiPolicy

frame = np.arange(48 * 64 * 3, dtype=np.uint8).reshape(48, 64, 3)
state = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75])

policy = OpenpiPolicy(port=int(sys.argv[1]), actions_are_velocity=False)
policy.reset(Scene("drawer", "open the drawer"))
chunks = [policy.act(Observation({"exterior_cam": frame, "wrist_cam": frame}, {STATE_KEY: state})) for _ in range(2)]
print(
    json.dumps(
        {
            "chunks": [[action.data.tolist() for action in chunk.actions] for chunk in chunks],
            "num_inferences": policy.num_inferences,
        }
    )
)
