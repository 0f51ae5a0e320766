"""A robot's state into the network's range and the network's actions back into the robot's units.

Both directions stand here, in the reference's order (dreamzero: groot/vla/data/transform/state_action.py, and `unapply`
of groot/vla/model/n1_5/sim_policy.py): the state is scaled by its percentiles and clipped; actions are cut to the
embodiment's widths, scaled back without a clip, and offsets are added to the very state that the request came with, as
it came. Computed in float64, given as float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from relay.engine.base import Note
from relay.models.dreamzero.recipe import Part, Recipe

_FAR = 2.25
"""In the network's units, in which the percentiles are -1 and 1: as far outside as no robot of the training data is."""


def to_network(state: Mapping[str, NDArray[np.float64]], recipe: Recipe) -> NDArray[np.float32]:
    """The state as the network takes it, (state_width,), padded with zeros.

    Args:
        state: by key, (width,) in the robot's units.
    """
    scaled = np.concatenate([np.clip(_scaled(state[part.key], part), -1, 1) for part in recipe.state])
    return np.pad(scaled, (0, recipe.state_width - len(scaled))).astype(np.float32)


def to_robot(
    actions: NDArray[np.float32], state: Mapping[str, NDArray[np.float64]], recipe: Recipe
) -> NDArray[np.float32]:
    """The network's actions (horizon, action_width) in the robot's units, (horizon, action_dim).

    Args:
        state: of the observation that the actions answer, as in `to_network`.
    """
    columns: list[NDArray[np.float64]] = []
    start = 0
    for part in recipe.actions:
        values = actions[:, start : start + part.width].astype(np.float64)
        start += part.width
        values = (values + 1) / 2 * (part.high - part.low) + part.low
        columns.append(values + state[part.key] if part.relative else values)
    return np.concatenate(columns, axis=1).astype(np.float32)


def outside(state: Mapping[str, NDArray[np.float64]], recipe: Recipe) -> tuple[Note, ...]:
    """A remark if the state is nowhere near the training data, which wrong units are the usual cause of."""
    far = [
        (abs(value), part, index)
        for part in recipe.state
        for index, value in enumerate(_scaled(state[part.key], part))
        if abs(value) > _FAR and part.low[index] != part.high[index]
    ]
    if not far:
        return ()
    _, part, index = max(far, key=lambda item: item[0])
    text = (
        f"{part.key}[{index}] is {state[part.key][index]:.4g}, far outside {part.low[index]:.4g} to "
        f"{part.high[index]:.4g} (1st to 99th percentile of the training data); units?"
    )
    return (Note(text, about="state outside the trained range"),)


def _scaled(values: NDArray[np.float64], part: Part) -> NDArray[np.float64]:
    """In units of the percentiles; what never changed in training stays as it is."""
    moving = part.low != part.high
    return np.where(moving, 2 * (values - part.low) / np.where(moving, part.high - part.low, 1) - 1, values)
