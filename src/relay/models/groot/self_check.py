"""Fixed observations, and what prepared shapes make of them against the plain path: compared at every start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from relay.engine.fast_path import largest_difference
from relay.models.groot.adapters import GrootAdapter
from relay.models.groot.config import GrootConfig
from relay.models.groot.fixed_shapes import FixedShapes
from relay.models.groot.inputs import GrootRow
from relay.models.groot.shapes import Shape
from relay.models.groot.transforms import GrootPrepared

Sample = Callable[[Sequence[GrootPrepared], Tensor, int], Tensor]
"""The plain path: rows, noise and steps to actions, (rows, action_horizon, max_action_dim)."""


def check_batch(
    row: GrootRow, config: GrootConfig, largest: Shape, count: int, seed: int = 0
) -> tuple[list[GrootPrepared], Tensor]:
    """Random observations like this one, and their noise; always the same. They differ in the prompts' lengths."""
    random = np.random.default_rng(seed)
    text = row.tokens[row.tokens != config.image_token_id]
    rows: list[GrootPrepared] = []
    for number in range(count):
        more = random.choice(text, 7 * (number + seed) % max(1, largest.text - len(text) + 1))
        drawn = GrootRow(
            tokens=np.concatenate((row.tokens, more)),
            images=tuple(random.integers(0, 256, image.shape, np.uint8) for image in row.images),
            state=random.standard_normal(row.state.shape).astype(np.float32),
            slot=row.slot,
        )
        rows.append(GrootPrepared(drawn, raw_state={}))
    noise = random.standard_normal((count, config.action_horizon, config.max_action_dim)).astype(np.float32)
    return rows, torch.from_numpy(noise)


def fixed_distance(
    fixed: FixedShapes,
    plain: Sample,
    sizes: Sequence[GrootRow],
    config: GrootConfig,
    adapters: Sequence[GrootAdapter] = (),
) -> float:
    """Largest difference of the fixed shapes' actions from the plain ones, in units of the latter's deviation.

    For each size of images a full batch, a single row with another number of steps and, from spoilt buffers, a batch
    that fills its shape not; and with adapters, a batch with as many as there are and none.

    Args:
        sizes: observations whose sizes are those of the checked ones.
        adapters: some that share batches.
    """
    largest, steps, compared = fixed.plan.largest, config.num_steps, list[tuple[Tensor, Tensor]]()

    def compare(rows: Sequence[GrootPrepared], noise: Tensor, num_steps: int) -> None:
        actions = fixed.sample(rows, noise, num_steps)
        if actions is not None:  # None where the memory was spent before this shape
            compared.append((actions, plain(rows, noise, num_steps).float().cpu()))

    for row in sizes:
        compare(*check_batch(row, config, largest, largest.rows, 0), steps)
        compare(*check_batch(row, config, largest, 1, 1), steps + 1)
        fixed.spoil()
        compare(*check_batch(row, config, largest, max(1, largest.rows - 1), 2), steps)
    if adapters:
        rows, noise = check_batch(sizes[0], config, largest, largest.rows, 3)
        mixed = (*adapters, None)
        compare([replace(one, adapter=mixed[i % len(mixed)]) for i, one in enumerate(rows)], noise, steps)
    return largest_difference(compared)
