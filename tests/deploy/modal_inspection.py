"""Builds `deploy/modal/app.py` with Modal's package, starts its class with stand-ins, prints what came of it as JSON.

Runs in the environment of deployment tools. Reaches no network: nothing is deployed.
"""

import importlib.util
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import modal

forwarded = []
commands = []
asked = {}
really = modal.App.server


def recorded(app, **options):
    asked.update(options)
    return really(app, **options)


modal.App.server = recorded
spec = importlib.util.spec_from_file_location("modal_app", Path(sys.argv[1]))
recipe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recipe)


@contextmanager
def forward(port, **options):
    forwarded.append({"port": port, **options})
    yield SimpleNamespace(tls_socket=("abc.r5.modal.host", 443))
    forwarded.append("closed")


class Process:
    """A server that ends by itself once, as on a lost device, and then only when told."""

    def __init__(self, command):
        self.ended = recipe.threading.Event()
        commands.append(command)
        if len(commands) == 1:
            self.ended.set()

    def wait(self):
        self.ended.wait(30)

    def terminate(self):
        self.ended.set()


recipe.modal.forward = forward
recipe.subprocess.Popen = Process
recipe.RESTART_S = 0.1

policy = recipe.Policy._get_user_cls()()
policy.start()
for _ in range(200):
    if len(commands) == 2:
        break
    recipe.threading.Event().wait(0.05)
policy.stop()

plain = (str, int, float, type(None))
print(
    json.dumps(
        {
            "app": recipe.app.name,
            "server": type(recipe.Policy).__name__,
            "options": {key: value for key, value in asked.items() if isinstance(value, plain)},
            "secrets": len(asked["secrets"]),
            "volumes": list(asked["volumes"]),
            "forwarded": forwarded,
            "commands": commands,
        }
    )
)
