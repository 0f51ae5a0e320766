"""`relay serve`: load a policy and answer observations until stopped."""

from __future__ import annotations

import importlib.util
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

if TYPE_CHECKING:
    from relay.engine.base import Engine, Progress


@dataclass(frozen=True)
class Serve:
    """Serve a policy over WebSocket until Ctrl-C or SIGTERM, then finish what is running."""

    model: tyro.conf.Positional[str]
    """What to serve: demo, pi0 or pi05."""

    checkpoint: Path | None = None
    """Folder of the checkpoint; the demo brings its own."""

    tokenizer: Path | None = None
    """Tokenizer file, where the checkpoint folder has none."""

    device: str = "auto"
    """Torch device, such as cpu or cuda:1; auto takes a GPU where there is one."""

    dtype: str = "auto"
    """float32, bfloat16, or auto: bfloat16 on a GPU, float32 on a CPU."""

    num_steps: int | None = None
    """Denoising steps of requests that don't say; the checkpoint's own by default."""

    max_batch: int = 8
    """Most requests that share a pass through the model."""

    seed: int | None = None
    """Noise seed of requests that bring none; by default each draws a fresh one."""

    default_prompt: str | None = None
    """Task for observations without a prompt; without it they are refused."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets other machines reach the policy, and takes API keys or --insecure."""

    port: int = 8000
    """Port to listen on; 0 takes any free one."""

    idle_timeout: float = 30.0
    """Seconds without a message after which clients of vLLM-Omni's endpoint are closed; 0 for never."""

    handshake: Literal["openpi", "roboarena"] = "openpi"
    """First frame for OpenPI clients: the policy's metadata, or the six keys that RoboArena clients insist on."""

    api_keys_file: Path | None = None
    """File of API keys, one a line; clients must bring one of them, or of those in RELAY_API_KEYS."""

    insecure: bool = False
    """Listen beyond this machine without API keys: whoever reaches the port can drive the policy."""

    allowed_origin: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A web page's origin that may connect, such as https://dash.example; give it once for each."""

    allowed_host: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A host name, without port, under which clients may ask for this server; any if none is given."""

    tls_cert: Path | None = None
    """PEM file of the server's certificate chain; clients then connect to wss://."""

    tls_key: Path | None = None
    """PEM file of the certificate's private key, without a password."""

    tracebacks: bool = True
    """Tracebacks, without paths, in the errors that OpenPI clients read; with several API keys there are none."""

    max_connections: int = 1_024
    """Most open connections; further clients are told that the server is full."""

    max_queue: int = 1_024
    """Most requests that wait, over all connections; further ones are refused."""

    def run(self) -> int:
        missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
        if missing:
            needed = " and ".join(missing)
            return _fail(f"serving needs {needed}; install with: pip install 'relay-robotics[server]'")
        from relay.models import registry
        from relay.server.api_keys import read_api_keys
        from relay.server.app import serve
        from relay.server.settings import ServerSettings
        from relay.server.tls import tls_context

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("websockets").setLevel(logging.WARNING)  # says what relay says, once more
        try:
            settings = ServerSettings(
                host=self.host,
                port=self.port,
                max_batch=self.max_batch,
                handshake=self.handshake,
                idle_timeout=self.idle_timeout,
                seed=self.seed,
                api_keys=read_api_keys(self.api_keys_file),
                insecure=self.insecure,
                allowed_origins=self.allowed_origin,
                allowed_hosts=self.allowed_host,
                tls=tls_context(self.tls_cert, self.tls_key),
                tracebacks=self.tracebacks,
                max_connections=self.max_connections,
                max_queue=self.max_queue,
            )
            registry.checkpoint_folder(self.model, self.checkpoint)
        except ValueError as error:
            return _fail(str(error))

        def load(progress: Progress) -> Engine:
            return registry.load(
                self.model,
                checkpoint=self.checkpoint,
                tokenizer=self.tokenizer,
                device=self.device,
                dtype=self.dtype,
                num_steps=self.num_steps,
                max_batch=self.max_batch,
                default_prompt=self.default_prompt,
                progress=progress,
            )

        serve(load, settings)
        return 0


def _fail(message: str) -> int:
    print(f"relay serve: {message}", file=sys.stderr)
    return 2
