"""Codecs, which keys hold images, and decoding: the pixels that come back, and the refusals that name the camera."""

import io
import re
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, JpegImagePlugin

from relay.protocol import images
from relay.protocol.errors import ObservationError
from relay.protocol.images import (
    Codec,
    decode_frame,
    decode_images,
    decoded_bytes,
    encode_frame,
    encode_images,
    image_header,
    one_by_one,
)
from relay.side_by_side import side_by_side

Frame = NDArray[np.uint8]
JPEG_CODECS = [codec for codec in Codec if codec.quality is not None]


def photo(height: int = 96, width: int = 128) -> Frame:
    """Smooth areas, edges and a little noise, as a camera gives."""
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    waves = [
        128 + 90 * np.sin(7 * x + 3 * y),
        120 + 80 * np.cos(5 * y - 2 * x),
        110 + 70 * np.sin(9 * x * y + 1),
    ]
    tiles = ((x * 8).astype(int) + (y * 6).astype(int)) % 2
    noise = np.random.default_rng(1).normal(0, 3, (height, width, 3))
    return np.clip(np.stack(waves, -1) + tiles[..., None] * [25, -18, 12] + noise, 0, 255).astype(np.uint8)


def saved(mode: str = "RGB", frame: Frame | None = None, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(photo() if frame is None else frame).convert(mode).save(buffer, **options)
    return buffer.getvalue()


def psnr(frame: Frame, other: Frame) -> float:
    return float(10 * np.log10(255**2 / np.mean((frame.astype(float) - other) ** 2)))


@pytest.fixture(params=["simplejpeg", "Pillow"])
def each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(images, "simplejpeg", None)
    return request.param


# ---- codecs -------------------------------------------------------------------------------------------------------


def test_the_codecs_and_their_qualities():
    assert {codec.name: codec.quality for codec in Codec} == {
        "RAW": None,
        "LOSSLESS": None,
        "JPEG_Q100": 100,
        "JPEG_Q98": 98,
        "JPEG_Q95": 95,
        "JPEG_Q92": 92,
        "JPEG_Q90": 90,
        "JPEG_Q85": 85,
        "JPEG_Q50": 50,
    }


def test_lossless_gives_back_every_pixel():
    noise = np.random.default_rng(0).integers(0, 256, (33, 47, 3), dtype=np.uint8)
    for frame in (photo(), noise, np.zeros((1, 1, 3), np.uint8)):
        np.testing.assert_array_equal(decode_frame(encode_frame(frame, Codec.LOSSLESS), "front"), frame)


@pytest.mark.parametrize("codec", JPEG_CODECS)
def test_each_jpeg_encoder_is_as_faithful_as_pillow(codec: Codec, monkeypatch: pytest.MonkeyPatch):
    frame = photo()
    with_simplejpeg = psnr(frame, decode_frame(encode_frame(frame, codec), "front"))
    monkeypatch.setattr(images, "simplejpeg", None)
    with_pillow = psnr(frame, decode_frame(encode_frame(frame, codec), "front"))
    assert abs(with_simplejpeg - with_pillow) < 0.6


@pytest.mark.parametrize("codec", [Codec.JPEG_Q95, Codec.JPEG_Q92])
def test_qualities_that_only_pillow_encodes_exactly_are_left_to_it(codec: Codec, monkeypatch: pytest.MonkeyPatch):
    encoded = encode_frame(photo(), codec)
    monkeypatch.setattr(images, "simplejpeg", None)
    assert encode_frame(photo(), codec) == encoded


@pytest.mark.parametrize("codec", JPEG_CODECS)
def test_colour_is_halved_only_below_quality_90(codec: Codec, each_backend: str):
    with Image.open(io.BytesIO(encode_frame(photo(), codec))) as image:
        sampling = JpegImagePlugin.get_sampling(image)
    assert sampling == (0 if (codec.quality or 0) >= 90 else 2)  # 4:4:4, 4:2:0


def test_smaller_qualities_give_smaller_files(each_backend: str):
    sizes = [len(encode_frame(photo(), codec)) for codec in JPEG_CODECS]
    assert sizes == sorted(sizes, reverse=True)


def test_red_stays_red():
    frame = np.zeros((16, 16, 3), np.uint8)
    frame[..., 0] = 255
    for codec in (Codec.LOSSLESS, Codec.JPEG_Q98, Codec.JPEG_Q92, Codec.JPEG_Q50):
        red, green, blue = decode_frame(encode_frame(frame, codec), "front")[8, 8].astype(int)
        assert red > 240
        assert max(green, blue) < 15


@pytest.mark.parametrize("codec", [Codec.LOSSLESS, Codec.JPEG_Q90])
def test_slices_are_encoded_as_they_look(codec: Codec, each_backend: str):
    frame = photo()[10:90:2, ::-1]
    assert not frame.flags.c_contiguous
    assert encode_frame(frame, codec) == encode_frame(frame.copy(), codec)


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        (np.zeros((4, 4, 4), np.uint8), "expected an (H, W, 3) uint8 RGB frame, got (4, 4, 4) uint8"),
        (np.zeros((4, 4), np.uint8), "expected an (H, W, 3) uint8 RGB frame, got (4, 4) uint8"),
        (np.zeros((4, 4, 3), np.float32), "expected an (H, W, 3) uint8 RGB frame, got (4, 4, 3) float32"),
        (np.zeros((0, 0, 3), np.uint8), "expected an (H, W, 3) uint8 RGB frame, got (0, 0, 3) uint8"),
        (np.zeros((1, 4097, 3), np.uint8), "frame is 4097x1 pixels; at most 4096 a side"),
    ],
)
def test_encode_frame_refuses_what_is_no_frame(frame: Any, complaint: str):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        encode_frame(frame, Codec.JPEG_Q90)


def test_encode_frame_refuses_raw():
    with pytest.raises(ValueError, match=r"Codec\.RAW sends arrays"):
        encode_frame(photo(), Codec.RAW)


# ---- which keys hold images ---------------------------------------------------------------------------------------


def test_frames_under_image_keys_are_encoded():
    frame = photo(8, 8)
    encoded = encode_images(
        {
            "image": {"base_0_rgb": frame},
            "images": {"cam_high": frame, "observation.images.front": frame},
            "video": {"ego": frame[None, None]},
            "observation/exterior_image_1_left": frame,
            "observation.images.front": frame,
            "video.ego": frame[None],
        },
        Codec.JPEG_Q90,
    )
    jpeg = encode_frame(frame, Codec.JPEG_Q90)
    assert encoded == {
        "image": {"base_0_rgb": jpeg},
        "images": {"cam_high": jpeg, "observation.images.front": jpeg},
        "video": {"ego": [[jpeg]]},
        "observation/exterior_image_1_left": jpeg,
        "observation.images.front": jpeg,
        "video.ego": [jpeg],
    }


def test_leading_axes_become_nested_lists():
    frames = np.stack([photo(8, 8)] * 6).reshape(2, 3, 8, 8, 3)
    encoded = encode_images({"video": {"ego": frames}}, Codec.LOSSLESS)["video"]["ego"]
    assert [[type(frame) for frame in row] for row in encoded] == [[bytes] * 3] * 2


def test_a_list_of_cameras_is_encoded_camera_by_camera():
    encoded = encode_images({"images": [photo(8, 8), photo(4, 6)]}, Codec.LOSSLESS)
    assert [decode_frame(data, "camera").shape for data in encoded["images"]] == [(8, 8, 3), (4, 6, 3)]


def test_nothing_else_is_encoded():
    observation: dict[Any, Any] = {
        b"image": photo(8, 8),
        "frame": photo(8, 8),
        "state": np.zeros((2, 2, 3), np.uint8),
        "state.images": photo(8, 8),
        "observation/joint_position": np.zeros(7),
        "observation/state": [0.5, 0.25],
        "image_mask": {"front": True},
        "prompt": "pick",
        "image": {"sent as JPEG": b"\xff\xd8\xff...", "absent": None},
    }
    encoded = encode_images(observation, Codec.JPEG_Q90)
    assert encoded == observation
    assert all(encoded[key] is observation[key] for key in ("frame", "state", "observation/joint_position"))


@pytest.mark.parametrize(
    "frame",
    [
        np.zeros((3, 48, 64), np.uint8),
        np.zeros((48, 64, 3), np.float32),
        np.full((48, 64, 3), 255.0),
        np.zeros((48, 64, 4), np.uint8),
        np.zeros((48, 64), np.uint8),
        np.zeros((0, 0, 3), np.uint8),
        np.zeros((0, 48, 64, 3), np.uint8),
    ],
    ids=lambda frame: f"{frame.shape} {frame.dtype}",
)
def test_other_frames_travel_unchanged_so_that_the_server_can_name_them(frame: Any):
    assert encode_images({"image": {"front": frame}}, Codec.JPEG_Q90)["image"]["front"] is frame


def test_raw_changes_nothing():
    observation = {"image": {"front": photo(8, 8)}}
    assert encode_images(observation, Codec.RAW)["image"]["front"] is observation["image"]["front"]


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.LOSSLESS, Codec.JPEG_Q90])
def test_the_observation_is_never_changed(codec: Codec):
    frame = photo(8, 8)
    observation = {"image": {"front": frame}, "images": [frame], "state": np.zeros(3)}
    encoded = encode_images(observation, codec)
    assert encoded is not observation
    assert observation["image"]["front"] is frame
    assert observation["images"][0] is frame


def test_a_frame_too_large_to_send_is_named():
    with pytest.raises(ValueError, match=re.escape("image['front']: frame is 4097x1 pixels")):
        encode_images({"image": {"front": np.zeros((1, 4097, 3), np.uint8)}}, Codec.JPEG_Q90)


def test_decode_images_gives_back_what_encode_images_took():
    frame = photo(8, 8)
    observation: dict[str, Any] = {
        "image": {"front": frame},
        "video": {"ego": np.stack([frame] * 6).reshape(2, 3, 8, 8, 3)},
        "images": [frame, photo(4, 6)],
        "observation/image": frame,
        "state": np.zeros(3),
    }
    decoded = decode_images(encode_images(observation, Codec.LOSSLESS))
    np.testing.assert_equal(decoded, observation)


def test_decode_images_leaves_other_values_alone():
    observation = {
        "photo": encode_frame(photo(8, 8), Codec.JPEG_Q90),
        "image": {"front": photo(8, 8), "note": b"no image"},
        "images": [photo(8, 8), photo(8, 8)],
        "prompt": "pick",
    }
    decoded = decode_images(observation)
    assert decoded["photo"] is observation["photo"]
    assert decoded["image"]["front"] is observation["image"]["front"]
    assert decoded["image"]["note"] == b"no image"
    assert decoded["images"] is observation["images"]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_decode_images_takes_any_bytes(kind: type):
    jpeg = encode_frame(photo(8, 8), Codec.JPEG_Q90)
    decoded = decode_images({"image": {"front": kind(jpeg)}})
    np.testing.assert_array_equal(decoded["image"]["front"], decode_frame(jpeg, "front"))


def test_decode_images_names_the_camera():
    with pytest.raises(ObservationError, match=re.escape("images['cam'][1] is a truncated image file")):
        decode_images({"images": {"cam": [encode_frame(photo(8, 8), Codec.JPEG_Q90), b"\xff\xd8\xff\xe0"]}})


# ---- decoding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(96, 128), (17, 31), (1, 1), (8, 7)])
@pytest.mark.parametrize(
    "options",
    [
        {"quality": 90, "subsampling": 0},
        {"quality": 85, "subsampling": 1},
        {"quality": 50, "subsampling": 2},
        {"quality": 90, "progressive": True},
        {"quality": 90, "keep_rgb": True},
        {"quality": 90, "comment": "taken today", "exif": b"Exif\0\0MM\0*\0\0\0\x08"},
    ],
    ids=str,
)
def test_the_jpeg_decoders_agree_on_every_pixel(
    size: tuple[int, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    data = saved(frame=photo(*size), format="JPEG", **options)
    frame = decode_frame(data, "front")
    assert frame.shape == (*size, 3)
    monkeypatch.setattr(images, "simplejpeg", None)
    np.testing.assert_array_equal(decode_frame(data, "front"), frame)


@pytest.mark.parametrize("options", [{"format": "JPEG"}, {"format": "PNG"}], ids=str)
def test_grey_becomes_rgb(options: dict[str, Any], each_backend: str):
    data = saved("L", **options)
    frame = decode_frame(data, "front")
    np.testing.assert_array_equal(frame, np.repeat(frame[..., :1], 3, axis=2))
    np.testing.assert_array_equal(frame[..., 0], np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("mode", ["RGB", "P", "1"])
def test_png_files_give_the_pixels_that_pillow_gives(mode: str):
    data = saved(mode, format="PNG")
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(decode_frame(data, "front"), expected)


def test_lossy_webp_files_are_decoded():
    data = saved(format="WEBP", quality=80)
    np.testing.assert_array_equal(decode_frame(data, "front"), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_exif_rotation_is_ignored(each_backend: str):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    assert decode_frame(saved(format="JPEG", exif=exif), "front").shape == (96, 128, 3)


def test_damaged_metadata_does_not_matter(each_backend: str):
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x09\x01\x0f\0\x02\0\xff\xff\xff\0\0\0\x10"
    data = saved(format="JPEG", exif=exif)
    assert decode_frame(data, "front").shape == (96, 128, 3)


def test_compressed_text_is_not_inflated():
    plain = saved(format="PNG")
    text = b"note\0\0" + zlib.compress(bytes(50_000_000))
    chunk = struct.pack(">I", len(text)) + b"zTXt" + text + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    np.testing.assert_array_equal(decode_frame(plain[:33] + chunk + plain[33:], "front"), decode_frame(plain, "front"))


def test_frames_after_the_pixels_do_not_matter():
    plain = saved(format="PNG")
    chunk = struct.pack(">I", 4) + b"fcTL" + b"\0" * 4 + struct.pack(">I", zlib.crc32(b"fcTL" + b"\0" * 4))
    np.testing.assert_array_equal(decode_frame(plain[:-12] + chunk + plain[-12:], "front"), photo())


def several(format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    first, second = Image.fromarray(photo()), Image.fromarray(photo()[::-1])
    first.save(buffer, format=format, save_all=True, append_images=[second], **options)
    return buffer.getvalue()


REFUSED: dict[str, tuple[bytes, str]] = {
    "text": (b"hello world!", "begins with the bytes 68 65 6c 6c 6f 20 77 6f; expected a JPEG, PNG or WebP file"),
    "nothing": (b"", "is empty; expected a JPEG, PNG or WebP file"),
    "GIF": (saved("P", format="GIF"), "begins with the bytes 47 49 46 38"),
    "PNG with alpha": (saved("RGBA", format="PNG"), "has an alpha channel; expected RGB"),
    "grey PNG with alpha": (saved("LA", format="PNG"), "has an alpha channel"),
    "PNG with a transparent colour": (saved("P", format="PNG", transparency=0), "has transparency"),
    "animated PNG": (several("PNG"), "is an animation"),
    "WebP with alpha": (saved("RGBA", frame=np.full((9, 9, 4), 7, np.uint8), format="WEBP"), "has an alpha channel"),
    "lossless WebP with alpha": (
        saved("RGBA", frame=np.full((9, 9, 4), 7, np.uint8), format="WEBP", lossless=True),
        "has an alpha channel",
    ),
    "animated WebP": (several("WEBP"), "is an animation"),
    "CMYK JPEG": (saved("CMYK", format="JPEG"), "is a JPEG file of 4 channels; expected RGB or grey"),
    "two JPEG frames": (several("MPO"), "holds several frames in one JPEG file"),
}


@pytest.mark.parametrize(("data", "complaint"), REFUSED.values(), ids=REFUSED.keys())
def test_images_a_policy_cannot_take_are_refused_by_their_header(data: bytes, complaint: str):
    with pytest.raises(ObservationError, match=re.escape(f"image['front'] {complaint}")):
        image_header(data, "image['front']")
    with pytest.raises(ObservationError, match=re.escape(f"image['front'] {complaint}")):
        decode_frame(data, "image['front']")


@pytest.mark.parametrize("options", [{"format": "JPEG"}, {"format": "PNG"}, {"format": "WEBP"}], ids=str)
@pytest.mark.parametrize("share", [0.001, 0.02, 0.5, 0.9])
def test_truncated_files_are_refused(options: dict[str, Any], share: float, each_backend: str):
    data = saved(**options)
    cut = data[: max(12, int(len(data) * share))]
    with pytest.raises(ObservationError, match=r"^front is a (damaged or )?truncated"):
        decode_frame(cut, "front")


def test_a_decoder_that_fails_oddly_is_a_refused_observation(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise KeyError("tile")

    monkeypatch.setattr(images, "_opened", fail)
    with pytest.raises(ObservationError, match=r"^front is a damaged or truncated PNG file$"):
        decode_frame(saved(format="PNG"), "front")


def test_decoded_bytes_are_known_from_the_headers():
    jpeg, lossless = encode_frame(photo(), Codec.JPEG_Q90), encode_frame(photo(10, 20), Codec.LOSSLESS)
    assert decoded_bytes(jpeg) == 96 * 128 * 3
    assert decoded_bytes([jpeg, [lossless]]) == 96 * 128 * 3 + 600
    assert decoded_bytes(photo()) == 96 * 128 * 3
    assert decoded_bytes([]) == 0


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("frame.jpg", "image['front'] is 'frame.jpg'; expected an (H, W, 3) uint8 RGB array"),
        (None, "image['front'] is nil"),
        ({"data": b""}, "image['front'] is a map of 1 items"),
        ([b"GIF89a"], "image['front'][0] begins with the bytes 47 49 46 38 39 61"),
    ],
)
def test_decoded_bytes_names_what_holds_no_image(value: Any, complaint: str):
    with pytest.raises(ObservationError, match=re.escape(complaint)):
        decoded_bytes(value, "image['front']")


# ---- fuzz ---------------------------------------------------------------------------------------------------------

SMALL = photo(12, 16)
FILES = [
    encode_frame(SMALL, Codec.LOSSLESS),
    encode_frame(SMALL, Codec.JPEG_Q90),
    saved(frame=SMALL, format="PNG"),
    saved(frame=SMALL, format="WEBP"),
    saved(frame=SMALL, format="JPEG", progressive=True, exif=b"Exif\0\0MM\0*\0\0\0\x08"),
    saved("P", frame=SMALL, format="PNG"),
]


@pytest.mark.parametrize("file", FILES, ids=range(len(FILES)))
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_files_are_decoded_or_refused(file: bytes, each_backend: str, data: st.DataObject):
    damaged = bytearray(file)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, min(len(file), 300) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(len(file) // 2, len(file)))])
    for candidate in (bytes(damaged), cut):
        frame = decoded_or_refused(candidate)
        assert frame is None or frame.nbytes == decoded_bytes(candidate)


def decoded_or_refused(data: bytes) -> Frame | None:
    try:
        return decode_frame(data, "front")
    except ObservationError:
        return None


def itself() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize("convert", [lambda value: encode_images(value, Codec.JPEG_Q90), decode_images])
@pytest.mark.parametrize("key", ["image", "observation/wrist_image_left"])
def test_a_list_of_frames_that_holds_itself_is_refused_with_its_key(convert: Any, key: str):
    with pytest.raises(ValueError, match=rf"^{key}.*: nested deeper than 16 levels"):
        convert({key: itself()})


@pytest.mark.parametrize("frames", [256, 257])
def test_one_camera_has_at_most_256_encoded_frames(frames: int):
    frame = encode_frame(np.zeros((2, 2, 3), np.uint8), Codec.JPEG_Q90)
    clip = [[frame] * 200, [frame] * (frames - 200)]
    if frames == 256:
        assert decoded_bytes(clip, "video") == 256 * 12
    else:
        with pytest.raises(ObservationError, match="video holds 257 frames; at most 256 are accepted"):
            decoded_bytes(clip, "video")


@pytest.mark.parametrize(
    ("codec", "side", "several_at_once"),
    [
        (Codec.LOSSLESS, 224, True),
        (Codec.LOSSLESS, 96, False),
        (Codec.JPEG_Q90, 224, False),
        (Codec.JPEG_Q90, 720, True),
    ],
)
def test_frames_are_encoded_as_the_caller_says_where_each_takes_long(codec: Codec, side: int, several_at_once: bool):
    lengths: list[int] = []

    def each(work: Any, items: Any) -> list[Any]:
        lengths.append(len(items))
        return one_by_one(work, items)

    observation = {"image": {"front": photo(side, side), "wrist": photo(side, side)}, "state": np.zeros(3)}
    encoded = encode_images(observation, codec, each)
    assert encoded["image"] == encode_images(observation, codec)["image"]
    assert lengths == ([2] if several_at_once else [])


def test_frames_are_decoded_as_the_caller_says():
    lengths: list[int] = []

    def each(work: Any, items: Any) -> list[Any]:
        lengths.append(len(items))
        return one_by_one(work, items)

    frame = encode_frame(photo(), Codec.JPEG_Q90)
    decoded = decode_images({"image": {"front": frame, "clip": [frame, frame]}, "prompt": "go"}, each)
    assert lengths == [3]
    assert {name: value.shape for name, value in decoded["image"].items()} == {
        "front": (96, 128, 3),
        "clip": (2, 96, 128, 3),
    }


def test_the_first_of_several_bad_frames_is_named():
    frame = encode_frame(photo(), Codec.JPEG_Q90)
    cut = frame[: len(frame) // 2]
    with pytest.raises(ObservationError, match=r"^image\['left'\] is a damaged"):
        decode_images({"image": {"front": frame, "left": cut, "right": cut}}, side_by_side)
