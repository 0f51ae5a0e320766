"""The tiny golden model: weights that follow from the tensors' names, and what the reference made of 20 calls."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

DATA = Path(__file__).parents[2] / "data" / "dreamzero"

ENCODERS = {
    "text": {"vocab_size": 512, "width": 64, "head_dim": 16, "heads": 4, "mlp": 96, "depth": 2},
    "image": {"depth": 2},
    "video": {"base": 8},
}

SCENARIOS: Mapping[str, tuple[tuple[int, str], ...]] = {
    "base": ((1, "A"), (4, "A"), (4, "A"), (4, "A"), (4, "A"), (4, "A")),
    "relang": ((1, "A"), (4, "A"), (4, "B"), (4, "B")),
    "eight": ((1, "A"), (8, "A"), (9, "A")),
    "restart": ((1, "A"), (4, "A"), (1, "A")),
    "full16": ((1, "A"), (4, "A")),
    "decouple": ((1, "A"), (4, "A")),
}
PROMPT_LENGTHS = {"A": 20, "B": 33, "NEG": 70}


def config_json(*, decouple: bool = False) -> dict[str, Any]:
    """The part of `config.json` that says what the tiny network is."""
    module = "groot.vla.model.dreamzero"
    return {
        "architectures": ["VLA"],
        "action_head_cfg": {
            "_target_": f"{module}.action_head.wan_flow_matching_action_tf.WANPolicyHead",
            "config": {
                "action_dim": 32,
                "action_horizon": 24,
                "num_frames": 33,
                "num_frame_per_block": 2,
                "max_state_dim": 64,
                "decouple_inference_noise": decouple,
                "diffusion_model_cfg": {
                    "model_type": "i2v",
                    "dim": 96,
                    "in_dim": 36,
                    "ffn_dim": 160,
                    "out_dim": 16,
                    "freq_dim": 32,
                    "eps": 1e-6,
                    "num_heads": 4,
                    "num_layers": 3,
                    "frame_seqlen": 12,
                    "max_chunk_size": 4,
                    "num_frame_per_block": 2,
                    "num_action_per_block": 24,
                    "num_state_per_block": 1,
                },
                "vae_cfg": {"_target_": f"{module}.modules.wan_video_vae.WanVideoVAE"},
            },
        },
    }


class TinyTensors:
    """The tiny checkpoint as a `TensorSource`; each tensor is made when it is read."""

    dtypes: Mapping[str, torch.dtype] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(shape) for name, shape in shapes().items()}

    def read(self, name: str) -> torch.Tensor:
        return torch.from_numpy(value_of(name, shapes()[name]))


@cache
def shapes() -> dict[str, list[int]]:
    """Every tensor of the tiny checkpoint."""
    return json.loads((DATA / "tiny_tensors.json").read_text())


def value_of(name: str, shape: list[int]) -> NDArray[np.float32]:
    """What the reference run was given under this name."""
    z = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    last = name.rsplit(".", 1)[-1]
    if last == "gamma" or (last == "weight" and len(shape) == 1):
        return (1 + 0.1 * z).astype(np.float32)
    if last in ("bias", "b"):
        return (0.05 * z).astype(np.float32)
    if last == "modulation":
        return (0.3 * z).astype(np.float32)
    if last == "W":
        return (z / math.sqrt(shape[1])).astype(np.float32)
    if name.endswith(("token_embedding.weight", "cls_embedding", "pos_embedding", "pos_embedding.embedding.weight")):
        return (0.5 * z).astype(np.float32)
    return (z / math.sqrt(math.prod(shape[1:]))).astype(np.float32)


@cache
def golden() -> dict[str, NDArray[Any]]:
    """Recorded outputs and noise."""
    with np.load(DATA / "tiny_gold.npz") as file:
        return dict(file)


def frames(tag: str, count: int) -> torch.Tensor:
    """Stitched frames uint8 (count, 48, 64, 3)."""
    random = np.random.RandomState(zlib.crc32(tag.encode()))
    return torch.from_numpy(random.randint(0, 256, (1, count, 48, 64, 3)).astype(np.uint8)[0])


def state(tag: str) -> torch.Tensor:
    """A normalized state (64,)."""
    random = np.random.RandomState(zlib.crc32(f"{tag}/state".encode()))
    return torch.from_numpy(random.uniform(-1, 1, (1, 1, 64)).astype(np.float32)[0, 0])


def prompt(name: str) -> tuple[int, ...]:
    """Token ids without padding."""
    random = np.random.RandomState(zlib.crc32(f"prompt/{name}".encode()))
    return tuple(random.randint(1, 512, (1, PROMPT_LENGTHS[name]))[0].tolist())


def distance(ours: torch.Tensor, name: str) -> float:
    """Relative L2 to what was recorded."""
    gold = torch.from_numpy(golden()[name]).reshape(ours.shape)
    return float((ours - gold).norm() / gold.norm())
