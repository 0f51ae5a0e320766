"""Gemma blocks as π0 uses them: two stacks of different widths that share one attention.

Written after "Gemma" (arXiv 2403.08295) and, for the shared attention and adaptive norms, openpi:
src/openpi/models/gemma.py. Attention here is always bidirectional over whatever the cache holds; order and visibility
come from what is written to the cache when, and from a key mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relay.engine.adapter_rows import RowChange, adapted, add_change
from relay.models.pi0.config import TransformerSize

_EPSILON = 1e-6
_ROPE_BASE = 10_000.0


class Rotation(NamedTuple):
    """Rotary tables for some tokens, float32: (rows or 1, tokens, 1, head_dim) each.

    Each angle stands twice, for both halves of a head; the first half's sines are negated.
    """

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


class BlockChange(NamedTuple):
    """What adapters change about the linear layers of one block, row by row."""

    qkv: RowChange | None = None
    out: RowChange | None = None
    gate_up: RowChange | None = None
    down: RowChange | None = None


UNCHANGED = BlockChange()


class Cache(Protocol):
    """Where keys and values of earlier tokens live."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add (rows, tokens, head_dim) keys and values; return all of them so far, (rows, 1, keys, head_dim)."""
        ...


class KeyValueCache:
    """Keys and values of all layers in one block, (2, depth, rows, capacity, head_dim), written in place.

    `start` says where the next tokens go; the denoising loop sets it back to the end of the prefix at every step.
    """

    def __init__(self, block: Tensor) -> None:
        self.keys, self.values = block.unbind(0)
        self.start = 0
        self._written = list(zip(self.keys.unbind(0), self.values.unbind(0), strict=True))
        with_head = block.unsqueeze(3)
        self._read = list(zip(with_head[0].unbind(0), with_head[1].unbind(0), strict=True))

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        stop = self.start + k.shape[1]
        keys, values = self._written[layer]
        keys[:, self.start : stop] = k
        values[:, self.start : stop] = v
        keys, values = self._read[layer]
        return keys[:, :, :stop], values[:, :, :stop]


def rotation(positions: Tensor, head_dim: int) -> Rotation:
    """Rotary tables of `positions` (rows, tokens), computed and kept in float32."""
    exponent = torch.arange(head_dim // 2, dtype=torch.float32, device=positions.device) * 2 / head_dim
    angles = positions[..., None, None].to(torch.float32) * _ROPE_BASE**-exponent
    sine = angles.sin()
    return Rotation(angles.cos().repeat(1, 1, 1, 2), torch.cat((-sine, sine), -1))


class GemmaBlock(nn.Module):
    """Attention and gated MLP; q, k and v are one matrix, gate and up another.

    A plain block owns the offsets of its two norms (stored as the distance from 1); a modulated one owns none and
    is told scale, shift and gate at each call.

    Attributes:
        between: what runs between the matrix products.
    """

    between: Between

    def __init__(self, size: TransformerSize, heads: int, head_dim: int, *, modulated: bool) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.between = PLAIN
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
        key_bias: Tensor | None = None,
        modulation: tuple[Modulation, Modulation] | None = None,
        change: BlockChange = UNCHANGED,
    ) -> Tensor:
        """Attend from `x` to everything in the cache and to itself.

        Args:
            x: (rows, tokens, width) in the compute dtype.
            key_bias: as `key_bias` makes it; None when every key may be seen.
            modulation: of the attention norm and of the MLP norm.
            change: what each row's adapter changes.
        """
        for_attention, for_mlp = modulation or (None, None)
        between = self.between
        rows, tokens, _ = x.shape
        y = between.normalize(x, None if for_attention else self.attention_norm, for_attention)
        q, k, v = self._project(y, tables, change)
        keys, values = cache.append(layer, k, v)
        # With a single key-value head, the query heads fold into the query axis: one matrix product, no repeated keys.
        attended = F.scaled_dot_product_attention(
            q.reshape(rows, 1, tokens * self.heads, self.head_dim),
            keys,
            values,
            attn_mask=key_bias,
        ).view(rows, tokens, self.heads * self.head_dim)
        x = between.add_gated(x, adapted(self.out, attended, change.out), for_attention)
        y = between.normalize(x, None if for_mlp else self.mlp_norm, for_mlp)
        hidden = between.gated_gelu(adapted(self.gate_up, y, change.gate_up))
        return between.add_gated(x, adapted(self.down, hidden, change.down), for_mlp)

    def write_keys_values(
        self, x: Tensor, tables: Rotation, cache: Cache, layer: int, change: BlockChange = UNCHANGED
    ) -> None:
        """The prefix's last layer: of it only keys and values are ever read (exact)."""
        y = self.between.normalize(x, self.attention_norm, None)
        queries = self.heads * self.head_dim
        kv = F.linear(y, self.qkv.weight[queries:])
        if change.qkv is not None:
            kv = add_change(kv, y, change.qkv.from_output(queries))
        k, v = kv.chunk(2, -1)  # (rows, tokens, head_dim)
        cache.append(layer, self.between.rotate(k[:, :, None], tables)[:, :, 0], v)

    def _project(self, y: Tensor, tables: Rotation, change: BlockChange) -> tuple[Tensor, Tensor, Tensor]:
        rows, tokens, _ = y.shape
        qkv = adapted(self.qkv, y, change.qkv).view(rows, tokens, self.heads + 2, self.head_dim)
        qk = self.between.rotate(qkv[:, :, :-1], tables)  # queries and the key together
        return qk[:, :, :-1], qk[:, :, -1], qkv[:, :, -1]


def normalize(x: Tensor, offset: Tensor | None, modulation: Modulation | None) -> Tensor:
    """RMS-normalize in float32, then scale by `1 + offset` or modulate; back to the dtype of `x`."""
    normed = F.rms_norm(x.float(), x.shape[-1:], None, _EPSILON)
    if modulation is None:
        assert offset is not None
        return torch.addcmul(normed, normed, offset.float()).to(x.dtype)
    return torch.addcmul(modulation.shift, normed, modulation.scale).to(x.dtype)


def add_gated(x: Tensor, y: Tensor, modulation: Modulation | None) -> Tensor:
    """The residual, with the adaptive norm's gate where there is one."""
    return x + y if modulation is None else torch.addcmul(x, y, modulation.gate.to(x.dtype))


def rotate(x: Tensor, tables: Rotation) -> Tensor:
    """Rotary position embedding, half-split convention: x (rows, tokens, heads, head_dim), rotated in float32."""
    wide = x.float()
    halves_swapped = wide.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(wide * tables.cos, halves_swapped, tables.sin).to(x.dtype)


def gated_gelu(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` of the two halves of the last axis."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def key_bias(valid: Tensor, suffix: int, dtype: torch.dtype) -> Tensor:
    """What is added to attention logits so that keys of invalid prefix tokens are not seen.

    Args:
        valid: (rows, prefix) bool.
        suffix: number of keys behind the prefix, which all may be seen.

    Returns:
        (rows, 1, 1, prefix + suffix) of `dtype`, 0 or minus infinity.
    """
    rows, prefix = valid.shape
    # Attention kernels copy a bias at every call unless its strides are multiples of 8.
    width = (prefix + suffix + 7) // 8 * 8
    bias = torch.zeros(rows, 1, 1, width, dtype=dtype, device=valid.device)
    bias[..., :prefix].masked_fill_(~valid[:, None, None], float("-inf"))
    return bias[..., : prefix + suffix]


class Between(NamedTuple):
    """The small functions between a block's matrix products, which a compiler can make one kernel each."""

    normalize: Callable[[Tensor, Tensor | None, Modulation | None], Tensor]
    rotate: Callable[[Tensor, Rotation], Tensor]
    add_gated: Callable[[Tensor, Tensor, Modulation | None], Tensor]
    gated_gelu: Callable[[Tensor], Tensor]


PLAIN = Between(normalize, rotate, add_gated, gated_gelu)


def compiled() -> Between:
    """The same functions, each compiled into one kernel on its first call; of any sizes, so that they stay few."""
    one_kernel = functools.partial(torch.compile, dynamic=True)
    return Between(one_kernel(normalize), one_kernel(rotate), one_kernel(add_gated), one_kernel(gated_gelu))
