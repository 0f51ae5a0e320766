"""Which decoder is chosen, with stand-ins for a GPU's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from relay.engine import decode
from relay.engine.decode import choose_decoder, gpu_decoder, pixel_difference, trial
from relay.engine.weights import CheckpointError
from relay.protocol.errors import ObservationError
from relay.protocol.images import Codec, decode_frame, encode_frame

CPU = torch.device("cpu")
FRAME = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
JPEG = encode_frame(FRAME, Codec.JPEG_Q90)


def same(data: bytes) -> NDArray[np.uint8]:
    """A GPU whose pixels are the CPU's."""
    return decode_frame(data, "frame")


def brighter(data: bytes) -> NDArray[np.uint8]:
    """A GPU whose pixels differ by one grey level."""
    return np.minimum(decode_frame(data, "frame"), 254) + 1


def instant(data: bytes) -> NDArray[np.uint8]:
    """A GPU that has decoded every trial file before it is asked."""
    return _DECODED[data]


_SIZES = ((224, 224), (640, 480), (1280, 720), (1920, 1080))
_DECODED = {data: decode_frame(data, "trial") for size in _SIZES for data in trial(size)}
_BRIGHTER = {data: np.minimum(frame, 254) + 1 for data, frame in _DECODED.items()}


def test_the_cpu_decodes_where_there_is_no_gpu() -> None:
    assert choose_decoder("auto", CPU) == (decode_frame, None)
    assert choose_decoder("cpu", CPU) == (decode_frame, None)


def test_a_gpu_that_is_not_there_cannot_be_forced() -> None:
    with pytest.raises(CheckpointError, match="--decode gpu needs a CUDA device"):
        choose_decoder("gpu", CPU)


def test_auto_keeps_the_cpu_while_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0  # on this clock the CPU takes no time

    def slower(data: bytes) -> NDArray[np.uint8]:
        nonlocal now
        now += 0.02
        return same(data)

    monkeypatch.setattr(decode, "perf_counter", lambda: now)
    assert choose_decoder("auto", CPU, slower) == (decode_frame, None)


def test_auto_never_takes_a_decoder_whose_pixels_differ() -> None:
    assert choose_decoder("auto", CPU, _BRIGHTER.__getitem__) == (decode_frame, None)


def test_auto_takes_a_faster_decoder_with_the_same_pixels() -> None:
    chosen, remark = choose_decoder("auto", CPU, instant)
    assert chosen is not decode_frame
    assert remark is None


def test_a_forced_gpu_states_how_its_pixels_differ() -> None:
    chosen, remark = choose_decoder("gpu", CPU, brighter)
    assert remark is not None
    assert "up to 1 grey levels" in remark
    assert np.array_equal(chosen(JPEG, "frame"), brighter(JPEG))


def test_a_forced_gpu_with_the_same_pixels_needs_no_remark() -> None:
    assert choose_decoder("gpu", CPU, same)[1] is None


def test_small_frames_stay_on_the_cpu() -> None:
    def never(data: bytes) -> NDArray[np.uint8]:
        raise AssertionError

    assert np.array_equal(gpu_decoder(never, 48 * 64 + 1)(JPEG, "frame"), decode_frame(JPEG, "frame"))


def test_what_the_gpu_cannot_decode_the_cpu_does() -> None:
    def fails(data: bytes) -> NDArray[np.uint8]:
        raise RuntimeError("unsupported")

    assert np.array_equal(gpu_decoder(fails)(JPEG, "frame"), decode_frame(JPEG, "frame"))


def test_other_formats_stay_on_the_cpu() -> None:
    file = encode_frame(FRAME, Codec.LOSSLESS)
    assert np.array_equal(gpu_decoder(brighter)(file, "frame"), FRAME)


def test_a_file_that_was_cut_short_is_refused_by_name() -> None:
    with pytest.raises(ObservationError, match=r"image\['front'\] is a damaged or truncated JPEG file"):
        gpu_decoder(lambda data: FRAME)(JPEG[: len(JPEG) // 2], "image['front']")


def test_the_difference_of_pixels_is_measured() -> None:
    assert pixel_difference(gpu_decoder(same)) == (0, 0.0)
    largest, share = pixel_difference(gpu_decoder(brighter))
    assert largest == 1
    assert share > 0.5
