"""Compiled functions give what the plain ones give, in both forms of a norm and for one row and several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from relay.models.pi0.gemma import PLAIN, Between, Modulation, Rotation, compiled, rotation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # of the compiler itself
]


@pytest.fixture(scope="module")
def between() -> Iterator[Between]:
    torch.compiler.reset()
    with torch.inference_mode():
        yield compiled()


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_gates_are_the_same(between: Between, rows: int, dtype: torch.dtype) -> None:
    x, y, offset = values(rows, 7, 32).to(dtype), values(rows, 7, 32).to(dtype), values(32)
    modulation = Modulation(*(values(rows, 1, 32) for _ in range(3)))
    for args in ((x, offset, None), (x, None, modulation)):
        torch.testing.assert_close(between.normalize(*args), PLAIN.normalize(*args))
    for gate in (None, modulation):
        torch.testing.assert_close(between.add_gated(x, y, gate), PLAIN.add_gated(x, y, gate), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rows", [1, 3])
def test_rotation_and_gelu_are_the_same(between: Between, rows: int) -> None:
    x, tables = values(rows, 7, 9, 16), rotation(torch.arange(7 * rows).view(rows, 7), 16)
    torch.testing.assert_close(between.rotate(x, Rotation(*tables)), PLAIN.rotate(x, tables))
    torch.testing.assert_close(between.gated_gelu(values(rows, 7, 64)), PLAIN.gated_gelu(values(rows, 7, 64)))
