"""Is it right: against recorded outputs of the reference, fixed shapes against the plain path, rows against others."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from relay.engine.fast_path import TOLERANCES
from relay.engine.weights import SafetensorsSource
from relay.models.pi0.assemble import assemble
from relay.models.pi0.config import CAMERAS
from relay.models.pi0.fixed_shapes import FixedShapes
from relay.models.pi0.model import Inputs, Pi0
from relay.models.pi0.self_check import check_batch, fixed_distance
from relay.models.pi0.shapes import ShapePlan
from relay.models.pi0.transforms import Pi0Prepared
from relay.models.pi0.weights import load_weights

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "models" / "pi0"))
import tiny  # the golden networks and observations

FAMILIES = ("pi0", "pi05")
STEPS = (1, 2, 5, 10)
GATES = {
    ("pi0", torch.float32): 1e-4,
    ("pi05", torch.float32): 1e-4,
    ("pi0", torch.bfloat16): 3e-2,
    ("pi05", torch.bfloat16): 2e-2,
}
BUCKETED = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
GPU_ROUNDING = 5
"""On a GPU, matrix products of other sizes add up in another order: float32 bounds are so many times wider."""


@dataclass(frozen=True, slots=True)
class Check:
    """A measured distance, in standard deviations of the actions, and the most it may be."""

    name: str
    distance: float
    gate: float

    @property
    def passed(self) -> bool:
        return self.distance <= self.gate  # not so for NaN


def checks(device: torch.device, *, quick: bool, fuse: bool) -> Iterator[Check]:
    """Every check on the tiny golden networks.

    Args:
        quick: fewer shapes and prompt lengths, in float32 only.
        fuse: also with compiled functions, where graphs are captured.
    """
    for family in FAMILIES:
        for dtype in (torch.float32,) if quick else (torch.float32, torch.bfloat16):
            label = f"{family} {str(dtype).removeprefix('torch.')}"
            gate = GATES[family, dtype]
            wider = GPU_ROUNDING if device.type == "cuda" and dtype == torch.float32 else 1
            model = network(family, device, dtype)
            for steps in STEPS:
                plain = model.sample_actions(to_device(tiny.golden_inputs(family, (0, 1), steps), device)).cpu()
                yield Check(f"{label}: plain, {steps} steps, to the reference", to_gold(family, steps, plain), gate)
            plan = ShapePlan((1, 2, 3), (16, 32, 40), (1, 2) if quick else (1, 2, 3, 4))
            for kind in ("graphs", "compiled") if fuse else ("graphs",):
                torch.compiler.reset()
                fixed = FixedShapes(model, plan, capture=device.type == "cuda", fuse=kind == "compiled")
                fixed.prepare(lambda phase, share: None)
                for steps in STEPS:
                    rows, noise = golden_rows(family, steps)
                    actions = sampled(fixed, rows, noise)
                    name = f"{label}: {kind}, {steps} steps, to the reference"
                    yield Check(name, to_gold(family, steps, actions), gate)
                bound = BUCKETED[dtype] * wider
                yield Check(f"{label}: {kind} to plain", fixed_distance(fixed, model), TOLERANCES[dtype])
                yield Check(
                    f"{label}: {kind}, all prompt lengths, to plain",
                    prompt_lengths(fixed, model, 13 if quick else 1),
                    bound,
                )
                yield Check(f"{label}: {kind}, rows alone to rows in a batch", neighbours(fixed, model), bound)
                yield Check(f"{label}: {kind} after its buffers were spoilt", after_poison(fixed, model), 0.0)


def network(family: str, device: torch.device, dtype: torch.dtype) -> Pi0:
    """A golden network on the device."""
    source = SafetensorsSource(tiny.DATA / f"{family}_tiny.safetensors")
    return load_weights(tiny.tiny_config(source.shapes), source, device, dtype, lambda phase, share: None)


def to_device(inputs: Inputs, device: torch.device) -> Inputs:
    """The same inputs there."""
    moved = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    tensors = {name: value.to(device) for name, value in moved.items() if isinstance(value, Tensor)}
    return replace(inputs, **tensors, layout=inputs.layout.to(device))


def golden_rows(family: str, steps: int) -> tuple[list[Pi0Prepared], Tensor]:
    """The golden observations as the engine prepares them."""
    gold = tiny.golden(family)
    rows: list[Pi0Prepared] = []
    for row in (0, 1):
        present = [i for i, camera in enumerate(CAMERAS) if gold[f"mask_{camera}"][row]]
        tokens = gold["tokens"][row][gold["token_mask"][row]]
        frames = np.stack([tiny.image(row, i) for i in present])
        rows.append(Pi0Prepared(frames, tuple(tokens.tolist()), gold["state"][row], steps))
    return rows, torch.from_numpy(gold["noise"])


def to_gold(family: str, steps: int, actions: Tensor) -> float:
    reference = torch.from_numpy(tiny.golden(family)[f"actions_f32_{steps}"])
    return distance(actions, reference)


def prompt_lengths(fixed: FixedShapes, model: Pi0, step: int) -> float:
    """The largest distance from the plain path over every so many lengths that a prompt can have."""
    rows, noise = check_batch(model.config, 1)
    lengths = range(1, fixed.plan.prompts[-1] + 1, step)
    cut = [[replace(rows[0], tokens=(rows[0].tokens * 2)[:length])] for length in lengths]
    return max(distance(sampled(fixed, one, noise), plain(model, one, noise)) for one in cut)


def neighbours(fixed: FixedShapes, model: Pi0) -> float:
    """The largest distance of a row's actions in batches of every size from those it has alone."""
    most = fixed.plan.largest.rows
    rows, noise = check_batch(model.config, most)
    alone = torch.cat([sampled(fixed, rows[i : i + 1], noise[i : i + 1]) for i in range(most)])
    return max(distance(sampled(fixed, rows[:n], noise[:n]), alone[:n]) for n in range(2, most + 1))


def after_poison(fixed: FixedShapes, model: Pi0) -> float:
    """What changes when everything in the buffers is spoilt between two calls."""
    rows, noise = check_batch(model.config, fixed.plan.largest.rows - 1)
    before = sampled(fixed, rows, noise)
    fixed.spoil()
    return distance(sampled(fixed, rows, noise), before)


def sampled(fixed: FixedShapes, rows: Sequence[Pi0Prepared], noise: Tensor) -> Tensor:
    actions = fixed.sample(rows, noise)
    assert actions is not None, "a shape of the plan was left out"
    return actions


def plain(model: Pi0, rows: Sequence[Pi0Prepared], noise: Tensor) -> Tensor:
    return model.sample_actions(assemble(model, rows, noise)).cpu()


def distance(actions: Tensor, reference: Tensor) -> float:
    return float((actions - reference).abs().max() / reference.std())
