"""Fixed observations, and what prepared shapes make of them against the plain path: compared at every start."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from relay.engine.chunking import Chunking
from relay.engine.fast_path import largest_difference
from relay.models.pi0.assemble import assemble
from relay.models.pi0.config import Pi0Config
from relay.models.pi0.fixed_shapes import FixedShapes
from relay.models.pi0.guidance import LeftOver
from relay.models.pi0.model import Pi0
from relay.models.pi0.resident import ResidentAdapters
from relay.models.pi0.transforms import Pi0Prepared


def check_batch(config: Pi0Config, count: int, seed: int = 0) -> tuple[list[Pi0Prepared], Tensor]:
    """Random observations, and their noise; always the same.

    They differ in cameras, prompt length and number of steps, and every other row keeps to a previous chunk.
    """
    random = np.random.default_rng(seed)
    side, most = config.vision.image_size, len(config.cameras)
    rows: list[Pi0Prepared] = []
    horizon, chunking = config.action_horizon, Chunking()
    weights = chunking.weights(1, (horizon + 1) // 2, horizon)
    for row in range(count):
        cameras = most - (row + seed) % most
        tokens = random.integers(1, config.vocab_size, max(1, config.max_token_len - 7 * (row + seed) % 32))
        previous = random.standard_normal((horizon, config.action_dim)).astype(np.float32)
        rows.append(
            Pi0Prepared(
                images=random.integers(0, 256, (cameras, side, side, 3), np.uint8),
                tokens=tuple(tokens.tolist()),
                state=random.standard_normal(config.action_dim).astype(np.float32),
                num_steps=max(1, config.num_steps - row % 2),
                left_over=LeftOver(previous, weights, chunking) if (row + seed) % 2 else None,
            )
        )
    noise = random.standard_normal((count, config.action_horizon, config.action_dim)).astype(np.float32)
    return rows, torch.from_numpy(noise)


def fixed_distance(fixed: FixedShapes, model: Pi0, resident: ResidentAdapters | None = None) -> float:
    """Largest difference of the fixed shapes' actions from the plain ones, in units of the latter's deviation.

    A full batch, a single row and the full batch again, so that what a batch leaves in the buffers would show; and with
    adapters, if there are `resident` ones, a full batch with as many as the device holds and none.
    """
    largest = fixed.plan.largest.rows
    batches = [check_batch(model.config, count, seed) for count, seed in ((largest, 0), (1, 1), (largest, 0))]
    if resident is not None and (some := resident.sample()):
        rows, noise = check_batch(model.config, largest)
        adapters = [*some, None]
        mixed = [replace(row, adapter=adapters[i % len(adapters)]) for i, row in enumerate(rows)]
        batches[2:2] = [(mixed, noise)]
    compared: list[tuple[Tensor, Tensor]] = []
    for rows, noise in batches:
        network, inputs = model, assemble(model, rows, noise)
        if resident is not None:
            images = [len(row.images) for row in rows]
            network, inputs = resident.apply(inputs, [row.adapter for row in rows], images)
        plain = network.sample_actions(inputs).cpu()
        actions = fixed.sample(rows, noise)
        if actions is not None:  # None where the memory was spent before this shape
            compared.append((actions, plain))
    return largest_difference(compared)
