"""Camera frames to pictures: every view cropped and resized as in training, all views of a moment side by side.

The network sees one picture per moment. Which moments belong to a call depends on those before it: `RecentFrames`
says so, in the words of dreamzero: socket_test_optimized_AR.py. It knows no keys and no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from relay.engine.frames import resize_with_pad

CLIP = 4
"""Moments that a call goes on with, where the caller does not send as many as training had."""

WHOLE_CLIPS = (8, 9)
"""Moments that are taken as they come: what training used, with or without the one before."""

COUNTS = (1, 2, 3, CLIP, *WHOLE_CLIPS)
"""Moments that one observation may hold."""


@dataclass(frozen=True, slots=True)
class Views:
    """How the frames of one embodiment become a picture.

    Attributes:
        received: (height, width) that frames are brought to first, that of the training data.
        crop: share of each side that is kept, from the middle.
        tile: (height, width) of one view in the picture.
        count: views that the network was trained with.
        wrist_on_top: the third view spans the upper half, the first two stand below it; else a square of four tiles.
    """

    received: tuple[int, int]
    crop: float
    tile: tuple[int, int]
    count: int
    wrist_on_top: bool

    @property
    def picture(self) -> tuple[int, int]:
        """(height, width) of the whole."""
        height, width = self.tile
        return self.tile if self.count == 1 else (2 * height, 2 * width)


def fit(frames: Sequence[NDArray[np.uint8]], views: Views) -> NDArray[np.uint8]:
    """The frames of one view, of any sizes, as tiles (T, height, width, 3).

    Whatever their size, they are padded to the training data's first; then cropped and resized as there (dreamzero:
    groot/vla/data/transform/video.py: VideoCrop, VideoResize, VideoToNumpy).
    """
    height, width = views.received
    received = np.stack([resize_with_pad(frame, height, width) for frame in frames])
    kept_height, kept_width = int(height * views.crop), int(width * views.crop)
    top, left = round((height - kept_height) / 2), round((width - kept_width) / 2)  # half to even, as torchvision does
    pixels = (torch.from_numpy(received).float() / 255).permute(0, 3, 1, 2)  # (T, 3, height, width)
    pixels = pixels[..., top : top + kept_height, left : left + kept_width]
    if pixels.shape[2:] != views.tile:
        pixels = F.interpolate(pixels, views.tile, mode="bilinear", align_corners=False, antialias=True)
    return (pixels.permute(0, 2, 3, 1) * 255).to(torch.uint8).contiguous().numpy()  # truncated, as in training


def stitch(tiles: Sequence[NDArray[np.uint8] | None], views: Views) -> NDArray[np.uint8]:
    """All views as pictures (T, height, width, 3); a view that is missing is black.

    Args:
        tiles: by view, each (T, height, width, 3) or None; at least one is there.
    """
    moments = next(len(tile) for tile in tiles if tile is not None)
    if views.count == 1:
        (tile,) = tiles
        assert tile is not None
        return tile
    height, width = views.tile
    pictures = np.zeros((moments, 2 * height, 2 * width, 3), np.uint8)
    above, below, left, right = slice(0, height), slice(height, None), slice(0, width), slice(width, None)
    if views.wrist_on_top:
        first, second, wrist = tiles
        places = [(first, below, left), (second, below, right)]
        if wrist is not None:
            pictures[:, above] = np.repeat(wrist, 2, axis=2)
    else:
        corners = ((above, left), (below, left), (above, right))
        places = [(tile, *corner) for tile, corner in zip(tiles, corners, strict=False)]
    for tile, rows, columns in places:
        if tile is not None:
            pictures[:, rows, columns] = tile
    return pictures


@dataclass(frozen=True, slots=True)
class RecentFrames:
    """The newest pictures of an episode; a value that is never changed, so that a call that failed changes nothing.

    Attributes:
        pictures: up to four, oldest first.
    """

    pictures: tuple[NDArray[np.uint8], ...] = ()

    def clip(self, new: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """What the network sees of an observation (T, height, width, 3): T of 1, 4, 8 or 9.

        An episode begins with its newest picture. After that a call has the last four, the oldest repeated where there
        are fewer; eight or nine at once are taken as they are.
        """
        if not self.pictures:
            return new[-1:]
        if len(new) in WHOLE_CLIPS:
            return new
        recent = self.followed_by(new).pictures
        return np.stack([*[recent[0]] * (CLIP - len(recent)), *recent])

    def followed_by(self, new: NDArray[np.uint8]) -> RecentFrames:
        """The episode after an observation was answered."""
        newest = [picture.copy() for picture in new[-CLIP:]]  # of their own, so that a long clip can be let go
        return RecentFrames((*self.pictures, *newest)[-CLIP:])

    @property
    def nbytes(self) -> int:
        return sum(picture.nbytes for picture in self.pictures)
