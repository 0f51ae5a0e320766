"""How many operations one call dispatches: what a GPU is told, kernel by kernel, where nothing is captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny import golden_inputs, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from relay.models.pi0.model import Pi0

LEROBOT = {"pi05": 4747, "pi0": 4457}
"""lerobot 0.6.1, counted by benchmarks/engine.py: same sizes, three cameras, 40 prompt tokens, 10 steps."""


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[Counting]:
    """As lerobot runs, under `no_grad`: inference mode would count composite operations as one."""
    with torch.no_grad(), Counting() as counts:
        yield counts


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_a_call_dispatches_less_than_half_of_lerobots_operations(family: str) -> None:
    model, inputs = tiny_model(family), golden_inputs(family, (1,), 10)
    assert len(inputs.images) == 3
    model.sample_actions(inputs)  # tables are made
    with counting() as counts:
        Pi0.sample_actions.__wrapped__(model, inputs)  # pyright: ignore
    assert 1000 < counts.count <= 0.5 * LEROBOT[family]


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_a_denoising_step_dispatches_nothing_but_the_blocks_need(family: str) -> None:
    """The time costs nothing: of a step's operations all but a few are in its three blocks, 50 at most in each."""
    model = tiny_model(family)
    totals: list[int] = []
    for steps in (4, 5):
        inputs = golden_inputs(family, (1,), steps)
        model.sample_actions(inputs)
        with counting() as counts:
            Pi0.sample_actions.__wrapped__(model, inputs)  # pyright: ignore
        totals.append(counts.count)
    assert totals[1] - totals[0] <= 3 * 50 + 30
