"""Camera frames on the CPU: from an image slot to pixels of the size a model wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from relay.protocol.errors import ObservationError
from relay.protocol.image_header import image_header, is_image_file
from relay.protocol.images import decode_frame, one_by_one
from relay.side_by_side import side_by_side

EXPECTED = "expected (H, W, 3) uint8 RGB, or a complete JPEG, PNG or WebP file as bytes"
BATCH_ADVICE = (
    "an observation holds one frame of each camera: for a batch, open one connection per robot, "
    "and the server merges their requests"
)

Decode: TypeAlias = Callable[[bytes, str], NDArray[np.uint8]]
"""Encoded bytes and the slot's name for messages to (H, W, 3) uint8 RGB, as `decode_frame`."""


def read_frame(value: Any, name: str, decode: Decode = decode_frame) -> NDArray[np.uint8]:
    """The pixels of one image slot, (H, W, 3) uint8 RGB.

    Args:
        value: an array or an encoded image.
        name: the slot for error messages, such as `image['base_0_rgb']`.
        decode: what decodes an encoded image.

    Raises:
        ObservationError: for any other type, shape or dtype, and for images that cannot be decoded.
    """
    if isinstance(value, bytes | memoryview):
        return decode(bytes(value), name)
    if isinstance(value, list) and (shape := _shape(value, name)):
        raise ObservationError(f"{name}: {EXPECTED}, got {shape} as a list of frames; {BATCH_ADVICE}")
    if not isinstance(value, np.ndarray):
        raise ObservationError(f"{name}: {EXPECTED}, got {type(value).__name__}")
    if value.dtype != np.uint8 or value.ndim != 3 or value.shape[-1] != 3 or value.size == 0:
        hint = ""
        if value.ndim == 4:
            hint = f"; {BATCH_ADVICE}"
        elif value.ndim == 3 and value.shape[0] == 3:
            hint = "; transpose channels-first frames with .transpose(1, 2, 0)"
        raise ObservationError(f"{name}: {EXPECTED}, got {value.shape} {value.dtype}{hint}")
    return value


def each_frame(work: Callable[[Any, str], _Result], frames: Mapping[str, Any]) -> list[_Result]:
    """`work(value, name)` for the frames of one observation, several at once where it takes long enough.

    Args:
        work: decodes or resizes one frame.
        frames: image slots by their names for messages.

    Raises:
        ObservationError: what `work` raised for the first frame that failed.
    """
    each = side_by_side if any(_takes_long(value) for value in frames.values()) else one_by_one
    return each(lambda named: work(named[1], named[0]), list(frames.items()))


def _takes_long(value: Any) -> bool:
    """Whether it has to be decoded, or is larger than models take it."""
    return not isinstance(value, np.ndarray) or value.nbytes > _USUAL_BYTES


_USUAL_BYTES: Final = 3 * 256 * 256
_Result = TypeVar("_Result")


def _shape(frames: list[Any], name: str) -> tuple[int, ...]:
    """The shape of an array that came as a list of frames, as our clients send what they compress; else empty."""
    lengths: list[int] = []
    part: Any = frames
    while isinstance(part, list) and part:
        lengths.append(len(part))
        part = part[0]
    if isinstance(part, bytes) and is_image_file(part):
        header = image_header(part, name)
        return (*lengths, header.height, header.width, 3)
    return (*lengths, *part.shape) if isinstance(part, np.ndarray) else ()


def resize_with_pad(frame: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Fit a frame into (height, width, 3), keeping its aspect ratio and padding with black, centred.

    The same steps as openpi's server (openpi: packages/openpi-client/src/openpi_client/image_tools.py): Pillow's
    antialiased bilinear filter, sizes truncated, the odd padding pixel at the bottom or right.
    """
    if frame.shape[:2] == (height, width):
        return frame
    ratio = max(frame.shape[1] / width, frame.shape[0] / height)
    new_height, new_width = max(1, int(frame.shape[0] / ratio)), max(1, int(frame.shape[1] / ratio))
    resized = Image.fromarray(frame).resize((new_width, new_height), Image.Resampling.BILINEAR)
    padded = np.zeros((height, width, 3), np.uint8)
    top, left = (height - new_height) // 2, (width - new_width) // 2
    padded[top : top + new_height, left : left + new_width] = np.asarray(resized)
    return padded
