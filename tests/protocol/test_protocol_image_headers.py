"""Sizes read from image headers, and the limits that hold before a pixel is decoded."""

import io
import re
import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from relay.protocol import images
from relay.protocol.errors import ObservationError
from relay.protocol.images import decode_frame, image_header


def saved(width: int, height: int, mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(buffer, **options)
    return buffer.getvalue()


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, *, colour: int = 2, depth: int = 8, more: bytes = b"") -> bytes:
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    pixels = png_chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + header + more + pixels + png_chunk(b"IEND", b"")


def segment(marker: int, content: bytes = b"") -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(content) + 2) + content


def jpeg(width: int = 16, height: int = 16, *, frame: int = 0xC0, depth: int = 8, channels: int = 3) -> bytes:
    content = struct.pack(">BHHB", depth, height, width, channels) + b"\x01\x11\x00" * channels
    return b"\xff\xd8" + segment(0xE0, b"JFIF\0") + segment(frame, content) + segment(0xDA, b"\x00") + b"\xff\xd9"


def riff(chunk: bytes, content: bytes) -> bytes:
    body = b"WEBP" + chunk + struct.pack("<I", len(content)) + content
    return b"RIFF" + struct.pack("<I", len(body)) + body


def extended_webp(width: int, height: int, flags: int = 0) -> bytes:
    return riff(
        b"VP8X", struct.pack("<I", flags) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    )


@pytest.mark.parametrize(
    ("options", "format", "channels"),
    [
        ({"format": "JPEG"}, "JPEG", 3),
        ({"format": "JPEG", "progressive": True}, "JPEG", 3),
        ({"format": "JPEG", "mode": "L"}, "JPEG", 1),
        ({"format": "PNG"}, "PNG", 3),
        ({"format": "PNG", "mode": "P"}, "PNG", 3),
        ({"format": "PNG", "mode": "L"}, "PNG", 1),
        ({"format": "WEBP"}, "WEBP", 3),
        ({"format": "WEBP", "lossless": True}, "WEBP", 3),
        ({"format": "WEBP", "exif": b"Exif\0\0MM\0*\0\0\0\x08"}, "WEBP", 3),
    ],
    ids=str,
)
@pytest.mark.parametrize(("width", "height"), [(37, 21), (1, 1), (4096, 2)])
def test_formats_and_sizes_are_read(options: dict[str, Any], format: str, channels: int, width: int, height: int):
    header = image_header(saved(width, height, **options))
    assert (header.format, header.width, header.height, header.channels) == (format, width, height, channels)
    assert header.decoded_bytes == width * height * 3


BOMBS: dict[str, tuple[bytes, str]] = {
    "PNG": (png(60_000, 60_000), "is 60000x60000 pixels; expected 1 to 4096 a side"),
    "PNG, cut after its header": (png(60_000, 60_000)[:33], "is 60000x60000 pixels"),
    "PNG of the largest size": (png(2**31 - 1, 2**31 - 1), "is 2147483647x2147483647 pixels"),
    "wide PNG": (png(4097, 1), "is 4097x1 pixels"),
    "JPEG": (jpeg(65_535, 65_535), "is 65535x65535 pixels"),
    "JPEG whose height comes later": (jpeg(16, 0), "is 16x0 pixels"),
    "WebP": (extended_webp(2**24, 2**24), "is 16777216x16777216 pixels"),
    "lossless WebP": (riff(b"VP8L", b"\x2f" + struct.pack("<I", 16_383 | 16_383 << 14)), "is 16384x16384 pixels"),
    "lossy WebP": (
        riff(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 16_383, 16_383)),
        "is 16383x16383 pixels",
    ),
}


@pytest.mark.parametrize(("data", "complaint"), BOMBS.values(), ids=BOMBS.keys())
def test_sizes_are_limited_before_decoding(data: bytes, complaint: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(images, "_opened", None)
    monkeypatch.setattr(images, "simplejpeg", None)
    with pytest.raises(ObservationError, match=re.escape(f"front {complaint}")):
        decode_frame(data, "front")


def test_a_large_canvas_around_a_small_frame_is_refused():
    frame = saved(8, 8, format="WEBP", lossless=True)
    data = extended_webp(4096, 4096) + frame[12:]
    data = data[:4] + struct.pack("<I", len(data) - 8) + data[8:]
    with pytest.raises(ObservationError, match="front is a damaged or truncated WEBP file"):
        decode_frame(data, "front")


REFUSED: dict[str, tuple[bytes, str]] = {
    "12-bit JPEG": (jpeg(depth=12), "has 12 bits per sample"),
    "lossless JPEG": (jpeg(frame=0xC3), "is a lossless or arithmetic-coded JPEG file"),
    "arithmetic JPEG": (jpeg(frame=0xC9), "is a lossless or arithmetic-coded JPEG file"),
    "two-channel JPEG": (jpeg(channels=2), "is a JPEG file of 2 channels"),
    "two frame headers": (
        jpeg()[:-2].replace(b"\xff\xda", b"\xff\xe1") + jpeg()[2:],
        "is a damaged JPEG file: it has two",
    ),
    "no frame header": (b"\xff\xd8" + segment(0xDA), "is a damaged JPEG file: it has no frame header"),
    "no marker": (b"\xff\xd8\xff\xe0\x00\x02\x00\x00", "is a damaged JPEG file: no marker at byte 6"),
    "no segment": (b"\xff\xd8\xff\xe0\x00\x01\x00", "is a damaged JPEG file: no segment at byte 2"),
    "marker without length": (
        b"\xff\xd8\xff\xd0" + jpeg(4096, 4096)[2:],
        "is a damaged JPEG file: no segment at byte 2",
    ),
    "stuffed byte": (b"\xff\xd8\xff\x00" + jpeg(4096, 4096)[2:], "is a damaged JPEG file: no segment at byte 2"),
    "endless segments": (b"\xff\xd8" + segment(0xE1) * 1_000_000, "is a JPEG file of more than 256 segments"),
    "endless padding": (b"\xff\xd8" + b"\xff" * 5_000_000, "is a JPEG file of more than 256 segments"),
    "endless scans": (jpeg() + b"\xff\xda" * 65, "is a JPEG file of 66 scans over 16x16 pixels: too many"),
    "endless progressive scans, of all channels": (
        jpeg(frame=0xC2).replace(segment(0xDA, b"\0"), segment(0xDA, b"\3")) + b"\xff\xda" * 65,
        "is a JPEG file of 66 scans over 16x16 pixels: too many",
    ),
    "some scans of a huge frame": (
        jpeg(4096, 4096) + b"\xff\xda" * 9,
        "is a JPEG file of 10 scans over 4096x4096 pixels: too many",
    ),
    "PNG without header": (
        b"\x89PNG\r\n\x1a\n" + png_chunk(b"IDAT", b""),
        "is a damaged PNG file: it does not begin with",
    ),
    "PNG of an unknown colour type": (png(4, 4, colour=5), "is a damaged PNG file: colour type 5"),
    "16-bit PNG": (png(4, 4, depth=16), "has 16 bits per sample"),
    "endless chunks": (png(4, 4, more=png_chunk(b"tEXt", b"") * 20_000), "is a PNG file of more than 16384 chunks"),
    "WebP of an unknown kind": (riff(b"VP9 ", b""), "is a damaged WebP file: no VP8"),
    "WebP without key frame": (riff(b"VP8 ", bytes(20)), "is a damaged WebP file: it does not begin with a key frame"),
    "lossless WebP without signature": (riff(b"VP8L", bytes(20)), "is a damaged WebP file: no lossless signature"),
    "animated WebP": (extended_webp(4, 4, flags=2), "is an animation"),
    "WebP with alpha": (extended_webp(4, 4, flags=16), "has an alpha channel"),
}


@pytest.mark.parametrize(("data", "complaint"), REFUSED.values(), ids=REFUSED.keys())
def test_headers_a_decoder_should_not_see_are_refused(data: bytes, complaint: str):
    with pytest.raises(ObservationError, match=re.escape(f"image {complaint}")):
        image_header(data)


@pytest.mark.parametrize(
    "data",
    [
        saved(9, 9, format="JPEG"),
        saved(9, 9, format="PNG"),
        saved(9, 9, format="WEBP"),
        saved(9, 9, format="WEBP", lossless=True),
        extended_webp(9, 9),
    ],
    ids=["JPEG", "PNG", "WebP", "lossless WebP", "extended WebP"],
)
def test_a_header_cut_anywhere_is_refused(data: bytes):
    for length in range(25):
        with pytest.raises(ObservationError, match=r"^front (is a truncated image file|begins with|is empty)"):
            image_header(data[:length], "front")


def test_reading_headers_takes_no_memory():
    data = saved(500, 500, format="PNG")
    tracemalloc.start()
    try:
        image_header(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize("marker", [b"\xff\xd0", b"\xff\x01", b"\xff\x00"], ids=["restart", "temporary", "stuffed"])
def test_no_second_header_hides_behind_a_marker_without_length(marker: bytes):
    """A decoder goes on right behind it, at 5,000 pixels; whoever takes the next bytes for its length, elsewhere."""
    large, small = jpeg(5000, 5000)[2:-2], jpeg()[2:]
    behind = int.from_bytes(large[:2], "big") - len(large)
    filling = segment(0xFE, bytes(60_000)) + segment(0xFE, bytes(behind - 60_004 - 2) + small)
    with pytest.raises(ObservationError, match="no segment at byte 2"):
        image_header(b"\xff\xd8" + marker + large + filling)
