"""What is counted without a network is what a network takes."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model

from relay.models.pi0.memory import activation_bytes, cache_bytes, parameters, weight_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_weights_are_counted_as_they_are_loaded(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype)
    assert weight_bytes(model.config, dtype) == sum(parameter.nbytes for parameter in model.parameters())
    assert parameters(model.config) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_the_cache_of_a_row_is_counted_as_it_is_made(family: str) -> None:
    model = tiny_model(family)
    cache = model.new_cache(1, 2 * 256 + 51)
    expected = cache.keys.nbytes + cache.values.nbytes
    assert cache_bytes(model.config, torch.float32, cameras=2, prompt=51) == expected


def test_more_cameras_take_more() -> None:
    config = tiny_model("pi05").config
    two, three = (activation_bytes(config, torch.bfloat16, cameras=cameras, prompt=51) for cameras in (2, 3))
    assert two < three
