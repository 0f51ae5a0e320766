"""Gemma blocks as π0 uses them: two stacks of different widths that share one attention.

Written after "Gemma" (arXiv 2403.08295) and, for the shared attention and adaptive norms, openpi:
src/openpi/models/gemma.py. Attention here is always bidirectional over whatever the cache holds; order and visibility
come from what is written to the cache when, and from a key mask.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relay.models.pi0.config import TransformerSize

_EPSILON = 1e-6
_ROPE_BASE = 10_000.0


class Rotation(NamedTuple):
    """Rotary tables for some tokens, float32: (rows or 1, tokens, 1, head_dim / 2) each."""

    cos: Tensor
    sin: Tensor

    def at(self, start: int, stop: int) -> Rotation:
        """The tables of tokens `start` to `stop`."""
        return Rotation(self.cos[:, start:stop], self.sin[:, start:stop])


class Modulation(NamedTuple):
    """One adaptive norm at one time: `normed * scale + shift`, then `residual + gate * sublayer`.

    Float32, (rows or 1, tokens or 1, width). `scale` already holds the 1 that the reference adds.
    """

    scale: Tensor
    shift: Tensor
    gate: Tensor


class Cache(Protocol):
    """Where keys and values of earlier tokens live."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add (rows, tokens, head_dim) keys and values; return all of them so far."""
        ...


class KeyValueCache:
    """Keys and values of all layers in one preallocated block, written in place.

    `start` says where the next tokens go; the denoising loop sets it back to the end of the prefix at every step.
    """

    def __init__(
        self, depth: int, rows: int, capacity: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ):
        self.keys = torch.empty(depth, rows, capacity, head_dim, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self.start = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        stop = self.start + k.shape[1]
        self.keys[layer, :, self.start : stop] = k
        self.values[layer, :, self.start : stop] = v
        return self.keys[layer, :, :stop], self.values[layer, :, :stop]


def rotation(positions: Tensor, head_dim: int) -> Rotation:
    """Rotary tables of `positions` (rows, tokens), computed and kept in float32."""
    exponent = torch.arange(head_dim // 2, dtype=torch.float32, device=positions.device) * 2 / head_dim
    angles = positions[..., None, None].to(torch.float32) * _ROPE_BASE**-exponent
    return Rotation(angles.cos(), angles.sin())


class GemmaBlock(nn.Module):
    """Attention and gated MLP; q, k and v are one matrix, gate and up another.

    A plain block owns the offsets of its two norms (stored as the distance from 1); a modulated one owns none and
    is told scale, shift and gate at each call.
    """

    def __init__(self, size: TransformerSize, heads: int, head_dim: int, *, modulated: bool) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        if not modulated:
            self.attention_norm = nn.Parameter(torch.zeros(size.width))
            self.mlp_norm = nn.Parameter(torch.zeros(size.width))
        self.qkv = nn.Linear(size.width, (heads + 2) * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, size.width, bias=False)
        self.gate_up = nn.Linear(size.width, 2 * size.mlp, bias=False)
        self.down = nn.Linear(size.mlp, size.width, bias=False)

    def forward(
        self,
        x: Tensor,
        tables: Rotation,
        cache: Cache,
        layer: int,
        key_mask: Tensor | None = None,
        modulation: tuple[Modulation, Modulation] | None = None,
    ) -> Tensor:
        """Attend from `x` to everything in the cache and to itself.

        Args:
            x: (rows, tokens, width) in the compute dtype.
            key_mask: (rows, keys) bool, False where a key must not be seen; None when all may.
            modulation: of the attention norm and of the MLP norm.
        """
        for_attention, for_mlp = modulation or (None, None)
        rows, tokens, _ = x.shape
        y = normalize(x, None if for_attention else self.attention_norm, for_attention)
        q, k, v = self._project(y, tables)
        keys, values = cache.append(layer, k, v)
        # With a single key-value head, the query heads fold into the query axis: one matrix product, no repeated keys.
        attended = F.scaled_dot_product_attention(
            q.reshape(rows, 1, tokens * self.heads, self.head_dim),
            keys[:, None],
            values[:, None],
            attn_mask=None if key_mask is None else key_mask[:, None, None],
        ).view(rows, tokens, self.heads * self.head_dim)
        x = add_gated(x, self.out(attended), for_attention)
        y = normalize(x, None if for_mlp else self.mlp_norm, for_mlp)
        gate, up = self.gate_up(y).chunk(2, -1)
        return add_gated(x, self.down(F.gelu(gate, approximate="tanh") * up), for_mlp)

    def write_keys_values(self, x: Tensor, tables: Rotation, cache: Cache, layer: int) -> None:
        """The prefix's last layer: of it only keys and values are ever read (exact)."""
        y = normalize(x, self.attention_norm, None)
        k, v = F.linear(y, self.qkv.weight[self.heads * self.head_dim :]).chunk(2, -1)  # (rows, tokens, head_dim)
        cache.append(layer, rotate(k[:, :, None], tables)[:, :, 0], v)

    def _project(self, y: Tensor, tables: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        rows, tokens, _ = y.shape
        qkv = self.qkv(y).view(rows, tokens, self.heads + 2, self.head_dim)
        qk = rotate(qkv[:, :, :-1], tables)  # queries and the key together
        return qk[:, :, :-1], qk[:, :, -1], qkv[:, :, -1]


def normalize(x: Tensor, offset: Tensor | None, modulation: Modulation | None) -> Tensor:
    """RMS-normalize in float32, then scale by `1 + offset` or modulate; back to the dtype of `x`."""
    if modulation is None:
        assert offset is not None
        return F.rms_norm(x.float(), x.shape[-1:], 1 + offset.float(), _EPSILON).to(x.dtype)
    normed = F.rms_norm(x.float(), x.shape[-1:], None, _EPSILON)
    return torch.addcmul(modulation.shift, normed, modulation.scale).to(x.dtype)


def add_gated(x: Tensor, y: Tensor, modulation: Modulation | None) -> Tensor:
    """The residual, with the adaptive norm's gate where there is one."""
    return x + y if modulation is None else torch.addcmul(x, y, modulation.gate.to(x.dtype))


def rotate(x: Tensor, tables: Rotation) -> Tensor:
    """Rotary position embedding, half-split convention: x (rows, tokens, heads, head_dim), rotated in float32."""
    first, second = x.float().chunk(2, -1)
    cos, sin = tables
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
