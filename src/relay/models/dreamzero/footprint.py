"""How much device memory a DreamZero network takes: its weights and a session by counting, its work by estimate."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from relay.engine.weights import CheckpointError
from relay.models.dreamzero.config import TEXT_TOKENS, DreamZeroConfig
from relay.models.dreamzero.weights import Network

_HIDDEN = 1024
"""Of the maps of state and actions, where no tensors tell it: the reference's own."""

_BRANCHES = 2
_NAMES = {"dit": "transformer", "text": "text encoder", "image": "image encoder", "video": "video encoder"}


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on the device.

    Attributes:
        weights: by part of the network.
        memory: keys and values of the frames that a session has seen.
        cross: keys and values of a session's prompt and first frame.
        work: the most that one inference needs besides, an estimate.
    """

    weights: Mapping[str, int]
    memory: int
    cross: int
    work: int

    @property
    def network(self) -> int:
        """All weights."""
        return sum(self.weights.values())

    @property
    def session(self) -> int:
        """One session while it is on the device."""
        return self.memory + self.cross

    @property
    def least(self) -> int:
        """What serving one session needs."""
        return self.network + self.session + self.work


def footprint(config: DreamZeroConfig, dtype: torch.dtype, network: Network | None = None) -> Footprint:
    """What a network of these sizes takes.

    Args:
        dtype: that it is served in.
        network: one on any device, such as meta; by default one of these sizes is built there.
    """
    if network is None:
        with torch.device("meta"):
            network = Network(config, state_hidden=_HIDDEN, action_hidden=_HIDDEN)
    weights = {
        _NAMES[name]: sum(parameter.numel() for parameter in part.parameters()) * dtype.itemsize
        for name, part in network.named_children()
    }
    dit = config.dit
    per_token = dit.depth * 2 * _BRANCHES * dit.width * dtype.itemsize
    image_tokens = (config.image.image_size // config.image.patch) ** 2 + 1
    return Footprint(
        weights=weights,
        memory=per_token * (config.window_tokens + config.action_horizon + 1),
        cross=per_token * (TEXT_TOKENS + image_tokens),
        work=max(_pass_bytes(config, dtype), _video_bytes(config, dtype)),
    )


def check_room(needed: Footprint, free: int | None, device: str) -> None:
    """See that a device can hold the network and one session.

    Args:
        free: bytes that are free there; None where that is not known.

    Raises:
        CheckpointError: it can't; with how much is needed, and for what.
    """
    if free is None or needed.least <= free:
        return
    raise CheckpointError(
        f"dreamzero needs {_gb(needed.least)} on {device}, of which {_gb(free)} are free: {_gb(needed.network)} for "
        f"the weights, {_gb(needed.session)} for one session, about {_gb(needed.work)} to work in; take a larger "
        "device, or one that nothing else runs on"
    )


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device; None where that cannot be found out."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not sys.platform.startswith("linux") or not meminfo.is_file():
        return None
    values = dict(line.split(":", 1) for line in meminfo.read_text("ascii").splitlines() if ":" in line)
    available = values.get("MemAvailable", "").split()
    return int(available[0]) * 1024 if available else None


def _pass_bytes(config: DreamZeroConfig, dtype: torch.dtype) -> int:
    """One block of the transformer: input, norm and output, queries, keys and values twice, the MLP's hidden values."""
    tokens = config.block_frames * config.dit.frame_tokens + config.action_horizon + 1
    return _BRANCHES * tokens * (9 * config.dit.width + 2 * config.dit.mlp) * dtype.itemsize


def _video_bytes(config: DreamZeroConfig, dtype: torch.dtype) -> int:
    """The first stage of the video encoder: four frames at its base width, as input, norm, output and what is kept for
    the next four, with the padded copies of both convolutions."""
    latent_pixels = 4 * config.dit.frame_tokens  # patches of 2 x 2
    stage = config.video.space // (2 if config.video.version == "2.2" else 1)  # 2.2 begins with patches of its own
    pixels = latent_pixels * stage**2
    return 8 * 4 * pixels * config.video.base * dtype.itemsize


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
