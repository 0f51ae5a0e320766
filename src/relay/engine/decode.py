"""What decodes JPEG frames: the CPU, or the GPU where that is asked for, or where it is faster and gives equal pixels.

For frames of robots' cameras the CPU is fast (0.15 ms for 224 pixels) and its decoders agree bit for bit, which a GPU's
need not. torchvision or nvidia-nvimgcodec is used for the GPU, whichever is installed.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from relay.engine.frames import Decode
from relay.engine.weights import CheckpointError
from relay.protocol.image_header import image_header
from relay.protocol.images import decode_frame

DECODERS = ("auto", "cpu", "gpu")

GpuJpeg: TypeAlias = Callable[[bytes], NDArray[np.uint8]]
"""JPEG bytes to (H, W, 3) uint8 RGB on the CPU, decoded on a GPU; raises for what it cannot decode."""

TRIAL_SIZES = ((224, 224), (640, 480), (1280, 720), (1920, 1080))
_ROUNDS = 5


def choose_decoder(choice: str, device: torch.device, gpu: GpuJpeg | None = None) -> tuple[Decode, str | None]:
    """The decoder to use, and a remark if it can give other pixels than the CPU's.

    Args:
        choice: `cpu`; `gpu`; or `auto`: the GPU from the size on at which it is faster, if its pixels are the CPU's.
        gpu: a decoder on the GPU, for tests; by default one of the installed libraries.

    Raises:
        CheckpointError: `gpu` where there is no GPU or no library.
    """
    if choice == "cpu" or (choice == "auto" and device.type != "cuda" and gpu is None):
        return decode_frame, None
    gpu = gpu or installed(device)
    if gpu is None:
        if choice == "auto":
            return decode_frame, None
        raise CheckpointError("--decode gpu needs a CUDA device, and torchvision or nvidia-nvimgcodec installed")
    largest, share = pixel_difference(gpu_decoder(gpu))
    if choice == "gpu":
        remark = (
            f"--decode gpu: its pixels differ from the CPU's by up to {largest} grey levels, in {share:.1%} of values"
        )
        return gpu_decoder(gpu), remark if largest else None
    pixels = faster_from(gpu) if largest == 0 else None
    return (decode_frame if pixels is None else gpu_decoder(gpu, pixels)), None


def gpu_decoder(gpu: GpuJpeg, pixels: int = 0) -> Decode:
    """A decoder that takes the GPU for whole JPEG files of at least so many pixels, else the CPU, also for errors."""

    def decode(data: bytes, name: str) -> NDArray[np.uint8]:
        header = image_header(data, name)
        # A GPU's decoder fills up a file that was cut short; the CPU's refuses it by name.
        whole = header.format == "JPEG" and data.rstrip(b"\0").endswith(b"\xff\xd9")
        if whole and header.height * header.width >= pixels:
            try:
                frame = gpu(data)
            except Exception:  # whatever the library raises, the CPU's decoder says what is wrong with the file
                return decode_frame(data, name)
            if frame.shape == (header.height, header.width, 3):
                return frame
        return decode_frame(data, name)

    return decode


def pixel_difference(decode: Decode) -> tuple[int, float]:
    """Largest difference from the CPU's pixels over files of every usual kind, and the share of values that differ."""
    differences = [
        np.abs(decode(data, "trial").astype(np.int16) - decode_frame(data, "trial"))
        for size in TRIAL_SIZES[:2]
        for data in trial(size)
    ]
    values = np.concatenate([difference.ravel() for difference in differences])
    return int(values.max()), float((values > 0).mean())


def faster_from(gpu: GpuJpeg) -> int | None:
    """The number of pixels from which on the GPU is faster at every size that is tried; None if it never is."""
    threshold: int | None = None
    for size in reversed(TRIAL_SIZES):
        data = next(iter(trial(size)))
        if _seconds(lambda data=data: gpu(data)) >= _seconds(lambda data=data: decode_frame(data, "trial")):
            break
        threshold = size[0] * size[1]
    return threshold


def trial(size: tuple[int, int]) -> Sequence[bytes]:
    """JPEG files of one picture: full and halved colour, progressive, grey, high and low quality."""
    width, height = size
    y, x = np.mgrid[:height, :width]
    noise = np.random.default_rng(0).integers(0, 40, (height, width, 3))
    waves = np.stack([100 + 80 * np.sin(x / 31 + c) * np.cos(y / (17 + 5 * c)) for c in range(3)], -1)
    picture = Image.fromarray(np.clip(waves + noise, 0, 255).astype(np.uint8))
    kinds: list[tuple[Image.Image, dict[str, Any]]] = [
        (picture, {"quality": 90, "subsampling": "4:4:4"}),
        (picture, {"quality": 85, "subsampling": "4:2:0"}),
        (picture, {"quality": 50, "subsampling": "4:2:2"}),
        (picture, {"quality": 90, "progressive": True}),
        (picture.convert("L"), {"quality": 90}),
    ]
    return [_jpeg(image, **options) for image, options in kinds]


def _jpeg(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", **options)
    return buffer.getvalue()


def _seconds(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        started = perf_counter()
        work()
        best = min(best, perf_counter() - started)
    return best


def installed(device: torch.device) -> GpuJpeg | None:
    """A decoder on this GPU, if there is one and a library for it is installed."""
    if device.type != "cuda":
        return None
    for make in (_torchvision, _nvimgcodec):
        try:
            return make(device)
        except ImportError:
            continue
    return None


def _torchvision(device: torch.device) -> GpuJpeg:
    io_module: Any = importlib.import_module("torchvision.io")

    def decode(data: bytes) -> NDArray[np.uint8]:
        file = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        pixels = io_module.decode_jpeg(file, mode=io_module.ImageReadMode.RGB, device=device)  # (3, H, W)
        return pixels.permute(1, 2, 0).contiguous().cpu().numpy()

    return decode


def _nvimgcodec(device: torch.device) -> GpuJpeg:
    nvimgcodec: Any = importlib.import_module("nvidia.nvimgcodec")
    decoder = nvimgcodec.Decoder(device_id=device.index or 0)

    def decode(data: bytes) -> NDArray[np.uint8]:
        return np.array(decoder.decode(data).cpu())  # (H, W, 3) RGB

    return decode
