"""Frames to pictures, against resizing and stitching written out in NumPy; and which pictures belong to a call."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from relay.models.dreamzero.frames import RecentFrames, Views, fit, stitch

DROID = Views((180, 320), 0.95, (176, 320), 3, wrist_on_top=True)
SQUARE = Views((180, 320), 0.95, (176, 320), 3, wrist_on_top=False)


def noise(*shape: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


def weights(given: int, wanted: int) -> NDArray[np.float64]:
    """(wanted, given): triangles as wide as an output pixel, or an input pixel where that is wider."""
    ratio = given / wanted
    reach = max(ratio, 1.0)
    centres = (np.arange(wanted) + 0.5) * ratio
    heights = np.maximum(0, 1 - np.abs(np.arange(given) + 0.5 - centres[:, None]) / reach)
    return heights / heights.sum(1, keepdims=True)


def resized(frame: NDArray[np.uint8], height: int, width: int) -> NDArray[np.float64]:
    across = weights(frame.shape[1], width) @ frame  # (rows, width, 3)
    return np.tensordot(weights(frame.shape[0], height), across, 1)


@pytest.mark.parametrize("tile", [(176, 320), (160, 320), (24, 32)])
def test_a_frame_is_cropped_in_the_middle_resized_with_antialias_and_truncated(tile: tuple[int, int]) -> None:
    frame = noise(180, 320)
    ours = fit([frame], Views((180, 320), 0.95, tile, 3, wrist_on_top=True))[0]
    exact = resized(frame[4 : 4 + 171, 8 : 8 + 304], *tile)
    doubtful = np.abs(exact - exact.round()) < 1e-2  # where float32 may fall on the other side of a whole number
    assert (ours == np.floor(exact))[~doubtful].all()
    assert np.abs(ours - exact).max() < 1.01
    assert doubtful.mean() < 0.03


def test_flat_frames_stay_flat() -> None:
    for value in range(256):
        frame = np.full((180, 320, 3), value, np.uint8)
        assert (fit([frame], DROID) == value).all(), value


def test_frames_of_another_size_are_padded_to_the_size_of_training_first() -> None:
    frame = noise(480, 640)
    small = Image.fromarray(frame).resize((240, 180), Image.Resampling.BILINEAR)
    padded = np.zeros((180, 320, 3), np.uint8)
    padded[:, 40:280] = np.asarray(small)
    assert (fit([frame], DROID) == fit([padded], DROID)).all()


def test_frames_of_one_view_may_differ_in_size() -> None:
    first, second = noise(180, 320), noise(90, 160, seed=1)
    both = fit([first, second], DROID)
    assert both.shape == (2, 176, 320, 3)
    assert (both[1] == fit([second], DROID)[0]).all()


def tiles(count: int = 3) -> list[NDArray[np.uint8]]:
    return [noise(2, 176, 320, seed=seed) for seed in range(count)]


def test_droids_wrist_spans_the_upper_half_and_the_exteriors_stand_below() -> None:
    left, right, wrist = tiles()
    picture = stitch([left, right, wrist], DROID)
    assert picture.shape == (2, 352, 640, 3)
    for column in (0, 1, 2, 3, 638, 639):
        assert (picture[:, :176, column] == wrist[:, :, column // 2]).all()
    assert (picture[:, 176:, :320] == left).all()
    assert (picture[:, 176:, 320:] == right).all()


@pytest.mark.parametrize("missing", [0, 1])
def test_an_exterior_that_is_missing_is_black(missing: int) -> None:
    present: list[NDArray[np.uint8] | None] = list(tiles())
    whole = stitch(present, DROID)
    present[missing] = None
    picture = stitch(present, DROID)
    black = (slice(None), slice(176, None), slice(320 * missing, 320 * missing + 320))
    assert (picture[black] == 0).all()
    picture[black] = whole[black]
    assert (picture == whole).all()


def test_other_robots_views_fill_a_square_but_for_its_last_corner() -> None:
    first, second, third = tiles()
    picture = stitch([first, second, third], SQUARE)
    assert (picture[:, :176, :320] == first).all()
    assert (picture[:, 176:, :320] == second).all()
    assert (picture[:, :176, 320:] == third).all()
    assert (picture[:, 176:, 320:] == 0).all()


def test_a_single_view_is_the_picture() -> None:
    views = Views((180, 320), 0.95, (176, 320), 1, wrist_on_top=False)
    (only,) = tiles(1)
    assert (stitch([only], views) == only).all()
    assert views.picture == (176, 320)


def numbered(*values: int) -> NDArray[np.uint8]:
    """One-pixel pictures that can be told apart."""
    return np.array(values, np.uint8).reshape(-1, 1, 1, 1).repeat(3, axis=3)


def values(pictures: NDArray[np.uint8]) -> list[int]:
    return pictures[:, 0, 0, 0].tolist()


def played(*observations: list[int]) -> list[list[int]]:
    """What the network sees call by call."""
    recent, calls = RecentFrames(), []
    for observation in observations:
        calls.append(values(recent.clip(numbered(*observation))))
        recent = recent.followed_by(numbered(*observation))
    return calls


def test_an_episode_begins_with_one_frame_and_goes_on_with_four() -> None:
    assert played([1], [2, 3, 4, 5], [6, 7, 8, 9]) == [[1], [2, 3, 4, 5], [6, 7, 8, 9]]


def test_single_frames_are_joined_by_those_before_and_the_oldest_is_repeated() -> None:
    assert played([1], [2], [3], [4], [5]) == [[1], [1, 1, 1, 2], [1, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]


@pytest.mark.parametrize("count", [2, 4, 8, 9])
def test_of_several_frames_that_begin_an_episode_the_newest_counts(count: int) -> None:
    assert played(list(range(count))) == [[count - 1]]


def test_frames_that_came_with_the_first_are_known_to_the_next_call() -> None:
    assert played([1, 2, 3, 4], [5]) == [[4], [2, 3, 4, 5]]


def test_eight_or_nine_frames_are_taken_as_they_come() -> None:
    eight, nine = list(range(10, 18)), list(range(20, 29))
    assert played([1], eight, nine, [30]) == [[1], eight, nine, [26, 27, 28, 30]]


def test_any_traffic_of_up_to_four_frames_is_buffered_as_the_reference_does() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        traffic = [random.integers(0, 256, random.integers(1, 5)).tolist() for _ in range(8)]
        buffer: list[int] = []
        expected: list[list[int]] = []
        for number, observation in enumerate(traffic):
            buffer += observation
            wanted = 1 if number == 0 else 4
            expected.append([buffer[0]] * (wanted - len(buffer)) + buffer[-wanted:])
        assert played(*traffic) == expected


def test_a_call_that_is_not_kept_changes_nothing() -> None:
    recent = RecentFrames().followed_by(numbered(1, 2))
    recent.clip(numbered(3))
    recent.followed_by(numbered(4, 5, 6, 7))
    assert values(np.stack(recent.pictures)) == [1, 2]


def test_kept_pictures_do_not_hold_on_to_the_clip_they_came_in() -> None:
    clip = numbered(*range(9))
    recent = RecentFrames().followed_by(clip)
    clip[:] = 0
    assert values(np.stack(recent.pictures)) == [5, 6, 7, 8]
    assert recent.nbytes == 12
