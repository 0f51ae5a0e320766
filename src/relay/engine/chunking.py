"""Real-time chunking's numbers: how strongly each step of a new chunk is drawn to what is left of the one before.

After "Real-Time Execution of Action Chunking Flow Policies" (arXiv 2506.07339), with the schedules and defaults of
lerobot (src/lerobot/policies/rtc/modeling_rtc.py). Knows no network and no units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Schedule = Literal["linear", "exp", "ones", "zeros"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)


@dataclass(frozen=True, slots=True)
class Chunking:
    """How a policy is guided by what is left of its previous chunk.

    Attributes:
        schedule: the weights between the steps that will have been executed and the end of the guided ones.
        max_weight: bound of the guidance, which would be infinite at the first denoising step.

    Raises:
        ValueError: an unknown schedule, or a bound that isn't positive.
    """

    schedule: Schedule = "linear"
    max_weight: float = 10.0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"--rtc-schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        if not 0 < self.max_weight < math.inf:
            raise ValueError(f"--rtc-max-guidance-weight must be a positive number, got {self.max_weight}")

    def weights(self, delay: int, guided: int, horizon: int) -> NDArray[np.float32]:
        """How much each of a chunk's steps keeps to the previous chunk, (horizon,) in [0, 1].

        Args:
            delay: steps that will have been executed when the reply arrives; their weight is 1.
            guided: steps that guide in all; behind them the weight is 0.
        """
        delay = min(delay, guided)
        between = guided - delay
        ramp = np.linspace(1, 0, between + 2)[1:-1]  # (between,)
        match self.schedule:
            case "exp":
                ramp = ramp * np.expm1(ramp) / (math.e - 1)
            case "ones":
                ramp = np.ones(between)
            case "zeros":
                ramp = np.zeros(between)
            case "linear":
                pass
        return np.concatenate([np.ones(delay), ramp, np.zeros(horizon - guided)]).astype(np.float32)

    def strengths(self, num_steps: int) -> NDArray[np.float64]:
        """The guidance at each denoising step, (num_steps,); its time runs from 1, noise, towards 0, actions."""
        time = 1 - np.arange(num_steps) / num_steps
        with np.errstate(divide="ignore"):
            return np.minimum(self.max_weight, (time**2 + (1 - time) ** 2) / (time * (1 - time)))
