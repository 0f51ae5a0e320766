"""The diffusion transformer: blocks that look at the text, at the actions, at the images, at the actions, and again.

Written after "Scalable Diffusion Models with Transformers" (arXiv 2212.09748) and "GR00T N1" (arXiv 2503.14734). Of the
observation it sees keys and values that are made once per request; of the time, norms that are made once per schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relay.models.groot.config import GrootConfig
from relay.models.groot.layers import NORM_EPSILON, Linear, Mlp, attend, split_heads

_FINAL_EPSILON = 1e-6
_TIME_WIDTH = 256
_LONGEST_PERIOD = 10_000.0


class Modulation(NamedTuple):
    """A norm's weight and bias at one time, (width,) each; the weight holds the 1 that is added to the scale."""

    weight: Tensor
    bias: Tensor


class Look(NamedTuple):
    """What the cross-attention of one block sees: keys, values (rows, heads, n, head_dim), and the padding's mask."""

    keys: Tensor
    values: Tensor
    bias: Tensor | None


class DiffusionTransformer(nn.Module):
    """Even blocks look at the observation, odd ones at the sequence itself."""

    def __init__(self, config: GrootConfig) -> None:
        super().__init__()
        sizes, width = config.dit, config.dit.width
        self.heads = sizes.heads
        self.looks_at_text = [
            block % (2 * config.attend_text_every_n_blocks) == 0 for block in range(0, sizes.depth, 2)
        ]
        texts, images = sum(self.looks_at_text), len(self.looks_at_text) - sum(self.looks_at_text)
        # The keys and values of all blocks that look at the same tokens are one matrix.
        self.text_keys_values = Linear(config.backbone_embedding_dim, 2 * texts * width)
        self.image_keys_values = Linear(config.backbone_embedding_dim, 2 * images * width)
        self.blocks = nn.ModuleList(DiffusionBlock(width, sizes.heads, crosses=i % 2 == 0) for i in range(sizes.depth))
        self.time_in, self.time_out = Linear(_TIME_WIDTH, width), Linear(width, width)
        # Scale and shift of the norm before each block's attention, and of the final norm.
        self.modulation_weight = nn.Parameter(torch.empty(sizes.depth + 1, 2 * width, width))
        self.modulation_bias = nn.Parameter(torch.empty(sizes.depth + 1, 2 * width))
        self.out = Linear(width, config.hidden_size)

    def look(
        self, text: Tensor, images: Tensor, rows: int, text_bias: Tensor | None, image_bias: Tensor | None
    ) -> list[Look]:
        """Keys and values of every block that looks at the observation.

        Args:
            text, images: the features of the tokens of each kind, (rows * n, backbone_embedding_dim).
        """
        of_text = self._looks(self.text_keys_values(text), rows, text_bias)
        of_images = self._looks(self.image_keys_values(images), rows, image_bias)
        return [of_text.pop(0) if at_text else of_images.pop(0) for at_text in self.looks_at_text]

    def _looks(self, packed: Tensor, rows: int, bias: Tensor | None) -> list[Look]:
        parts = packed.shape[-1] // self.modulation_weight.shape[-1]
        keys_values = split_heads(packed, rows, parts, self.heads) if parts else ()
        return [Look(k, v, bias) for k, v in zip(keys_values[::2], keys_values[1::2], strict=True)]

    def forward(self, x: Tensor, modulations: Sequence[Modulation], looks: Sequence[Look]) -> Tensor:
        """(rows * tokens, width) to (rows * tokens, hidden_size); `modulations` of one step, as `modulate` has them."""
        rows = len(looks[0].keys)
        for i, block in enumerate(self.blocks):
            x = block(x, rows, modulations[i], looks[i // 2] if i % 2 == 0 else None)
        return self.out(_normalize(x, modulations[-1], _FINAL_EPSILON))

    def modulate(self, times: Tensor) -> list[list[Modulation]]:
        """All modulations at each of `times` (steps,) float32, the final norm's last."""
        half = _TIME_WIDTH // 2
        turns = torch.exp(-math.log(_LONGEST_PERIOD) / (half - 1) * torch.arange(half, device=times.device))
        angles = times[:, None] * turns  # (steps, half)
        code = torch.cat((angles.cos(), angles.sin()), -1).to(self.modulation_bias.dtype)
        told = F.silu(self.time_out(F.silu(self.time_in(code))))  # (steps, width)
        norms, double, width = self.modulation_weight.shape
        table = told @ self.modulation_weight.view(norms * double, width).t() + self.modulation_bias.flatten()
        scale, shift = table.view(len(times), norms, 2, width).unbind(2)  # each (steps, norms, width)
        return [
            [Modulation(*pair) for pair in zip(weight.unbind(0), bias.unbind(0), strict=True)]
            for weight, bias in zip((1 + scale).unbind(0), shift.contiguous().unbind(0), strict=True)
        ]


def time_code(times: Tensor, width: int) -> Tensor:
    """The sinusoidal code that stands beside each action, (steps, width) float32 for times (steps,)."""
    half = width // 2
    turns = torch.exp(-math.log(_LONGEST_PERIOD) / half * torch.arange(half, device=times.device))
    angles = times[:, None] * turns
    return torch.cat((angles.sin(), angles.cos()), -1)


class DiffusionBlock(nn.Module):
    """Attention behind a modulated norm, MLP behind a plain one; no gates."""

    def __init__(self, width: int, heads: int, *, crosses: bool) -> None:
        super().__init__()
        self.heads = heads
        if crosses:
            self.q = Linear(width, width)
        else:
            self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width)
        self.mlp = Mlp(width, 4 * width)

    def forward(self, x: Tensor, rows: int, modulation: Modulation, look: Look | None) -> Tensor:
        """x (rows * tokens, width); without `look`, attention is over the sequence itself."""
        y = _normalize(x, modulation, NORM_EPSILON)
        if look is None:
            attended = attend(*split_heads(self.qkv(y), rows, 3, self.heads))
        else:
            q = self.q(y).view(rows, -1, self.heads, look.keys.shape[-1]).transpose(1, 2)
            attended = attend(q, *look)
        x = x + self.out(attended)
        return x + self.mlp(F.layer_norm(x, x.shape[-1:], None, None, NORM_EPSILON))


def _normalize(x: Tensor, modulation: Modulation, epsilon: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], modulation.weight, modulation.bias, epsilon)
