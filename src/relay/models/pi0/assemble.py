"""Prepared observations as the network's inputs, as many tensors as there are kinds; for batches of any shape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from relay.models.pi0.guidance import Guidance
from relay.models.pi0.model import Inputs, Pi0
from relay.models.pi0.prefix import RowTokens, lay_out
from relay.models.pi0.transforms import Pi0Prepared


def assemble(model: Pi0, rows: Sequence[Pi0Prepared], noise: Tensor) -> Inputs:
    """Put a batch on the model's device.

    Args:
        noise: (rows, horizon, action_dim) float32 on the CPU.
    """
    device = model.action_in.weight.device
    layout = lay_out(
        [RowTokens([True] * len(row.images), [True] * len(row.tokens)) for row in rows], model.config.vision.tokens
    )
    num_steps = [row.num_steps for row in rows]
    state = None if model.modulated else torch.from_numpy(np.stack([row.state for row in rows])).to(device)
    return Inputs(
        images=torch.from_numpy(np.concatenate([row.images for row in rows])).to(device),
        tokens=torch.tensor([token for row in rows for token in row.tokens], device=device),
        layout=layout.to(device),
        noise=noise.to(device),
        num_steps=num_steps,
        state=state,
        guidance=Guidance.of([row.left_over for row in rows], num_steps, device),
    )
