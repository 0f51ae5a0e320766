"""The maps between one embodiment's states and actions and the diffusion transformer's width.

A checkpoint holds a slot of each map for every embodiment; here are those of the embodiments that are served.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relay.models.groot.config import GrootConfig


class EmbodimentMaps(nn.Module):
    """One slot.

    Attributes:
        mix_action, mix_time: the halves of one matrix over an action and the time code beside it.
    """

    def __init__(self, config: GrootConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.input_embedding_dim
        self.state_in, self.state_out = SlotLinear(config.state_width, hidden), SlotLinear(hidden, width)
        self.action_in = SlotLinear(config.max_action_dim, width)
        self.mix_action = SlotLinear(width, width)
        self.mix_time = nn.Parameter(torch.empty(width, width))
        self.action_out = SlotLinear(width, width)
        self.decode_in, self.decode_out = SlotLinear(hidden, hidden), SlotLinear(hidden, config.max_action_dim)

    def embed_state(self, state: Tensor) -> Tensor:
        """(rows, state_width) to (rows, width)."""
        return self.state_out(F.relu(self.state_in(state)))

    def time_bias(self, code: Tensor) -> Tensor:
        """What a time code (steps, width) adds inside `embed_actions`, (steps, width)."""
        return torch.addmm(self.mix_action.bias, code, self.mix_time)

    def embed_actions(self, actions: Tensor, time_bias: Tensor, positions: Tensor) -> Tensor:
        """(n, max_action_dim) to (n, width).

        Args:
            time_bias: (width,), as `time_bias` makes it.
            positions: (n, width), the last map's bias included.
        """
        mixed = torch.addmm(time_bias, self.action_in(actions), self.mix_action.weight)
        return torch.addmm(positions, F.silu(mixed), self.action_out.weight)

    def decode(self, x: Tensor) -> Tensor:
        """(n, hidden_size) to velocities (n, max_action_dim)."""
        return self.decode_out(F.relu(self.decode_in(x)))


class SlotLinear(nn.Module):
    """`x @ weight + bias` for x (n, inputs), the weight stored as it is used: (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)
