"""A frame for when there is no camera: shows what resizing, padding and the order of colours do to a picture."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

_BARS = ("white", "yellow", "cyan", "lime", "magenta", "red", "blue", "black")


def draw_test_card(name: str, width: int = 640, height: int = 480) -> NDArray[np.uint8]:
    """A camera's test card, (height, width, 3) uint8 RGB.

    Its circle stays round unless the frame is stretched, its border tells what is cut off, and its named colours show
    red and blue swapped.
    """
    card = Image.new("RGB", (width, height), "gray")
    draw = ImageDraw.Draw(card)
    bar = width / len(_BARS)
    for index, colour in enumerate(_BARS):
        draw.rectangle((index * bar, 0, (index + 1) * bar, height // 3), fill=colour)
    radius = height // 4
    middle, centre = width // 2, height * 2 // 3
    draw.ellipse((middle - radius, centre - radius, middle + radius, centre + radius), outline="white", width=6)
    for line, (word, colour) in enumerate((("RED", "red"), ("GREEN", "lime"), ("BLUE", "blue"))):
        draw.text((width * 0.06, height * (0.45 + 0.15 * line)), word, fill=colour, font_size=height // 12)
    draw.text((middle, centre), name, fill="white", anchor="mm", font_size=height // 24)
    draw.rectangle((0, 0, width - 1, height - 1), outline="orange", width=4)
    return np.asarray(card)
