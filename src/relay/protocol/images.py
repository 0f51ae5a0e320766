"""Camera frames as bytes and back: the codecs, which keys hold images, and decoding that checks before it spends.

It knows no model: what size or how many cameras a policy takes is decided elsewhere.
"""

from __future__ import annotations

import enum
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from relay.protocol.errors import ObservationError
from relay.protocol.image_header import ImageHeader, image_header, is_image_file, pixels_only
from relay.protocol.limits import MAX_DEPTH, MAX_FRAMES, MAX_IMAGE_SIDE
from relay.protocol.wording import child_path, shown

try:
    import simplejpeg  # pyright: ignore[reportMissingTypeStubs]
except ImportError:  # Pillow does the same, more slowly
    simplejpeg = None

__all__ = [
    "Codec",
    "Each",
    "ImageHeader",
    "decode_frame",
    "decode_images",
    "decoded_bytes",
    "encode_frame",
    "encode_images",
    "image_header",
    "one_by_one",
]


class Codec(enum.Enum):
    """How frames travel: as arrays, as lossless WebP, or as JPEG of a quality.

    JPEG keeps full colour resolution (4:4:4) at quality 90 and above and halves it (4:2:0) below.
    """

    RAW = "raw"
    LOSSLESS = "lossless"
    JPEG_Q100 = "jpeg_q100"
    JPEG_Q98 = "jpeg_q98"
    JPEG_Q95 = "jpeg_q95"
    JPEG_Q92 = "jpeg_q92"
    JPEG_Q90 = "jpeg_q90"
    JPEG_Q85 = "jpeg_q85"
    JPEG_Q50 = "jpeg_q50"

    @property
    def quality(self) -> int | None:
        """JPEG quality, None for `RAW` and `LOSSLESS`."""
        return int(self.value[6:]) if self.value.startswith("jpeg_q") else None


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Each(Protocol):
    """How the frames of one observation are worked on: one by one, or several at once."""

    def __call__(self, work: Callable[[_Item], _Result], items: Sequence[_Item], /) -> list[_Result]: ...


def one_by_one(work: Callable[[_Item], _Result], items: Sequence[_Item], /) -> list[_Result]:
    """Each after the other, on the caller's thread."""
    return [work(item) for item in items]


def encode_images(observation: Mapping[str, Any], codec: Codec, each: Each = one_by_one) -> dict[str, Any]:
    """Encode the frames of an observation; the observation itself is left as it is.

    uint8 arrays `(..., H, W, 3)` under `image`, `images`, `video` and under keys beginning with `observation/`,
    `observation.images` or `video.` become bytes, in lists nested as the leading axes. Everything else, bytes
    included, passes through.

    Args:
        each: how frames are encoded that take half a millisecond or more.

    Raises:
        ValueError: naming the key, for a frame of more than 4,096 pixels a side or nesting deeper than 16 levels.
    """
    if codec is Codec.RAW:
        return dict(observation)

    def encode(named: tuple[NDArray[np.uint8], str]) -> bytes:
        frame, name = named
        try:
            return encode_frame(frame, codec)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    frames = _found(observation, _encode_slot)
    takes_long = all(frame.size >= _TAKES_LONG.get(codec, _LARGE) for frame, _ in frames)
    files = iter((each if takes_long else one_by_one)(encode, frames))
    return _replaced(observation, _encode_slot, lambda _value, _name: next(files))


def decode_images(observation: Mapping[str, Any], each: Each = one_by_one) -> dict[str, Any]:
    """Decode the encoded frames of an observation, for a server that takes arrays only.

    Lists of encoded frames become one array with a leading axis, if the frames are of one size.

    Args:
        each: how the frames are decoded.

    Raises:
        ObservationError: naming the key, for an image that cannot be decoded.
    """
    files = _found(observation, _decode_slot)
    if not files:
        return dict(observation)
    frames = iter(each(lambda named: decode_frame(*named), files))
    return _replaced(observation, _decode_slot, lambda _value, _name: next(frames))


def _found(observation: Mapping[str, Any], slot: _Slot) -> list[tuple[Any, str]]:
    """What a walk through the image slots would replace, each with its name."""
    found: list[tuple[Any, str]] = []
    _replaced(observation, slot, lambda value, name: found.append((value, name)))
    return found


def _replaced(observation: Mapping[str, Any], slot: _Slot, replace: Callable[[Any, str], Any]) -> dict[str, Any]:
    return {key: slot(value, key, replace) if is_image_key(key) else value for key, value in observation.items()}


def is_image_key(key: object) -> bool:
    """Whether frames are expected under this top-level key of an observation."""
    return isinstance(key, str) and (key in _IMAGE_KEYS or key.startswith(_IMAGE_PREFIXES))


_IMAGE_KEYS: Final = frozenset(("image", "images", "video"))
_IMAGE_PREFIXES: Final = ("observation/", "observation.images", "video.")


def encode_frame(frame: NDArray[np.uint8], codec: Codec) -> bytes:
    """Encode one `(H, W, 3)` uint8 RGB frame as a JPEG or WebP file.

    Raises:
        ValueError: for `Codec.RAW`, another shape or dtype, or more than 4,096 pixels a side.
    """
    if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8 or 0 in frame.shape:
        raise ValueError(f"expected an (H, W, 3) uint8 RGB frame, got {frame.shape} {frame.dtype}")
    if max(frame.shape) > MAX_IMAGE_SIDE:
        raise ValueError(f"frame is {frame.shape[1]}x{frame.shape[0]} pixels; at most {MAX_IMAGE_SIDE} a side")
    frame = np.ascontiguousarray(frame)
    if codec is Codec.LOSSLESS:
        return _saved(frame, format="WEBP", lossless=True, method=0, quality=0, exact=True)
    quality = codec.quality
    if quality is None:
        raise ValueError("Codec.RAW sends arrays; it has no encoded form")
    full_colour = quality >= 90
    # Below 96 libjpeg-turbo's other interface takes a faster, less exact transform: 0.5 dB worse at 95, 0.1 at 90.
    if simplejpeg is not None and quality not in (92, 95):
        return simplejpeg.encode_jpeg(frame, quality, "RGB", "444" if full_colour else "420", fastdct=False)
    return _saved(frame, format="JPEG", quality=quality, subsampling=0 if full_colour else 2)


def _saved(frame: NDArray[np.uint8], **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, **options)
    return buffer.getvalue()


def decode_frame(data: bytes, name: str) -> NDArray[np.uint8]:
    """Decode one JPEG, PNG or WebP file to `(H, W, 3)` uint8 RGB; grey becomes RGB, EXIF rotation is ignored.

    Raises:
        ObservationError: naming `name`, for an image refused by its header, truncated or damaged.
    """
    header = image_header(data, name)
    try:
        if header.format == "JPEG" and simplejpeg is not None:
            frame = simplejpeg.decode_jpeg(data, "RGB")
        else:
            frame = _opened(pixels_only(data, header.format), header.format)
    except Exception as error:  # decoders raise whatever their parsers raise
        raise ObservationError(f"{name} is a damaged or truncated {header.format} file") from error
    if frame.shape != (header.height, header.width, 3):
        raise ObservationError(f"{name} is a damaged {header.format} file: its pixels differ from its header in size")
    return frame


def _opened(data: bytes, image_format: str) -> NDArray[np.uint8]:
    image: Any = Image.open(io.BytesIO(data), formats=[image_format])
    with image:
        return np.asarray(image.convert("RGB"))


def decoded_bytes(value: Any, name: str = "image") -> int:
    """Memory that an image slot takes once decoded, from the headers alone: bytes, lists of bytes, or an array.

    Raises:
        ObservationError: naming `name`, as `image_header` does, or for a value that holds no image.
    """
    if isinstance(value, bytes):
        return image_header(value, name).decoded_bytes
    if isinstance(value, np.ndarray):
        return cast("NDArray[Any]", value).nbytes
    if isinstance(value, (list, tuple)):
        parts = cast("list[Any]", value)
        frames = _count_frames(parts)
        if frames > MAX_FRAMES:
            raise ObservationError(f"{name} holds {frames} frames; at most {MAX_FRAMES} are accepted")
        return sum(decoded_bytes(part, child_path(name, index)) for index, part in enumerate(parts))
    raise ObservationError(
        f"{name} is {shown(value)}; expected an (H, W, 3) uint8 RGB array or the bytes of a JPEG, PNG or WebP file"
    )


def _count_frames(parts: Any) -> int:
    return sum(_count_frames(part) if isinstance(part, (list, tuple)) else 1 for part in parts)


_Slot: TypeAlias = Callable[[Any, str, Callable[[Any, str], Any]], Any]
"""Walks through one slot's value and has each frame replaced."""


def _encode_slot(value: Any, name: str, replace: Callable[[Any, str], Any], depth: int = 1) -> Any:
    _check_depth(name, depth)
    if isinstance(value, dict):
        return {
            key: _encode_slot(part, child_path(name, key), replace, depth + 1)
            for key, part in cast("dict[Any, Any]", value).items()
        }
    if isinstance(value, (list, tuple)):
        parts = cast("list[Any]", value)
        return [_encode_slot(part, child_path(name, index), replace, depth + 1) for index, part in enumerate(parts)]
    if not isinstance(value, np.ndarray):
        return value
    array = cast("NDArray[Any]", value)
    if array.dtype != np.uint8 or array.ndim < 3 or array.shape[-1] != 3 or array.size == 0:
        return array
    if array.ndim > 3:
        return [_encode_slot(part, child_path(name, index), replace, depth + 1) for index, part in enumerate(array)]
    return replace(array, name)


_LARGE: Final = 3 * 480 * 640
_TAKES_LONG: Final = {Codec.LOSSLESS: 3 * 160 * 160}
"""Values of a frame that takes half a millisecond to encode; what takes less is not worth waking another core."""


def _decode_slot(value: Any, name: str, replace: Callable[[Any, str], Any], depth: int = 1) -> Any:
    _check_depth(name, depth)
    if isinstance(value, dict):
        return {
            key: _decode_slot(part, child_path(name, key), replace, depth + 1)
            for key, part in cast("dict[Any, Any]", value).items()
        }
    if isinstance(value, (list, tuple)):
        parts = cast("list[Any]", value)
        decoded = [_decode_slot(part, child_path(name, index), replace, depth + 1) for index, part in enumerate(parts)]
        return parts if all(new is old for new, old in zip(decoded, parts, strict=True)) else _stacked(decoded)
    if isinstance(value, _BYTES_LIKE) and is_image_file(bytes(value)):
        return replace(bytes(value), name)
    return value


def _check_depth(name: str, depth: int) -> None:
    """A list may hold itself."""
    if depth > MAX_DEPTH:
        raise ObservationError(f"{name}: nested deeper than {MAX_DEPTH} levels")


def _stacked(parts: list[Any]) -> Any:
    """Frames of one size as one array; others stay a list."""
    frames = [cast("NDArray[np.uint8]", part) for part in parts if isinstance(part, np.ndarray)]
    if len(frames) < len(parts) or len({(frame.shape, frame.dtype) for frame in frames}) != 1:
        return parts
    return np.stack(frames)


_BYTES_LIKE: Final[tuple[Any, ...]] = (bytes, bytearray, memoryview)
