"""Statistics of training data: what cannot be right in them, and the files of openpi and lerobot that hold them.

Knows no model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from relay.engine.normalization import PAIRS, Kind, Statistics

NORM_STATS_FILE = "norm_stats.json"
_FIELDS = ("mean", "std", "q01", "q99", "min", "max")
_PADDING = 1e-6
"""Largest absolute value that a statistic of a padding dimension has: histogram edges of openpi lie 1e-10 off zero."""


_LEVELS_BELOW_LINKS = 2


class StatisticsError(ValueError):
    """Statistics that are missing, damaged or of another robot; names the file, the dimension and the remedy."""


def find_openpi_assets(folder: Path) -> dict[str, Path]:
    """The statistics files below `folder/assets`, by asset id.

    An asset id may be a repository's id and so a nested folder, such as `physical-intelligence/libero`. A linked folder
    is searched as deep as one of a repository's id goes, so that a link to a whole disk does not take all day.
    """
    assets = folder / "assets"
    below = sorted(_folders_below(assets, (assets.resolve(),)))
    files = {place.relative_to(assets).as_posix(): place / NORM_STATS_FILE for place in below}
    return {asset_id: file for asset_id, file in files.items() if file.is_file()}


def read_norm_stats(file: Path) -> tuple[Statistics, Statistics]:
    """State and action statistics of an openpi `norm_stats.json` (openpi: src/openpi/shared/normalize.py)."""
    try:
        content: Any = json.loads(file.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise StatisticsError(f"{file} cannot be read as JSON: {error}") from None
    except RecursionError:
        raise StatisticsError(f"{file} cannot be read as JSON: it is nested too deeply") from None
    stats = _mapping(content, "an object with the key 'norm_stats'", file).get("norm_stats")
    stats = _mapping(stats, "'norm_stats' to be an object of 'state' and 'actions'", file)
    for key in ("state", "actions"):
        if key not in stats:
            raise StatisticsError(f"{file} has no statistics of {key!r}; it has {', '.join(stats) or 'none at all'}")
    state, actions = (
        _statistics(_mapping(stats[key], f"{key!r} to be an object", file), key, file) for key in ("state", "actions")
    )
    return state, actions


def read_lerobot_state(file: Path, key: str) -> Statistics:
    """The statistics of one feature, such as `observation.state`, in a lerobot processor's state file.

    Raises:
        StatisticsError: the file is missing or damaged, or has none of this feature.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not file.is_file():
        raise StatisticsError(f"no statistics at {file}; copy it from where the checkpoint was trained")
    try:
        tensors: dict[str, NDArray[Any]] = load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise StatisticsError(f"{file} is not a whole safetensors file: {error}") from None
    found = {name.removeprefix(f"{key}."): value for name, value in tensors.items() if name.rpartition(".")[0] == key}
    if not found:
        features = sorted({name.rpartition(".")[0] for name in tensors})
        raise StatisticsError(f"{file} has no statistics of {key!r}; it has {', '.join(features) or 'none at all'}")
    return _statistics(found, key, file)


def fit(statistics: Statistics, kind: Kind, width: int | None, *, name: str, file: Path) -> Statistics:
    """The statistics at the robot's real width, checked in every dimension that counts.

    Args:
        kind: what they will be used for; its two vectors must be there and change, none may hold what cannot be right.
        width: the real width, or None to take them as they are. Longer statistics are cut where the rest is zero: some
            checkpoints were trained on padded vectors.
        name: what they are statistics of, for messages.

    Raises:
        StatisticsError: a vector is missing, too short or another robot's; a value is constant or cannot be right.
    """
    try:
        pair = statistics.pair(kind) if kind != "none" else ()
    except KeyError as missing:
        raise StatisticsError(
            f"{file} has no {missing.args[0]} of {name}, which {kind} normalization needs; compute the statistics anew"
        ) from None
    if not pair:
        return statistics
    first, second = pair
    given = len(first)
    if width is None:
        width = given
    if given < width or any(np.abs(vector[width:]).max(initial=0) > _PADDING for vector in pair):
        raise StatisticsError(
            f"{file} has statistics of {given} {name} dimensions, but this robot's {name} has {width}; "
            "they are another robot's: name theirs with --robot, or take the statistics of this one"
        )
    vectors = {field: vector for field in _FIELDS if (vector := getattr(statistics, field)) is not None}
    if wrong := damage({field: vector[:width] for field, vector in vectors.items()}, name):
        raise StatisticsError(f"{file}: {wrong}; compute the statistics anew")
    spread = second if kind == "z_score" else second - first
    flat = np.flatnonzero(spread[:width] == 0)
    if len(flat):
        what = "std" if kind == "z_score" else " - ".join(reversed(PAIRS[kind]))
        where = ", ".join(f"{name}[{i}]" for i in flat)
        raise StatisticsError(
            f"{file}: {what} of {where} is {spread[flat[0]]:g}, so it cannot be scaled; compute the statistics from "
            "data in which it changes, or name the robot with --robot if these dimensions are padding"
        )
    return statistics.cut(width)


def damage(vectors: Mapping[str, NDArray[np.float64]], name: str) -> str | None:
    """What cannot be right in statistics, the first number of them by its place; None where nothing is.

    Args:
        vectors: by the statistic's name, `(n,)`, or `(steps, n)` by step.
        name: what they are statistics of.
    """
    for field, vector in vectors.items():
        for place in np.argwhere(~np.isfinite(vector)).tolist():
            return f"{field} of {name}{place} is {vector[tuple(place)]}, expected a finite number"
    for place in np.argwhere(vectors.get("std", np.zeros(0)) < 0).tolist():
        return f"std of {name}{place} is {vectors['std'][tuple(place)]:g}, expected 0 or more"
    for first, second in (PAIRS["quantile"], PAIRS["min_max"]):
        low, high = (vectors.get(field, np.zeros(0)) for field in (first, second))
        turned = np.argwhere(low > high).tolist() if low.shape == high.shape else []
        for place in turned:
            return f"{first} of {name}{place} is {low[tuple(place)]:g}, above {second}, {high[tuple(place)]:g}"
    return None


def numbers(value: Any) -> NDArray[np.float64] | None:
    """A list of numbers, or of such lists, as an array; None for all else, numbers that are text among it."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return array.astype(np.float64) if array.dtype.kind in "iuf" else None


def _folders_below(folder: Path, above: tuple[Path, ...], levels: float = math.inf) -> Iterator[Path]:
    """Every folder below; `above` are the real folders on the way here, to which no link leads back."""
    if levels == 0:
        return
    try:
        places = [place for place in folder.iterdir() if place.is_dir()]
    except OSError:
        return
    for place in places:
        real = place.resolve()
        if real in above:
            continue
        yield place
        reach = _LEVELS_BELOW_LINKS if place.is_symlink() else math.inf
        yield from _folders_below(place, (*above, real), min(levels - 1, reach))


def _statistics(values: Mapping[str, Any], name: str, file: Path) -> Statistics:
    """Vectors of equal length from lists or arrays; fields that are unknown here, such as counts, don't matter."""
    vectors: dict[str, NDArray[np.float64]] = {}
    for field in _FIELDS:
        value = values.get(field)
        if value is None:
            continue
        vector = numbers(value)
        if vector is None:
            raise StatisticsError(f"{file}: {field} of {name} is not a list of numbers")
        if vector.ndim != 1 or len(vector) == 0:
            raise StatisticsError(f"{file}: {field} of {name} has shape {vector.shape}, expected one dimension")
        vectors[field] = vector
    lengths = {field: len(vector) for field, vector in vectors.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{field} {length}" for field, length in lengths.items())
        raise StatisticsError(f"{file}: the statistics of {name} differ in length: {shown}")
    return Statistics(**vectors)


def _mapping(value: Any, expected: str, file: Path) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise StatisticsError(f"{file}: expected {expected}")
    return cast("dict[str, Any]", value)
