"""openpi's JAX names and layouts against its PyTorch ones, on a checkpoint that Orbax wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tiny import DATA, Tensors, tiny_model

from relay.engine.orbax import OrbaxSource
from relay.engine.weights import CheckpointError, SafetensorsSource, TensorSource
from relay.models.pi0.jax_names import RULES, from_jax
from relay.models.pi0.weights import packing


class Arrays(Tensors):
    """JAX arrays in memory."""

    def read_layer(self, name: str, layer: int) -> torch.Tensor:
        return self[name][layer]


def renamed(**arrays: torch.Tensor) -> TensorSource:
    return from_jax(cast("Any", Arrays({name.replace("__", "/"): array for name, array in arrays.items()})))


@pytest.fixture
def written() -> TensorSource:
    pytest.importorskip("tensorstore", reason="tensorstore is not here: pip install 'relay-robotics[jax]'")
    return from_jax(OrbaxSource(Path(DATA / "cut_jax/params")))


def test_every_tensor_of_a_written_checkpoint_is_the_one_it_was_written_from(written: TensorSource) -> None:
    expected = SafetensorsSource(DATA / "cut.safetensors")
    assert dict(written.shapes) == dict(expected.shapes)
    for name in expected.shapes:
        tensor = written.read(name)
        assert torch.equal(tensor, expected.read(name)), name
        assert tensor.is_contiguous(), name
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), name


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_a_rule_makes_every_tensor_that_the_network_needs(family: str) -> None:
    made = {rule.torch for rule in RULES}
    for packed in packing(tiny_model(family).config):
        for name in packed.sources:
            pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
            assert pattern in made


def test_an_array_that_no_rule_knows_keeps_its_name() -> None:
    source = renamed(surprise__kernel=torch.ones(2, 3))
    assert dict(source.shapes) == {"surprise/kernel": (2, 3)}
    assert source.read("surprise/kernel").tolist() == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("shape", [(), (3,), (3, 4, 5)])
def test_an_array_of_another_rank_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match="action_in_proj/kernel has the shape"):
        renamed(action_in_proj__kernel=torch.ones(shape))
