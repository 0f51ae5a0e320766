"""What the parts of a GR00T network share: linear layers, attention's heads, rotation, the plain MLP.

Tokens of all rows stand below each other, (rows * tokens, width), wherever they are multiplied by a matrix, so that a
linear layer is one operation; only attention sees rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relay.engine.adapter_rows import RowChange, add_change_below

NORM_EPSILON = 1e-5


class BlockChange(NamedTuple):
    """What adapters change, row by row, about the linear layers of one block; of those that the block has."""

    q: RowChange | None = None
    qkv: RowChange | None = None
    out: RowChange | None = None
    fc1: RowChange | None = None
    fc2: RowChange | None = None
    gate_up: RowChange | None = None
    down: RowChange | None = None


UNCHANGED = BlockChange()


class Linear(nn.Module):
    """`x @ weight + bias` for x (n, inputs).

    The weight is (inputs, outputs), a transposed view of the memory that a checkpoint fills: transposing at each call
    would cost the host an operation more.
    """

    bias: Tensor | None

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs).t())
        self.register_parameter("bias", nn.Parameter(torch.empty(outputs)) if bias else None)

    def forward(self, x: Tensor, change: RowChange | None = None) -> Tensor:
        y = torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)
        return y if change is None else add_change_below(y, x, change)


class Mlp(nn.Module):
    """Two layers with biases and GELU's tanh form between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = Linear(width, hidden)
        self.fc2 = Linear(hidden, width)

    def forward(self, x: Tensor, change: BlockChange = UNCHANGED) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x, change.fc1), approximate="tanh"), change.fc2)


def split_heads(packed: Tensor, rows: int, parts: int, heads: int) -> tuple[Tensor, ...]:
    """(rows * tokens, parts * width) to `parts` tensors of (rows, heads, tokens, head_dim) for attention."""
    width = packed.shape[-1] // (parts * heads)
    return packed.view(rows, -1, parts, heads, width).permute(2, 0, 3, 1, 4).unbind(0)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention over (rows, heads, tokens, head_dim), joined to (rows * tokens, width)."""
    return join_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))


def join_heads(x: Tensor) -> Tensor:
    """(rows, heads, tokens, head_dim) to (rows * tokens, heads * head_dim)."""
    rows, heads, tokens, head_dim = x.shape
    return x.transpose(1, 2).reshape(rows * tokens, heads * head_dim)


class Rotation(NamedTuple):
    """Rotary tables, float32, that broadcast against (rows, tokens, ..., head_dim).

    Each angle stands twice, for both halves of a head; the first half's sines are negated.
    """

    cos: Tensor
    sin: Tensor


def rotation(angles: Tensor) -> Rotation:
    """The tables of `angles` (..., head_dim / 2), float32."""
    cosine, sine = angles.cos(), angles.sin()
    return Rotation(torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1))


def rotate(x: Tensor, tables: Rotation) -> Tensor:
    """Rotary position embedding, half-split convention, computed in float32 and returned in the dtype of x."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * tables.cos, swapped, tables.sin).to(x.dtype)


def frequencies(count: int, base: float, device: torch.device) -> Tensor:
    """(count,) float32 rotary frequencies, from 1 downwards; always computed, never loaded or rounded."""
    return base ** -(torch.arange(count, dtype=torch.float32, device=device) / count)


def key_bias(lengths: Tensor, longest: int, dtype: torch.dtype) -> Tensor:
    """What is added to attention logits so that keys behind a row's own are not seen.

    Args:
        lengths: (rows,) int64, keys of each row.
        longest: keys in the batch.

    Returns:
        (rows, 1, 1, longest) of `dtype`, 0 or minus infinity.
    """
    # Attention kernels copy a bias at every call unless its strides are multiples of 8.
    places = torch.arange((longest + 7) // 8 * 8, device=lengths.device)
    bias = torch.zeros(len(lengths), len(places), dtype=dtype, device=lengths.device)
    return bias.masked_fill_(places >= lengths[:, None], float("-inf"))[:, None, None, :longest]
