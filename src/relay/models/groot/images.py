"""Camera frames to the sizes that GR00T's vision tower takes: the checkpoint's crop and resize, then the tower's own.

Every step rounds to whole grey levels, which the network was trained with: leaving one out moves the actions. The area
recipe is Isaac-GR00T's of N1.7 (gr00t/model/gr00t_n1d7/image_augmentations.py), the tower's resize the Qwen3-VL image
processor's (transformers: models/qwen2_vl/image_processing_qwen2_vl.py). Knows no camera and no observation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from relay.models.groot.area import resize_area
from relay.models.groot.fused import Kernel, Step, chain, resize_fused
from relay.models.groot.image_recipe import ImageRecipe

TOKEN_SIDE = 32
"""Pixels along a side of what becomes one token: two patches of 16."""

MIN_PIXELS, MAX_PIXELS = 65_536, 16_777_216
"""Of a frame in the vision tower (nvidia/Cosmos-Reason2-2B: preprocessor_config.json)."""


def prepare_frame(frame: NDArray[np.uint8], recipe: ImageRecipe, *, fast: bool = False) -> NDArray[np.uint8]:
    """A frame (H, W, 3) as the network takes it: (h, w, 3), sides multiples of 32.

    Args:
        fast: take all resizes in one step, in a half to a quarter of the time; off by a grey level or two, and by
            more where lerobot's recipe overshoots at sharp edges.
    """
    if not fast:
        return resize_bicubic(crop_and_resize(frame, recipe), *vision_size(*cropped_size(*_sides(frame), recipe)))
    if recipe.letterbox:
        frame = _letterbox(frame)
    rows, columns = _chains(*_sides(frame), recipe)
    return resize_fused(frame, chain(frame.shape[0], rows), chain(frame.shape[1], columns))


def _chains(height: int, width: int, recipe: ImageRecipe) -> list[tuple[Step, ...]]:
    """The resizes of `crop_and_resize` and the tower's own, along each side."""
    first = resized_size(height, width, recipe)
    kept = kept_size(*first, recipe)
    last = cropped_size(height, width, recipe)
    kernel = _KERNELS[recipe.kind]
    return [
        ((kernel, 0, side, whole), (kernel, _offset(whole, part, recipe), part, end), ("bicubic", 0, end, seen))
        for side, whole, part, end, seen in zip((height, width), first, kept, last, vision_size(*last), strict=True)
    ]


_KERNELS: Mapping[str, Kernel] = {"area": "area", "torchvision": "bilinear", "lerobot": "bicubic"}


def crop_and_resize(frame: NDArray[np.uint8], recipe: ImageRecipe) -> NDArray[np.uint8]:
    """The checkpoint's own part of the chain, as at evaluation."""
    if recipe.letterbox:
        frame = _letterbox(frame)
    final = cropped_size(*_sides(frame), recipe)
    frame = _resize(frame, *resized_size(*_sides(frame), recipe), recipe)
    height, width = kept_size(*_sides(frame), recipe)
    top, left = (_offset(side, part, recipe) for side, part in zip(_sides(frame), (height, width), strict=True))
    return _resize(frame[top : top + height, left : left + width], *final, recipe)


def cropped_size(height: int, width: int, recipe: ImageRecipe) -> tuple[int, int]:
    """What `crop_and_resize` makes of a frame of this size."""
    if recipe.kind != "area":
        return _target(recipe)
    if recipe.letterbox:
        height = width = max(height, width)
    return resized_size(*kept_size(*resized_size(height, width, recipe), recipe), recipe)


def vision_size(height: int, width: int) -> tuple[int, int]:
    """The nearest size of whole tokens within the tower's bounds."""
    rounded = [round(side / TOKEN_SIDE) * TOKEN_SIDE for side in (height, width)]
    if rounded[0] * rounded[1] > MAX_PIXELS:
        ratio = math.sqrt(height * width / MAX_PIXELS)
        rounded = [max(TOKEN_SIDE, math.floor(side / ratio / TOKEN_SIDE) * TOKEN_SIDE) for side in (height, width)]
    elif rounded[0] * rounded[1] < MIN_PIXELS:
        ratio = math.sqrt(MIN_PIXELS / (height * width))
        rounded = [math.ceil(side * ratio / TOKEN_SIDE) * TOKEN_SIDE for side in (height, width)]
    return rounded[0], rounded[1]


def resize_bicubic(frame: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """The tower's resize: bicubic with antialias, rounded."""
    return _interpolate(frame, height, width, "bicubic")


def resized_size(height: int, width: int, recipe: ImageRecipe) -> tuple[int, int]:
    """What a frame of this size is resized to before it is cropped."""
    if recipe.kind == "torchvision" or recipe.shortest_edge is None:
        return _target(recipe)
    if recipe.kind == "lerobot":
        return recipe.shortest_edge, recipe.shortest_edge
    scale = recipe.shortest_edge / min(height, width)
    return max(1, round(height * scale)), max(1, round(width * scale))


def kept_size(height: int, width: int, recipe: ImageRecipe) -> tuple[int, int]:
    """What the crop leaves of a frame of this size; lerobot rounds where Isaac-GR00T cuts off."""
    if recipe.kind == "torchvision":
        assert recipe.crop is not None
        return recipe.crop
    to_int = round if recipe.kind == "lerobot" else int
    return max(1, to_int(height * recipe.crop_fraction)), max(1, to_int(width * recipe.crop_fraction))


def _offset(side: int, kept: int, recipe: ImageRecipe) -> int:
    """Where a centred crop begins; torchvision rounds halves to even."""
    return round((side - kept) / 2) if recipe.kind == "torchvision" else (side - kept) // 2


def _target(recipe: ImageRecipe) -> tuple[int, int]:
    assert recipe.target is not None
    return recipe.target


def _resize(frame: NDArray[np.uint8], height: int, width: int, recipe: ImageRecipe) -> NDArray[np.uint8]:
    kernel = _KERNELS[recipe.kind]
    return resize_area(frame, height, width) if kernel == "area" else _interpolate(frame, height, width, kernel)


def _letterbox(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    height, width = frame.shape[:2]
    side = max(height, width)
    if height == width:
        return frame
    square = np.zeros((side, side, 3), np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = frame
    return square


def _sides(frame: NDArray[np.uint8]) -> tuple[int, int]:
    return frame.shape[0], frame.shape[1]


def _interpolate(frame: NDArray[np.uint8], height: int, width: int, mode: str) -> NDArray[np.uint8]:
    """torchvision's resize of a uint8 image: torch's own, with antialias."""
    if frame.shape[:2] == (height, width):
        return frame
    pixels = torch.from_numpy(np.require(frame, requirements=["C", "W"])).permute(2, 0, 1)[None]  # (1, 3, H, W)
    resized = interpolate(pixels, (height, width), mode=mode, antialias=True, align_corners=False)
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())
