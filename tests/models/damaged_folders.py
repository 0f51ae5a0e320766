"""Checkpoint folders that are damaged in one place, to see that a look at them and a start say the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

Damage = Callable[[Path], object]

MISSING: Any = object()
"""Takes an entry or a tensor out."""

_LARGE = 200_000


def copy_of(whole: Path, folder: Path) -> Path:
    """The same folder to be damaged; its large files are links."""
    for file in whole.rglob("*"):
        place = folder / file.relative_to(whole)
        if file.is_dir():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.stat().st_size > _LARGE:
            place.symlink_to(file.resolve())
        else:
            shutil.copy(file, place)
    return folder


def file_damages(*names: str) -> dict[str, Damage]:
    """Each file missing, empty, cut short, and something else."""

    def cut(place: Path) -> None:
        content = place.read_bytes()
        place.unlink()
        place.write_bytes(content[: len(content) // 2])

    def filled(content: bytes) -> Damage:
        def fill(place: Path) -> None:
            place.unlink()
            place.write_bytes(content)

        return fill

    def at(name: str, how: Damage) -> Damage:
        return lambda folder: how(folder / name)

    ways: dict[str, Damage] = {
        "missing": Path.unlink,
        "empty": filled(b""),
        "cut short": cut,
        "no text": filled(b"\xff\x00\xfe{" * 9),
        "nested": filled(b"[" * 10_000),
    }
    return {f"{name} {way}": at(name, how) for name in names for way, how in ways.items()}


def entry(file: str, keys: Sequence[str | int], value: Any) -> tuple[str, Damage]:
    """An entry of a JSON or YAML file with another value, or without one; and what it is called."""
    told = "missing" if value is MISSING else "..." if len(str(value)) > 40 else str(value)
    load, dump = (json.loads, json.dumps) if file.endswith("json") else (yaml.safe_load, yaml.safe_dump)

    def change(folder: Path) -> None:
        content = load((folder / file).read_text("utf-8"))
        inner = content
        for key in keys[:-1]:
            inner = inner[key]
        if value is MISSING:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = value
        (folder / file).write_text(dump(content), "utf-8")

    return f"{'.'.join(map(str, keys))} {told}", change


def tensor(name: str, way: str) -> tuple[str, Damage]:
    """A tensor that is missing, that nobody knows, or of another shape, kind or content; and what it is called."""

    def change(folder: Path) -> None:
        files = [file for file in sorted(folder.glob("*.safetensors")) if file.name.startswith("model")]
        for file in files:
            tensors = load_file(file)
            if name in tensors:
                {**_TENSORS, **_CONTENTS}[way](tensors, name)
                file.unlink()
                save_file(tensors, file)

    return f"{name} {way}", change


def _other(make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor], str], None]:
    def change(tensors: dict[str, Tensor], name: str) -> None:
        tensors[name] = make(tensors[name])

    return change


_TENSORS: dict[str, Callable[[dict[str, Tensor], str], Any]] = {
    "missing": dict.pop,
    "beside an unknown one": lambda tensors, name: tensors.update({f"{name}.more": torch.zeros(2)}),
    "one row longer": _other(lambda tensor: torch.cat((tensor, tensor[:1]))),
    "in one axis": _other(lambda tensor: tensor.flatten()),
    "empty": _other(lambda tensor: torch.zeros(0)),
    "of integers": _other(lambda tensor: tensor.to(torch.int32)),
    "of truths": _other(lambda tensor: tensor.bool()),
}
TENSOR_WAYS = tuple(_TENSORS)


def _ending_in(value: float) -> Callable[[dict[str, Tensor], str], None]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return _other(change)


_CONTENTS = {"with NaN": _ending_in(torch.nan), "with infinity": _ending_in(-torch.inf)}
NOT_FINITE = tuple(_CONTENTS)
"""What only the values tell, at which a look at a folder does not look."""
