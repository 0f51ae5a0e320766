"""The tiny golden models: random π0 and π0.5 networks whose outputs were recorded from openpi's JAX implementation.

The golden files hold weights (openpi-PyTorch names, exact in bfloat16), inputs and JAX's actions in both precisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from relay.engine.weights import SafetensorsSource, TensorSource
from relay.models.pi0.config import CAMERAS, Pi0Config
from relay.models.pi0.model import Inputs, Pi0
from relay.models.pi0.prefix import RowTokens, lay_out
from relay.models.pi0.weights import load_weights, read_sizes

DATA = Path(__file__).parents[2] / "data" / "pi0"


@cache
def golden(family: str) -> dict[str, NDArray[Any]]:
    """Recorded inputs and outputs."""
    with np.load(DATA / f"{family}_tiny_gold.npz") as file:
        return dict(file)


class Tensors(dict[str, torch.Tensor]):
    """Tensors in memory as a `TensorSource`."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in self.items()}

    def read(self, name: str) -> torch.Tensor:
        return self[name].clone()


def tiny_tensors(family: str) -> Tensors:
    """The golden weights in openpi's PyTorch names, without any head."""
    return Tensors(load_file(DATA / f"{family}_tiny.safetensors"))


def tiny_config(shapes: Mapping[str, tuple[int, ...]]) -> Pi0Config:
    """The configuration of a tiny network with these tensors."""
    sizes = read_sizes(shapes)
    return Pi0Config(
        family=sizes.family,
        vision=sizes.vision(heads=2),
        language=sizes.language,
        expert=sizes.expert,
        heads=sizes.query_width // sizes.head_dim,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab_size,
        action_dim=sizes.action_dim,
        action_horizon=10,
        state_dim=32,
        max_token_len=40,
        state_in_prompt=sizes.family == "pi05",
    )


def load_tiny(source: TensorSource, dtype: torch.dtype = torch.float32) -> Pi0:
    """A tiny network from any source, through the real loader."""
    return load_weights(tiny_config(source.shapes), source, torch.device("cpu"), dtype, lambda phase, share: None)


@cache
def tiny_model(family: str, dtype: torch.dtype = torch.float32) -> Pi0:
    """The golden network."""
    return load_tiny(SafetensorsSource(DATA / f"{family}_tiny.safetensors"), dtype)


def image(row: int, camera: int) -> NDArray[np.uint8]:
    """The golden picture of a batch row and camera: `(3+i)·x + (5+2·b)·y + 40·c + 17·i mod 256`."""
    y, x, c = np.meshgrid(np.arange(224), np.arange(224), np.arange(3), indexing="ij")
    return (((3 + camera) * x + (5 + 2 * row) * y + 40 * c + 17 * camera) % 256).astype(np.uint8)


def golden_inputs(
    family: str,
    rows: Sequence[int],
    num_steps: int | Sequence[int],
    *,
    compact: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """The golden observations of `rows` as the network takes them, with or without the masked tokens."""
    gold, model = golden(family), tiny_model(family, dtype)
    images: list[NDArray[np.uint8]] = []
    tokens: list[NDArray[np.int64]] = []
    layout_rows: list[RowTokens] = []
    for row in rows:
        present = [bool(gold[f"mask_{camera}"][row]) for camera in CAMERAS]
        prompt_mask = gold["token_mask"][row]
        kept = [i for i in range(3) if present[i] or not compact]
        images += [image(row, i) for i in kept]
        tokens.append(gold["tokens"][row][prompt_mask] if compact else gold["tokens"][row])
        layout_rows.append(
            RowTokens(
                [present[i] for i in kept], prompt_mask[prompt_mask].tolist() if compact else prompt_mask.tolist()
            )
        )
    return Inputs(
        images=torch.from_numpy(np.stack(images)),
        tokens=torch.from_numpy(np.concatenate(tokens)).long(),
        layout=lay_out(layout_rows, model.config.vision.tokens),
        noise=torch.from_numpy(gold["noise"][list(rows)]),
        num_steps=[num_steps] * len(rows) if isinstance(num_steps, int) else num_steps,
        state=torch.from_numpy(gold["state"][list(rows)]) if family == "pi0" else None,
    )
