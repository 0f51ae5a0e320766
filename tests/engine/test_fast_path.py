"""A prepared path is taken when it gives what the plain one gives; else there is a remark why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from relay.engine.fast_path import checked, largest_difference


@dataclass(frozen=True)
class Shapes:
    left_out: Sequence[str] = ()


def test_what_gives_the_same_is_taken() -> None:
    shapes = Shapes()
    assert checked("shapes", lambda: shapes, lambda prepared: 1e-4, 1e-4) == (shapes, [])


@pytest.mark.parametrize(("distance", "said"), [(2e-4, "2.0e-04"), (float("nan"), "nan"), (float("inf"), "inf")])
def test_what_gives_something_else_is_not(distance: float, said: str) -> None:
    prepared, remarks = checked("shapes", Shapes, lambda prepared: distance, 1e-4)
    assert prepared is None
    expected = (
        f"shapes are off: their actions differ from the plain ones by {said} of their deviation, more than 0.0001"
    )
    assert remarks == [expected]


@pytest.mark.parametrize("at", ["preparing", "comparing"])
def test_what_fails_is_not_taken_and_its_error_is_logged(at: str, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*prepared: Shapes) -> float:
        raise MemoryError("no room")

    path = checked("shapes", fails if at == "preparing" else Shapes, fails, 1e-4)  # pyright: ignore
    assert path == (None, ["shapes are off: MemoryError while capturing"])
    assert "capturing failed" in caplog.text
    assert "no room" in caplog.text


def test_a_lost_device_is_not_hidden() -> None:
    def fails() -> Shapes:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        checked("shapes", fails, lambda prepared: 0.0, 1e-4)


def test_shapes_without_memory_are_counted_and_the_first_is_named() -> None:
    shapes = Shapes(["batch 8", "batch 4"])
    assert checked("shapes", lambda: shapes, lambda prepared: 0.0, 1e-4) == (
        shapes,
        ["2 shapes found no memory for a graph and run without, the first is batch 8"],
    )


def test_the_largest_difference_is_told_in_deviations_of_the_plain_actions() -> None:
    plain = torch.tensor([0.0, 2.0, 4.0])  # a deviation of 2
    assert largest_difference([(plain, plain), (plain + torch.tensor([0.0, -1.0, 0.5]), plain)]) == 0.5
    assert largest_difference([]) == 0


@pytest.mark.parametrize("order", [1, -1])
def test_actions_that_are_no_numbers_are_never_near(order: int) -> None:
    plain = torch.tensor([0.0, 2.0, 4.0])
    batches = [(plain * float("nan"), plain), (plain, plain)][::order]
    assert not largest_difference(batches) <= 1e9
