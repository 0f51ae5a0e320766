"""The language model's features made ready for the diffusion transformer: a norm and some self-attention over them.

The reference runs one unpadded row at a time here and masks nothing; padding of a batch is masked, so that a row's
features are those it would have alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from relay.models.groot.config import StackSizes
from relay.models.groot.layers import NORM_EPSILON, UNCHANGED, BlockChange, Linear, Mlp, attend, split_heads


class FeatureAdaptation(nn.Module):
    """Norm and self-attention blocks, bidirectional and without positions."""

    def __init__(self, sizes: StackSizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.width, eps=NORM_EPSILON)
        self.blocks = nn.ModuleList(FeatureBlock(sizes) for _ in range(sizes.depth))

    def forward(self, features: Tensor, rows: int, bias: Tensor | None, changes: Sequence[BlockChange] = ()) -> Tensor:
        """Features (rows * n, width) in and out.

        Args:
            bias: as `key_bias` makes it, None without padding.
            changes: what adapters change about each block; empty where they change none.
        """
        x = self.norm(features)
        for i, block in enumerate(self.blocks):
            x = block(x, rows, bias, changes[i] if changes else UNCHANGED)
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

    def forward(self, x: Tensor, rows: int, bias: Tensor | None, change: BlockChange) -> Tensor:
        q, k, v = split_heads(self.qkv(self.attention_norm(x), change.qkv), rows, 3, self.heads)
        x = x + self.out(attend(q, k, v, bias), change.out)
        return x + self.mlp(self.mlp_norm(x), change)
