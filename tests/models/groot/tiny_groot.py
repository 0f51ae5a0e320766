"""The tiny golden model: a random GR00T N1.7 network whose outputs were recorded from a public implementation.

Weights follow from the tensors' names, so only names and shapes are kept; inputs and outputs are float32.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from relay.engine.weights import TensorSource
from relay.models.groot.assemble import assemble
from relay.models.groot.config import GrootConfig, read_config
from relay.models.groot.inputs import GrootRow
from relay.models.groot.layers import Linear
from relay.models.groot.model import Groot, GrootInputs
from relay.models.groot.shapes import Shape
from relay.models.groot.weights import load_weights

DATA = Path(__file__).parents[2] / "data" / "groot"
PATCH_WEIGHT = "backbone.model.model.visual.patch_embed.proj.weight"
IMAGE, VISION_START, VISION_END = 151_655, 151_652, 151_653


@cache
def golden() -> dict[str, NDArray[Any]]:
    """Recorded inputs and outputs."""
    with np.load(DATA / "groot_tiny_gold.npz") as file:
        return dict(file)


@cache
def described() -> dict[str, Any]:
    """Configuration, backbone and the tensors' shapes."""
    return json.loads((DATA / "groot_tiny_tensors.json").read_text("utf-8"))


def tiny_json() -> dict[str, Any]:
    """The tiny model's `config.json`."""
    switches = {"use_vlln": True, "use_alternate_vl_dit": True, "add_pos_embed": True}
    return described()["config"] | switches


def tiny_config() -> GrootConfig:
    return read_config(tiny_json(), described()["backbone"])


class TinyTensors(dict[str, tuple[int, ...]]):
    """The golden weights as a `TensorSource`: each made from its name when it is read.

    Args:
        made: tensors that are given instead of made.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], made: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__({name: tuple(shape) for name, shape in shapes.items()})
        self.made = dict(made or {})
        self.update({name: tuple(tensor.shape) for name, tensor in self.made.items()})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: self.made[name].dtype if name in self.made else torch.float32 for name in self}

    def read(self, name: str) -> torch.Tensor:
        return self.made[name].clone() if name in self.made else golden_tensor(name, self[name])


def golden_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A golden weight: normal numbers of a generator that the name seeds, around 1 for the weights of norms."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    values = drawn * np.float32(0.08)
    return torch.from_numpy(values + 1 if len(shape) == 1 and name.endswith(".weight") else values)


def tiny_tensors() -> TinyTensors:
    return TinyTensors(described()["tensors"])


def load_tiny(source: TensorSource, dtype: torch.dtype = torch.float32, slots: Sequence[int] | None = None) -> Groot:
    """A tiny network from any source, through the real loader."""
    return load_weights(tiny_config(), source, torch.device("cpu"), dtype, lambda phase, share: None, slots=slots)


@cache
def tiny_model(dtype: torch.dtype = torch.float32) -> Groot:
    return load_tiny(tiny_tensors(), dtype)


@cache
def two_frame_model(dtype: torch.dtype = torch.float32) -> Groot:
    """The golden network with its patch weights as they are stored: the golden patches have two unequal frames."""
    model = load_tiny(tiny_tensors(), dtype)
    stored = golden_tensor(PATCH_WEIGHT, tuple(described()["tensors"][PATCH_WEIGHT]))
    projection = Linear(stored[0].numel(), len(stored))
    projection.weight = torch.nn.Parameter(stored.flatten(1).t().to(dtype), requires_grad=False)
    projection.bias = model.vision.patch_projection.bias
    model.vision.patch_projection = projection
    return model


def golden_inputs(
    num_steps: int, *, slot: int = 2, dtype: torch.dtype = torch.float32, shape: Shape | None = None
) -> GrootInputs:
    """The golden observation as `two_frame_model` takes it."""
    gold = golden()
    grids = [(int(h), int(w)) for _, h, w in gold["image_grid_thw"]]
    blank = tuple(np.zeros((16 * h, 16 * w, 3), np.uint8) for h, w in grids)
    row = GrootRow(gold["input_ids"][0], blank, gold["state"].reshape(-1), slot)
    inputs = assemble(tiny_model(dtype), [row], torch.from_numpy(gold["noise"]), num_steps, shape)
    patches = torch.zeros(len(grids), max(h * w for h, w in grids), gold["pixel_values"].shape[1])
    start = 0
    for room, (h, w) in zip(patches, grids, strict=True):
        room[: h * w] = torch.from_numpy(gold["pixel_values"][start : start + h * w])
        start += h * w
    return replace(inputs, patches=patches)


def drawn_row(seed: int, grids: Sequence[tuple[int, int]], words: int, *, slot: int = 2) -> GrootRow:
    """A random observation with images of so many tokens down and across, and a text of so many words."""
    random, config = np.random.default_rng(seed), tiny_config()
    images = tuple(random.integers(0, 256, (32 * h, 32 * w, 3), np.uint8) for h, w in grids)
    tokens = [151_644, 872, 198]
    for h, w in grids:
        tokens += [VISION_START, *[IMAGE] * (h * w), VISION_END]
    tokens += [*random.integers(1000, 2000, words).tolist(), 151_645, 198]
    state = random.standard_normal(config.state_width).astype(np.float32)
    return GrootRow(np.array(tokens), images, state, slot)


def drawn_noise(*seeds: int) -> torch.Tensor:
    """(rows, action_horizon, max_action_dim), each row from its own seed."""
    config = tiny_config()
    shape = (config.action_horizon, config.max_action_dim)
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
