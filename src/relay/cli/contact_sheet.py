"""Frames side by side with their names, as one picture."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

_GAP, _LINE = 8, 20


def contact_sheet(frames: Mapping[str, NDArray[np.uint8] | None]) -> Image.Image:
    """One picture of all frames (height, width, 3), pixels unchanged; a masked camera is an empty box.

    At least one frame must be there.
    """
    height, width, _ = next(frame for frame in frames.values() if frame is not None).shape
    sheet = Image.new("RGB", (_GAP + (width + _GAP) * len(frames), _LINE + height + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (name, frame) in enumerate(frames.items()):
        left = _GAP + index * (width + _GAP)
        draw.text((left, 4), name if frame is not None else f"{name}: masked", fill="black")
        if frame is not None:
            sheet.paste(Image.fromarray(frame), (left, _LINE))
        else:
            draw.rectangle((left, _LINE, left + width - 1, _LINE + height - 1), outline="gray")
    return sheet
