"""The diffusion transformer: blocks that look at the text, at the actions, at the images, at the actions, and again.

Written after "Scalable Diffusion Models with Transformers" (arXiv 2212.09748) and "GR00T N1" (arXiv 2503.14734). Of the
observation it sees keys and values that are made once per request; of the time, norms that are made once per schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relay.engine.adapter_rows import RowChange, add_change_below
from relay.models.groot.config import GrootConfig
from relay.models.groot.layers import NORM_EPSILON, UNCHANGED, BlockChange, Linear, Mlp, attend, split_heads

_FINAL_EPSILON = 1e-6
_TIME_WIDTH = 256
_LONGEST_PERIOD = 10_000.0


class Modulation(NamedTuple):
    """A norm's weight and bias at one time; the weight holds the 1 that is added to the scale.

    (width,) each, or (rows, 1, width) where adapters make rows differ.
    """

    weight: Tensor
    bias: Tensor


class Look(NamedTuple):
    """What the cross-attention of one block sees: keys, values (rows, heads, n, head_dim), and the padding's mask."""

    keys: Tensor
    values: Tensor
    bias: Tensor | None


class DitChange(NamedTuple):
    """What adapters change, row by row; empty or None where they change nothing.

    Attributes:
        blocks: each block's own layers.
        keys, values: of every block that looks at the observation.
        out: the last layer.
    """

    blocks: Sequence[BlockChange] = ()
    keys: Sequence[RowChange] = ()
    values: Sequence[RowChange] = ()
    out: RowChange | None = None


class TimeChange(NamedTuple):
    """What one adapter changes about what depends on the time alone; the norms' in the order of `modulation_weight`."""

    time_in: RowChange | None = None
    time_out: RowChange | None = None
    norms: Mapping[int, RowChange] = MappingProxyType({})


SAME_DIT, SAME_TIME = DitChange(), TimeChange()


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

    def look(self, text: Tensor, images: Tensor, change: DitChange = SAME_DIT) -> tuple[Tensor, Tensor]:
        """Keys and values of every block that looks at the text, and of those that look at the images.

        Args:
            text, images: the features of the tokens of each kind, (rows * n, backbone_embedding_dim).

        Returns:
            (rows * n, 2 * blocks * width) each, for `looks`.
        """
        packed_text, packed_images = self.text_keys_values(text), self.image_keys_values(images)
        self._change_looks(packed_text, text, change, at_text=True)
        self._change_looks(packed_images, images, change, at_text=False)
        return packed_text, packed_images

    def looks(
        self, text: Tensor, images: Tensor, rows: int, text_bias: Tensor | None, image_bias: Tensor | None
    ) -> list[Look]:
        """What each block that looks at the observation sees, as views of what `look` made."""
        of_text, of_images = self._looks(text, rows, text_bias), self._looks(images, rows, image_bias)
        return [of_text.pop(0) if at_text else of_images.pop(0) for at_text in self.looks_at_text]

    def _change_looks(self, packed: Tensor, features: Tensor, change: DitChange, *, at_text: bool) -> None:
        """Add what adapters change about each of the keys and values that are packed into one matrix."""
        width = self.modulation_weight.shape[-1]
        looks = [look for look, text in enumerate(self.looks_at_text) if text == at_text]
        for part, changes in enumerate((change.keys, change.values)):
            for place, look in enumerate(looks if changes else ()):
                start = (2 * place + part) * width
                add_change_below(packed[:, start : start + width], features, changes[look])

    def _looks(self, packed: Tensor, rows: int, bias: Tensor | None) -> list[Look]:
        parts = packed.shape[-1] // self.modulation_weight.shape[-1]
        keys_values = split_heads(packed, rows, parts, self.heads) if parts else ()
        return [Look(k, v, bias) for k, v in zip(keys_values[::2], keys_values[1::2], strict=True)]

    def forward(
        self, x: Tensor, modulations: Sequence[Modulation], looks: Sequence[Look], change: DitChange = SAME_DIT
    ) -> Tensor:
        """(rows * tokens, width) to (rows * tokens, hidden_size); `modulations` are those of one step."""
        rows, changes = len(looks[0].keys), change.blocks
        for i, block in enumerate(self.blocks):
            look = looks[i // 2] if i % 2 == 0 else None
            x = block(x, rows, modulations[i], look, changes[i] if changes else UNCHANGED)
        return self.out(_normalize(x, modulations[-1], _FINAL_EPSILON), change.out)

    def modulate(self, times: Tensor, change: TimeChange = SAME_TIME) -> Tensor:
        """Weights and biases of all norms at each of `times` (steps,) float32: (steps, 2 * norms, width).

        All weights, then all biases; the final norm is the last one.
        """
        half = _TIME_WIDTH // 2
        turns = torch.exp(-math.log(_LONGEST_PERIOD) / (half - 1) * torch.arange(half, device=times.device))
        angles = times[:, None] * turns  # (steps, half)
        code = torch.cat((angles.cos(), angles.sin()), -1).to(self.modulation_bias.dtype)
        told = F.silu(self.time_out(F.silu(self.time_in(code, change.time_in)), change.time_out))  # (steps, width)
        norms, double, width = self.modulation_weight.shape
        table = told @ self.modulation_weight.view(norms * double, width).t() + self.modulation_bias.flatten()
        for norm, of_norm in change.norms.items():
            add_change_below(table[:, norm * double : (norm + 1) * double], told, of_norm)
        scale, shift = table.view(len(times), norms, 2, width).unbind(2)  # each (steps, norms, width)
        return torch.cat((1 + scale, shift), 1)


def modulations(norms: Sequence[Tensor]) -> list[Modulation]:
    """Those of one step, from the weights of all norms and then all their biases."""
    half = len(norms) // 2
    return [Modulation(*pair) for pair in zip(norms[:half], norms[half:], strict=True)]


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

    def forward(self, x: Tensor, rows: int, modulation: Modulation, look: Look | None, change: BlockChange) -> Tensor:
        """x (rows * tokens, width); without `look`, attention is over the sequence itself."""
        y = _normalize(x, modulation, NORM_EPSILON)
        if look is None:
            attended = attend(*split_heads(self.qkv(y, change.qkv), rows, 3, self.heads))
        else:
            q = self.q(y, change.q).view(rows, -1, self.heads, look.keys.shape[-1]).transpose(1, 2)
            attended = attend(q, *look)
        x = x + self.out(attended, change.out)
        return x + self.mlp(F.layer_norm(x, x.shape[-1:], None, None, NORM_EPSILON), change)


def _normalize(x: Tensor, modulation: Modulation, epsilon: float) -> Tensor:
    weight, bias = modulation
    if weight.dim() == 1:
        return F.layer_norm(x, x.shape[-1:], weight, bias, epsilon)
    normed = F.layer_norm(x, x.shape[-1:], None, None, epsilon).view(len(weight), -1, x.shape[-1])
    return torch.addcmul(bias, normed, weight).flatten(0, 1)
