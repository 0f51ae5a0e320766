"""GR00T N1.7 at full size with random weights made on the device: how long calls take, and the least they can take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gpu_parts.networks import PEAK_BYTES, PEAK_FLOP
from gpu_parts.times import CountingMode, kernels, seconds, synchronize
from relay.engine.graphs import graph_budget
from relay.engine.prepared_sizes import batch_sizes
from relay.models.groot.assemble import assemble
from relay.models.groot.config import COSMOS_REASON2, RELEASED, GrootConfig, read_config
from relay.models.groot.fixed_shapes import FixedShapes
from relay.models.groot.inputs import GrootRow
from relay.models.groot.model import Groot
from relay.models.groot.self_check import fixed_distance
from relay.models.groot.shapes import Pictures, ShapePlan
from relay.models.groot.transforms import GrootPrepared

IMAGES, SIDES, PROMPT = 4, (256, 448), 11
"""DROID: two cameras of 180x320 at two times, after the resize chain, and a sentence of eleven tokens."""

_TINY_BACKBONE: Mapping[str, Any] = {
    "text_config": {
        **COSMOS_REASON2["text_config"],
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "rope_theta": 5_000_000,
    "mrope_section": [4, 2, 2],
    "vision_config": {
        **COSMOS_REASON2["vision_config"],
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1, 2],
    },
    "image_token_id": 500,
}
_TINY: Mapping[str, Any] = {
    **RELEASED,
    "select_layer": 4,
    "backbone_embedding_dim": 64,
    "hidden_size": 24,
    "input_embedding_dim": 32,
    "max_num_embodiments": 4,
    "diffusion_model_cfg": {
        **RELEASED["diffusion_model_cfg"],
        "num_layers": 8,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "output_dim": 24,
    },
    "vl_self_attention_cfg": {
        **RELEASED["vl_self_attention_cfg"],
        "num_layers": 2,
        "num_attention_heads": 4,
        "attention_head_dim": 16,
    },
}


def config(scale: str) -> GrootConfig:
    """The released network, or a tiny one of its shape."""
    return read_config(RELEASED) if scale == "full" else read_config(_TINY, _TINY_BACKBONE)


def random_network(config: GrootConfig, device: torch.device) -> Groot:
    """Random weights of the usual size, in bfloat16 on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # made at once in the dtype that is served: 6.3 GB and not 12.6
    try:
        with torch.device(device):
            model = Groot(config, [0])
    finally:
        torch.set_default_dtype(default)
    with torch.no_grad():
        for parameter in model.parameters():
            deviation = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.normal_(0, deviation, generator=generator)
    return model.eval()


def rows(config: GrootConfig, count: int, seed: int = 0) -> list[GrootRow]:
    """Prepared observations of a DROID robot, all different."""
    random = np.random.default_rng(seed)
    side = config.vision.token_side
    image_tokens = SIDES[0] * SIDES[1] // side**2
    words = random.integers(1, config.image_token_id, (count, PROMPT + 5 + 2 * IMAGES))
    prompts = [
        np.concatenate([row[:3], *[_block(row[3 + 2 * i :], image_tokens, config) for i in range(IMAGES)], row[11:]])
        for row in words
    ]
    return [
        GrootRow(
            tokens=prompt,
            images=tuple(random.integers(0, 256, (*SIDES, 3)).astype(np.uint8) for _ in range(IMAGES)),
            state=random.uniform(-1, 1, config.state_width).astype(np.float32),
            slot=0,
        )
        for prompt in prompts
    ]


def _block(words: np.ndarray[Any, Any], image_tokens: int, config: GrootConfig) -> np.ndarray[Any, Any]:
    """A start marker, one image and an end marker."""
    return np.concatenate([words[:1], np.full(image_tokens, config.image_token_id), words[1:2]])


def prepare(model: Groot, max_batch: int) -> FixedShapes:
    """The shapes of these observations and of instructions up to twice as long, as CUDA graphs on a GPU."""
    image_tokens = IMAGES * SIDES[0] * SIDES[1] // model.config.vision.token_side**2
    pictures = {image_tokens: Pictures(IMAGES, *SIDES)}
    plan = ShapePlan(texts=(32, 48), images=(image_tokens,), rows=batch_sizes(max_batch), pictures=pictures)
    device = model.device
    fixed = FixedShapes(model, 0, plan, capture=device.type == "cuda", budget_bytes=graph_budget(device))
    fixed.prepare(lambda phase, share: None)
    return fixed


def prepared_agrees(model: Groot, fixed: FixedShapes, steps: int) -> dict[str, float]:
    """Largest difference of prepared shapes' actions from the plain ones, in deviations of the latter."""

    def plain(batch: Sequence[GrootPrepared], noise: torch.Tensor, num_steps: int) -> torch.Tensor:
        return model.sample_actions(assemble(model, [one.row for one in batch], noise, num_steps))

    return {"distance": fixed_distance(fixed, plain, rows(model.config, 1), replace(model.config, num_steps=steps))}


def in_process(model: Groot, count: int, steps: int, rounds: int, fixed: FixedShapes | None = None) -> dict[str, float]:
    """Milliseconds from prepared rows to actions on the CPU, every round with other frames."""
    device = model.device
    noise = torch.randn(count, model.config.action_horizon, model.config.max_action_dim, device=device)
    batches = [rows(model.config, count, seed=100 * r) for r in range(min(rounds, 4))]

    def call(batch: Sequence[GrootRow]) -> None:
        if not sampled(model, fixed, batch, noise, steps).isfinite().all():
            raise RuntimeError("the actions are not finite")

    call(batches[0])
    asked = [batches[r % len(batches)] for r in range(rounds)]
    times = [1e3 * seconds(lambda b=b: call(b)) for b in asked]
    floor = floor_ms(model.config, count, steps)
    median = statistics.median(times)
    return {"p50_ms": median, "worst_ms": max(times), "floor_ms": floor, "ratio": median / floor}


@torch.inference_mode()
def parts(model: Groot, fixed: FixedShapes, count: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each prepared part by itself, of what is left of a call with one step, and of a look told anew.

    Frames of sizes that are not prepared pay `plain_look_ms` instead of `look_ms`.
    """
    batch = rows(model.config, count)
    noise = torch.zeros(count, model.config.action_horizon, model.config.max_action_dim, device=model.device)
    shape = fixed.plan.fit(batch)
    assert shape is not None

    def median(work: Callable[[], object], times: int = 1) -> float:
        def run() -> None:
            for _ in range(times):
                work()
            synchronize(model.device)

        run()
        return 1e3 * statistics.median(seconds(run) for _ in range(rounds)) / times

    inputs = assemble(model, batch, noise, 1, shape)
    whole = median(lambda: sampled(model, fixed, batch, noise, 1))
    look = median(lambda: fixed.graphs.replay(("look", shape)), 10)
    step = median(lambda: fixed.graphs.replay(("step", shape)), 10)
    plain_look = median(lambda: fixed.look(inputs, shape))
    return {"look_ms": look, "step_ms": step, "rest_ms": whole - look - step, "plain_look_ms": plain_look}


def sampled(
    model: Groot, fixed: FixedShapes | None, batch: Sequence[GrootRow], noise: torch.Tensor, steps: int
) -> torch.Tensor:
    """Actions on the CPU, from prepared shapes where there are any."""
    if fixed is None:
        return model.sample_actions(assemble(model, batch, noise, steps)).cpu()
    actions = fixed.sample([GrootPrepared(row, raw_state={}) for row in batch], noise, steps)
    assert actions is not None, "a shape of the plan was left out"
    return actions


def rows_agree(model: Groot, count: int, steps: int) -> dict[str, float]:
    """Largest difference between a row of a batch and the row by itself, in deviations of all actions."""
    device = model.device
    config = model.config
    batch = rows(config, count)
    noise = torch.randn(count, config.action_horizon, config.max_action_dim, device=device)
    together = model.sample_actions(assemble(model, batch, noise, steps))
    alone = torch.cat(
        [model.sample_actions(assemble(model, [row], noise[i : i + 1], steps)).float() for i, row in enumerate(batch)]
    )
    return {"distance": float((together - alone).abs().max() / alone.std())}


def launches(model: Groot, fixed: FixedShapes, steps: int) -> dict[str, float]:
    """Operations dispatched in one plain call, and kernels and graph launches where a profiler counts them."""
    config = model.config
    device = model.device
    noise = torch.zeros(1, config.action_horizon, config.max_action_dim, device=device)
    one = rows(config, 1)
    inputs = assemble(model, one, noise, steps)
    sample = getattr(Groot.sample_actions, "__wrapped__", Groot.sample_actions)  # without inference mode
    with torch.no_grad():
        sample(model, inputs)  # tables are made
        with CountingMode() as mode:
            sample(model, inputs)
    counts: dict[str, float] = {"dispatched": mode.count}
    if device.type == "cuda":
        counts["kernels_plain"] = kernels(lambda: sampled(model, None, one, noise, steps))
        counts["kernels_prepared"] = kernels(lambda: sampled(model, fixed, one, noise, steps))
    return counts


def memory(device: torch.device) -> dict[str, float]:
    """Gigabytes on the device."""
    if device.type != "cuda":
        return {}
    synchronize(device)
    return {
        "allocated_gb": torch.cuda.memory_allocated(device) / 1e9,
        "most_allocated_gb": torch.cuda.max_memory_allocated(device) / 1e9,
    }


def floor_ms(config: GrootConfig, count: int, steps: int) -> float:
    """The least time of a call: of each part its arithmetic or its memory traffic, whichever takes longer.

    What does not depend on the observation, and keys and values of what the head looks at, are not counted per step.
    """
    vision, text, dit, vl = config.vision, config.text, config.dit, config.vl
    patches = IMAGES * SIDES[0] * SIDES[1] // vision.patch**2
    tokens = patches // vision.merge**2 + PROMPT + 5 + 2 * IMAGES
    tower = vision.depth * (4 * vision.width**2 + 2 * vision.width * vision.mlp)
    layer = 2 * text.width * text.head_dim * (text.heads + text.kv_heads) + 3 * text.width * text.mlp
    language = config.select_layer * layer
    adapt = vl.depth * 12 * vl.width**2
    cross = dit.depth // 2 * 2 * config.backbone_embedding_dim * dit.width
    # Of each block: queries and the output, keys and values of every other one, and the MLP of four widths.
    step = dit.depth * 10 * dit.width**2 + dit.depth // 2 * 2 * dit.width**2
    attention = vision.depth * 4 * patches * (patches // IMAGES) * vision.width
    attention += config.select_layer * 4 * tokens**2 * text.heads * text.head_dim // 2
    parts = [
        (2 * count * patches * tower + count * attention, 2 * tower),
        (2 * count * tokens * (language + adapt + cross), 2 * (language + adapt + cross)),
        *[(2 * count * (config.action_horizon + 1) * step, 2 * step)] * steps,
    ]
    return 1e3 * sum(max(flop / PEAK_FLOP, moved / PEAK_BYTES) for flop, moved in parts)
