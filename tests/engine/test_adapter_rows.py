"""Changes of linear layers, row by row, against products worked out for each row alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from relay.engine.adapter_rows import (
    Changes,
    ChangeTables,
    LinearChange,
    LinearShape,
    RowChange,
    adapted,
    add_change,
    add_change_below,
    by_layer,
    groups,
)

SHAPES = {"one": LinearShape(2, 6, 5, torch.float32), "other": LinearShape(1, 6, 5, torch.float32)}
CPU = torch.device("cpu")


def low_rank(rank: int, seed: int) -> LinearChange:
    generator = torch.Generator().manual_seed(seed)
    return LinearChange(torch.randn(6, rank, generator=generator), torch.randn(rank, 5, generator=generator))


def delta(change: LinearChange) -> torch.Tensor:
    assert change.down is not None
    assert change.up is not None
    return torch.einsum("ir,ro->io", change.down, change.up)


ADAPTERS: list[Changes] = [
    {"one": {0: low_rank(2, 1), 1: low_rank(3, 2)}},
    {"one": {1: low_rank(1, 3)}, "other": {0: LinearChange(dense=torch.ones(6, 5), bias=torch.arange(5.0))}},
]


def filled(slots: int = 2) -> ChangeTables:
    tables = ChangeTables(SHAPES, ADAPTERS, slots, CPU)
    for slot, adapter in enumerate(ADAPTERS, 1):
        tables.write(slot, adapter)
    return tables


@pytest.mark.parametrize("slots", [(1, 2, 0), (2, 2, 2), (1, 1, 1), (0, 0, 2)])
def test_each_row_gets_its_own_change(slots: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(6, 5), torch.randn(3, 4, 6)
    changes = filled().rows(slots)
    y = adapted(linear, x, changes["one"][1])
    for row, slot in enumerate(slots):
        weight = linear.weight.T if slot == 0 else linear.weight.T + delta(ADAPTERS[slot - 1]["one"][1])
        assert torch.allclose(y[row], x[row] @ weight + linear.bias, atol=1e-5)


def test_a_row_without_an_adapter_keeps_its_bits() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(6, 5), torch.randn(2, 4, 6)
    y = adapted(linear, x, filled().rows((1, 0))["one"][0])
    assert torch.equal(y[1], linear(x)[1])


def test_dense_changes_and_biases_are_added() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(6, 5), torch.randn(2, 4, 6)
    y = adapted(linear, x, filled().rows((0, 2))["other"][0])
    assert torch.allclose(y[0], linear(x[0]))
    assert torch.allclose(y[1], linear(x[1]) + x[1].sum(-1, keepdim=True) + torch.arange(5.0), atol=1e-5)


@pytest.mark.parametrize("slots", [(1, 2, 0), (2, 2, 2)])
def test_rows_below_each_other_get_the_same_changes(slots: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(3, 4, 6), torch.randn(3, 4, 5)
    for kind, layers in filled().rows(slots, below=True).items():
        for change, beside in zip(layers, filled().rows(slots)[kind], strict=True):
            ours = add_change_below(y.clone().flatten(0, 1), x.flatten(0, 1), change)
            assert torch.allclose(ours, add_change(y.clone(), x, beside).flatten(0, 1), atol=1e-6)


def test_kinds_that_no_row_changes_are_left_out() -> None:
    assert set(filled().rows((1, 0))) == {"one"}
    assert set(filled().rows((1, 2))) == {"one", "other"}
    assert not filled().rows((0, 0))


def test_only_parts_that_an_adapter_has_get_a_table() -> None:
    (change,) = filled().rows((2,))["other"]
    assert change.down is None
    assert change.up is None
    (change, _) = filled().rows((1,))["one"]
    assert change.dense is None
    assert change.bias is None


def test_writing_a_slot_anew_leaves_nothing_of_what_was_there() -> None:
    tables = filled()
    tables.write(1, {"one": {1: low_rank(1, 9)}})
    change = tables.rows((1,))["one"][0]
    assert change.down is not None
    assert not change.down.any()
    expected = delta(low_rank(1, 9))
    x = torch.eye(6)[None]
    assert torch.allclose(add_change(torch.zeros(1, 6, 5), x, tables.rows((1,))["one"][1])[0], expected, atol=1e-6)


LATER: list[Changes] = [
    {"one": {0: low_rank(1, 4)}},
    {"one": {1: low_rank(4, 5)}},
    {"other": {0: LinearChange(bias=torch.ones(5))}},
    {"other": {0: low_rank(1, 6)}},
]


@pytest.mark.parametrize("held", [[0], [2], [0, 2], [0, 1, 2, 3]], ids=str)
def test_buffers_take_every_adapter_that_fits_them_whoever_came_or_went_since(held: list[int]) -> None:
    """Two adapters need more than the buffers have: a larger rank, and factors where there is room for none."""
    buffers = filled().buffers(3)
    tables = ChangeTables(SHAPES, [LATER[number] for number in held], len(held), CPU)
    for slot, number in enumerate(held, 1):
        tables.write(slot, LATER[number])
    for slot, number in enumerate(held, 1):
        for change in buffers.values():
            for part in change:
                if part is not None:
                    part.fill_(torch.nan)
        assert tables.gather([0, slot, 0], buffers) == (number in {0, 2})
        if number not in {0, 2}:
            continue
        for kind, change in buffers.items():
            for layer, of_layer in enumerate(by_layer(change, lambda t: t)):
                y = add_change(torch.zeros(3, 6, 5), torch.eye(6).repeat(3, 1, 1), of_layer)
                told = LATER[number].get(kind, {}).get(layer)
                assert not y[0].any()
                assert not y[2].any()
                assert torch.allclose(y[1], torch.zeros(6, 5) if told is None else applied(told), atol=1e-6)


def applied(change: LinearChange) -> torch.Tensor:
    """What a change adds for the rows of the unit matrix."""
    return torch.ones(6, 5) if change.bias is not None else delta(change)


def test_the_memory_of_a_slot_is_what_the_tables_take() -> None:
    # one: 2 layers of rank 3 (6 x 3 and 3 x 5); other: 6 x 5 and 5.
    assert ChangeTables.bytes_per_slot(SHAPES, ADAPTERS) == 4 * (2 * (18 + 15) + 30 + 5)


def test_the_changes_of_some_outputs_are_those_of_the_whole() -> None:
    x, y = torch.randn(1, 4, 6), torch.zeros(1, 4, 5)
    whole = RowChange(torch.randn(1, 6, 2), torch.randn(1, 2, 5), torch.randn(1, 6, 5), torch.randn(1, 1, 5))
    part = add_change(y[..., 3:], x, whole.from_output(3))
    assert torch.allclose(part, add_change(y, x, whole)[..., 3:], atol=1e-6)


@dataclass(frozen=True)
class Named:
    name: str
    alone: bool = False


def test_groups_hold_no_more_adapters_than_fit_and_those_that_run_alone_by_themselves() -> None:
    a, b, c, alone = Named("a"), Named("b"), Named("c"), Named("alone", alone=True)
    assert groups([a, None, b, alone, c, a, None, alone], 2) == [[0, 1, 2, 5, 6], [4], [3, 7]]
    assert groups([None, None], 1) == [[0, 1]]
