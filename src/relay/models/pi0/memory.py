"""How much device memory a π0 or π0.5 network takes: its weights by counting, a row of a batch by estimate."""

from __future__ import annotations

import torch

from relay.models.pi0.config import Pi0Config
from relay.models.pi0.model import Pi0


def parameters(config: Pi0Config) -> int:
    """Parameters that action sampling uses."""
    return sum(parameter.numel() for parameter in _on_no_device(config).parameters())


def weight_bytes(config: Pi0Config, dtype: torch.dtype) -> int:
    """Bytes of all parameters with the large matrices in `dtype`."""
    model = _on_no_device(config).to_compute_dtype(dtype)
    return sum(parameter.numel() * parameter.dtype.itemsize for parameter in model.parameters())


def cache_bytes(config: Pi0Config, dtype: torch.dtype, *, cameras: int, prompt: int) -> int:
    """Keys and values of one row: every layer's, for prefix, state token and actions."""
    tokens = cameras * config.vision.tokens + prompt + config.action_horizon + (config.family == "pi0")
    return 2 * config.language.depth * tokens * config.head_dim * dtype.itemsize


def activation_bytes(config: Pi0Config, dtype: torch.dtype, *, cameras: int, prompt: int) -> int:
    """The most that one row holds at once besides its cache: an estimate from the widest layer of each tower.

    A layer holds its input, its normalized input and its output, queries, keys and values twice (before and after the
    rotation, or the heads' layout), and the MLP's hidden values. Attention matrices are never whole.
    """
    vision, language = config.vision, config.language
    image_tokens = cameras * vision.tokens
    per_image_token = 3 * vision.width + 6 * vision.width + 2 * vision.mlp
    queries = (config.heads + 2) * config.head_dim
    per_prefix_token = 3 * language.width + 2 * queries + 3 * language.mlp
    widest = max(image_tokens * per_image_token, (image_tokens + prompt) * per_prefix_token)
    pixels = 3 * cameras * vision.image_size**2 * torch.float32.itemsize
    return widest * dtype.itemsize + pixels


def _on_no_device(config: Pi0Config) -> Pi0:
    with torch.device("meta"):
        return Pi0(config)
