"""The vision tower: a ViT that hands features on at several depths (Qwen3-VL: arXiv 2511.21631).

Every image is attended to by itself; images of different sizes in one batch are padded at the end and masked. Knows
nothing of cameras, prompts or where the tokens go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relay.models.groot.config import VisionSizes
from relay.models.groot.layers import (
    UNCHANGED,
    BlockChange,
    Linear,
    Mlp,
    Rotation,
    attend,
    frequencies,
    key_bias,
    rotate,
    rotation,
)

_EPSILON = 1e-6
_ROPE_BASE = 10_000.0
_TABULATED_PATCHES = 65_536
"""Most patches whose tables are kept: 130 MB at full size."""

Grid = tuple[int, int]
"""Patches of an image, down and across."""


class Seen(NamedTuple):
    """What the language model gets of all images: their tokens, and what is added behind its first layers.

    (tokens, output_width) each, image after image, without padding.
    """

    tokens: Tensor
    deepstack: list[Tensor]


class Places(NamedTuple):
    """What depends on an image's size alone.

    Attributes:
        positions: (1, patches, width), the learned positions resampled.
        tables: (1, patches, 3, 1, head_dim): for queries, keys and values, of which the last are not turned.
    """

    positions: Tensor
    tables: Rotation


class VisionChange(NamedTuple):
    """What adapters change about the vision tower, image by image; empty where they change nothing."""

    blocks: Sequence[BlockChange] = ()
    deepstack: Sequence[BlockChange] = ()
    merger: BlockChange = UNCHANGED


SAME_VISION = VisionChange()


class VisionTower(nn.Module):
    """Patches to tokens of the language model's width."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.sizes = sizes
        # Both frames of a still image are the same, so the weights of the two are summed when they are loaded.
        self.patch_projection = Linear(3 * sizes.patch**2, sizes.width)
        self.positions = nn.Parameter(torch.empty(sizes.positions, sizes.width))
        self.blocks = nn.ModuleList(VisionBlock(sizes) for _ in range(sizes.depth))
        self.deepstack = nn.ModuleList(Merger(sizes, norm_merged=True) for _ in sizes.deepstack)
        self.merger = Merger(sizes, norm_merged=False)
        self._places: dict[Grid, Places] = {}

    def forward(self, patches: Tensor, grids: Sequence[Grid], change: VisionChange = SAME_VISION) -> Seen:
        """Embed images.

        Args:
            patches: (images, patches, 3 * patch * patch) uint8, or already scaled to [-1, 1]: channels first in each,
                the patches of a merged token beside each other; as many as the largest image has.
            grids: of each image.
            change: what the images' adapters change.
        """
        images, longest, _ = patches.shape
        places, bias = self._place(grids, longest)
        if patches.dtype == torch.uint8:
            patches = patches.to(torch.float32).div_(127.5).sub_(1)
        x = self.patch_projection(patches.flatten(0, 1).to(self.positions.dtype))  # (images * patches, width)
        x = (x.view(images, longest, -1) + places.positions).flatten(0, 1)
        deepstack: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            x = block(x, images, places.tables, bias, change.blocks[i] if change.blocks else UNCHANGED)
            if i in self.sizes.deepstack:
                level = len(deepstack)
                of_level = change.deepstack[level] if change.deepstack else UNCHANGED
                deepstack.append(self.deepstack[level](x, of_level))
        tokens = self.merger(x, change.merger)  # (images * patches / 4, output_width)
        if bias is None:
            return Seen(tokens, deepstack)
        real = self._real_tokens(grids, longest, tokens.device)
        return Seen(tokens[real], [features[real] for features in deepstack])

    def _place(self, grids: Sequence[Grid], longest: int) -> tuple[Places, Tensor | None]:
        """Positions and tables of all images, and the mask of the padding if they differ in size."""
        each = [self.tabulated(grid) for grid in grids]
        if len(set(grids)) == 1:
            return each[0], None
        positions, cos, sin = (
            torch.cat([_pad(part, longest) for part in parts])
            for parts in zip(*((p.positions, p.tables.cos, p.tables.sin) for p in each), strict=True)
        )
        lengths = torch.tensor([h * w for h, w in grids], device=positions.device)
        return Places(positions, Rotation(cos, sin)), key_bias(lengths, longest, self.positions.dtype)

    def tabulated(self, grid: Grid) -> Places:
        """What depends on this size; made once, and kept while there is room."""
        places = self._places.pop(grid, None) or self._make_places(grid)
        self._places[grid] = places
        while sum(h * w for h, w in self._places) > _TABULATED_PATCHES and len(self._places) > 1:
            del self._places[next(iter(self._places))]  # the one that was used longest ago
        return places

    def _make_places(self, grid: Grid) -> Places:
        sizes, device = self.sizes, self.positions.device
        rows, columns = (
            _merged_order(axis, sizes.merge)
            for axis in torch.meshgrid(*(torch.arange(side, device=device) for side in grid), indexing="ij")
        )  # each (patches,)
        side = math.isqrt(sizes.positions)
        table = self.positions.float().view(side, side, -1).permute(2, 0, 1)[None]  # (1, width, side, side)
        resampled = F.interpolate(table, grid, mode="bilinear", align_corners=True)[0].permute(1, 2, 0)
        positions = resampled[rows, columns][None].to(self.positions.dtype)

        turns = frequencies(sizes.head_dim // 4, _ROPE_BASE, device)
        angles = torch.cat((rows[:, None] * turns, columns[:, None] * turns), -1)  # (patches, head_dim / 2)
        turned = angles[None, :, None, None].repeat(1, 1, 3, 1, 1)
        turned[:, :, 2] = 0
        return Places(positions, rotation(turned))

    def _real_tokens(self, grids: Sequence[Grid], longest: int, device: torch.device) -> Tensor:
        merged = self.sizes.merge**2
        starts = range(0, len(grids) * longest // merged, longest // merged)
        spans = [torch.arange(start, start + h * w // merged) for start, (h, w) in zip(starts, grids, strict=True)]
        return torch.cat(spans).to(device)


def _merged_order(x: Tensor, merge: int) -> Tensor:
    """(height, width) to (height * width,), the patches of a merged token beside each other."""
    height, width = x.shape
    return x.view(height // merge, merge, width // merge, merge).transpose(1, 2).reshape(-1)


def _pad(x: Tensor, longest: int) -> Tensor:
    """Zeros behind axis 1."""
    return F.pad(x, (*(0, 0) * (x.dim() - 2), 0, longest - x.shape[1]))


class VisionBlock(nn.Module):
    """Pre-norm attention within each image, and an MLP; biases throughout."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.attention_norm = nn.LayerNorm(sizes.width, eps=_EPSILON)
        self.qkv = Linear(sizes.width, 3 * sizes.width)
        self.out = Linear(sizes.width, sizes.width)
        self.mlp_norm = nn.LayerNorm(sizes.width, eps=_EPSILON)
        self.mlp = Mlp(sizes.width, sizes.mlp)

    def forward(self, x: Tensor, images: int, tables: Rotation, bias: Tensor | None, change: BlockChange) -> Tensor:
        # Turning the values by nothing costs less than taking them apart from queries and keys first.
        packed = self.qkv(self.attention_norm(x), change.qkv).view(images, -1, 3, self.heads, x.shape[-1] // self.heads)
        q, k, v = rotate(packed, tables).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(attend(q, k, v, bias), change.out)
        return x + self.mlp(self.mlp_norm(x), change)


class Merger(nn.Module):
    """Squares of `merge` x `merge` patches to one token; normalized patch by patch, or when they are merged."""

    def __init__(self, sizes: VisionSizes, *, norm_merged: bool) -> None:
        super().__init__()
        merged = sizes.width * sizes.merge**2
        self.merged, self.norm_merged = merged, norm_merged
        self.norm = nn.LayerNorm(merged if norm_merged else sizes.width, eps=_EPSILON)
        self.fc1 = Linear(merged, merged)
        self.fc2 = Linear(merged, sizes.output_width)

    def forward(self, x: Tensor, change: BlockChange) -> Tensor:
        x = self.norm(x.view(-1, self.merged)) if self.norm_merged else self.norm(x).view(-1, self.merged)
        return self.fc2(F.gelu(self.fc1(x, change.fc1)), change.fc2)
