"""Format and size of an encoded image, read from its first bytes without decoding a pixel.

Only what the limits and the decoders need; it refuses what a policy cannot take (alpha, CMYK, 16 bit, several frames).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from relay.protocol.errors import ObservationError
from relay.protocol.limits import MAX_DECODED_BYTES, MAX_IMAGE_SIDE


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What an encoded image says about itself.

    Attributes:
        format: `JPEG`, `PNG` or `WEBP`, the names Pillow uses.
        width, height: pixels.
        channels: 1 for grey, 3 for colour; both are decoded to three.
    """

    format: str
    width: int
    height: int
    channels: int

    @property
    def decoded_bytes(self) -> int:
        """Size of the decoded uint8 RGB frame."""
        return self.width * self.height * 3


def image_header(data: bytes, name: str = "image") -> ImageHeader:
    """Read the header of a JPEG, PNG or WebP file and check it against the limits.

    Raises:
        ObservationError: naming `name`, for anything else, a truncated header, more than 4,096 pixels a side, alpha,
            CMYK, 16 bit, or an animation.
    """
    try:
        if data.startswith(_JPEG_SIGNATURE):
            header = _jpeg_header(data)
        elif data.startswith(_PNG_SIGNATURE):
            header = _png_header(data)
        elif is_image_file(data):
            header = _webp_header(data)
        else:
            came = f"begins with the bytes {data[:8].hex(' ')}" if data else "is empty"
            raise _Refused(f"{came}; expected a JPEG, PNG or WebP file, or an (H, W, 3) uint8 RGB array")
        if not (0 < header.width <= MAX_IMAGE_SIDE and 0 < header.height <= MAX_IMAGE_SIDE):
            raise _Refused(f"is {header.width}x{header.height} pixels; expected 1 to {MAX_IMAGE_SIDE} a side")
        if header.decoded_bytes > MAX_DECODED_BYTES:
            raise _Refused(f"takes {header.decoded_bytes} bytes decoded; at most {MAX_DECODED_BYTES} are accepted")
    except _Refused as error:
        raise ObservationError(f"{name} {error}") from None
    except (IndexError, struct.error):
        raise ObservationError(f"{name} is a truncated image file: its header is incomplete") from None
    return header


def is_image_file(data: bytes) -> bool:
    """Whether `data` begins as a JPEG, PNG or WebP file does."""
    return data.startswith((_JPEG_SIGNATURE, _PNG_SIGNATURE)) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")


def pixels_only(data: bytes, image_format: str) -> bytes:
    """The same image without what a decoder would parse besides pixels: EXIF, text, colour profiles, later frames.

    `data` has passed `image_header`.
    """
    if image_format == "JPEG":
        segments = _jpeg_segments(data)
        kept = [data[start:end] for marker, start, end in segments if marker not in _JPEG_METADATA]
        return b"".join((data[:2], *kept, data[segments[-1][2] :]))
    if image_format == "PNG":
        kept = [data[start:end] for kind, start, end in _png_chunks(data) if kind in _PNG_PIXELS]
        return b"".join((_PNG_SIGNATURE, *kept))
    return data


class _Refused(Exception):
    """The predicate of the sentence that says why an image is refused."""


_JPEG_SIGNATURE: Final = b"\xff\xd8\xff"
# JFIF (0xE0) and Adobe (0xEE) stay: they say how the channels are to be read.
_JPEG_METADATA: Final = frozenset((*range(0xE1, 0xEE), 0xEF, 0xFE))
_JPEG_SCAN: Final = b"\xff\xda"
_JPEG_SEGMENT: Final = struct.Struct(">xBH")  # marker, length
_MAX_JPEG_SEGMENTS: Final = 256
_MAX_JPEG_SCANS: Final = 64
_MAX_JPEG_SCAN_PIXELS: Final = 128 * 1024 * 1024
"""Every scan of a progressive file goes over all pixels again: thousands of scans, or tens over a huge frame, cost
seconds. Encoders write about ten."""

_PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_PNG_PIXELS: Final = frozenset((b"IHDR", b"PLTE", b"IDAT", b"IEND"))
_PNG_CHUNK: Final = struct.Struct(">I4s")  # length of what follows, type
_MAX_PNG_CHUNKS: Final = 16_384


def _jpeg_header(data: bytes) -> ImageHeader:
    header: ImageHeader | None = None
    progressive = False
    segments = _jpeg_segments(data)
    for marker, start, _ in segments:
        if marker == 0xE2 and data[start + 4 : start + 8] == b"MPF\0":
            raise _Refused("holds several frames in one JPEG file; send each as its own file")
        if not 0xC0 <= marker <= 0xCF or marker in (0xC4, 0xC8, 0xCC):
            continue
        if header is not None:
            raise _Refused("is a damaged JPEG file: it has two frame headers")
        if marker > 0xC2:
            raise _Refused("is a lossless or arithmetic-coded JPEG file; expected baseline or progressive")
        depth, channels = data[start + 4], data[start + 9]
        if depth != 8:
            raise _Refused(f"has {depth} bits per sample; expected 8")
        if channels not in (1, 3):
            raise _Refused(f"is a JPEG file of {channels} channels; expected RGB or grey")
        header = ImageHeader("JPEG", _big(data, start + 7, 2), _big(data, start + 5, 2), channels)
        progressive = marker == 0xC2
    if header is None:
        raise _Refused("is a damaged JPEG file: it has no frame header before the first scan")
    # A first scan with all channels is all of a file that is not progressive: decoders read no further one.
    whole = not progressive and data[segments[-1][1] + 4] == header.channels
    scans = 1 if whole else data.count(_JPEG_SCAN)
    # One scan is bounded by the limit on the sides, which has its own words.
    if scans > _MAX_JPEG_SCANS or (scans > 1 and scans * header.width * header.height > _MAX_JPEG_SCAN_PIXELS):
        raise _Refused(f"is a JPEG file of {scans} scans over {header.width}x{header.height} pixels: too many")
    return header


def _jpeg_segments(data: bytes) -> list[tuple[int, int, int]]:
    """(marker, start, end) of each segment up to the header of the first scan, which is the last one."""
    segments: list[tuple[int, int, int]] = []
    position = 2
    for _ in range(_MAX_JPEG_SEGMENTS):
        if data[position] != 0xFF:
            raise _Refused(f"is a damaged JPEG file: no marker at byte {position}")
        marker, length = _JPEG_SEGMENT.unpack_from(data, position)
        if marker == 0xFF:  # padding before a marker
            position += 1
            continue
        end = position + 2 + length
        # Some markers have no length: to decoders, the next segment begins right behind them.
        if length < 2 or marker < 0xC0 or 0xD0 <= marker <= 0xD9:
            raise _Refused(f"is a damaged JPEG file: no segment at byte {position}")
        if end > len(data):
            raise IndexError
        segments.append((marker, position, end))
        if marker == 0xDA:
            return segments
        position = end
    raise _Refused(f"is a JPEG file of more than {_MAX_JPEG_SEGMENTS} segments before the first scan")


def _png_header(data: bytes) -> ImageHeader:
    if _part(data, 12, 4) != b"IHDR":
        raise _Refused("is a damaged PNG file: it does not begin with IHDR")
    depth, colour = data[24], data[25]
    if depth == 16:
        raise _Refused("has 16 bits per sample; expected 8")
    if colour in (4, 6):
        raise _Refused("has an alpha channel; expected RGB")
    if colour not in (0, 2, 3):
        raise _Refused(f"is a damaged PNG file: colour type {colour}")
    header = ImageHeader("PNG", _big(data, 16, 4), _big(data, 20, 4), 1 if colour == 0 else 3)
    if max(header.width, header.height) > MAX_IMAGE_SIDE:
        return header  # refused for its size, whatever follows
    for kind, _, _ in _png_chunks(data):
        if kind == b"tRNS":
            raise _Refused("has transparency; expected RGB")
        if kind == b"acTL":
            raise _Refused("is an animation; expected one frame")
    return header


def _png_chunks(data: bytes) -> list[tuple[bytes, int, int]]:
    """(type, start, end) of each chunk, from IHDR to IEND."""
    chunks: list[tuple[bytes, int, int]] = []
    position = len(_PNG_SIGNATURE)
    for _ in range(_MAX_PNG_CHUNKS):
        length, kind = _PNG_CHUNK.unpack_from(data, position)
        end = position + 12 + length
        if end > len(data):
            raise IndexError
        chunks.append((kind, position, end))
        if kind == b"IEND":
            return chunks
        position = end
    raise _Refused(f"is a PNG file of more than {_MAX_PNG_CHUNKS} chunks")


def _webp_header(data: bytes) -> ImageHeader:
    """The first chunk: lossy `VP8 `, lossless `VP8L`, or the extended header `VP8X` with flags and canvas size."""
    kind = _part(data, 12, 4)
    if kind == b"VP8 ":
        if _part(data, 23, 3) != b"\x9d\x01\x2a":
            raise _Refused("is a damaged WebP file: it does not begin with a key frame")
        return ImageHeader("WEBP", _little(data, 26, 2) & 0x3FFF, _little(data, 28, 2) & 0x3FFF, 3)
    if kind == b"VP8L":
        if data[20] != 0x2F:
            raise _Refused("is a damaged WebP file: no lossless signature")
        bits = _little(data, 21, 4)
        if bits >> 28 & 1:
            raise _Refused("has an alpha channel; expected RGB")
        return ImageHeader("WEBP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, 3)
    if kind == b"VP8X":
        if data[20] & 0x02:
            raise _Refused("is an animation; expected one frame")
        if data[20] & 0x10:
            raise _Refused("has an alpha channel; expected RGB")
        return ImageHeader("WEBP", _little(data, 24, 3) + 1, _little(data, 27, 3) + 1, 3)
    raise _Refused("is a damaged WebP file: no VP8, VP8L or VP8X chunk")


def _big(data: bytes, start: int, size: int) -> int:
    return int.from_bytes(_part(data, start, size), "big")


def _little(data: bytes, start: int, size: int) -> int:
    return int.from_bytes(_part(data, start, size), "little")


def _part(data: bytes, start: int, size: int) -> bytes:
    part = data[start : start + size]
    if len(part) < size:
        raise IndexError
    return part
