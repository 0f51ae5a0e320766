"""Frames resized by area equal OpenCV's, by recorded digests and by the definition of each case."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from relay.models.groot.area import resize_area

DIGESTS = {
    (480, 640, 256, 341): "c783f4e3ae69c5a4",
    (720, 1280, 256, 455): "2730794253a279af",
    (243, 323, 256, 340): "bc04cb9c3af366b9",
    (180, 320, 256, 455): "8e38660117c857a7",
    (512, 512, 256, 256): "4029323d9278d87f",
    (768, 768, 256, 256): "8eb6b0b42d60c543",
    (480, 640, 160, 320): "58beb529dd6516e1",
    (300, 100, 280, 256): "750906cf0fffca19",
    (97, 61, 13, 60): "f8e3f34199005dcf",
    (5, 7, 1, 1): "9f13cbdb4c751a8b",
}
"""Of `cv2.resize(noise(...), (width, height), interpolation=cv2.INTER_AREA)` by OpenCV 5.0.0; 4.11.0 gives the same."""


def noise(height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(height * 10_000 + width).integers(0, 256, (height, width, 3)).astype(np.uint8)


@pytest.mark.parametrize("sizes", DIGESTS)
def test_every_case_gives_the_pixels_of_opencv(sizes: tuple[int, int, int, int]) -> None:
    height, width, new_height, new_width = sizes
    resized = resize_area(noise(height, width), new_height, new_width)
    assert resized.shape == (new_height, new_width, 3)
    assert hashlib.sha256(resized.tobytes()).hexdigest()[:16] == DIGESTS[sizes]


def covered(source: int, target: int) -> NDArray[np.float64]:
    """(target, source) shares: how much of each target pixel each source pixel covers."""
    scale = source / target
    shares = np.zeros((target, source))
    for place in range(target):
        for pixel in range(source):
            overlap = min((place + 1) * scale, pixel + 1) - max(place * scale, pixel)
            shares[place, pixel] = max(0.0, overlap) / scale
    return shares


@pytest.mark.parametrize(("size", "new", "most"), [((48, 64), (26, 35), 0.51), ((18, 32), (26, 46), 1.6)])
def test_each_pixel_is_the_mean_of_the_area_it_covers(size: tuple[int, int], new: tuple[int, int], most: float) -> None:
    frame = noise(*size)
    exact = np.einsum("ha,abc,wb->hwc", covered(size[0], new[0]), frame, covered(size[1], new[1]))
    assert np.abs(resize_area(frame, *new) - exact).max() < most


def test_whole_factors_average_blocks_and_round_half_to_even() -> None:
    frame = np.zeros((4, 4, 3), np.uint8)
    frame[0, :3] = 4, 8, 12  # sums of 12, 24 and 36 over blocks of 16 pixels: 0.75, 1.5 and 2.25
    assert resize_area(frame, 1, 1).tolist() == [[[1, 2, 2]]]


def test_halves_round_up_in_blocks_of_two() -> None:
    frame = np.zeros((2, 2, 3), np.uint8)
    frame[0, 0] = 2, 6, 10
    assert resize_area(frame, 1, 1).tolist() == [[[1, 2, 3]]]
    assert [math.floor(value / 4 + 0.5) for value in (2, 6, 10)] == [1, 2, 3]


def test_a_frame_of_the_right_size_stays_as_it_is() -> None:
    frame = noise(8, 9)
    assert resize_area(frame, 8, 9) is frame


def test_a_slice_of_a_frame_resizes_as_its_copy() -> None:
    frame = noise(100, 90)
    part = frame[3:90, 5:85]
    assert np.array_equal(resize_area(part, 64, 60), resize_area(part.copy(), 64, 60))


def test_frames_that_may_not_be_written_to_are_taken() -> None:
    frame = noise(30, 40)
    frame.flags.writeable = False
    assert resize_area(frame, 20, 27).shape == (20, 27, 3)
