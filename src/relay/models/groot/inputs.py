"""One observation as the network takes it. Knows nothing of torch, cameras, units or prompts' text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class GrootRow:
    """One row of a batch, after everything that happens to an observation before the network.

    Attributes:
        tokens: (n,) the whole prompt, with one image token in place of every 32x32 pixels of each image.
        images: each (height, width, 3) RGB after the whole resize chain, sides multiples of 32, in prompt order.
        state: (state_history_length * max_state_dim,) normalized and padded, oldest step first.
        slot: which of the per-embodiment maps are this robot's.
    """

    tokens: NDArray[np.int64]
    images: tuple[NDArray[np.uint8], ...]
    state: NDArray[np.float32]
    slot: int
