"""Real-time chunking: the flow of a new chunk, drawn at every denoising step to what is left of the one before.

Each step's velocity says where a straight flow would end; the difference between that end and the previous chunk,
weighted step by step of the chunk, corrects it (arXiv 2506.07339). As lerobot has it, the difference is not taken back
through the network (lerobot: src/lerobot/policies/rtc/modeling_rtc.py), so nothing is differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relay.engine.chunking import Chunking


@dataclass(frozen=True, slots=True)
class LeftOver:
    """What a row keeps to.

    Attributes:
        actions: (horizon, action_dim) float32, normalized; zeros where the previous chunk has no step or dimension.
        weights: (horizon,) float32 in [0, 1], how much each step keeps to them.
        chunking: how strongly.
    """

    actions: NDArray[np.float32]
    weights: NDArray[np.float32]
    chunking: Chunking


@dataclass(frozen=True, slots=True)
class Guidance:
    """What a batch's rows keep to, on the device; rows without a left-over keep to nothing.

    Attributes:
        previous: (rows, horizon, action_dim) float32.
        pulls: (steps, rows, horizon, 1) float32: the share of the difference that is made up at each denoising step.
        remaining: (steps, rows, 1, 1) float32: steps of the same size from there to the end of the flow.
    """

    previous: Tensor
    pulls: Tensor
    remaining: Tensor

    @classmethod
    def of(
        cls, rows: Sequence[LeftOver | None], num_steps: Sequence[int], device: torch.device, padded: int | None = None
    ) -> Guidance | None:
        """That of a batch; None if no row has a left-over.

        Args:
            num_steps: denoising steps of each row.
            padded: how many rows to make, those behind the batch's being zero; by default as many as there are.
        """
        some = next((row for row in rows if row is not None), None)
        if some is None:
            return None
        size, longest, horizon = padded or len(rows), max(num_steps), len(some.weights)
        previous = np.zeros((size, *some.actions.shape), np.float32)
        pulls = np.zeros((longest, size, horizon, 1), np.float32)
        remaining = np.zeros((longest, size, 1, 1), np.float32)
        for number, (row, steps) in enumerate(zip(rows, num_steps, strict=True)):
            if row is not None:
                previous[number] = row.actions
                pulls[:steps, number, :, 0] = row.chunking.strengths(steps)[:, None] / steps * row.weights
                remaining[:steps, number, 0, 0] = np.arange(steps)[::-1]
        return cls(*(torch.from_numpy(array).to(device) for array in (previous, pulls, remaining)))

    def draw(self, x: Tensor, moved: Tensor, step: int) -> None:
        """Correct `x` (rows, horizon, action_dim), which denoising step number `step` has just left, in place.

        Args:
            moved: what that step took off `x`, same shape.
        """
        end = torch.addcmul(x, self.remaining[step], moved, value=-1)
        x.addcmul_(self.pulls[step], self.previous - end)
