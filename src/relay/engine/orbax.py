"""Arrays of an Orbax checkpoint, as JAX programs write them, without JAX: TensorStore reads the files.

Orbax lays a tree of arrays down as one Zarr array per leaf, named by the leaf's path joined with dots, either in one
OCDBT key-value store or in a folder each; `_METADATA` (JSON) lists the leaves (orbax-checkpoint:
checkpoint/_src/serialization/type_handlers.py). Nothing in it is code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relay.engine.weights import CheckpointError, refuse_non_finite

METADATA_FILE = "_METADATA"
_UNFINISHED = ".orbax-checkpoint-tmp"
_NO_ARRAYS = frozenset({"None", "Dict", "List", "Tuple", "NamedTuple"})  # how Orbax writes down empty nodes
_KEPT_BYTES = 400 * 2**20  # in float32, the queries of all layers and the keys and values with them
_NO_LIMIT = 2**62


class OrbaxSource:
    """The arrays in one Orbax folder, such as openpi's `params/`, named like `PaliGemma/img/embedding/kernel`.

    An item name that wraps the whole tree (`params`) and a last part `value` that all leaves have are left out.

    Raises:
        CheckpointError: when tensorstore is not installed, or the folder is incomplete or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        metadata = _read_metadata(folder)
        self._specs = _plain_names({"/".join(keys): self._spec(keys, metadata) for keys in _leaves(folder, metadata)})
        arrays = {name: self._open(name) for name in self._specs}
        self._shapes = {name: tuple(array.shape) for name, array in arrays.items()}
        self._dtypes = {name: self._dtype(name, array.dtype.name) for name, array in arrays.items()}
        self._caching: dict[str, Any] = {}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return MappingProxyType(self._shapes)

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return MappingProxyType(self._dtypes)

    def read(self, name: str) -> Tensor:
        """One whole array, in its stored dtype and in memory of its own."""
        return self._read(name, self._open(name))

    def read_layer(self, name: str, layer: int) -> Tensor:
        """Entry `layer` of axis 0, likewise.

        Layers may share chunks, which can only be decoded whole. So decoded chunks are kept until other arrays need
        the room; asking for all layers of one array after the other decodes each chunk once.
        """
        if name not in self._caching:
            array = self._open(name, {"cache_pool": {"total_bytes_limit": _NO_LIMIT}})
            self._make_room(_nbytes(array))
            self._caching[name] = array
        return self._read(f"{name}[{layer}]", self._caching[name][layer])

    def _make_room(self, size: int) -> None:
        while self._caching and size + sum(map(_nbytes, self._caching.values())) > _KEPT_BYTES:
            del self._caching[next(iter(self._caching))]

    def _spec(self, keys: tuple[str, ...], metadata: dict[str, Any]) -> dict[str, Any]:
        store: dict[str, Any] = {"driver": "file", "path": f"{self._folder.resolve()}/"}
        path = ".".join(keys) + "/"
        if (self._folder / "manifest.ocdbt").is_file():
            store = {"driver": "ocdbt", "base": store, "path": path}
        else:
            store["path"] += path
        spec: dict[str, Any] = {
            "driver": "zarr3" if metadata.get("use_zarr3") else "zarr",
            "kvstore": store,
            "recheck_cached_data": "open",
        }
        if metadata.get("store_array_data_equal_to_fill_value"):
            spec["fill_missing_data_reads"] = False  # a chunk that is not there was lost
        return spec

    def _open(self, name: str, context: dict[str, Any] | None = None) -> Any:
        """The array: its shape and dtype are read, its values are not."""
        ts = _tensorstore()
        try:
            return ts.open(self._specs[name], open=True, read=True, context=ts.Context(context or {})).result()
        except (ValueError, OSError) as error:
            raise self._damaged(name, error) from None

    def _dtype(self, name: str, stored: str) -> torch.dtype:
        dtype = getattr(torch, stored, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{name} in {self._folder} holds {stored}, expected floating point")
        return dtype

    def _read(self, name: str, array: Any) -> Tensor:
        try:
            values = array.read(order="C").result()
        except (ValueError, OSError) as error:
            raise self._damaged(name, error) from None
        if values.dtype.name == "bfloat16":  # NumPy knows it through ml_dtypes, PyTorch does not take it from there
            tensor = torch.from_numpy(values.view(np.uint16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(values)
        refuse_non_finite(tensor, name, self._folder)
        return tensor

    def _damaged(self, name: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"cannot read {name} in {self._folder}: the checkpoint is incomplete or damaged; fetch it again "
            f"({str(error).splitlines()[0][:300]})"
        )


def _read_metadata(folder: Path) -> dict[str, Any]:
    if _UNFINISHED in folder.resolve().name:
        raise CheckpointError(f"{folder} was never finished: its writer was stopped before renaming it")
    path = folder / METADATA_FILE
    if not path.is_file():
        raise CheckpointError(f"no {METADATA_FILE} in {folder}: expected a folder that Orbax wrote, whole")
    try:
        metadata = json.loads(path.read_text("utf-8"))
        if not isinstance(metadata["tree_metadata"], dict):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{path} is damaged: expected a JSON object with 'tree_metadata'") from None
    parts = sorted(part.name for part in folder.glob("ocdbt.process_*"))
    if parts and not (folder / "manifest.ocdbt").is_file():
        raise CheckpointError(f"{folder} has {parts[0]} but no manifest.ocdbt: the checkpoint was never finished")
    return metadata


def _leaves(folder: Path, metadata: dict[str, Any]) -> list[tuple[str, ...]]:
    """The path of every array."""
    try:
        return [
            tuple(str(key["key"]) for key in entry["key_metadata"])
            for entry in metadata["tree_metadata"].values()
            if entry["value_metadata"]["value_type"] not in _NO_ARRAYS
        ]
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{folder / METADATA_FILE} is damaged: it lists leaves in a form not known") from None


def _plain_names(arrays: dict[str, Any]) -> dict[str, Any]:
    if all(name.startswith("params/") for name in arrays):
        arrays = {name.removeprefix("params/"): array for name, array in arrays.items()}
    if all(name.endswith("/value") for name in arrays):
        arrays = {name.removesuffix("/value"): array for name, array in arrays.items()}
    return arrays


def _nbytes(array: Any) -> int:
    return array.size * array.dtype.numpy_dtype.itemsize


def _tensorstore() -> Any:
    try:
        import tensorstore  # pyright: ignore[reportMissingImports]  # an extra
    except ImportError:
        raise CheckpointError("reading a JAX checkpoint needs tensorstore: pip install 'relay-robotics[jax]'") from None
    return tensorstore
