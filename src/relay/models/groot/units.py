"""A robot's state into the network's range and the network's actions back into the robot's units.

Both directions stand here, in Isaac-GR00T's order (gr00t/data/state_action/state_action_processor.py): the state is
encoded and scaled; actions are cut to the embodiment's horizon and widths, scaled back, and made absolute by the very
state that the request came with. Computed in float64, given as float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from relay.engine.normalization import FAR_DEVIATIONS, FAR_RANGES
from relay.models.groot.poses import compose
from relay.models.groot.recipe import ActionGroup, Recipe, StatePart


def to_network(state: Mapping[str, NDArray[np.float32]], recipe: Recipe) -> NDArray[np.float32]:
    """The state as the network takes it, (state_steps * max_state_dim,), oldest step first, padded with zeros.

    Args:
        state: by key, (state_steps, width) in the robot's units.
    """
    padded = np.zeros((recipe.state_steps, recipe.max_state_dim), np.float32)
    if recipe.exclude_state:
        return padded.ravel()
    encoded = [encode(state[part.key].astype(np.float64), part, clip=recipe.clip) for part in recipe.state]
    joined = np.concatenate(encoded, axis=-1)  # (state_steps, sum of the encoded widths)
    padded[:, : joined.shape[-1]] = joined
    return padded.ravel()


def encode(values: NDArray[np.float64], part: StatePart, *, clip: bool) -> NDArray[np.float64]:
    """One part of the state, (..., width), in the network's range: (..., encoded_width)."""
    if part.encoding == "sin_cos":
        return np.concatenate([np.sin(values), np.cos(values)], axis=-1)
    if part.encoding == "mean_std":
        mean, deviation = part.low, part.high
        moving = deviation != 0
        return np.where(moving, (values - mean) / np.where(moving, deviation, 1), values)
    low, high = part.low, part.high
    moving = ~np.isclose(high, low)
    scaled = np.where(moving, 2 * ((values - low) / np.where(moving, high - low, 1)) - 1, 0)
    return np.clip(scaled, -1, 1) if clip else scaled


def outside(state: Mapping[str, NDArray[np.float32]], recipe: Recipe) -> str | None:
    """A remark if the newest state is nowhere near the training data, which wrong units are the usual cause of.

    That is more than six standard deviations from the mean, or more than 0.625 widths of the range beyond its ends, as
    for other models. Clipping would hide it from the network.
    """
    worst, farthest = None, 1.0
    for part in recipe.state:
        if part.encoding == "sin_cos":
            continue
        scaled = encode(state[part.key][-1].astype(np.float64), part, clip=False)  # (width,)
        far = np.abs(scaled) / (FAR_DEVIATIONS if part.encoding == "mean_std" else FAR_RANGES)
        index = int(np.argmax(far))
        if far[index] > farthest:
            worst, farthest = (part, index), float(far[index])
    if worst is None:
        return None
    part, index = worst
    where = f"state[{part.key!r}][{index}] is {float(state[part.key][-1, index]):.4g}"
    low, high = float(part.low[index]), float(part.high[index])
    if part.encoding == "mean_std":
        off = farthest * FAR_DEVIATIONS
        return f"{where}, {off:.0f} standard deviations from the mean {low:.4g} of the training data; units?"
    return f"{where}, far outside {low:.4g} to {high:.4g} of the training data; units?"


def to_robot_units(
    actions: NDArray[np.float32], state: Mapping[str, NDArray[np.float32]], recipe: Recipe
) -> dict[str, NDArray[np.float32]]:
    """The network's actions (action_horizon, max_action_dim) by group, (horizon, width) each.

    Args:
        state: of the observation that the actions answer, as in `to_network`.
    """
    result: dict[str, NDArray[np.float32]] = {}
    column = 0
    for group in recipe.actions:
        values = actions[: recipe.horizon, column : column + group.width].astype(np.float64)
        column += group.width
        values = scale_back(values, group)
        if group.relative is not None:
            start = state[group.state_key][-1].astype(np.float64)  # (width,)
            values = start + values if group.relative == "joints" else compose(group.relative, start, values)
        result[group.key] = values.astype(np.float32)
    return result


def scale_back(values: NDArray[np.float64], group: ActionGroup) -> NDArray[np.float64]:
    """One group of actions (horizon, width) out of the network's range; what has no deviation is left as it is."""
    if group.scaling == "mean_std":
        mean, deviation = group.low, group.high
        return np.where(deviation != 0, values * deviation + mean, values)
    return (np.clip(values, -1, 1) + 1) / 2 * (group.high - group.low) + group.low
