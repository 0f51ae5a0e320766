"""Which shapes the diffusion transformer is prepared for, and which of them a batch fits.

A shape says how many tokens of each kind a row's observation may have, and how many rows there are; a batch goes into
the smallest shape that holds it, its tail masked. Few shapes mean a short start, many mean little padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from relay.engine.prepared_sizes import at_least, batch_sizes, rounded_up
from relay.models.groot.images import cropped_size, vision_size
from relay.models.groot.inputs import GrootRow
from relay.models.groot.prompt import image_tokens, text_tokens
from relay.models.groot.recipe import Recipe

FRAMES = ((224, 224), (480, 640), (180, 320))
"""Height and width of frames that robots send: those of other sizes often have one of these aspect ratios."""

WORDS = (16, 48, 128)
"""Tokens of instructions; a sentence has some ten."""


class Shape(NamedTuple):
    """A prepared shape; `text` and `images` count a row's tokens, those of the prompt's template among the text."""

    text: int
    images: int
    rows: int

    def __str__(self) -> str:
        return f"{self.text} text and {self.images} image tokens × batch {self.rows}"


class Pictures(NamedTuple):
    """So many images of one size, in pixels as the vision tower takes them."""

    images: int
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class ShapePlan:
    """The shapes that are prepared: each number of text tokens with each of image tokens and each number of rows.

    Numbers of tokens are multiples of 8: attention kernels copy the padding's mask at every call where it has others.

    Attributes:
        texts, images, rows: rising.
        pictures: for a number of image tokens, the images of a row that have so many together; where they are there,
            all that is computed once per request is prepared, too, for rows of just these images.
    """

    texts: tuple[int, ...]
    images: tuple[int, ...]
    rows: tuple[int, ...]
    pictures: Mapping[int, Pictures] = field(default_factory=dict[int, Pictures])

    @classmethod
    def of(cls, recipe: Recipe, max_batch: int) -> ShapePlan:
        """The shapes of what an embodiment's robots usually send: any mix of `FRAMES`, up to the longest of `WORDS`."""
        images = len(recipe.cameras) * len(recipe.frames)
        sizes = [vision_size(*cropped_size(*frame, recipe.image)) for frame in FRAMES]
        pictures = {rounded_up(images * image_tokens(*size), 8): Pictures(images, *size) for size in sizes}
        return cls(
            texts=tuple(rounded_up(text_tokens(images, words), 8) for words in WORDS),
            images=tuple(sorted(pictures)),
            rows=batch_sizes(max_batch),
            pictures=pictures,
        )

    def __iter__(self) -> Iterator[Shape]:
        """All shapes, the largest first: the memory it takes serves the others too."""
        for rows in reversed(self.rows):
            for images in reversed(self.images):
                for text in reversed(self.texts):
                    yield Shape(text, images, rows)

    @property
    def largest(self) -> Shape:
        """The shape that holds all others."""
        return Shape(self.texts[-1], self.images[-1], self.rows[-1])

    @property
    def most_images(self) -> int:
        """Of a batch that is prepared from the start of a call."""
        return self.rows[-1] * max((pictures.images for pictures in self.pictures.values()), default=0)

    def whole(self, rows: Sequence[GrootRow], shape: Shape) -> bool:
        """Whether these rows have the images that the shape is prepared for from the start of a call."""
        pictures = self.pictures.get(shape.images)
        return pictures is not None and all(
            len(row.images) == pictures.images and {image.shape[:2] for image in row.images} == {pictures[1:]}
            for row in rows
        )

    def fit(self, rows: Sequence[GrootRow]) -> Shape | None:
        """The smallest shape that holds these rows; None if there is none."""
        of_images = [sum(image_tokens(*image.shape[:2]) for image in row.images) for row in rows]
        text = at_least(self.texts, max(len(row.tokens) - count for row, count in zip(rows, of_images, strict=True)))
        images, size = at_least(self.images, max(of_images)), at_least(self.rows, len(rows))
        if text is None or images is None or size is None:
            return None
        return Shape(text, images, size)
