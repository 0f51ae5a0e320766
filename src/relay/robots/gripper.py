"""What the number of a gripper means, and how one convention's numbers become another's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class Gripper:
    """The values at which a gripper is closed and open; between them it moves linearly.

    DROID closes at 1 and opens at 0, LIBERO closes at 1 and opens at -1, ALOHA closes at 0 and opens at 1.

    Raises:
        ValueError: the two are equal.
    """

    closed_at: float
    open_at: float

    def __post_init__(self) -> None:
        if self.closed_at == self.open_at:
            raise ValueError(f"a gripper that is closed and open at {self.closed_at:g} cannot move")


def convert_gripper(values: ArrayLike, given: Gripper, wanted: Gripper) -> NDArray[np.float64]:
    """Values in one convention as another has them, of any shape; what lies beyond closed or open stays beyond."""
    openness = (np.asarray(values, np.float64) - given.closed_at) / (given.open_at - given.closed_at)
    return openness * (wanted.open_at - wanted.closed_at) + wanted.closed_at
