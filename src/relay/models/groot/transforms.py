"""One observation to what the network takes, and the network's actions back into the robot's units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relay.engine.base import Note
from relay.models.groot.inputs import GrootRow


@dataclass(frozen=True, slots=True)
class GrootPrepared:
    """One observation, ready for the device.

    Attributes:
        row: what the network takes.
        raw_state: by key, (state_steps, width) float32 in the robot's units, which relative actions start from.
        flat: the observation came with flat keys, so the reply's keys are `action.<key>`.
        num_steps: denoising steps asked for; None for the checkpoint's own.
        notes: what the caller should know.
        ignored: keys of the observation that mean nothing to this policy.
        adapter: the adapter to run it with.
    """

    row: GrootRow
    raw_state: Mapping[str, NDArray[np.float32]]
    flat: bool = False
    num_steps: int | None = None
    notes: tuple[Note, ...] = ()
    ignored: tuple[str, ...] = ()
    adapter: Any = None
