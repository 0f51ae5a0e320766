"""What a checkpoint says of camera frames: how they are cropped and resized.

Read from `processor_config.json` (Isaac-GR00T: gr00t/model/gr00t_n1d7/processing_gr00t_n1d7.py). Knows no frame and no
embodiment: the settings hold for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from relay.engine.json_entries import entry, entry_or
from relay.engine.weights import CheckpointError
from relay.models.groot.formats import PROCESSOR_FILE
from relay.protocol.wording import shown


@dataclass(frozen=True, slots=True)
class ImageRecipe:
    """How frames are cropped and resized before the vision tower's own resize.

    Attributes:
        kind: `area` (N1.7's, `use_albumentations`), `torchvision` (Isaac-GR00T's other one) or `lerobot` (lerobot's
            own version of that).
        letterbox: pad to a square with black first.
        shortest_edge: of the kinds `area` and `lerobot`; None in `area` resizes to `target` exactly.
        crop_fraction: of the kinds `area` and `lerobot`: how much of each side is kept.
        target, crop: (height, width); of `torchvision`, and of `area` without `shortest_edge`.
    """

    kind: Literal["area", "torchvision", "lerobot"]
    letterbox: bool = False
    shortest_edge: int | None = None
    crop_fraction: float = 1.0
    target: tuple[int, int] | None = None
    crop: tuple[int, int] | None = None


def read_image_recipe(processor: Mapping[str, Any]) -> ImageRecipe:
    """How frames are resized.

    Args:
        processor: `processor_kwargs` of `processor_config.json`; `lerobot_frames` tells that lerobot trained on these
            settings, which reads some of them in another way.

    Raises:
        CheckpointError: an entry is missing or contradicts another.
    """
    target, crop = _pair(processor, "image_target_size"), _pair(processor, "image_crop_size")
    letterbox = entry_or(processor, "letter_box_transform", False, PROCESSOR_FILE)
    area = entry(processor, "use_albumentations", bool, PROCESSOR_FILE)
    by_lerobot = entry_or(processor, "lerobot_frames", False, PROCESSOR_FILE)
    if not area and not by_lerobot:
        if target is None or crop is None:
            missing = "image_crop_size" if target else "image_target_size"
            raise CheckpointError(f"{PROCESSOR_FILE}: {missing} is missing, expected height and width")
        if crop[0] > target[0] or crop[1] > target[1]:
            raise CheckpointError(f"{PROCESSOR_FILE}: image_crop_size {crop} is larger than image_target_size {target}")
        return ImageRecipe("torchvision", letterbox, target=target, crop=crop)
    edge = processor.get("shortest_image_edge")
    if edge is not None and (type(edge) is not int or edge < 1):
        raise CheckpointError(f"{PROCESSOR_FILE}: shortest_image_edge is {shown(edge)}, expected pixels")
    fraction = processor.get("crop_fraction")
    if fraction is None and by_lerobot and crop is None:
        fraction = 1.0
    if fraction is None:
        if target is None or crop is None:
            raise CheckpointError(
                f"{PROCESSOR_FILE}: neither crop_fraction nor image_crop_size and image_target_size say what is kept"
            )
        fraction = crop[0] / target[0]
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise CheckpointError(f"{PROCESSOR_FILE}: the crop keeps {shown(fraction)} of a side, expected 0 to 1")
    if (edge is None or by_lerobot) and target is None:
        raise CheckpointError(f"{PROCESSOR_FILE}: image_target_size is missing, expected height and width")
    if by_lerobot and edge is None:
        edge = cast("tuple[int, int]", target)[0]
    return ImageRecipe("area" if area else "lerobot", letterbox, edge, float(fraction), target, crop)


def _pair(processor: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    value = processor.get(key)
    if value is None:
        return None
    sides = cast("list[Any]", value) if isinstance(value, list) else []
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise CheckpointError(f"{PROCESSOR_FILE}: {key} is {shown(value)}, expected height and width in pixels")
    return sides[0], sides[1]
