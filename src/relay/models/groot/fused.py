"""The whole chain of crops and resizes in one step: faster, and a grey level or two off.

Each resize is linear along each side, so that the chain is one sparse matrix for the rows and one for the columns. What
differs is the rounding to whole grey levels in between, which is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Kernel = Literal["area", "bilinear", "bicubic"]

Weights = NDArray[np.float64]


def resize_fused(frame: NDArray[np.uint8], rows: Tensor, columns: Tensor) -> NDArray[np.uint8]:
    """A frame (H, W, 3) to (h, w, 3).

    Args:
        rows, columns: sparse matrices (h, H) and (w, W), as `chain` makes them.
    """
    width = frame.shape[1]
    pixels = torch.from_numpy(np.require(frame.reshape(len(frame), -1), requirements=["C", "W"]))
    tall = torch.sparse.mm(rows, pixels.float())  # (h, W * 3)
    height = len(tall)
    tall = tall.view(height, width, 3).transpose(0, 1).reshape(width, height * 3)
    wide = torch.sparse.mm(columns, tall).round_().clamp_(0, 255).to(torch.uint8)  # (w, h * 3)
    return wide.view(-1, height, 3).transpose(0, 1).contiguous().numpy()


Step = tuple[Kernel, int, int, int]
"""One resize along a side: its kernel, the first pixel and the number of those taken, and how many they become."""


@lru_cache(256)
def chain(source: int, steps: tuple[Step, ...]) -> Tensor:
    """Resizes of a side of `source` pixels one after the other as a sparse float32 matrix (target, source)."""
    weights: Weights = np.eye(source)
    for kernel, first, count, target in steps:
        weights = _resize(kernel, count, target) @ weights[first : first + count]
    weights = np.where(np.abs(weights) < _NOTHING, 0, weights)
    weights /= weights.sum(axis=1, keepdims=True)
    place = np.nonzero(weights)
    values = torch.from_numpy(weights[place].astype(np.float32))
    indices = torch.from_numpy(np.stack(place))
    size = weights.shape
    return torch.sparse_coo_tensor(indices, values, size, is_coalesced=True, check_invariants=False)


_NOTHING = 1e-4
"""Weights below this are left out: 256 grey levels do not show them."""


def _resize(kernel: Kernel, source: int, target: int) -> Weights:
    """(target, source) weights of one resize, each row with a sum of 1."""
    if source == target:
        return np.eye(source)
    scale = source / target
    pixels = np.arange(source)
    if kernel == "area":
        edges = np.arange(target + 1) * scale
        ends = np.minimum(edges[1:, None], pixels + 1)
        return np.maximum(ends - np.maximum(edges[:-1, None], pixels), 0) / scale
    centres = (np.arange(target) + 0.5) * scale
    weights = _KERNELS[kernel](np.abs(pixels + 0.5 - centres[:, None]) / max(scale, 1))
    return weights / weights.sum(axis=1, keepdims=True)


def _triangle(x: Weights) -> Weights:
    return np.maximum(1 - x, 0)


def _cubic(x: Weights) -> Weights:
    """Keys' kernel with a = -0.5, as torch's antialiased bicubic has it."""
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


_KERNELS: dict[str, Callable[[Weights], Weights]] = {"bilinear": _triangle, "bicubic": _cubic}
