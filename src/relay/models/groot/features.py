"""The language model's features made ready for the diffusion transformer: a norm and some self-attention over them.

The reference runs one unpadded row at a time here and masks nothing; padding of a batch is masked, so that a row's
features are those it would have alone.
"""

from __future__ import annotations

from torch import Tensor, nn

from relay.models.groot.config import StackSizes
from relay.models.groot.layers import NORM_EPSILON, Linear, Mlp, attend, split_heads


class FeatureAdaptation(nn.Module):
    """Norm and self-attention blocks, bidirectional and without positions."""

    def __init__(self, sizes: StackSizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.width, eps=NORM_EPSILON)
        self.blocks = nn.ModuleList(FeatureBlock(sizes) for _ in range(sizes.depth))

    def forward(self, features: Tensor, rows: int, bias: Tensor | None) -> Tensor:
        """Features (rows * n, width) in and out; `bias` as `key_bias` makes it, None without padding."""
        x = self.norm(features)
        for block in self.blocks:
            x = block(x, rows, bias)
        return x


class FeatureBlock(nn.Module):
    """Pre-norm attention and MLP, with biases throughout."""

    def __init__(self, sizes: StackSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.attention_norm = nn.LayerNorm(sizes.width, eps=NORM_EPSILON)
        self.qkv = Linear(sizes.width, 3 * sizes.width)
        self.out = Linear(sizes.width, sizes.width)
        self.mlp_norm = nn.LayerNorm(sizes.width, eps=NORM_EPSILON)
        self.mlp = Mlp(sizes.width, 4 * sizes.width)

    def forward(self, x: Tensor, rows: int, bias: Tensor | None) -> Tensor:
        q, k, v = split_heads(self.qkv(self.attention_norm(x)), rows, 3, self.heads)
        x = x + self.out(attend(q, k, v, bias))
        return x + self.mlp(self.mlp_norm(x))
