"""What one observation becomes before it reaches the device. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class GrootRow:
    """One observation as the network takes it.

    Attributes:
        tokens: (n,) the whole prompt, image tokens in place.
        images: each (h, w, 3) after the whole resize chain, sides multiples of 32; time outermost, camera innermost.
        state: (state_history_length * max_state_dim,) normalized and padded with zeros, oldest step first.
        slot: which of the per-embodiment maps are this robot's.
    """

    tokens: NDArray[np.int64]
    images: tuple[NDArray[np.uint8], ...]
    state: NDArray[np.float32]
    slot: int
