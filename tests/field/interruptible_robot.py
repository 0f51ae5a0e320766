"""A robot program that does what it is told on stdin, so that a test can stop it as a whole in between.

`infer` calls the policy at argv[1] and prints `ok`, or the error and its cause; the end of stdin ends it. With the word
`reconnect` as argv[2] it asks for that, and prints `ok, session restarted` when it is told so.
"""

import os
import sys

import numpy as np

import relay

os.environ["WALLE_URL"] = sys.argv[1]
with relay.PolicyClient("pi05", reconnect="reconnect" in sys.argv[2:]) as client:
    print("connected", flush=True)
    for _ in sys.stdin:
        try:
            actions = client.infer({"state": np.zeros(3, np.float32)})
            restarted = client.last.reconnected and client.last.session_fresh
            done = "ok, session restarted" if restarted else "ok"
            print(done if isinstance(actions, np.ndarray) else actions, flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
