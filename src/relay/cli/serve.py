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
    """Address to listen on; 0.0.0.0 lets other machines reach the policy."""

    port: int = 8000
    """Port to listen on; 0 takes any free one."""

    idle_timeout: float = 30.0
    """Seconds without a message after which clients of vLLM-Omni's endpoint are closed; 0 for never."""

    handshake: Literal["openpi", "roboarena"] = "openpi"
    """First frame for OpenPI clients: the policy's metadata, or the six keys that RoboArena clients insist on."""

    def run(self) -> int:
        missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
        if missing:
            needed = " and ".join(missing)
            return _fail(f"serving needs {needed}; install with: pip install 'relay-robotics[server]'")
        from relay.models import registry
        from relay.server.app import serve
        from relay.server.settings import ServerSettings

        try:
            settings = ServerSettings(
                host=self.host,
                port=self.port,
                max_batch=self.max_batch,
                handshake=self.handshake,
                idle_timeout=self.idle_timeout,
                seed=self.seed,
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

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("websockets").setLevel(logging.WARNING)  # says what relay says, once more
        serve(load, settings)
        return 0


def _fail(message: str) -> int:
    print(f"relay serve: {message}", file=sys.stderr)
    return 2
