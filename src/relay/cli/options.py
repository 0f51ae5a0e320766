"""What may be chosen about a served policy and about the listener, on the command line or in a file.

Each field is an option; its text is the option's help. Imports no server and no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import UseAppendAction


@dataclass(frozen=True)
class PolicyOptions:
    """How one policy is loaded and run."""

    checkpoint: Path | None = None
    """Folder of the checkpoint; the demo brings its own."""

    config: str | None = None
    """openpi's configuration that the checkpoint was trained with, such as pi05_droid, where the folder doesn't say."""

    robot: str | None = None
    """Robot profile, by name or as a YAML file; by default the configuration's or the checkpoint's own."""

    embodiment: str | None = None
    """For groot and dreamzero: which of the checkpoint's robots, by its tag; needed where it was trained on several."""

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

    adapter: UseAppendAction[tuple[str, ...]] = ()
    """A LoRA adapter that requests may ask for, as name=folder; give it once for each. The demo has one of its own."""

    default_adapter: str | None = None
    """Adapter of requests that name none; they name base for none."""

    adapter_root: Path | None = None
    """Folder whose sub-folders are adapters, each under its own name; looked through again on SIGHUP."""

    adapter_memory: float = 4.0
    """GiB of device memory for adapters; those used longest ago make room."""

    merge_adapter: bool = False
    """Add the only adapter to the weights at the start: it costs no time then, and nothing else can be asked for."""

    graphs: Literal["auto", "off"] = "auto"
    """auto replays prepared shapes as CUDA graphs on a GPU, once checked against the plain path; off doesn't."""

    compile: bool = False
    """With graphs, compile the small functions between matrix products at start-up; needs a C compiler and Triton."""

    decode: Literal["auto", "cpu", "gpu"] = "auto"
    """JPEG frames on the cpu, the gpu, or auto: the GPU where it is faster and its pixels are the CPU's."""

    resize: Literal["exact", "fast"] = "exact"
    """For groot: frames resized exactly as in training, or faster and a grey level or two off."""

    cameras: Literal["roboarena", "droid"] | None = None
    """For dreamzero: how clients number DROID's two exterior cameras: roboarena from 0, droid from 1; the checkpoint's
    own by default, else roboarena."""

    schedule: Literal["fixed", "dynamic"] = "fixed"
    """For dreamzero: the network runs --num-steps times (5, 6, 7, 8 or 16), or rests whenever it changes little, which
    is not exact."""

    session_memory: float | None = None
    """For dreamzero: GB of device memory for what sessions remember; those used longest ago are set aside and computed
    again when they go on. By default what is free once the model is loaded, for 16 of them at most."""

    rtc_schedule: Literal["linear", "exp", "ones", "zeros"] = "linear"
    """Real-time chunking: how the weight of the previous chunk falls behind the steps executed meanwhile."""

    rtc_max_guidance_weight: float = 10.0
    """Real-time chunking: bound of the guidance; higher keeps closer to the previous chunk."""

    handshake: Literal["openpi", "roboarena"] = "openpi"
    """First frame for OpenPI clients: the policy's metadata, or the six keys that RoboArena clients insist on."""


@dataclass(frozen=True)
class ListenerOptions:
    """Where and for whom the server listens."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets other machines reach the policy, and takes API keys or --insecure."""

    port: int = 8000
    """Port to listen on; 0 takes any free one."""

    idle_timeout: float = 30.0
    """Seconds without a message after which clients of vLLM-Omni's endpoint are closed; 0 for never."""

    api_keys_file: Path | None = None
    """File of API keys, one a line; clients must bring one of them, or of RELAY_API_KEYS; read again on SIGHUP."""

    insecure: bool = False
    """Listen beyond this machine without API keys: whoever reaches the port can drive the policy."""

    allowed_origin: UseAppendAction[tuple[str, ...]] = ()
    """A web page's origin that may connect, such as https://dash.example; give it once for each."""

    allowed_host: UseAppendAction[tuple[str, ...]] = ()
    """A host name, without port, under which clients may ask for this server; any if none is given."""

    tls_cert: Path | None = None
    """PEM file of the server's certificate chain; clients then connect to wss://. Read again on SIGHUP."""

    tls_key: Path | None = None
    """PEM file of the certificate's private key, without a password."""

    tracebacks: bool = True
    """Whether errors that OpenPI clients read hold a traceback, without paths; with several API keys they never do."""

    max_connections: int = 1_024
    """Most open connections; further clients are told that the server is full."""

    max_connections_per_key: int | None = None
    """Most open connections of clients with the same API key; no limit of its own by default."""

    max_queue: int = 1_024
    """Most requests that wait for one policy; further ones are refused."""

    metrics_host: str = "127.0.0.1"
    """Address of the metrics' own port."""

    metrics_port: int | None = None
    """Port for /metrics alone; by default they are on the main port, for this machine only; 0 serves none."""

    direct_url: str | None = None
    """Address that leads clients past any proxy to this very process; they are told it, with a one-use ticket."""

    direct_host: str | None = None
    """Address of the direct route's own port; --host by default."""

    direct_port: int | None = None
    """Port for the direct route alone, which opens to tickets only; by default it is the main port."""

    direct_tls_cert: Path | None = None
    """PEM file of the direct port's certificate chain; that of --tls-cert by default."""

    direct_tls_key: Path | None = None
    """PEM file of its private key, without a password."""

    direct_fingerprint: bool = False
    """Tell clients the SHA-256 of the direct route's certificate, which they check instead of an authority's word."""
