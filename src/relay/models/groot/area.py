"""OpenCV's INTER_AREA resize in NumPy, equal to it bit for bit (opencv: modules/imgproc/src/resize.cpp).

Three cases, as there: sides that shrink by whole factors are averaged in integers; other shrinking weighs each pixel by
the share of it that is covered, in float32, row by row and in OpenCV's order of additions; enlarging mixes two
neighbours with weights of eleven bits. Only frames (height, width, 3) uint8.
"""

from __future__ import annotations

import math
from functools import lru_cache, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BITS = 11
"""Of the weights in the enlarging case."""


def resize_area(frame: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """A frame (H, W, 3) resized to (height, width, 3)."""
    rows, columns = frame.shape[:2]
    if (height, width) == (rows, columns):
        return frame
    if height > rows or width > columns:
        return _mix_neighbours(frame, height, width)
    if rows % height == 0 and columns % width == 0:
        return _average_blocks(frame, height, width)
    return _weigh_pixels(frame, height, width)


def _average_blocks(frame: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    down, across = frame.shape[0] // height, frame.shape[1] // width
    blocks = frame.reshape(height, down, width, across, 3)
    sums = np.zeros((height, width, 3), np.int32)
    for row in range(down):
        for column in range(across):
            sums += blocks[:, row, :, column]
    if down == across == 2:
        return ((sums + 2) >> 2).astype(np.uint8)
    return np.rint(sums.astype(np.float32) * np.float32(1 / (down * across))).astype(np.uint8)


def _weigh_pixels(frame: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    rows, columns = frame.shape[:2]
    shares = [(index, np.repeat(weights, 3)) for index, weights in _shares(columns, width)]
    across = np.empty((rows, width * 3), np.float32)
    for some in _blocks(rows):
        parts = (np.multiply(_pick(frame[some], index), weights, dtype=np.float32) for index, weights in shares)
        across[some] = reduce(np.add, parts)
    result = np.empty((height, width * 3), np.uint8)
    for some in _blocks(height):
        parts = (across[index[some]] * weights[some, None] for index, weights in _shares(rows, height))
        result[some] = np.rint(reduce(np.add, parts))
    return result.reshape(height, width, 3)


def _mix_neighbours(frame: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    rows, columns = frame.shape[:2]
    left, right, near, far = _neighbours(columns, width)
    near, far = np.repeat(near, 3), np.repeat(far, 3)
    across = np.empty((rows, width * 3), np.int32)
    for some in _blocks(rows):
        mixed = across[some]
        np.multiply(_pick(frame[some], left), near, out=mixed, dtype=np.int32)
        mixed += np.multiply(_pick(frame[some], right), far, dtype=np.int32)
        mixed >>= 4
    above, below, near, far = _neighbours(rows, height)
    result = np.empty((height, width * 3), np.uint8)
    for some in _blocks(height):
        mixed = across[above[some]] * near[some, None]
        mixed >>= 16
        lower = across[below[some]] * far[some, None]
        lower >>= 16
        mixed += lower
        mixed += 2
        mixed >>= 2
        result[some] = mixed
    return result.reshape(height, width, 3)


def _blocks(rows: int) -> list[slice]:
    """Rows that are worked on together: few enough for the processor's cache, which doubles the speed."""
    return [slice(start, start + _BLOCK) for start in range(0, rows, _BLOCK)]


_BLOCK = 32


def _pick(frame: NDArray[np.uint8], index: NDArray[np.intp]) -> NDArray[np.uint8]:
    """Some columns of a frame as (rows, columns * 3); a pixel moves as one value of three bytes, which is faster."""
    pixels: NDArray[Any] = np.ascontiguousarray(frame).view("V3")[..., 0]
    return np.take(pixels, index, axis=1, mode="clip").view(np.uint8).reshape(len(frame), -1)


@lru_cache(256)
def _shares(source: int, target: int) -> tuple[tuple[NDArray[np.intp], NDArray[np.float32]], ...]:
    """By the order of addition, which pixel each target pixel takes and with what weight; 0 where it takes none."""
    scale = 1 / (target / source)
    taken: list[list[tuple[int, float]]] = []
    for place in range(target):
        start, end = place * scale, place * scale + scale
        size = min(scale, source - start)
        last = min(math.floor(end), source - 1)
        first = min(math.ceil(start), last)
        parts = [(pixel, 1 / size) for pixel in range(first, last)]
        if first - start > _SLIVER:
            parts.insert(0, (first - 1, (first - start) / size))
        if end - last > _SLIVER:
            parts.append((last, min(end - last, 1.0, size) / size))
        taken.append(parts)
    most = max(map(len, taken))
    padded = [parts + [(0, 0.0)] * (most - len(parts)) for parts in taken]
    return tuple(
        (np.array([parts[n][0] for parts in padded], np.intp), np.array([parts[n][1] for parts in padded], np.float32))
        for n in range(most)
    )


_SLIVER = 1e-3
"""Of a pixel, below which OpenCV leaves a partly covered one out."""


@lru_cache(256)
def _neighbours(
    source: int, target: int
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.int32], NDArray[np.int32]]:
    """For each target pixel its two source pixels, and their weights in units of 1 / 2048."""
    ratio = target / source
    place = np.arange(target)
    near = np.floor(place * (1 / ratio)).astype(np.intp)
    share = ((place + 1) - (near + 1) * ratio).astype(np.float32)
    share = np.where(share <= 0, np.float32(0), share - np.floor(share))
    share[near >= source - 1] = 0
    near = np.minimum(near, source - 1)
    one = np.float32(1 << _BITS)
    weights = (np.rint((np.float32(1) - share) * one).astype(np.int32), np.rint(share * one).astype(np.int32))
    return near, np.minimum(near + 1, source - 1), *weights
