"""The SigLIP vision tower and its projection to the language model's width.

Written after "Sigmoid Loss for Language Image Pre-Training" (arXiv 2303.15343) and the layer order of big_vision's ViT
as PaliGemma uses it: no class token, no pooling, tanh GELU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relay.models.pi0.config import VisionSize

_EPSILON = 1e-6


class VisionTower(nn.Module):
    """Images to tokens; images are independent of each other."""

    def __init__(self, size: VisionSize, output_width: int) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, size.width, size.patch, stride=size.patch)
        self.position_embedding = nn.Parameter(torch.zeros(size.tokens, size.width))
        self.blocks = nn.ModuleList(VisionBlock(size) for _ in range(size.depth))
        self.final_norm = nn.LayerNorm(size.width, eps=_EPSILON)
        self.projector = nn.Linear(size.width, output_width)

    def forward(self, images: Tensor) -> Tensor:
        """Embed images.

        Args:
            images: (n, height, width, 3) uint8 RGB, or float32 already scaled to [-1, 1].

        Returns:
            (n, tokens, output_width) in the dtype of the projector. They are not divided by the square root of the
            width, as openpi's copy of PaliGemma does not either.
        """
        if images.dtype == torch.uint8:
            images = images.to(torch.float32).div_(255).mul_(2).sub_(1)
        # Patches and positions stay float32 in every reference implementation. A convolution whose patches do not
        # overlap is a matrix product, and as one it is not rounded to TF32 on a GPU.
        kernel = self.patch_embedding.weight  # (width, 3, patch, patch)
        patches = _patches(images, kernel.shape[-1])  # (n, tokens, 3 * patch * patch)
        x = F.linear(patches, kernel.flatten(1), self.patch_embedding.bias) + self.position_embedding
        x = x.to(self.projector.weight.dtype)  # (n, tokens, width)
        for block in self.blocks:
            x = block(x)
        return self.projector(self.final_norm(x))  # (n, tokens, output_width)


def _patches(images: Tensor, side: int) -> Tensor:
    """(n, height, width, 3) cut into squares, row by row: (n, tokens, 3 * side * side), channels first in each."""
    n, height, width, channels = images.shape
    grid = images.view(n, height // side, side, width // side, side, channels)
    return grid.permute(0, 1, 3, 5, 2, 4).reshape(n, -1, channels * side * side)


class VisionBlock(nn.Module):
    """Pre-norm attention and MLP, with biases throughout."""

    def __init__(self, size: VisionSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width, eps=_EPSILON)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.mlp_norm = nn.LayerNorm(size.width, eps=_EPSILON)
        self.fc1 = nn.Linear(size.width, size.mlp)
        self.fc2 = nn.Linear(size.mlp, size.width)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(n, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (n, heads, tokens, head_dim)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, tokens, width)
        x = x + self.out(attended)
        return x + self.fc2(F.gelu(self.fc1(self.mlp_norm(x)), approximate="tanh"))
