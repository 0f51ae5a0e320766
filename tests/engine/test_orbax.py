"""Orbax folders: the arrays in them, and what is wrong with them.

The folder that Orbax itself wrote is tests/data/pi0/cut_jax (see tests/models/pi0/make_cut.py); the others are laid
down here in its older form, a Zarr array per folder.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relay.engine.orbax import OrbaxSource
from relay.engine.weights import CheckpointError

ts: Any = pytest.importorskip("tensorstore", reason="tensorstore is not here: pip install 'relay-robotics[jax]'")

WRITTEN = Path(__file__).parents[1] / "data/pi0/cut_jax/params"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A copy of what Orbax wrote."""
    return Path(shutil.copytree(WRITTEN, tmp_path / "params"))


def lay_down(folder: Path, arrays: dict[str, np.ndarray], chunks: dict[str, list[int]] | None = None) -> Path:
    """A folder per array, and the list of them."""
    folder.mkdir()
    leaves = {}
    for name, array in arrays.items():
        parts = name.split("/")
        metadata = {"chunks": (chunks or {}).get(name, list(array.shape)), "dimension_separator": "."}
        store = {"driver": "file", "path": f"{folder}/{'.'.join(parts)}/"}
        spec = {"driver": "zarr", "kvstore": store, "metadata": metadata, "store_data_equal_to_fill_value": True}
        ts.open(spec, create=True, dtype=array.dtype.name, shape=array.shape).result().write(array).result()
        keys = [{"key": part, "key_type": 2} for part in parts]
        leaves[str(tuple(parts))] = {"key_metadata": keys, "value_metadata": {"value_type": "np.ndarray"}}
    metadata = {"tree_metadata": leaves, "store_array_data_equal_to_fill_value": True}
    (folder / "_METADATA").write_text(json.dumps(metadata))
    return folder


def test_an_item_name_and_a_last_part_that_all_leaves_share_are_left_out() -> None:
    names = OrbaxSource(WRITTEN).shapes
    assert names["PaliGemma/img/embedding/kernel"] == (14, 14, 3, 12)
    assert names["action_in_proj/bias"] == (16,)


def test_a_last_part_that_only_some_leaves_have_stays(tmp_path: Path) -> None:
    one = np.ones(1, np.float32)
    folder = lay_down(tmp_path / "params", {"params/a/value": one, "params/b": one})
    assert set(OrbaxSource(folder).shapes) == {"a/value", "b"}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_every_float_dtype_comes_back_as_it_was_stored(tmp_path: Path, dtype: str) -> None:
    array = np.array([[1.5, -2.0, 0.0]]).astype(ts.dtype(dtype).numpy_dtype)
    tensor = OrbaxSource(lay_down(tmp_path / "params", {"params/a": array})).read("a")
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.tolist() == [[1.5, -2.0, 0.0]]


LAYERS = np.arange(5 * 4, dtype=np.float32).reshape(5, 4)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_layers_equal_the_rows_of_the_whole_array(tmp_path: Path, depth: int) -> None:
    source = OrbaxSource(lay_down(tmp_path / "params", {"params/a": LAYERS}, {"params/a": [depth, 4]}))
    assert [source.read_layer("a", i).tolist() for i in (0, 1, 2, 3, 4, 0)] == LAYERS[[0, 1, 2, 3, 4, 0]].tolist()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_by_name(tmp_path: Path, dtype: str, value: float) -> None:
    array = LAYERS.astype(ts.dtype(dtype).numpy_dtype)
    array[3, 1:3] = value
    source = OrbaxSource(lay_down(tmp_path / "params", {"params/a": array}))
    with pytest.raises(CheckpointError, match=r"^a in .*params: 2 of 20 values are NaN or infinite; the training"):
        source.read("a")
    assert source.read_layer("a", 2).tolist() == LAYERS[2].tolist()
    with pytest.raises(CheckpointError, match=r"^a\[3\] in .*params: 2 of 4 values are NaN or infinite; the training"):
        source.read_layer("a", 3)


def test_layers_that_share_a_chunk_are_decoded_once(tmp_path: Path) -> None:
    folder = lay_down(tmp_path / "params", {"params/a": LAYERS}, {"params/a": [2, 4]})
    source = OrbaxSource(folder)
    source.read_layer("a", 0)
    shutil.rmtree(folder)
    assert source.read_layer("a", 1).tolist() == LAYERS[1].tolist()
    with pytest.raises(CheckpointError):
        source.read_layer("a", 2)


def test_what_is_held_of_other_arrays_makes_room_for_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = lay_down(tmp_path / "params", {"params/a": LAYERS, "params/b": LAYERS + 1})
    source = OrbaxSource(folder)
    monkeypatch.setattr("relay.engine.orbax._KEPT_BYTES", LAYERS.nbytes + 1)
    source.read_layer("a", 0)
    source.read_layer("b", 0)
    shutil.rmtree(folder)
    assert source.read_layer("b", 1).tolist() == (LAYERS[1] + 1).tolist()
    with pytest.raises(CheckpointError):
        source.read_layer("a", 1)


def test_a_lost_chunk_is_an_error_and_not_zeros(tmp_path: Path) -> None:
    folder = lay_down(tmp_path / "params", {"params/a": LAYERS}, {"params/a": [2, 4]})
    (folder / "params.a/1.0").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read a in .*incomplete or damaged"):
        OrbaxSource(folder).read("a")


def test_a_lost_array_is_named(tmp_path: Path) -> None:
    folder = lay_down(tmp_path / "params", {"params/a": LAYERS, "params/b": LAYERS})
    shutil.rmtree(folder / "params.b")
    with pytest.raises(CheckpointError, match=r"cannot read b in .*incomplete or damaged"):
        OrbaxSource(folder)


def test_a_folder_without_metadata_is_named(written: Path) -> None:
    (written / "_METADATA").unlink()
    with pytest.raises(CheckpointError, match=r"no _METADATA in .*params"):
        OrbaxSource(written)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tree_metadata": []}', '{"tree_metadata": {"a": {}}}'])
def test_damaged_metadata_is_named(written: Path, text: str) -> None:
    (written / "_METADATA").write_text(text)
    with pytest.raises(CheckpointError, match="_METADATA is damaged"):
        OrbaxSource(written)


def test_a_folder_that_orbax_did_not_finish_is_told(written: Path) -> None:
    unfinished = written.rename(written.with_name("params.orbax-checkpoint-tmp-17"))
    with pytest.raises(CheckpointError, match="was never finished"):
        OrbaxSource(unfinished)


def test_a_checkpoint_whose_parts_were_never_merged_is_told(written: Path) -> None:
    (written / "manifest.ocdbt").unlink()
    with pytest.raises(CheckpointError, match=r"ocdbt\.process_0 but no manifest\.ocdbt"):
        OrbaxSource(written)


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:9])])
@pytest.mark.parametrize("place", ["d", "ocdbt.process_0/d"])
def test_lost_and_cut_data_files_are_errors(written: Path, place: str, damage: Any) -> None:
    for file in (written / place).iterdir():
        damage(file)
    with pytest.raises(CheckpointError, match="incomplete or damaged; fetch it again"):
        OrbaxSource(written).read("PaliGemma/img/embedding/kernel")


def test_without_tensorstore_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(CheckpointError, match=r"pip install 'relay-robotics\[jax\]'"):
        OrbaxSource(WRITTEN)
