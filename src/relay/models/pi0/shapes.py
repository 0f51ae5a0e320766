"""Which shapes a network is prepared for, and which of them a batch fits.

A shape says how many cameras and prompt tokens a row may have and how many rows there are; a batch goes into the
smallest shape that holds it, its tail masked. Few shapes mean a short start, many mean little padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from relay.models.pi0.config import Pi0Config
from relay.models.pi0.transforms import Pi0Prepared


class Shape(NamedTuple):
    """A prepared shape; `prompt` counts tokens."""

    cameras: int
    prompt: int
    rows: int

    @property
    def images(self) -> int:
        """Places for images."""
        return self.cameras * self.rows

    def __str__(self) -> str:
        cameras = f"{self.cameras} camera{'s' if self.cameras > 1 else ''}"
        return f"{cameras} × {self.prompt} tokens × batch {self.rows}"


@dataclass(frozen=True, slots=True)
class ShapePlan:
    """The shapes that are prepared: each number of cameras with each prompt length and each number of rows."""

    cameras: tuple[int, ...]
    prompts: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def of(cls, config: Pi0Config, max_batch: int, shortest_prompt: int = 1) -> ShapePlan:
        """Every shape that observations of this network can have.

        Args:
            shortest_prompt: tokens that every prompt has at least, such as those of the state.
        """
        longest = _rounded(config.max_token_len, 8)
        prompts = [*range(16, 96, 16), *range(96, longest, 32)]
        kept = [length for length in prompts if shortest_prompt <= length < longest]
        return cls(
            cameras=tuple(range(1, len(config.cameras) + 1)),
            prompts=(*kept, longest),
            rows=_batch_sizes(max_batch),
        )

    def __iter__(self) -> Iterator[Shape]:
        """All shapes, the largest first: the memory it takes serves the others too."""
        for rows in reversed(self.rows):
            for cameras in reversed(self.cameras):
                for prompt in reversed(self.prompts):
                    yield Shape(cameras, prompt, rows)

    @property
    def largest(self) -> Shape:
        """The shape that holds all others."""
        return Shape(self.cameras[-1], self.prompts[-1], self.rows[-1])

    @property
    def images(self) -> tuple[int, ...]:
        """Numbers of images that the vision tower is prepared for."""
        return tuple(sorted({cameras * rows for cameras in self.cameras for rows in self.rows}))

    def fit(self, rows: Sequence[Pi0Prepared]) -> Shape | None:
        """The smallest shape that holds these rows; None if there is none."""
        cameras = at_least(self.cameras, max(len(row.images) for row in rows))
        prompt = at_least(self.prompts, max(len(row.tokens) for row in rows))
        size = at_least(self.rows, len(rows))
        if cameras is None or prompt is None or size is None:
            return None
        return Shape(cameras, prompt, size)


def at_least(sizes: Sequence[int], needed: int) -> int | None:
    """The first of the rising sizes that is large enough."""
    return next((size for size in sizes if size >= needed), None)


def _batch_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16 … up to `most`: at most a third of a batch is padding."""
    sizes = {size for power in range(most.bit_length()) for size in (2**power, 3 * 2**power)}
    return (*sorted(size for size in sizes if size < most), most)


def _rounded(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple
