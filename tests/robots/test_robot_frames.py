"""Frames in the forms that robots send: the reference's pixels, or a refusal that names what came."""

from __future__ import annotations

import numpy as np
import pytest
from reference import expected_frame

from relay.protocol.errors import ObservationError
from relay.robots.frames import FORMS, read_frame

FRAME = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)
KEY = "observation/image"


@pytest.mark.parametrize(
    "frame",
    [
        FRAME,
        FRAME.transpose(2, 0, 1),
        (FRAME / 255).astype(np.float32),
        FRAME.transpose(2, 0, 1) / 255,
        FRAME[::2, ::-1],
        FRAME.transpose(2, 0, 1)[:, ::2, 1:],
    ],
    ids=["plain", "channels first", "float32", "float64 channels first", "a slice", "a slice channels first"],
)
def test_a_frame_has_the_references_pixels(frame: np.ndarray) -> None:
    taken = read_frame(frame, KEY, FORMS)
    assert isinstance(taken, np.ndarray)
    assert taken.dtype == np.uint8
    assert np.array_equal(taken, expected_frame(frame))


def test_floats_are_truncated() -> None:
    frame = np.full((4, 5, 3), 0.9999 / 255 * 8, np.float64)
    taken = read_frame(frame, KEY, FORMS)
    assert isinstance(taken, np.ndarray)
    assert (taken == 7).all()


@pytest.mark.parametrize("frame", [FRAME, FRAME.transpose(2, 0, 1), FRAME[None]])
def test_uint8_pixels_are_not_copied(frame: np.ndarray) -> None:
    taken = read_frame(frame, KEY, FORMS)
    assert isinstance(taken, np.ndarray)
    assert np.shares_memory(taken, FRAME)


@pytest.mark.parametrize("value", [FRAME[None], FRAME[None, None], [FRAME], [[FRAME]], [FRAME[None]]])
def test_leading_axes_of_one_are_taken_off(value: object) -> None:
    assert np.array_equal(np.asarray(read_frame(value, KEY, ())), FRAME)


@pytest.mark.parametrize("value", [b"\xff\xd8\xff", memoryview(b"\xff\xd8\xff")])
def test_image_files_pass_through(value: bytes) -> None:
    assert read_frame(value, KEY, ()) is value


def test_an_image_file_in_a_list_of_one_passes_through() -> None:
    assert read_frame([b"\xff\xd8\xff"], KEY, ()) == b"\xff\xd8\xff"


@pytest.mark.parametrize(
    ("value", "came"),
    [
        (FRAME[..., 0], r"got \(24, 32\) uint8"),
        (np.zeros((24, 32, 4), np.uint8), r"got \(24, 32, 4\) uint8"),
        (np.zeros((0, 0, 3), np.uint8), r"got \(0, 0, 3\) uint8"),
        (np.zeros((2, 24, 32, 3), np.uint8), r"got \(2, 24, 32, 3\) uint8; one observation holds one frame"),
        (FRAME.astype(np.int32), r"got \(24, 32, 3\) int32"),
        ([1, 2], "got a list of 2 items"),
        (None, "got nil"),
    ],
)
def test_other_shapes_and_types_are_refused_naming_key_and_what_came(value: object, came: str) -> None:
    with pytest.raises(ObservationError, match=rf"'observation/image': expected \(H, W, 3\) or \(3, H, W\).*{came}"):
        read_frame(value, KEY, FORMS)


def test_floats_are_refused_where_the_profile_has_none() -> None:
    with pytest.raises(ObservationError, match=r"expected \(H, W, 3\) uint8, RGB.*got \(24, 32, 3\) float64"):
        read_frame(FRAME / 255, KEY, ())


def test_channels_first_is_refused_with_the_remedy_where_the_profile_has_none() -> None:
    with pytest.raises(ObservationError, match=r"got \(3, 24, 32\) uint8; transpose channels-first frames"):
        read_frame(FRAME.transpose(2, 0, 1), KEY, ("float",))


@pytest.mark.parametrize(("value", "range_"), [(255.0, "from 0 to 255"), (-0.5, "from -0.5 to 0"), (np.nan, "nan")])
def test_floats_outside_0_to_1_are_refused(value: float, range_: str) -> None:
    frame = np.zeros((4, 5, 3), np.float32)
    frame[2, 2, 1] = value
    with pytest.raises(ObservationError, match=f"'observation/image': float frames go from 0 to 1.*{range_}"):
        read_frame(frame, KEY, FORMS)


def test_a_frame_that_may_be_either_layout_is_refused() -> None:
    with pytest.raises(ObservationError, match="may be channels-first or channels-last"):
        read_frame(np.zeros((3, 24, 3), np.uint8), KEY, FORMS)
