"""What each codec makes of one camera frame: bytes and fidelity, as the table in docs/codecs.md.

    python benchmarks/codecs.py            writes the table into the page
    python benchmarks/codecs.py --frame    makes the frame anew first

The frame is synthetic and always the same: benchmarks/data/frame.png, 224x224, photograph-like. Sizes and PSNR depend
on the frame, and slightly on the versions of the encoders.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from relay import Codec
from relay.protocol.images import decode_frame, encode_frame

ROOT = Path(__file__).resolve().parents[1]
FRAME = ROOT / "benchmarks" / "data" / "frame.png"
PAGE = ROOT / "docs" / "codecs.md"
BEGIN, END = "<!-- begin: python benchmarks/codecs.py -->", "<!-- end -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frame", action="store_true", help="make the frame anew before measuring it")
    if parser.parse_args().frame:
        FRAME.parent.mkdir(exist_ok=True)
        Image.fromarray(synthetic_frame()).save(FRAME, optimize=True)
    text = table([measured(codec, frame()) for codec in Codec])
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{text}{END}{rest.split(END)[1]}", "utf-8")
    print(text)


@dataclass(frozen=True, slots=True)
class Row:
    """One codec's result: bytes of the encoded frame, and PSNR in dB over all three channels; infinite if exact."""

    codec: str
    size: int
    psnr: float


def frame() -> NDArray[np.uint8]:
    """The frame in the repository, (224, 224, 3) uint8 RGB."""
    with Image.open(FRAME) as image:
        return np.asarray(image.convert("RGB"))


def measured(codec: Codec, pixels: NDArray[np.uint8]) -> Row:
    """Encode and decode one frame as client and server do."""
    if codec is Codec.RAW:
        return Row(codec.name, pixels.nbytes, float("inf"))
    data = encode_frame(pixels, codec)
    error = np.mean((decode_frame(data, codec.name).astype(np.float64) - pixels) ** 2)
    return Row(codec.name, len(data), float(10 * np.log10(255**2 / error)) if error else float("inf"))


def table(rows: list[Row]) -> str:
    """The rows in Markdown."""
    raw = rows[0].size
    lines = ["| codec | bytes | of RAW | PSNR |", "|---|---:|---:|---:|"]
    for row in rows:
        fidelity = "exact" if np.isinf(row.psnr) else f"{row.psnr:.1f} dB"
        lines.append(f"| `{row.codec}` | {row.size:,} | {row.size / raw:.1%} | {fidelity} |")
    return "\n".join(lines) + "\n"


def read_table(page: str) -> list[Row]:
    """The rows that a page holds between the two markers."""
    lines = page.split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    return [
        Row(codec, int(size.replace(",", "")), float("inf" if psnr == "exact" else psnr.removesuffix(" dB")))
        for codec, size, _, psnr in cells
    ]


def synthetic_frame(side: int = 224) -> NDArray[np.uint8]:
    """A wooden table under a lamp with a cloth, a ball, cubes and a wall behind, slightly blurred and noisy.

    Gradients, textures, coloured edges and sensor noise in the amounts that a camera's picture has them.
    """
    random = np.random.default_rng(7)
    scale = 3  # drawn larger and averaged down, as a lens would
    y, x = np.mgrid[0 : side * scale, 0 : side * scale] / (side * scale)
    image = wall(x, y)
    on_table = y > 0.38
    image[on_table] = wood(x, y, random)[on_table]
    cloth = (x + 0.25 * y > 0.72) & (y > 0.5) & (y < 0.92)
    weave = 0.85 + 0.15 * np.sin(2 * np.pi * 45 * x) * np.sin(2 * np.pi * 45 * y)
    image[cloth] = (weave[..., None] * np.array([88, 116, 150]))[cloth]
    cubes = ((0.12, 0.46, 0.17, (178, 52, 46)), (0.42, 0.62, 0.2, (58, 128, 70)), (0.36, 0.4, 0.11, (206, 172, 60)))
    for left, top, size, colour in cubes:
        shadow = np.exp(-(((x - left - size * 0.8) / size) ** 2 + ((y - top - size) / (0.4 * size)) ** 2) * 2)
        image *= 1 - 0.45 * (shadow * on_table)[..., None]
        face = (x > left) & (x < left + size) & (y > top) & (y < top + size)
        lid = (y > top - 0.25 * size) & (y <= top) & (np.abs(x - left - size / 2 - 0.4 * (top - y)) < size / 2)
        image[face] = (np.array(colour) * (0.95 - 0.35 * (y - top) / size)[..., None])[face]
        image[lid] = np.minimum(np.array(colour) * 1.25, 255)
    ball = (x - 0.77) ** 2 + (y - 0.62) ** 2
    light = np.clip(1.15 - 6 * np.hypot(x - 0.74, y - 0.57), 0.2, 1.1)
    image[ball < 0.0081] = (light[..., None] * np.array([225, 120, 40]))[ball < 0.0081]
    image += 70 * np.exp(-((x - 0.74) ** 2 + (y - 0.57) ** 2) / 0.0004)[..., None]
    image *= (1.08 - 0.5 * ((x - 0.45) ** 2 + (y - 0.4) ** 2))[..., None]
    image = image.reshape(side, scale, side, scale, 3).mean(axis=(1, 3))
    grain = random.normal(0, 2.0, (side, side, 1)) + random.normal(0, 0.8, (side, side, 3))
    return np.clip(image + grain, 0, 255).round().astype(np.uint8)


def wall(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Plaster with a soft gradient, and a dark shelf with bright spines of books."""
    image = (205 - 50 * x - 60 * y)[..., None] * np.array([1.0, 0.97, 0.9])
    books = (x > 0.55) & (y > 0.1) & (y < 0.3)
    spine = np.floor((x - 0.55) / 0.028)
    tone = 0.55 + 0.4 * np.sin(9.7 * spine)
    colours = np.stack([120 + 80 * np.sin(spine * 2.1), 110 + 60 * np.sin(spine * 3.7), 90 + 70 * np.sin(spine)], -1)
    image[books] = (tone[..., None] * colours + 40)[books]
    image[(x > 0.52) & (y >= 0.3) & (y < 0.325)] = (70, 52, 40)
    return image


def wood(x: NDArray[np.float64], y: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.float64]:
    """Planks with grain: waves bent by other waves."""
    plank = np.floor(y * 7)
    bend = sum(
        amount * np.sin(2 * np.pi * (frequency * x + 1.3 * frequency * y) + plank + random.uniform(0, 6))
        for frequency, amount in ((1.3, 0.5), (2.9, 0.25), (6.1, 0.1))
    )
    grain = 0.5 + 0.5 * np.sin(2 * np.pi * (26 * y + 2 * bend + 0.37 * plank))
    fibre = 0.5 + 0.5 * np.sin(2 * np.pi * (95 * y + 3 * x + 4 * bend))
    tone = 0.78 + 0.17 * grain + 0.07 * fibre + 0.05 * np.sin(2.7 * plank)
    tone[np.abs(y * 7 - np.round(y * 7)) < 0.02] *= 0.6
    return tone[..., None] * np.array([168, 122, 78])


if __name__ == "__main__":
    main()
