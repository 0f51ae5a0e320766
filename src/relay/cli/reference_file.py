"""Reads recorded inputs and outputs of a reference implementation; docs/parity.md describes the file.

Arrays by name, samples on axis 0, and a JSON text `metadata`; as `.npz` without pickles, or as `.safetensors`.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relay.protocol.wording import shown

GROUP = "actions/"
"""Before the name of an action group, for policies whose actions are a map."""

_DTYPES = ("float32", "bfloat16")
_UNITS = ("robot", "model")


class InvalidReference(ValueError):
    """A reference that cannot be compared with; the text names the file, the array and what was expected."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One sample: what went in, and what the reference answered.

    Attributes:
        noise: (horizon, action_dim) float32.
        actions: (horizon, dimensions), or such an array for each action group.
    """

    observation: Mapping[str, Any]
    noise: NDArray[np.float32]
    num_steps: int | None
    actions: NDArray[np.float64] | Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Reference:
    """A whole file.

    Attributes:
        source: who made it, such as `openpi`.
        versions: by package.
        dtype: what the reference computed in.
        units: `robot` or `model`, if it says.
    """

    samples: tuple[Recorded, ...]
    source: str = "unknown"
    versions: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "float32"
    units: str | None = None


def read_reference(path: Path) -> Reference:
    """Read and check a file of either kind.

    Raises:
        InvalidReference: it is damaged or lacks something.
        OSError: it cannot be read.
    """
    arrays, metadata = _read(path)
    groups = [name for name in arrays if name.startswith(GROUP)]
    for name in ("noise", *([] if groups else ["actions"])):
        if name not in arrays:
            raise InvalidReference(f"{path} has no array {name!r}; it has {', '.join(arrays) or 'none at all'}")
    count = len(arrays["noise"]) if arrays["noise"].ndim == 3 else 0
    if count == 0:
        raise InvalidReference(f"{path}: noise is {shown(arrays['noise'])}, expected (samples, horizon, action_dim)")
    columns = {name: _per_sample(name, array, count, path) for name, array in arrays.items() if name != "num_steps"}
    noise = columns.pop("noise").astype(np.float32)
    answers = {name: columns.pop(name).astype(np.float64) for name in groups or ["actions"]}
    for name, actions in answers.items():
        if actions.ndim != 3 or not np.isfinite(actions).all() or not np.isfinite(noise).all():
            raise InvalidReference(
                f"{path}: {name} are {shown(actions)}, expected (samples, horizon, dimensions) and finite numbers, "
                "in noise too"
            )
    steps = _steps(arrays.get("num_steps"), count, path)
    prompts = _prompts(columns.pop("prompt", None), metadata.get("prompt"), count, path)
    samples = [
        Recorded(
            _nested({**{name: column[i] for name, column in columns.items()}, **prompts[i]}),
            noise[i],
            steps[i],
            {name.removeprefix(GROUP): part[i] for name, part in answers.items()} if groups else answers["actions"][i],
        )
        for i in range(count)
    ]
    return Reference(
        tuple(samples),
        source=str(metadata.get("source", "unknown")),
        versions={str(name): str(version) for name, version in (metadata.get("versions") or {}).items()},
        dtype=_choice(metadata, "dtype", _DTYPES, path) or "float32",
        units=_choice(metadata, "units", _UNITS, path),
    )


def _read(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """All arrays but `metadata`, and the metadata."""
    if path.suffix == ".npz":
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            raise InvalidReference(f"{path} is not a whole .npz file of plain arrays: {error}") from None
        text = arrays.pop("metadata", None)
        return arrays, _metadata("{}" if text is None else str(text), path)
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                text = (file.metadata() or {}).get("metadata", "{}")
        except (SafetensorError, TypeError) as error:
            raise InvalidReference(f"{path} is not a whole safetensors file: {error}") from None
        return arrays, _metadata(text, path)
    raise InvalidReference(f"{path}: expected a file that ends in .npz or .safetensors")


def _metadata(text: str, path: Path) -> dict[str, Any]:
    try:
        metadata = json.loads(text)
    except ValueError:
        metadata = None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("versions") or {}, dict):
        raise InvalidReference(f"{path}: metadata is {shown(text)}, expected a JSON object")
    return metadata


def _per_sample(name: str, array: NDArray[Any], count: int, path: Path) -> NDArray[Any]:
    if array.ndim == 0 or len(array) != count:
        raise InvalidReference(f"{path}: {name} is {shown(array)}, expected {count} samples on axis 0, as noise has")
    return array


def _steps(array: NDArray[Any] | None, count: int, path: Path) -> list[int | None]:
    """One for all samples, or one each."""
    if array is None:
        return [None] * count
    if array.dtype.kind not in "iu" or array.shape not in ((), (1,), (count,)):
        raise InvalidReference(f"{path}: num_steps is {shown(array)}, expected one integer, or one per sample")
    return [int(steps) for steps in np.broadcast_to(array, (count,))]


def _prompts(array: NDArray[Any] | None, stated: Any, count: int, path: Path) -> list[dict[str, str]]:
    """The array `prompt`, or the metadata's: one text, or one per sample."""
    texts = stated if array is None else array.tolist()
    if texts is None:
        return [{}] * count
    if isinstance(texts, str):
        texts = [texts] * count
    if not isinstance(texts, list) or len(texts) != count or not all(isinstance(text, str) for text in texts):
        raise InvalidReference(f"{path}: prompt is {shown(stated)}, expected a text, or {count} of them")
    return [{"prompt": text} for text in texts]


def _choice(metadata: Mapping[str, Any], key: str, choices: tuple[str, ...], path: Path) -> str | None:
    value = metadata.get(key)
    if value is not None and value not in choices:
        raise InvalidReference(
            f"{path}: metadata's {key} is {shown(value)}, expected {' or '.join(map(repr, choices))}"
        )
    return value


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`image/base_0_rgb` as an entry of the map `image`."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        key, _, inner = name.partition("/")
        if inner:
            nested.setdefault(key, {})[inner] = value
        else:
            nested[key] = value
    return nested
