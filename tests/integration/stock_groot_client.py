"""The unmodified OpenPI client with a GR00T observation in the flat form: URL, arrays, language key, text."""

import json
import sys

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

url, file, language, text = sys.argv[1:]
with np.load(file) as arrays:
    observation = dict(arrays)

policy = WebsocketClientPolicy(url)
reply = policy.infer({**observation, language: [text], "seed": 7})
actions = {key: value.tolist() for key, value in reply["actions"].items()}
print(json.dumps({"actions": actions, "metadata": policy.get_server_metadata()}))
