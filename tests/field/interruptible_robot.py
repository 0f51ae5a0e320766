"""A robot program that does what it is told on stdin, so that a test can stop it as a whole in between.

`infer` calls the policy at argv[1] and prints `ok`, or the error and its cause; the end of stdin ends it.
"""

import os
import sys

import numpy as np

import relay

os.environ["WALLE_URL"] = sys.argv[1]
with relay.PolicyClient("pi05") as client:
    print("connected", flush=True)
    for _ in sys.stdin:
        try:
            actions = client.infer({"state": np.zeros(3, np.float32)})
            print("ok" if isinstance(actions, np.ndarray) else actions, flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
