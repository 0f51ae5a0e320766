"""Tensors on disk, by name: what every model family reads its weights from. Knows no model's names.

Safetensors files are read with plain reads and not mapped into memory, as the safetensors library does it: the pages of
a mapped file count as memory of the process for as long as the mapping lives, and a file that is cut short while it is
mapped kills the process instead of raising an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_PICKLES = ("*.pt", "*.pth", "*.bin", "*.ckpt", "*.pkl")
_LONGEST_HEADER = 100_000_000  # bytes; the safetensors library's own limit
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded faithfully; says which tensors or files, and what to do."""


class TensorSource(Protocol):
    """Tensors on disk by name, read one at a time."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor; no tensor is read for it."""
        ...

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The stored dtype of every tensor; no tensor is read for it."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU, in its stored dtype and in memory of its own.

        Raises:
            CheckpointError: when the file has changed or cannot be read, or the tensor holds NaN or infinity.
        """
        ...


class SafetensorsSource:
    """One safetensors file, or a folder with `model.safetensors` or its shards, with or without their index.

    Raises:
        CheckpointError: naming the file that is missing, damaged or of another kind, and the remedy.
    """

    def __init__(self, path: Path) -> None:
        self._places: dict[str, _Place] = {}
        for file in find_safetensors(path) if path.is_dir() else [path]:
            for name, place in _read_header(file).items():
                if name in self._places:
                    raise CheckpointError(f"{name} is both in {self._places[name].file.name} and in {file.name}")
                self._places[name] = place
        self._shapes = {name: place.shape for name, place in self._places.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: place.dtype for name, place in self._places.items()}

    def read(self, name: str) -> Tensor:
        place = self._places[name]
        tensor = torch.empty(place.shape, dtype=place.dtype)
        if tensor.numel() == 0:
            return tensor
        try:
            with place.file.open("rb", buffering=0) as file:
                file.seek(place.start)
                _fill(tensor, file)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"cannot read {name} from {place.file}: {error}") from None
        refuse_non_finite(tensor, name, place.file)
        return tensor


def find_safetensors(folder: Path) -> list[Path]:
    """The safetensors files that hold a folder's weights: the one file, the index's shards, or the shards by number.

    Raises:
        CheckpointError: when there are none, or not all.
    """
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if (folder / INDEX_FILE).is_file():
        return _indexed(folder / INDEX_FILE)
    shards = sorted(file for file in folder.iterdir() if _SHARD.fullmatch(file.name))
    if shards:
        _, count = _numbers(shards[0])
        expected = [folder / f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        return _existing(expected, "its other shards")
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder / pickles[0]} is a pickle, which can run code when it is loaded, so it is never read; load it "
            f"where you trust it and write {SINGLE_FILE} with safetensors.torch.save_file"
        )
    raise CheckpointError(f"no {SINGLE_FILE} in {folder}")


def no_floats(names: Iterable[str], dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """A sentence for each of these tensors that holds no floating-point numbers, as weights do."""
    return [
        f"wrong dtype: {name} holds {dtypes[name]}, expected floating-point numbers"
        for name in names
        if name in dtypes and not dtypes[name].is_floating_point
    ]


def refuse_non_finite(tensor: Tensor, name: str, path: Path) -> None:
    """See that a tensor that was read from `path` holds neither NaN nor infinity.

    Raises:
        CheckpointError: it does.
    """
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return
    low, high = tensor.aminmax()  # one pass and no copy; both are NaN if any value is, in every floating dtype
    if math.isfinite(low.item()) and math.isfinite(high.item()):
        return
    wrong = tensor.numel() - int(tensor.isfinite().sum())
    raise CheckpointError(
        f"{name} in {path}: {wrong:,} of {tensor.numel():,} values are NaN or infinite; the training diverged, or the "
        "file is damaged: take an earlier checkpoint, or copy it again"
    )


class _Place(NamedTuple):
    """Where a tensor stands."""

    file: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def _indexed(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{index} is damaged: expected a JSON object with a 'weight_map' of file names") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}, expected a file in the same folder")
    return _existing([index.parent / name for name in names], index.name)


def _numbers(shard: Path) -> tuple[int, int]:
    match = _SHARD.fullmatch(shard.name)
    assert match
    return int(match[1]), int(match[2])


def _existing(files: Sequence[Path], by: str) -> list[Path]:
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{files[0].parent} lacks {', '.join(missing)}, of which {by} speaks")
    return list(files)


def _read_header(path: Path) -> dict[str, _Place]:
    """Names, dtypes, shapes and places of one file's tensors (github.com/huggingface/safetensors, "Format")."""
    try:
        with path.open("rb") as file:
            first = file.read(8)
            length = int.from_bytes(first, "little")
            size = path.stat().st_size
            if len(first) < 8 or not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                raise CheckpointError(f"{path} is not a safetensors file{_what_else(first, size)}")
            header = json.loads(file.read(length))
            places = {
                name: _place(path, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"
            }
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the header of {path} is damaged; fetch the file again") from None
    end = max((place.start + _nbytes(place) for place in places.values()), default=8 + length)
    if size < end:
        raise CheckpointError(f"{path} is cut short: {size:,} bytes of {end:,}; fetch it again")
    return places


def _place(path: Path, name: str, entry: dict[str, Any], data: int) -> _Place:
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(f"{path}: {name} has dtype {entry['dtype']}; dtypes are {', '.join(_DTYPES)}")
    place = _Place(path, data + begin, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
    sound = all(type(number) is int and number >= 0 for number in (begin, end, *place.shape))
    if not sound or end - begin != _nbytes(place):
        raise ValueError(name)
    return place


def _nbytes(place: _Place) -> int:
    return math.prod(place.shape) * place.dtype.itemsize


def _what_else(first: bytes, size: int) -> str:
    if first.startswith(b"version "):
        return " but a Git LFS pointer; run `git lfs pull` in its folder"
    if first.startswith((b"PK\x03\x04", b"\x80")):
        return (
            " but a renamed pickle, which can run code when it is loaded and is never read; load it where you trust it "
            "and write it anew with safetensors.torch.save_file"
        )
    return f" ({size:,} bytes); fetch it again"


def _fill(tensor: Tensor, file: Any) -> None:
    """Read from `file` until `tensor` is full; one read gives 2 GiB at most."""
    buffer = tensor.view(-1).view(torch.uint8).numpy().data
    filled = 0
    while filled < len(buffer):
        count = file.readinto(buffer[filled:])
        if not count:
            raise EOFError("the file ends early")
        filled += count
