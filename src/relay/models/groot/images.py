"""Camera frames to the sizes that GR00T's vision tower takes: the checkpoint's crop and resize, then the tower's own.

Every step rounds to whole grey levels, which the network was trained with: leaving one out moves the actions. The area
recipe is Isaac-GR00T's of N1.7 (gr00t/model/gr00t_n1d7/image_augmentations.py), the tower's resize the Qwen3-VL image
processor's (transformers: models/qwen2_vl/image_processing_qwen2_vl.py). Knows no camera and no observation.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from relay.models.groot.area import resize_area
from relay.models.groot.recipe import ImageRecipe

TOKEN_SIDE = 32
"""Pixels along a side of what becomes one token: two patches of 16."""

MIN_PIXELS, MAX_PIXELS = 65_536, 16_777_216
"""Of a frame in the vision tower (nvidia/Cosmos-Reason2-2B: preprocessor_config.json)."""


def prepare_frame(frame: NDArray[np.uint8], recipe: ImageRecipe, *, fast: bool = False) -> NDArray[np.uint8]:
    """A frame (H, W, 3) as the network takes it: (h, w, 3), sides multiples of 32.

    Args:
        fast: in the area recipe, take all resizes in one step; differs by a grey level or two.
    """
    return resize_bicubic(crop_and_resize(frame, recipe), *vision_size(*cropped_size(*_sides(frame), recipe)))


def crop_and_resize(frame: NDArray[np.uint8], recipe: ImageRecipe) -> NDArray[np.uint8]:
    """The checkpoint's own part of the chain, as at evaluation."""
    if recipe.letterbox:
        frame = _letterbox(frame)
    if recipe.kind == "torchvision":
        assert recipe.target is not None
        assert recipe.crop is not None
        frame = _interpolate(frame, *recipe.target, "bilinear")
        top, left = (round((side - kept) / 2) for side, kept in zip(recipe.target, recipe.crop, strict=True))
        return _interpolate(frame[top:, left:][: recipe.crop[0], : recipe.crop[1]], *recipe.target, "bilinear")
    if recipe.kind == "lerobot":
        assert recipe.target is not None
        assert recipe.shortest_edge is not None
        frame = resize_bicubic(frame, recipe.shortest_edge, recipe.shortest_edge)
        return resize_bicubic(_crop(frame, recipe), *recipe.target)
    frame = resize_area(frame, *area_size(*_sides(frame), recipe))
    frame = _crop(frame, recipe)
    return resize_area(frame, *area_size(*_sides(frame), recipe))


def cropped_size(height: int, width: int, recipe: ImageRecipe) -> tuple[int, int]:
    """What `crop_and_resize` makes of a frame of this size."""
    if recipe.kind != "area":
        assert recipe.target is not None
        return recipe.target
    if recipe.letterbox:
        height = width = max(height, width)
    height, width = area_size(height, width, recipe)
    return area_size(*kept_size(height, width, recipe), recipe)


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


def area_size(height: int, width: int, recipe: ImageRecipe) -> tuple[int, int]:
    """What the area recipe resizes a frame of this size to: by its shorter side, or to the target."""
    if recipe.shortest_edge is None:
        assert recipe.target is not None
        return recipe.target
    scale = recipe.shortest_edge / min(height, width)
    return max(1, round(height * scale)), max(1, round(width * scale))


def kept_size(height: int, width: int, recipe: ImageRecipe) -> tuple[int, int]:
    """What the crop leaves of a frame of this size; lerobot rounds where Isaac-GR00T cuts off."""
    to_int = round if recipe.kind == "lerobot" else int
    return max(1, to_int(height * recipe.crop_fraction)), max(1, to_int(width * recipe.crop_fraction))


def _crop(frame: NDArray[np.uint8], recipe: ImageRecipe) -> NDArray[np.uint8]:
    height, width = kept_size(*_sides(frame), recipe)
    top, left = (frame.shape[0] - height) // 2, (frame.shape[1] - width) // 2
    return frame[top : top + height, left : left + width]


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
