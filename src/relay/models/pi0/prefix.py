"""Where the image and prompt tokens of each row stand in the prefix.

A prefix is compact: masked cameras and prompt padding are left out instead of masked, which changes nothing but the
work (no real token ever attends to them, and they take no position). Rows of one batch are padded at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PrefixLayout:
    """How to gather rows from the pool of all image tokens followed by all prompt tokens.

    Attributes:
        index: (rows, prefix) int64 into the pool; padding points at the row's own first token.
        valid: (rows, prefix) bool, False at tokens nobody may attend to; None when there are none.
        positions: (rows, prefix) int64, counting valid tokens only.
        lengths: (rows,) int64, number of valid tokens.
    """

    index: Tensor
    valid: Tensor | None
    positions: Tensor
    lengths: Tensor

    def to(self, device: torch.device) -> PrefixLayout:
        """The same layout on `device`."""
        valid = None if self.valid is None else self.valid.to(device, non_blocking=True)
        index, positions, lengths = (
            t.to(device, non_blocking=True) for t in (self.index, self.positions, self.lengths)
        )
        return PrefixLayout(index, valid, positions, lengths)


@dataclass(frozen=True, slots=True)
class RowTokens:
    """What one row brings to the pool.

    Attributes:
        images: for each of its images in the pool, whether the row may see it.
        prompt: for each of its prompt tokens in the pool, whether the row may see it.
    """

    images: Sequence[bool]
    prompt: Sequence[bool]


def lay_out(rows: Sequence[RowTokens], tokens_per_image: int) -> PrefixLayout:
    """Place every row's images, in the order given, before its prompt."""
    image_start, prompt_start = 0, tokens_per_image * sum(len(row.images) for row in rows)
    indices: list[np.ndarray] = []
    valids: list[np.ndarray] = []
    for row in rows:
        images, prompt = tokens_per_image * len(row.images), len(row.prompt)
        indices.append(np.r_[image_start : image_start + images, prompt_start : prompt_start + prompt])
        valids.append(np.r_[np.repeat(np.asarray(row.images, bool), tokens_per_image), np.asarray(row.prompt, bool)])
        image_start, prompt_start = image_start + images, prompt_start + prompt

    longest = max(len(index) for index in indices)
    index = np.stack([np.pad(i, (0, longest - len(i)), constant_values=i[0]) for i in indices])
    valid = np.stack([np.pad(v, (0, longest - len(v))) for v in valids])
    positions = np.maximum(np.cumsum(valid, axis=1) - 1, 0)
    return PrefixLayout(
        index=torch.from_numpy(index),
        valid=None if valid.all() else torch.from_numpy(valid),
        positions=torch.from_numpy(positions),
        lengths=torch.from_numpy(valid.sum(1)),
    )
