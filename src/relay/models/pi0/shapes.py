"""Which shapes a network is prepared for, and which of them a batch fits.

A shape says how many cameras and prompt tokens a row may have and how many rows there are; a batch goes into the
smallest shape that holds it, its tail masked. Few shapes mean a short start, many mean little padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from relay.engine.prepared_sizes import at_least, batch_sizes, rounded_up
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
        longest = rounded_up(config.max_token_len, 8)
        prompts = [*range(16, 96, 16), *range(96, longest, 32)]
        kept = [length for length in prompts if shortest_prompt <= length < longest]
        return cls(
            cameras=tuple(range(1, len(config.cameras) + 1)),
            prompts=(*kept, longest),
            rows=batch_sizes(max_batch),
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
