"""What a checkpoint says of one embodiment: its cameras, state, action groups, statistics and image settings.

Read from `processor_config.json`, `statistics.json` and `embodiment_id.json` (Isaac-GR00T:
gr00t/model/gr00t_n1d7/processing_gr00t_n1d7.py). Knows no folder and no observation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from relay.models.groot.embodiments import Embodiment

StateEncoding = Literal["sin_cos", "mean_std", "min_max"]
ActionScaling = Literal["mean_std", "min_max"]
Relative = Literal["joints", "xyz_rot6d", "xyz_rotvec"]
"""How a relative group is made absolute: by adding, or by composing poses with a rotation in one of two forms."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One key of the state.

    Attributes:
        key: its name.
        width: numbers in it, in the robot's units.
        encoding: how it is brought into the network's range.
        low, high: (width,) float64: the ends of the range, or mean and deviation for `mean_std`; zeros for `sin_cos`.
    """

    key: str
    width: int
    encoding: StateEncoding
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    @property
    def encoded_width(self) -> int:
        return 2 * self.width if self.encoding == "sin_cos" else self.width


@dataclass(frozen=True, slots=True)
class ActionGroup:
    """One group of the actions.

    Attributes:
        key: its name.
        width: columns of the network's output that it takes.
        scaling: how it leaves the network's range.
        low, high: float64, (width,) or one row per step (horizon, width): the ends of the range, or mean and
            deviation for `mean_std`.
        relative: None for absolute actions.
        state_key: the part of the state that relative actions start from.
    """

    key: str
    width: int
    scaling: ActionScaling
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    relative: Relative | None = None
    state_key: str = ""


@dataclass(frozen=True, slots=True)
class ImageRecipe:
    """How frames are cropped and resized before the vision tower's own resize.

    Attributes:
        area: the recipe of N1.7 (`use_albumentations`): area interpolation by the shorter side; else torchvision's.
        letterbox: pad to a square with black first.
        shortest_edge: of the area recipe; None resizes to `target` exactly.
        crop_fraction: of the area recipe: how much of each side is kept.
        target, crop: (height, width); of torchvision's recipe, and of the area recipe without `shortest_edge`.
    """

    area: bool
    letterbox: bool
    shortest_edge: int | None
    crop_fraction: float
    target: tuple[int, int] | None
    crop: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Recipe:
    """One embodiment of one checkpoint.

    Attributes:
        embodiment: its tag and its slot.
        cameras: keys in the order the network takes them.
        frames: offsets in control steps of the frames of each camera, oldest first, such as (-15, 0).
        language_key: the key of the instruction.
        state: its parts in order.
        state_steps: how many states in time, oldest first.
        exclude_state: the network was trained without the state; it gets zeros.
        clip: whether states scaled to a range are cut off at its ends.
        actions: the groups in order.
        horizon: steps in a chunk, at most the network's.
        max_state_dim, max_action_dim, action_horizon: the network's own sizes.
        image: how frames are resized.
        formalize_language: whether instructions are lower-cased and lose their punctuation.
    """

    embodiment: Embodiment
    cameras: tuple[str, ...]
    frames: tuple[int, ...]
    language_key: str
    state: tuple[StatePart, ...]
    state_steps: int
    exclude_state: bool
    clip: bool
    actions: tuple[ActionGroup, ...]
    horizon: int
    max_state_dim: int
    max_action_dim: int
    action_horizon: int
    image: ImageRecipe
    formalize_language: bool
