"""Which device a model is put on."""

from __future__ import annotations

import pytest
import torch

from relay.engine.device import choose_device
from relay.engine.weights import CheckpointError


def test_auto_takes_a_gpu_where_there_is_one() -> None:
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["nope", "cuda:99", "cpu:x", "", "meta"])
def test_a_device_that_cannot_be_used_is_refused_with_those_that_can(name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"--device {name}: .*; this machine has .*cpu"):
        choose_device(name)
