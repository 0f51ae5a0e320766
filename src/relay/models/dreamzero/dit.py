"""The causal video transformer: patches of latent frames, actions and a state in one sequence.

Written after dreamzero: groot/vla/model/dreamzero/modules/wan_video_dit_action_casual_chunk.py. There is no mask: order
comes from what is written to the memory of keys and values when, and every token sees all of that and all others of
its own pass. Branches (the prompt's and, for guidance, the negative prompt's) are rows of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relay.models.dreamzero.config import DreamZeroConfig

_ROPE_BASE = 10_000.0
_TIME_BASE = 10_000.0


class CrossKeys(NamedTuple):
    """What one block attends to besides the sequence; each (branches, heads, tokens, head_dim)."""

    text_keys: Tensor
    text_values: Tensor
    image_keys: Tensor
    image_values: Tensor


class Moment(NamedTuple):
    """Everything that depends on a timestep alone.

    Attributes:
        blocks: shift, scale and gate of attention and MLP, (depth, 6, width); the scales already hold their 1.
        head: shift and scale of the output norm, (2, width), likewise.
    """

    blocks: Tensor
    head: Tensor


class Joined(NamedTuple):
    """Actions and state that are denoised beside the video.

    Attributes:
        actions: (branches, horizon, action_dim).
        state: (branches, 1, state_dim).
        timestep: the actions' own.
        block: how many blocks of frames came before in this window.
    """

    actions: Tensor
    state: Tensor
    timestep: int
    block: int


class SlotLinear(nn.Module):
    """A linear map stored as (1, in, out), the one category of a category-specific map."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.zeros(1, width_in, width_out))
        self.b = nn.Parameter(torch.zeros(1, width_out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.W[0] + self.b[0]


class SlotMlp(nn.Module):
    """Two such maps with a ReLU between them."""

    def __init__(self, width_in: int, hidden: int, width_out: int) -> None:
        super().__init__()
        self.layer1 = SlotLinear(width_in, hidden)
        self.layer2 = SlotLinear(hidden, width_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(F.relu(self.layer1(x)))


class ActionEncoder(nn.Module):
    """Actions and their timestep to tokens."""

    def __init__(self, action_dim: int, width: int) -> None:
        super().__init__()
        self.W1 = SlotLinear(action_dim, width)
        self.W2 = SlotLinear(2 * width, width)
        self.W3 = SlotLinear(width, width)

    def forward(self, actions: Tensor, timestep: int) -> Tensor:
        half = self.W1.W.shape[2] // 2
        exponent = torch.arange(half, dtype=torch.float32, device=actions.device) / half
        angles = timestep * torch.exp(-math.log(_TIME_BASE) * exponent)
        code = torch.cat((angles.sin(), angles.cos())).to(actions.dtype)
        code = code.expand(*actions.shape[:2], -1)  # (branches, horizon, width)
        return self.W3(F.silu(self.W2(torch.cat((self.W1(actions), code), -1))))


class RmsNorm(nn.Module):
    """RMS over the whole width in float32, cast back before the weight."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), None, self.epsilon).to(x.dtype) * self.weight


class SelfAttention(nn.Module):
    """Queries, keys and values as one matrix; the norms run over all heads together."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.o = nn.Linear(width, width)
        self.norm_q = RmsNorm(width, epsilon)
        self.norm_k = RmsNorm(width, epsilon)


class CrossAttention(nn.Module):
    """One query against text and image apart; the two answers are added."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.k_img, self.v_img = nn.Linear(width, width), nn.Linear(width, width)
        self.norm_q, self.norm_k, self.norm_k_img = (RmsNorm(width, epsilon) for _ in range(3))


class Block(nn.Module):
    """Attention over the memory, attention to text and image, MLP."""

    def __init__(self, width: int, heads: int, mlp: int, epsilon: float) -> None:
        super().__init__()
        self.heads, self.epsilon = heads, epsilon
        self.self_attn = SelfAttention(width, epsilon)
        self.cross_attn = CrossAttention(width, epsilon)
        self.norm3 = nn.LayerNorm(width, epsilon)
        self.ffn = nn.Sequential(nn.Linear(width, mlp), nn.GELU("tanh"), nn.Linear(mlp, width))
        self.modulation = nn.Parameter(torch.zeros(1, 6, width))

    def cross_keys(self, text: Tensor, image: Tensor) -> CrossKeys:
        """Keys and values of (branches, tokens, width) text and image features."""
        attention = self.cross_attn
        return CrossKeys(
            self._heads(attention.norm_k(attention.k(text))),
            self._heads(attention.v(text)),
            self._heads(attention.norm_k_img(attention.k_img(image))),
            self._heads(attention.v_img(image)),
        )

    def forward(
        self,
        x: Tensor,
        modulation: Sequence[Tensor],
        rotation: Tensor,
        memory: Tensor,
        cached: int,
        cross: CrossKeys,
        *,
        keys_only: bool,
    ) -> Tensor:
        """One block over (branches, tokens, width).

        Args:
            modulation: shift, scale, gate, shift, scale, gate; each (1 or tokens, width).
            rotation: rotary angles as complex numbers, (tokens, head_dim / 2).
            memory: keys and values, (2, branches, heads, capacity, head_dim); this pass's are written behind `cached`.
            keys_only: write keys and values and leave out the rest, which nobody reads; returns `x`.
        """
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation
        attention = self.self_attn
        q, k, v = attention.qkv(self._norm(x) * scale + shift).chunk(3, -1)
        stop = cached + x.shape[1]
        memory[0, :, :, cached:stop] = rotated(self._heads(attention.norm_k(k)), rotation)
        memory[1, :, :, cached:stop] = self._heads(v)
        if keys_only:
            return x
        q = rotated(self._heads(attention.norm_q(q)), rotation)
        keys, values = memory[0, :, :, :stop], memory[1, :, :, :stop]
        x = x + attention.o(_flat(F.scaled_dot_product_attention(q, keys, values))) * gate
        attention = self.cross_attn
        q = self._heads(attention.norm_q(attention.q(self.norm3(x))))
        seen = F.scaled_dot_product_attention(q, cross.text_keys, cross.text_values)
        seen = seen + F.scaled_dot_product_attention(q, cross.image_keys, cross.image_values)
        x = x + attention.o(_flat(seen))
        return x + self.ffn(self._norm(x) * mlp_scale + mlp_shift) * mlp_gate

    def _norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), eps=self.epsilon)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)  # (branches, heads, tokens, head_dim)


class ImageEmbedding(nn.Module):
    """The image encoder's tokens to the transformer's width."""

    def __init__(self, image: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            nn.LayerNorm(image), nn.Linear(image, image), nn.GELU(), nn.Linear(image, width), nn.LayerNorm(width)
        )


class Head(nn.Module):
    """Tokens to squares of 2 x 2 latents."""

    def __init__(self, width: int, out_channels: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, 4 * out_channels)
        self.modulation = nn.Parameter(torch.zeros(1, 2, width))


class Dit(nn.Module):
    """The transformer with its embeddings; names as in the checkpoint, but for the packed `qkv`."""

    def __init__(self, config: DreamZeroConfig, *, state_hidden: int, action_hidden: int) -> None:
        super().__init__()
        sizes = config.dit
        width = sizes.width
        self.sizes, self.block_frames, self.action_horizon = sizes, config.block_frames, config.action_horizon
        self.state_encoder = SlotMlp(config.state_dim, state_hidden, width)
        self.action_encoder = ActionEncoder(config.action_dim, width)
        self.action_decoder = SlotMlp(width, action_hidden, config.action_dim)
        self.patch_embedding = nn.Conv3d(sizes.in_channels, width, (1, 2, 2), (1, 2, 2))
        self.text_embedding = nn.Sequential(
            nn.Linear(config.text.width, width), nn.GELU("tanh"), nn.Linear(width, width)
        )
        self.time_embedding = nn.Sequential(nn.Linear(sizes.time_width, width), nn.SiLU(), nn.Linear(width, width))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        image = config.image.width
        self.img_emb = ImageEmbedding(image, width)
        self.blocks = nn.ModuleList(Block(width, sizes.heads, sizes.mlp, sizes.epsilon) for _ in range(sizes.depth))
        self.head = Head(width, sizes.out_channels)
        self._moments: dict[int, Moment] = {}

    def cross_keys(self, text: Tensor, image: Tensor) -> list[CrossKeys]:
        """What the blocks attend to of a prompt and a first frame; once per window.

        Args:
            text: (branches, 512, text width); image: (branches, 257, image width).
        """
        text, image = self.text_embedding(text), self.img_emb.proj(image)
        return [block.cross_keys(text, image) for block in self._stack]

    def new_memory(self, branches: int, tokens: int) -> Tensor:
        """Room for keys and values, (depth, 2, branches, heads, tokens, head_dim)."""
        sizes = self.sizes
        weight = self.head.head.weight
        return weight.new_zeros(sizes.depth, 2, branches, sizes.heads, tokens, sizes.head_dim)

    def forward(
        self,
        video: Tensor,
        timestep: int,
        start_frame: int,
        memory: Tensor,
        cached: int,
        cross: Sequence[CrossKeys],
        joined: Joined | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """One pass over some latent frames, with or without actions.

        Args:
            video: (branches, in_channels, frames, height, width) latents.
            start_frame: of the first of them in its window.
            memory: as `new_memory` makes it; the first `cached` tokens are earlier frames, this pass's come behind.
            joined: actions and state; without them only keys and values are wanted, as when frames are observed.

        Returns:
            The flows of video (branches, out_channels, frames, height, width) and actions (branches, horizon,
            action_dim); None without `joined`.
        """
        x, grid = self._patches(video)
        rotation = self._rotation(start_frame, grid, joined)
        moment = self._moment(timestep)
        modulation = moment.blocks[:, :, None]  # (depth, 6, 1, width)
        video_tokens = x.shape[1]
        if joined is not None:
            x = torch.cat(
                (x, self.action_encoder(joined.actions, joined.timestep), self.state_encoder(joined.state)), 1
            )
            if joined.timestep != timestep:
                other = self._moment(joined.timestep).blocks[:, :, None]
                modulation = torch.cat(
                    (
                        modulation.expand(-1, -1, video_tokens, -1),
                        other.expand(-1, -1, x.shape[1] - video_tokens, -1),
                    ),
                    2,
                )
        for number, block in enumerate(self._stack):
            last = joined is None and number == len(self.blocks) - 1
            x = block(x, modulation[number].unbind(0), rotation, memory[number], cached, cross[number], keys_only=last)
        if joined is None:
            return None
        actions = self.action_decoder(x[:, video_tokens : video_tokens + self.action_horizon])
        shift, scale = moment.head
        x = F.layer_norm(x[:, :video_tokens], (x.shape[-1],), eps=self.sizes.epsilon) * scale + shift
        return self._frames(self.head.head(x), grid), actions

    def _patches(self, video: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """Tokens (branches, frames * rows * columns, width), frame-major, of squares of 2 x 2 latents."""
        branches, channels, frames, height, width = video.shape
        grid = (frames, height // 2, width // 2)
        squares = video.view(branches, channels, frames, grid[1], 2, grid[2], 2).permute(0, 2, 3, 5, 1, 4, 6)
        weight = self.patch_embedding.weight.flatten(1)
        return F.linear(squares.reshape(branches, math.prod(grid), -1), weight, self.patch_embedding.bias), grid

    def _frames(self, tokens: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """The inverse of `_patches`, for the output's channels."""
        frames, rows, columns = grid
        squares = tokens.view(len(tokens), frames, rows, columns, 2, 2, self.sizes.out_channels)
        return squares.permute(0, 6, 1, 2, 4, 3, 5).reshape(len(tokens), -1, frames, 2 * rows, 2 * columns)

    def _rotation(self, start_frame: int, grid: tuple[int, int, int], joined: Joined | None) -> Tensor:
        """Rotary angles of every token as complex numbers, (tokens, head_dim / 2).

        A video token's head is split over frame, row and column; actions and state count along one axis of their own.
        """
        frames, rows, columns = grid
        head_dim, device = self.sizes.head_dim, self.head.head.weight.device
        side = head_dim // 6  # frequencies of row and of column
        parts = [
            _angles(torch.arange(start_frame, start_frame + frames), head_dim - 4 * side)[:, None, None],
            _angles(torch.arange(rows), 2 * side)[None, :, None],
            _angles(torch.arange(columns), 2 * side)[None, None, :],
        ]
        angles = torch.cat([part.expand(*grid, -1) for part in parts], -1).flatten(0, 2)
        if joined is not None:
            first = joined.block * self.action_horizon
            positions = torch.cat((torch.arange(first, first + self.action_horizon), torch.tensor([joined.block])))
            angles = torch.cat((angles, _angles(positions, head_dim)))
        return torch.polar(torch.ones_like(angles), angles).to(device, torch.complex64)

    @property
    def _stack(self) -> list[Block]:
        return cast("list[Block]", list(self.blocks))

    def _moment(self, timestep: int) -> Moment:
        """The modulation at a timestep, kept for the next time: there are seventeen in all."""
        if timestep not in self._moments:
            half = self.sizes.time_width // 2
            weight = self.head.head.weight
            frequencies = _TIME_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
            angles = timestep * frequencies
            code = torch.cat((angles.cos(), angles.sin())).to(weight.device, weight.dtype)
            embedded = self.time_embedding(code)
            projected = self.time_projection(embedded).view(6, -1)
            blocks = torch.cat([block.modulation for block in self._stack]) + projected  # (depth, 6, width)
            blocks[:, 1] += 1
            blocks[:, 4] += 1
            head = self.head.modulation[0] + embedded  # (2, width)
            head[1] += 1
            self._moments[timestep] = Moment(blocks, head)
        return self._moments[timestep]


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Heads (branches, heads, tokens, head_dim) turned by their tokens' angles, neighbouring numbers as pairs."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


def _angles(positions: Tensor, width: int) -> Tensor:
    """(positions, width / 2) float64."""
    exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
    return positions.double()[:, None] * _ROPE_BASE**-exponent


def _flat(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)  # (branches, tokens, width)
