"""GR00T N1.7 for `full_size.py`: its sizes, one DROID request, and the products and FLOP of that request.

Two cameras of two frames each, 256x448 after the resize: 448 image tokens and 25 others; 40 actions, 4 steps; one
embodiment's maps are kept of 32.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relay.engine.base import Progress
from relay.engine.weights import SafetensorsSource
from relay.models.groot.assemble import assemble
from relay.models.groot.config import COSMOS_REASON2, RELEASED, GrootConfig, read_config
from relay.models.groot.inputs import GrootRow
from relay.models.groot.model import Groot, GrootInputs
from relay.models.groot.weights import UNUSED, checkpoint_shapes, load_weights

SLOT, STEPS = 24, 4
IMAGES, GRID = 4, (8, 14)  # tokens down and across
VISION_START, VISION_END = 151_652, 151_653
TEXT = 3 + 2 * IMAGES + 11 + 2  # the template's tokens, two around each image, eleven words


def config(scale: str) -> GrootConfig:
    """GR00T N1.7 as it is published, or one of fewer layers."""
    sizes, backbone = copy.deepcopy(dict(RELEASED)), copy.deepcopy(dict(COSMOS_REASON2))
    if scale == "small":
        sizes["select_layer"] = 3
        sizes["diffusion_model_cfg"]["num_layers"] = 4
        sizes["vl_self_attention_cfg"]["num_layers"] = 1
        sizes["max_num_embodiments"] = SLOT + 1
        backbone["vision_config"] |= {"depth": 3, "deepstack_visual_indexes": [0, 1, 2]}
        backbone["text_config"]["vocab_size"] = 152_000 // 4
        backbone["image_token_id"] = 5
    return read_config(sizes, backbone)


def stored_shapes(config: GrootConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint, the two that nothing uses among them."""
    norm, head = UNUSED
    return checkpoint_shapes(config) | {
        norm: (config.text.width,),
        head: (config.text.vocab_size, config.text.width),
    }


def load(folder: Path, config: GrootConfig, progress: Progress) -> Groot:
    source = SafetensorsSource(folder)
    return load_weights(config, source, torch.device("cpu"), torch.bfloat16, progress, slots=[SLOT])


def droid_inputs(model: Groot) -> GrootInputs:
    """One row of DROID's shape."""
    random, config = np.random.default_rng(1), model.config
    side = config.vision.token_side
    images = tuple(random.integers(0, 256, (side * GRID[0], side * GRID[1], 3), np.uint8) for _ in range(IMAGES))
    image = [1, *[config.image_token_id] * math.prod(GRID), 2]
    tokens = np.array([*image * IMAGES, *range(10, 10 + TEXT - 2 * IMAGES)])
    state = random.standard_normal(config.state_width).astype(np.float32)
    noise = torch.randn(
        1, config.action_horizon, config.max_action_dim, generator=torch.Generator().manual_seed(1)
    ).bfloat16()
    return assemble(model, [GrootRow(tokens, images, state, SLOT)], noise, STEPS)


def products(model: Groot) -> list[tuple[int, int, Sequence[Tensor]]]:
    """The request's large products: how often, with how many rows, and the weights (inputs, outputs)."""
    patches, seen, acted = 4 * IMAGES * math.prod(GRID), IMAGES * math.prod(GRID), model.config.action_horizon + 1
    blocks: Any = list(model.dit.blocks)
    return [
        (1, patches, _weights(model.vision.blocks, ("qkv", "out", "mlp.fc1", "mlp.fc2"))),
        (1, seen, _weights([*model.vision.deepstack, model.vision.merger], ("fc1", "fc2"))),
        (1, seen + TEXT, _weights(model.language.layers, ("qkv", "out", "gate_up", "down"))),
        (1, seen + TEXT, _weights(model.adaptation.blocks, ("qkv", "out", "mlp.fc1", "mlp.fc2"))),
        (1, seen, [model.dit.image_keys_values.weight]),
        (1, TEXT, [model.dit.text_keys_values.weight]),
        (STEPS, acted, _weights(blocks[::2], ("q", "out", "mlp.fc1", "mlp.fc2"))),
        (STEPS, acted, _weights(blocks[1::2], ("qkv", "out", "mlp.fc1", "mlp.fc2"))),
    ]


def attention_flop(config: GrootConfig) -> float:
    """Multiplications and additions inside attention, which are no products of weights."""
    tokens = math.prod(GRID)
    patches, seen, acted = 4 * tokens, IMAGES * tokens, config.action_horizon + 1
    read = seen + TEXT
    once = config.vision.depth * IMAGES * patches**2 * config.vision.width
    once += config.select_layer * read**2 * config.text.heads * config.text.head_dim / 2  # causal
    once += config.vl.depth * read**2 * config.vl.width
    step = config.dit.depth / 4 * acted * (2 * acted + seen + TEXT) * config.dit.width
    return 4 * (once + STEPS * step)


def _weights(blocks: Any, names: Sequence[str]) -> list[Tensor]:
    return [block.get_submodule(name).weight for block in blocks for name in names]
