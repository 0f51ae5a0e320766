"""What a checkpoint's files say of camera frames, and what is refused about them."""

from __future__ import annotations

from typing import Any

import pytest

from relay.engine.weights import CheckpointError
from relay.models.groot.image_recipe import ImageRecipe, read_image_recipe

IMAGES: dict[str, Any] = {
    "use_albumentations": True,
    "shortest_image_edge": 256,
    "crop_fraction": 0.95,
    "image_target_size": [256, 256],
    "image_crop_size": [244, 244],
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ImageRecipe("area", False, 256, 0.95, (256, 256), (244, 244))),
        ({"crop_fraction": None}, ImageRecipe("area", False, 256, 244 / 256, (256, 256), (244, 244))),
        ({"shortest_image_edge": None}, ImageRecipe("area", False, None, 0.95, (256, 256), (244, 244))),
        ({"use_albumentations": False}, ImageRecipe("torchvision", target=(256, 256), crop=(244, 244))),
        ({"letter_box_transform": True}, ImageRecipe("area", True, 256, 0.95, (256, 256), (244, 244))),
        (
            {"use_albumentations": False, "lerobot_frames": True, "shortest_image_edge": None},
            ImageRecipe("lerobot", False, 256, 0.95, (256, 256), (244, 244)),
        ),
        (
            {"lerobot_frames": True, "crop_fraction": None, "image_crop_size": None},
            ImageRecipe("area", False, 256, 1.0, (256, 256), None),
        ),
    ],
)
def test_image_settings_choose_the_recipe(changes: dict[str, Any], expected: ImageRecipe) -> None:
    assert read_image_recipe({**IMAGES, **changes}) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crop_fraction": 1.2}, "the crop keeps 1.2 of a side"),
        ({"crop_fraction": None, "image_crop_size": None}, "neither crop_fraction nor image_crop_size"),
        ({"shortest_image_edge": None, "image_target_size": None}, "image_target_size is missing"),
        ({"shortest_image_edge": "256"}, "shortest_image_edge is '256', expected pixels"),
        ({"image_target_size": [256]}, "image_target_size is a list of 1 items, expected height and width"),
        ({"use_albumentations": False, "image_crop_size": None}, "image_crop_size is missing"),
        ({"use_albumentations": False, "image_crop_size": [300, 200]}, "is larger than image_target_size"),
    ],
)
def test_image_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_image_recipe({**IMAGES, **changes})
