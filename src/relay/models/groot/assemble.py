"""Rows as the network's inputs: padded to the longest, with everything that depends on where tokens stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relay.models.groot.config import GrootConfig
from relay.models.groot.inputs import GrootRow
from relay.models.groot.model import Groot, GrootInputs, TokensOfKind
from relay.models.groot.shapes import Shape
from relay.models.groot.vision import Grid


def assemble(
    model: Groot, rows: Sequence[GrootRow], noise: Tensor, num_steps: int, shape: Shape | None = None
) -> GrootInputs:
    """Put a batch on the model's device; a row's result does not depend on its neighbours.

    Args:
        rows: all of one slot.
        noise: (rows, action_horizon, max_action_dim) on any device.
        num_steps: denoising steps of all rows.
        shape: how many text and image tokens the diffusion transformer is to see of each row; the longest row's
            number without it. What comes before the transformer is padded to the longest row in any case.

    Raises:
        ValueError: when rows are of different slots, or a prompt and its images do not belong together.
    """
    config, device = model.config, model.device
    arrays = arrange(rows, config, shape)
    for name in LENGTHS if shape is None else LENGTHS[:1]:
        if len(set(arrays[name].tolist())) == 1:
            del arrays[name]  # nothing to mask where all are as long
    images = [image for row in rows for image in row.images]
    longest = max(image.shape[0] * image.shape[1] for image in images) // config.vision.patch**2
    arrays["patches"] = np.zeros((len(images), longest, 3 * config.vision.patch**2), np.uint8)
    pack_patches(images, config, arrays["patches"])
    tensors = {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in arrays.items()}
    return as_inputs(tensors, grids_of(rows, config), noise.to(device), rows[0].slot, num_steps)


LENGTHS = ("lengths", "text_lengths", "image_lengths")
"""Of each row: all tokens, and those of either kind."""


def arrange(
    rows: Sequence[GrootRow], config: GrootConfig, shape: Shape | None = None, longest: int | None = None
) -> dict[str, NDArray[Any]]:
    """All of a batch but its images and its noise, as arrays for `as_inputs`.

    Args:
        shape: as in `assemble`.
        longest: tokens that each row is padded to; the longest row's number without it.
    """
    slots = {row.slot for row in rows}
    if len(slots) > 1:
        raise ValueError(f"a batch holds rows of one embodiment, got slots {sorted(slots)}")
    longest = longest or max(len(row.tokens) for row in rows)
    tokens = np.zeros((len(rows), longest), np.int64)
    positions = np.zeros((len(rows), longest, 3), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = row.tokens
        positions[i, : len(row.tokens)] = token_positions(row, config)
    at_image = [row.tokens == config.image_token_id for row in rows]
    images = [i * longest + np.flatnonzero(there) for i, there in enumerate(at_image)]
    text = [i * longest + np.flatnonzero(~there) for i, there in enumerate(at_image)]
    return {
        "tokens": tokens,
        "positions": positions,
        "lengths": _lengths([row.tokens for row in rows]),
        "image_places": np.concatenate(images),
        "text": _padded(text, shape and shape.text),
        "text_lengths": _lengths(text),
        "images": _padded(images, shape and shape.images),
        "image_lengths": _lengths(images),
        "state": np.stack([row.state for row in rows]),
    }


def as_inputs(
    tensors: Mapping[str, Tensor], grids: Sequence[Grid], noise: Tensor, slot: int, num_steps: int
) -> GrootInputs:
    """What was arranged, on the device, as the network takes it; lengths that are not there are equal."""
    return GrootInputs(
        patches=tensors["patches"],
        grids=grids,
        tokens=tensors["tokens"],
        positions=tensors["positions"],
        lengths=tensors.get("lengths"),
        image_places=tensors["image_places"],
        text=TokensOfKind(tensors["text"], tensors.get("text_lengths")),
        images=TokensOfKind(tensors["images"], tensors.get("image_lengths")),
        state=tensors["state"],
        noise=noise,
        slot=slot,
        num_steps=num_steps,
    )


def token_positions(row: GrootRow, config: GrootConfig) -> NDArray[np.int64]:
    """Where each token stands, (n, 3): time, height and width.

    Text advances all three; an image's tokens share a time and spread over its grid, and what follows goes on behind
    the grid's longer side (Qwen2-VL: arXiv 2409.12191, section 2.1).

    Raises:
        ValueError: when the prompt's image tokens are not those of the row's images, in this order.
    """
    tokens, positions = row.tokens, np.empty((len(row.tokens), 3), np.int64)
    at_image = tokens == config.image_token_id
    grids = [_merged(_grid(image, config), config) for image in row.images]
    expected = sum(h * w for h, w in grids)
    if not grids or at_image.sum() != expected:
        raise ValueError(
            f"the prompt has {at_image.sum()} image tokens, expected {expected} for {len(grids)} images of "
            f"{', '.join(f'{h}x{w}' for h, w in grids)} tokens"
        )
    start = position = 0
    for h, w in grids:
        block = start + int(at_image[start:].argmax())
        stop = block + h * w
        if not at_image[block:stop].all():
            raise ValueError(f"an image of {h}x{w} tokens is interrupted in the prompt, at token {block}")
        positions[start:block] = np.arange(position, position + block - start)[:, None]
        position += block - start
        positions[block:stop, 0] = position
        positions[block:stop, 1] = position + np.repeat(np.arange(h), w)
        positions[block:stop, 2] = position + np.tile(np.arange(w), h)
        start, position = stop, position + max(h, w)
    positions[start:] = np.arange(position, position + len(tokens) - start)[:, None]
    return positions


def grids_of(rows: Sequence[GrootRow], config: GrootConfig) -> list[Grid]:
    """Patches down and across of all images, row after row."""
    return [_grid(image, config) for row in rows for image in row.images]


def _grid(image: NDArray[np.uint8], config: GrootConfig) -> Grid:
    """Patches down and across."""
    height, width, _ = image.shape
    side, patch = config.vision.token_side, config.vision.patch
    if height % side or width % side:
        raise ValueError(f"an image is {height}x{width}, expected sides that are multiples of {side}")
    return height // patch, width // patch


def _merged(grid: Grid, config: GrootConfig) -> Grid:
    """Tokens down and across."""
    return grid[0] // config.vision.merge, grid[1] // config.vision.merge


def pack_patches(images: Sequence[NDArray[np.uint8]], config: GrootConfig, patches: NDArray[np.uint8]) -> None:
    """Write images into `patches` (images, n, 3 * patch * patch): those of a merged token beside each other, each
    channels first.
    """
    merge, patch = config.vision.merge, config.vision.patch
    for room, image in zip(patches, images, strict=True):
        down, across = image.shape[0] // (merge * patch), image.shape[1] // (merge * patch)
        squares = image.reshape(down, merge, patch, across, merge, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        room[: down * across * merge**2].reshape(squares.shape)[...] = squares


def _padded(rows: Sequence[NDArray[np.int64]], most: int | None) -> NDArray[np.int64]:
    """Places of each row behind each other, all as many: the first one stands for those that are missing."""
    most = most or max(map(len, rows))
    return np.concatenate([np.pad(places, (0, most - len(places)), constant_values=places[0]) for places in rows])


def _lengths(rows: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.array([len(row) for row in rows], np.int64)
