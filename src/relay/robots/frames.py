"""Camera frames as robots send them to (H, W, 3) uint8 RGB, without copies where the pixels stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from relay.protocol.errors import ObservationError
from relay.protocol.wording import quoted, shown

Frame = NDArray[np.uint8] | bytes | memoryview
"""(H, W, 3) uint8 RGB, or an image file that is decoded later."""

FORMS = ("channels_first", "float")
"""Forms of a frame that a robot may use besides (H, W, 3) uint8."""


def read_frame(value: Any, key: str, forms: Sequence[str]) -> Frame:
    """One frame as (H, W, 3) uint8 RGB; image files pass through.

    Leading axes of 1 and lists of one are taken off. Of the other `forms`, channels-first frames are transposed, and
    float ones multiplied by 255 and truncated, as in openpi: src/openpi/policies/droid_policy.py (`_parse_image`).

    Raises:
        ObservationError: naming the key, what came and which forms are taken.
    """
    while isinstance(value, (list, tuple)) and len(cast("list[Any]", value)) == 1:
        value = value[0]
    if isinstance(value, (bytes, memoryview)):
        return value
    if not isinstance(value, np.ndarray):
        raise ObservationError(f"{quoted(key)}: expected {expected(forms)}, got {shown(value)}")
    frame = cast("NDArray[Any]", value)
    while frame.ndim > 3 and frame.shape[0] == 1:
        frame = frame[0]
    is_float = frame.dtype.kind == "f" and "float" in forms
    if frame.ndim != 3 or frame.size == 0 or not (frame.dtype == np.uint8 or is_float):
        raise _unfit(frame, key, forms)
    if frame.shape[0] == 3 and "channels_first" in forms:
        if frame.shape[2] == 3:
            raise ObservationError(
                f"{quoted(key)}: a frame of shape {frame.shape} may be channels-first or channels-last; "
                "send one whose height and width are not 3"
            )
        frame = frame.transpose(1, 2, 0)
    if frame.shape[2] != 3:
        raise _unfit(frame, key, forms)
    return _from_float(frame, key) if is_float else frame


def expected(forms: Sequence[str]) -> str:
    """The forms of a frame that are taken, in words."""
    shapes = "(H, W, 3) or (3, H, W)" if "channels_first" in forms else "(H, W, 3)"
    values = "uint8 or float in [0, 1]" if "float" in forms else "uint8"
    return f"{shapes} {values}, RGB, or a complete JPEG, PNG or WebP file as bytes"


def _from_float(frame: NDArray[Any], key: str) -> NDArray[np.uint8]:
    low, high = float(frame.min()), float(frame.max())
    if not (low >= 0 and high <= 1):
        raise ObservationError(
            f"{quoted(key)}: float frames go from 0 to 1, this one from {low:g} to {high:g}; send 0 to 255 as uint8"
        )
    return (255 * frame).astype(np.uint8)


def _unfit(frame: NDArray[Any], key: str, forms: Sequence[str]) -> ObservationError:
    hint = ""
    if frame.ndim == 4:
        hint = "; one observation holds one frame per camera"
    elif frame.ndim == 3 and frame.shape[0] == 3 and "channels_first" not in forms:
        hint = "; transpose channels-first frames with .transpose(1, 2, 0)"
    return ObservationError(f"{quoted(key)}: expected {expected(forms)}, got {frame.shape} {frame.dtype}{hint}")
