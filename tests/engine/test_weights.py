"""Safetensors on disk: read plainly, tensor by tensor, or refused with the file's name."""

from __future__ import annotations

import json
import math
import pickle
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from relay.engine.weights import CheckpointError, SafetensorsSource, refuse_non_finite

TENSORS = {
    "matrix": torch.arange(12, dtype=torch.float32).view(3, 4),
    "half": torch.tensor([0.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(7.0, dtype=torch.float64),
    "counts": torch.tensor([[1, -1]]),
    "flags": torch.tensor([True, False]),
    "nothing": torch.zeros(0, 3),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def shards(folder: Path) -> dict[str, str]:
    """Two files that hold the tensors between them; the index's map."""
    names = sorted(TENSORS)
    weight_map: dict[str, str] = {}
    for i, part in enumerate((names[:3], names[3:])):
        shard = f"model-{i + 1:05d}-of-00002.safetensors"
        save_file({name: TENSORS[name] for name in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    return weight_map


def same(source: SafetensorsSource) -> bool:
    return source.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()} and all(
        torch.equal(source.read(name), tensor) and source.read(name).dtype == tensor.dtype
        for name, tensor in TENSORS.items()
    )


def test_tensors_come_back_as_the_safetensors_library_wrote_them(file: Path) -> None:
    assert same(SafetensorsSource(file))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused_by_name(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    damaged = torch.ones(30, 50, dtype=dtype)
    damaged[[3, 29], [0, 49]] = value
    save_file({"whole": torch.ones(2), "damaged": damaged}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.read("whole").tolist() == [1, 1]
    told = r"^damaged in .*model\.safetensors: 2 of 1,500 values are NaN or infinite; .*: take an earlier checkpoint"
    with pytest.raises(CheckpointError, match=told):
        source.read("damaged")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_no_place_hides_a_value_that_is_not_finite(dtype: torch.dtype) -> None:
    for size in (1, 2, 7, 8, 9, 31, 33, 100):
        ends = torch.tensor([torch.finfo(dtype).min, torch.finfo(dtype).max], dtype=dtype).repeat(size)[:size]
        refuse_non_finite(ends, "ends", Path())
        for place in range(size):
            for value in (math.nan, math.inf, -math.inf):
                damaged = ends.clone()
                damaged[place] = value
                with pytest.raises(CheckpointError, match=f"1 of {size} values"):
                    refuse_non_finite(damaged, "damaged", Path())


def test_a_folder_stands_for_its_file(file: Path) -> None:
    assert same(SafetensorsSource(file.parent))


def test_a_tensor_that_was_read_is_the_callers_own(file: Path) -> None:
    source = SafetensorsSource(file)
    source.read("matrix").zero_()
    assert torch.equal(source.read("matrix"), TENSORS["matrix"])


@pytest.mark.parametrize("with_index", [True, False])
def test_shards_read_as_one(tmp_path: Path, with_index: bool) -> None:
    weight_map = shards(tmp_path)
    if with_index:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert same(SafetensorsSource(tmp_path))


@pytest.mark.parametrize("with_index", [True, False])
def test_a_missing_shard_is_named(tmp_path: Path, with_index: bool) -> None:
    weight_map = shards(tmp_path)
    if with_index:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00002\.safetensors"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", 7])
def test_an_index_cannot_point_out_of_its_folder(tmp_path: Path, name: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"matrix": name}}))
    with pytest.raises(CheckpointError, match="expected a file in the same folder"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": []}', "{}"])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        SafetensorsSource(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for i in (1, 2):
        save_file({"matrix": TENSORS["matrix"]}, tmp_path / f"model-0000{i}-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"matrix is both in model-00001.* and in model-00002"):
        SafetensorsSource(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model\.safetensors in"):
        SafetensorsSource(tmp_path)


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "policy.pth", "last.ckpt", "model.safetensors"])
def test_a_pickle_is_named_and_never_loaded(tmp_path: Path, name: str) -> None:
    sprung = tmp_path / "sprung"
    (tmp_path / name).write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(CheckpointError, match=rf"{name} .*pickle, which can run code"):
        SafetensorsSource(tmp_path)
    assert not sprung.exists()


def test_what_torch_save_wrote_under_the_name_of_a_safetensors_file_is_told(file: Path) -> None:
    torch.save(TENSORS, file)
    with pytest.raises(CheckpointError, match=r"renamed pickle.*write it anew with safetensors\.torch\.save_file"):
        SafetensorsSource(file)


def test_a_git_lfs_pointer_is_told(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7233\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer; run `git lfs pull`"):
        SafetensorsSource(file)


@pytest.mark.parametrize("kept", [0, 5, 8, 100, -1])
def test_a_file_cut_short_is_named(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors (is not a safetensors file|is cut short)"):
        SafetensorsSource(file)


def test_a_file_that_shrinks_after_it_was_opened_is_an_error_and_no_crash(file: Path) -> None:
    source = SafetensorsSource(file)
    file.write_bytes(file.read_bytes()[:-60])
    with pytest.raises(CheckpointError, match=r"cannot read .* from .*model\.safetensors: the file ends early"):
        [source.read(name) for name in TENSORS]


def test_a_dtype_that_is_not_read_is_named(file: Path) -> None:
    header = json.dumps({"matrix": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(CheckpointError, match="matrix has dtype F8_E4M3"):
        SafetensorsSource(file)


WHOLE = save({"a": torch.ones(2, 2), "b": torch.ones(3, dtype=torch.bfloat16)})


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_are_read_or_refused_but_raise_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    file.write_bytes(damaged)
    with suppress(CheckpointError):
        source = SafetensorsSource(file)
        for name in source.shapes:
            source.read(name)
