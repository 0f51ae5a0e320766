"""Named arrays that reach the device in one copy.

On the CPU they lie side by side in one page-locked block, so a batch costs one transfer however many inputs it has; on
the device the same layout holds tensors at addresses that never change. Knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 256
"""Bytes; what CUDA's own allocator aligns to."""

Field = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one array."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A view of a `Staging` block as named arrays.

    Attributes:
        host: to be filled, as numpy arrays over page-locked memory.
        device: the same fields on the device, valid after `upload`.
    """

    host: Mapping[str, NDArray[np.generic]]
    device: Mapping[str, Tensor]


class Staging:
    """A block of memory on the CPU and one of the same size on the device.

    It begins with `head` bytes for small arrays, which differ from shape to shape and end where the bulk begins; so
    both are one contiguous range, and the bulk's address is the same for every shape.

    Args:
        head: room for the small arrays, in bytes.
        bulk: shape and dtype of the bulk, which is filled from its start and may be sent in part.
    """

    def __init__(self, device: torch.device, head: int, bulk: Field) -> None:
        self._head = _aligned(head)
        shape, dtype = bulk
        size = self._head + math.prod(shape) * dtype.itemsize
        # Zeros, so that what no batch has written yet is at least a value.
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self.bulk_host = self._host[self._head :].view(dtype).view(shape).numpy()
        self.bulk = self._device[self._head :].view(dtype).view(shape)

    def view(self, fields: Mapping[str, Field]) -> Staged:
        """These arrays, laid out to end where the bulk begins."""
        start = self._head - size_of(fields)
        host = carve(self._host[start : self._head], fields)
        device = carve(self._device[start : self._head], fields)
        return Staged({name: tensor.numpy() for name, tensor in host.items()}, device)

    def upload(self, fields: Mapping[str, Field], bulk_items: int) -> None:
        """Send these arrays and the first items of the bulk, in one copy that is ordered before later kernels.

        The CPU's side must not be written again before the device has caught up.
        """
        start = self._head - size_of(fields)
        stop = self._head + bulk_items * self.bulk[0].numel() * self.bulk.dtype.itemsize
        self._device[start:stop].copy_(self._host[start:stop], non_blocking=True)

    def fill(self, value: int) -> None:
        """Set every byte on the device; for tests that nothing depends on what an earlier batch left."""
        self._device.fill_(value)


def size_of(fields: Mapping[str, Field]) -> int:
    """Bytes that these arrays take side by side."""
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in fields.values())


def carve(block: Tensor, fields: Mapping[str, Field]) -> dict[str, Tensor]:
    """Arrays side by side in a block of bytes, as views of it."""
    views: dict[str, Tensor] = {}
    start = 0
    for name, (shape, dtype) in fields.items():
        size = math.prod(shape) * dtype.itemsize
        views[name] = block[start : start + size].view(dtype).view(shape)
        start += _aligned(size)
    return views


def _aligned(size: int) -> int:
    return (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
