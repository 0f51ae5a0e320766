"""Frames on their way to the vision tower: sizes, crops, and pixels against independent resizes."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from relay.models.groot.area import resize_area
from relay.models.groot.image_recipe import ImageRecipe
from relay.models.groot.images import crop_and_resize, cropped_size, prepare_frame, vision_size

N17 = ImageRecipe("area", shortest_edge=256, crop_fraction=0.95, target=(256, 256), crop=(244, 244))
TORCHVISION = ImageRecipe("torchvision", target=(256, 256), crop=(231, 231))
LEROBOT = ImageRecipe("lerobot", shortest_edge=128, crop_fraction=0.95, target=(128, 96))


def ramp(height: int, width: int) -> NDArray[np.uint8]:
    y, x = np.mgrid[:height, :width]
    return np.stack([(x + 3 * y) % 256, (2 * x + y) % 256, (x + 5 * y) % 256], axis=-1).astype(np.uint8)


def smooth(height: int, width: int) -> NDArray[np.uint8]:
    y, x = np.mgrid[:height, :width]
    waves = [128 + 100 * np.sin(x / 17 + c) * np.cos(y / (11 + 3 * c)) for c in range(3)]
    return np.stack(waves, axis=-1).astype(np.uint8)


def by_pillow(frame: NDArray[Any], height: int, width: int, kind: Image.Resampling) -> NDArray[np.uint8]:
    return np.asarray(Image.fromarray(np.ascontiguousarray(frame)).resize((width, height), kind))


def test_the_released_recipe_gives_the_recorded_pixels() -> None:
    """The digest is lerobot's (tests/policies/groot/test_groot_n1_7_oss_parity.py), made with OpenCV."""
    frame = crop_and_resize(ramp(480, 640), N17)
    assert frame.shape == (256, 340, 3)
    assert hashlib.sha256(frame.tobytes()).hexdigest() == (
        "c17e47af68a812aa79db3bb7b64b549ddf10148ac1b204a9686095018561ae9e"
    )


@pytest.mark.parametrize(
    ("camera", "cropped", "seen", "tokens"),
    [
        ((256, 256), (256, 256), (256, 256), 64),
        ((224, 224), (256, 256), (256, 256), 64),
        ((480, 640), (256, 340), (256, 352), 88),
        ((180, 320), (256, 455), (256, 448), 112),
        ((720, 1280), (256, 455), (256, 448), 112),
    ],
)
def test_frames_become_the_sizes_and_tokens_of_the_reference(
    camera: tuple[int, int], cropped: tuple[int, int], seen: tuple[int, int], tokens: int
) -> None:
    frame = prepare_frame(ramp(*camera), N17)
    assert crop_and_resize(ramp(*camera), N17).shape == (*cropped, 3)
    assert cropped_size(*camera, N17) == cropped
    assert vision_size(*cropped) == seen
    assert frame.shape == (*seen, 3)
    assert frame.shape[0] * frame.shape[1] // 1024 == tokens


@pytest.mark.parametrize("recipe", [N17, TORCHVISION, LEROBOT, ImageRecipe("area", True, None, 0.9, (100, 120))])
@pytest.mark.parametrize("camera", [(64, 80), (81, 64), (33, 200), (100, 100)])
def test_sizes_are_known_before_a_frame_is_resized(recipe: ImageRecipe, camera: tuple[int, int]) -> None:
    assert crop_and_resize(ramp(*camera), recipe).shape[:2] == cropped_size(*camera, recipe)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((224, 224), (256, 256)),  # below the least: sqrt(65536 / 224^2) = 1.143, whose multiple rounds up
        ((240, 300), (256, 288)),  # 240 / 32 = 7.5 rounds to the even 8
        ((272, 272), (256, 256)),  # 8.5 to the even 8
        ((304, 304), (320, 320)),  # 9.5 to the even 10
        ((100, 1000), (96, 992)),  # 95,232 pixels are enough
        ((5, 5), (256, 256)),
        ((8192, 4096), (5792, 2880)),  # above the most: divided by sqrt(2), rounded down
    ],
)
def test_the_tower_takes_whole_tokens_within_its_bounds(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert vision_size(*size) == expected


def test_the_towers_resize_is_bicubic_with_antialias() -> None:
    frame = crop_and_resize(smooth(180, 320), N17)
    expected = by_pillow(frame, 256, 448, Image.Resampling.BICUBIC)
    assert np.abs(prepare_frame(smooth(180, 320), N17).astype(int) - expected).max() <= 1


def test_the_crop_of_the_area_recipe_rounds_down_and_is_centred() -> None:
    frame = smooth(256, 341)  # already the shorter side: 243 x 323 remain of it, from row 6 and column 9 on
    expected = resize_area(frame[6 : 6 + 243, 9 : 9 + 323], 256, round(323 * 256 / 243))
    assert np.array_equal(crop_and_resize(frame, N17), expected)


def test_without_a_shorter_side_the_area_recipe_takes_the_target() -> None:
    recipe = ImageRecipe("area", shortest_edge=None, crop_fraction=0.5, target=(60, 90))
    frame = smooth(60, 90)
    assert np.array_equal(crop_and_resize(frame, recipe), resize_area(frame[15:45, 22:67], 60, 90))


def test_the_torchvision_recipe_is_bilinear_with_antialias_around_a_centred_crop() -> None:
    frame = by_pillow(smooth(480, 640), 256, 256, Image.Resampling.BILINEAR)
    # (256 - 231) / 2 = 12.5 rounds to the even 12
    expected = by_pillow(frame[12 : 12 + 231, 12 : 12 + 231], 256, 256, Image.Resampling.BILINEAR)
    assert np.abs(crop_and_resize(smooth(480, 640), TORCHVISION).astype(int) - expected).max() <= 2


def test_lerobots_recipe_is_bicubic_over_a_square_and_rounds_its_crop() -> None:
    frame = by_pillow(smooth(480, 640), 128, 128, Image.Resampling.BICUBIC)
    # 0.95 * 128 = 121.6 rounds to 122, from (128 - 122) // 2 = 3 on
    expected = by_pillow(frame[3 : 3 + 122, 3 : 3 + 122], 128, 96, Image.Resampling.BICUBIC)
    assert np.abs(crop_and_resize(smooth(480, 640), LEROBOT).astype(int) - expected).max() <= 2


@pytest.mark.parametrize("kind", ["area", "torchvision"])
def test_letterboxing_puts_black_above_and_below_first(kind: Any) -> None:
    recipe = ImageRecipe(kind, True, 90, 1.0, (90, 90), (90, 90))
    frame = np.full((41, 90, 3), 200, np.uint8)
    boxed = crop_and_resize(frame, recipe)
    # 49 rows are missing: 24 above, 25 below
    assert boxed.shape == (90, 90, 3)
    assert (boxed[24:65] == 200).all()
    assert not boxed[:24].any()
    assert not boxed[65:].any()


@pytest.mark.parametrize("recipe", [N17, TORCHVISION, LEROBOT])
def test_frames_that_may_not_be_written_to_are_taken_without_a_warning(
    recipe: ImageRecipe, recwarn: pytest.WarningsRecorder
) -> None:
    frame = ramp(100, 120)
    frame.flags.writeable = False
    prepare_frame(frame, recipe)
    assert not recwarn.list


@pytest.mark.parametrize("recipe", [N17, TORCHVISION, ImageRecipe("area", True, 256, 0.95)])
@pytest.mark.parametrize("camera", [(180, 320), (480, 640), (224, 224), (300, 200), (250, 251)])
def test_the_fast_way_is_two_grey_levels_off_at_most(recipe: ImageRecipe, camera: tuple[int, int]) -> None:
    frame = np.random.default_rng(0).integers(0, 256, (*camera, 3)).astype(np.uint8)
    exact, fast = prepare_frame(frame, recipe), prepare_frame(frame, recipe, fast=True)
    assert fast.shape == exact.shape
    difference = np.abs(exact.astype(int) - fast)
    assert difference.max() <= 2
    assert (difference > 0).mean() < 0.5


def test_the_fast_way_is_as_near_for_lerobots_recipe_where_nothing_overshoots() -> None:
    frame = smooth(240, 320)
    assert np.abs(prepare_frame(frame, LEROBOT).astype(int) - prepare_frame(frame, LEROBOT, fast=True)).max() <= 2


def test_the_fast_way_keeps_a_frame_of_one_colour_as_it_is() -> None:
    assert (prepare_frame(np.full((180, 320, 3), 255, np.uint8), N17, fast=True) == 255).all()
