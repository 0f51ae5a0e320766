"""A policy on Modal: its proxy as the way in, and a tunnel to the very container as the direct route.

    modal secret create relay-api-keys RELAY_API_KEYS=...
    modal volume create relay-checkpoints && modal volume put relay-checkpoints pi05_droid
    modal deploy deploy/modal/app.py

Built and inspected with Modal's package 1.6.4, not yet run on Modal; see docs/deployment.md. The proxy asks for Modal's
own key and the server for an API key. The tunnel is on the public internet and asks for neither, so it leads to a port
that opens to tickets only: each client gets one over the first way, for one connection.
"""

import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path

import modal

MODEL, CHECKPOINT = "pi05", "/checkpoints/pi05_droid"
GPU, REGION = "L40S", "us-east"

PORT, DIRECT_PORT = 8000, 8443
STARTUP_S = 15 * 60  # load and warm up; Modal gives 30 s by default
DRAIN_S = 60  # the server takes up to 15 s of it; Modal gives none by default
RESTART_S = 2.0

ROOT = Path(__file__).resolve().parents[2] if modal.is_local() else Path("/app")

image = (
    modal.Image.debian_slim(python_version="3.11")
    .pip_install("torch==2.13.0")
    .add_local_file(ROOT / "pyproject.toml", "/app/pyproject.toml", copy=True)
    .add_local_file(ROOT / "README.md", "/app/README.md", copy=True)
    .add_local_file(ROOT / "LICENSE", "/app/LICENSE", copy=True)
    .add_local_dir(ROOT / "requirements", "/app/requirements", copy=True)
    .add_local_dir(ROOT / "src", "/app/src", copy=True, ignore=["**/__pycache__", "**/*.egg-info"])
    .run_commands("pip install -c /app/requirements/python3.11.txt '/app[server]'")
)
app = modal.App("relay", image=image)


@app.server(
    gpu=GPU,
    port=PORT,
    routing_region=REGION,
    compute_region=REGION,
    volumes={"/checkpoints": modal.Volume.from_name("relay-checkpoints")},
    secrets=[modal.Secret.from_name("relay-api-keys", required_keys=["RELAY_API_KEYS"])],
    min_containers=1,  # no robot waits for a cold start
    target_concurrency=8,  # connections, each of which is one request to Modal's proxy
    max_concurrency=64,
    startup_timeout=STARTUP_S,
    exit_grace_period=DRAIN_S,
)
class Policy:
    """One container: a server process, started again when it ends, and the tunnel to it."""

    @modal.enter()
    def start(self) -> None:
        self._open = ExitStack()
        host, port = self._open.enter_context(modal.forward(DIRECT_PORT)).tls_socket
        self._command = serve_command(host, port)
        self._stopping = threading.Event()
        self._process = subprocess.Popen(self._command)
        self._watcher = threading.Thread(target=self._keep_running, name="server", daemon=True)
        self._watcher.start()

    @modal.exit()
    def stop(self) -> None:
        self._stopping.set()
        self._process.terminate()  # it answers what it has taken, and closes with 1012
        self._watcher.join(DRAIN_S)
        self._open.close()

    def _keep_running(self) -> None:
        """A lost device ends the process; a new one in the same container gets it back."""
        while True:
            self._process.wait()
            if self._stopping.wait(RESTART_S):
                return
            self._process = subprocess.Popen(self._command)


def serve_command(tunnel_host: str, tunnel_port: int) -> list[str]:
    """The server's command line, with the tunnel's end as the address that clients are told."""
    return [
        *("relay", "serve", MODEL, "--checkpoint", CHECKPOINT),
        *("--host", "0.0.0.0", "--port", str(PORT)),
        *("--direct-url", f"wss://{tunnel_host}:{tunnel_port}"),
        *("--direct-host", "0.0.0.0", "--direct-port", str(DIRECT_PORT)),
        *("--metrics-port", "0"),
    ]
