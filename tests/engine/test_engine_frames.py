"""Image slots and resizing."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageOps

from relay.engine import frames
from relay.engine.frames import each_frame, read_frame, resize_with_pad
from relay.protocol.errors import ObservationError
from relay.protocol.images import Codec, encode_frame, one_by_one


def picture(height: int, width: int) -> np.ndarray:
    """Smooth waves, sharp edges and some noise: what resizing filters disagree on."""
    y, x = np.mgrid[:height, :width]
    waves = 127 + 120 * np.sin(x / 7.3)[..., None] * np.cos(y[..., None] / np.array([5.1, 11.7, 23.9]))
    waves[(x // 16 + y // 16) % 2 == 0] *= 0.5
    return (waves + np.random.default_rng(0).normal(0, 8, waves.shape)).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize(("height", "width"), [(480, 640), (720, 1280), (180, 320), (128, 128)])
def test_resizing_equals_pillows_bilinear_with_centred_black_padding(height: int, width: int) -> None:
    frame = picture(height, width)
    scale = max(width, height) / 224
    inner = Image.fromarray(frame).resize((int(width / scale), int(height / scale)), Image.Resampling.BILINEAR)
    expected = np.asarray(ImageOps.pad(inner, (224, 224), method=Image.Resampling.NEAREST, centering=(0.5, 0.5)))
    difference = np.abs(resize_with_pad(frame, 224, 224).astype(int) - expected.astype(int))
    assert difference.max() <= 1


def test_a_frame_of_the_right_size_is_returned_untouched() -> None:
    frame = picture(224, 224)
    assert resize_with_pad(frame, 224, 224) is frame


def test_the_odd_padding_pixel_goes_to_the_bottom() -> None:
    padded = resize_with_pad(np.full((125, 224, 3), 255, np.uint8), 224, 224)
    rows = np.flatnonzero(padded.any((1, 2)))
    assert (rows[0], 223 - rows[-1]) == (49, 50)


def test_a_frame_of_one_pixel_width_still_has_a_pixel() -> None:
    assert resize_with_pad(np.full((1000, 1, 3), 9, np.uint8), 224, 224).max() == 9


@pytest.mark.parametrize(
    ("value", "came", "hint"),
    [
        (np.zeros((3, 480, 640), np.uint8), r"\(3, 480, 640\) uint8", "transpose"),
        (np.zeros((480, 640, 3), np.float32), r"\(480, 640, 3\) float32", ""),
        (np.zeros((480, 640, 4), np.uint8), r"\(480, 640, 4\) uint8", ""),
        (np.zeros((480, 640), np.uint8), r"\(480, 640\) uint8", ""),
        (np.zeros((0, 0, 3), np.uint8), r"\(0, 0, 3\) uint8", ""),
        (np.zeros((2, 224, 224, 3), np.uint8), r"\(2, 224, 224, 3\) uint8", "one connection per robot"),
        ([np.zeros((8, 9, 3), np.uint8)] * 2, r"\(2, 8, 9, 3\) as a list", "one connection per robot"),
        (
            [[encode_frame(np.zeros((8, 9, 3), np.uint8), Codec.JPEG_Q90)] * 5] * 2,
            r"\(2, 5, 8, 9, 3\) as a list",
            "one",
        ),
        ([1, 2, 3], "list", ""),
        ([], "list", ""),
        (None, "NoneType", ""),
    ],
)
def test_anything_but_one_rgb_frame_is_refused_by_name(value: object, came: str, hint: str) -> None:
    with pytest.raises(ObservationError, match=rf"image\['base_0_rgb'\].*got {came}.*{hint}"):
        read_frame(value, "image['base_0_rgb']")


def test_a_frame_that_is_a_slice_with_strides_is_taken() -> None:
    frame = picture(480, 640)[::2, ::-2]
    assert np.array_equal(resize_with_pad(frame, 224, 224), resize_with_pad(frame.copy(), 224, 224))


@pytest.mark.parametrize(
    ("frame", "several_at_once"),
    [
        (encode_frame(picture(64, 64), Codec.JPEG_Q90), True),
        (picture(480, 640), True),
        (picture(224, 224), False),
    ],
    ids=["encoded", "large", "of the usual size"],
)
def test_frames_are_worked_on_side_by_side_where_one_takes_long(
    frame: object, several_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[int] = []
    monkeypatch.setattr(
        frames, "side_by_side", lambda work, items: shared.append(len(items)) or one_by_one(work, items)
    )
    assert each_frame(lambda value, name: name, {"front": frame, "wrist": picture(8, 8)}) == ["front", "wrist"]
    assert shared == ([2] if several_at_once else [])
