"""The language model's first layers, read once per request (Qwen3: arXiv 2505.09388; Qwen3-VL: arXiv 2511.21631).

Rows are padded at the end: a causal model never looks there, so padding needs no mask here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relay.engine.adapter_rows import RowChange, add_change_below
from relay.models.groot.config import TextSizes
from relay.models.groot.layers import (
    UNCHANGED,
    BlockChange,
    Linear,
    Rotation,
    frequencies,
    join_heads,
    rotate,
    rotation,
)


class LanguageModel(nn.Module):
    """Prompts with image tokens in them to features of every token."""

    def __init__(self, sizes: TextSizes, layers: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.token_embedding = nn.Parameter(torch.empty(sizes.vocab_size, sizes.width))
        self.layers = nn.ModuleList(LanguageLayer(sizes) for _ in range(layers))
        self._axes: Tensor | None = None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        image_places: Tensor,
        image_tokens: Tensor,
        deepstack: Sequence[Tensor],
        changes: Sequence[BlockChange] = (),
    ) -> Tensor:
        """The residual stream behind the last layer, without the final norm, which nothing here has.

        Args:
            tokens: (rows, n) int64.
            positions: (rows, n, 3) int64: time, height and width.
            image_places: (m,) int64, where image tokens go in the flattened `tokens`.
            image_tokens: (m, width).
            deepstack: (m, width) each: added at the same places behind the first layers.
            changes: what adapters change about each layer; empty where they change none.

        Returns:
            (rows * n, width).
        """
        tables = self.tables(positions)
        x = F.embedding(tokens.flatten(), self.token_embedding).index_copy_(0, image_places, image_tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, tables, changes[i] if changes else UNCHANGED)
            if i < len(deepstack):
                x.index_add_(0, image_places, deepstack[i])
        return x

    def tables(self, positions: Tensor) -> Rotation:
        """Rotary tables (rows, n, 1, head_dim) whose frequencies take turns between time, height and width."""
        half = self.sizes.head_dim // 2
        if self._axes is None:  # made once: a graph cannot take it from the CPU
            self._axes = torch.tensor(interleaved_axes(self.sizes.rope_sections), device=positions.device)
        angles = positions.index_select(-1, self._axes) * frequencies(half, self.sizes.rope_base, positions.device)
        return rotation(angles[:, :, None])


def interleaved_axes(sections: tuple[int, int, int]) -> list[int]:
    """Which axis each frequency turns with: time, height, width in turn while the sections of the last two last."""
    axes = [0] * sum(sections)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = [axis] * len(range(axis, 3 * sections[axis], 3))
    return axes


class LanguageLayer(nn.Module):
    """Causal attention with grouped queries, and a gated MLP; q, k and v are one matrix, gate and up another."""

    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.queries, self.keys = sizes.heads, sizes.kv_heads
        self.attention_norm = nn.Parameter(torch.empty(sizes.width))
        self.qkv = Linear(sizes.width, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim, bias=False)
        # One row per head, equal for all queries and for all keys, so that both are scaled together.
        self.head_norms = nn.Parameter(torch.empty(sizes.heads + sizes.kv_heads, sizes.head_dim))
        self.out = Linear(sizes.heads * sizes.head_dim, sizes.width, bias=False)
        self.mlp_norm = nn.Parameter(torch.empty(sizes.width))
        self.gate_up = Linear(sizes.width, 2 * sizes.mlp, bias=False)
        self.down = Linear(sizes.mlp, sizes.width, bias=False)

    def forward(self, x: Tensor, tables: Rotation, change: BlockChange) -> Tensor:
        """Add attention and MLP to x (rows * tokens, width), in place."""
        rows, head_dim = len(tables.cos), self.sizes.head_dim
        packed = self.qkv(self._normalize(x, self.attention_norm), change.qkv).view(
            rows, -1, self.queries + 2 * self.keys, head_dim
        )
        queries_keys, v = packed.split((self.queries + self.keys, self.keys), 2)
        turned = rotate(self._normalize(queries_keys) * self.head_norms, tables)
        q, k = turned.transpose(1, 2).split((self.queries, self.keys), 1)
        attended = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        _add_product(x, join_heads(attended), self.out, change.out)
        gate, up = self.gate_up(self._normalize(x, self.mlp_norm), change.gate_up).chunk(2, -1)
        return _add_product(x, F.silu(gate) * up, self.down, change.down)

    def _normalize(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.sizes.epsilon)


def _add_product(x: Tensor, y: Tensor, linear: Linear, change: RowChange | None) -> Tensor:
    """Add `linear` of y to x, in place."""
    x.addmm_(y, linear.weight)
    return x if change is None else add_change_below(x, y, change)
