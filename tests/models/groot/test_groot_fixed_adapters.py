"""Adapters over prepared steps: what the plain path gives with them, whatever the buffers held before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_groot_adapters import SAVED, TARGETS, random_factors, random_tensors, write
from tiny_groot import drawn_noise, drawn_row, tiny_config, tiny_model
from torch import Tensor

from relay.models.groot.adapters import GrootAdapter, read_adapter
from relay.models.groot.assemble import assemble
from relay.models.groot.fixed_shapes import FixedShapes
from relay.models.groot.resident import ResidentAdapters
from relay.models.groot.self_check import fixed_distance
from relay.models.groot.shapes import Pictures, ShapePlan
from relay.models.groot.transforms import GrootPrepared

PLAN = ShapePlan(texts=(32,), images=(16,), rows=(1, 2, 4), pictures={16: Pictures(2, 64, 96)})
GRIDS = {"prepared from the start": [(2, 3), (2, 3)], "prepared steps": [(2, 3), (2, 2)]}


class Setting:
    """A tiny network with one adapter of every kind of layer that is changed row by row."""

    def __init__(self, folder: Path, targets: Sequence[str] = tuple(TARGETS), images: str = "prepared steps") -> None:
        self.folder, self.grids = folder, GRIDS[images]
        self.held = [self.adapter(target, seed) for seed, target in enumerate(targets)]
        self.resident = ResidentAdapters(tiny_model(), lambda: self.held, 2**30)
        self.fixed = FixedShapes(tiny_model(), 2, PLAN, capture=False, resident=self.resident)
        self.fixed.prepare(lambda phase, share: None)

    def adapter(self, target: str, seed: int, rank: int = 4) -> GrootAdapter:
        factors = random_factors(TARGETS[target], seed=seed, rank=rank)
        return read_adapter(write(self.folder / f"{seed}-{rank}", factors, rank=rank), tiny_model())

    def sample(self, adapters: Sequence[GrootAdapter | None], num_steps: int = 3) -> Tensor | None:
        return self.fixed.sample(self.batch(adapters), drawn_noise(*range(len(adapters))), num_steps)

    def plain(self, batch: Sequence[GrootPrepared], noise: Tensor, num_steps: int) -> Tensor:
        fresh = ResidentAdapters(tiny_model(), lambda: self.held, 2**30)
        inputs = assemble(tiny_model(), [one.row for one in batch], noise, num_steps)
        images = [len(one.row.images) for one in batch]
        network, inputs = fresh.apply(inputs, [one.adapter for one in batch], images)
        return network.sample_actions(inputs)

    def distance(self, adapters: Sequence[GrootAdapter | None], num_steps: int = 3) -> float:
        actions = self.sample(adapters, num_steps)
        plain = self.plain(self.batch(adapters), drawn_noise(*range(len(adapters))), num_steps)
        assert actions is not None
        return float((actions - plain).abs().max() / plain.std())

    def batch(self, adapters: Sequence[GrootAdapter | None]) -> list[GrootPrepared]:
        """Rows of different prompts, one for each."""
        return [
            GrootPrepared(drawn_row(seed, self.grids, 3 + seed), raw_state={}, adapter=adapter)
            for seed, adapter in enumerate(adapters)
        ]


@pytest.fixture(scope="module", params=GRIDS)
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tmp_path_factory.mktemp("adapters"), images=request.param)


def adapter_of(setting: Setting, target: str) -> GrootAdapter:
    return setting.held[list(TARGETS).index(target)]


@pytest.mark.parametrize("target", list(TARGETS))
def test_each_adapter_alone_gives_what_the_plain_path_gives(setting: Setting, target: str) -> None:
    assert setting.distance([adapter_of(setting, target)]) <= 1e-5


@pytest.mark.parametrize("target", list(TARGETS))
def test_a_row_without_an_adapter_is_the_same_beside_one_with(setting: Setting, target: str) -> None:
    beside, alone = setting.sample([None, adapter_of(setting, target), None]), setting.sample([None])
    assert beside is not None
    assert alone is not None
    assert float((beside[0] - alone[0]).abs().max() / alone.std()) <= 1e-5


def test_batches_of_every_size_with_adapters_and_none_give_what_the_plain_path_gives(setting: Setting) -> None:
    mixed = [*setting.held, None]
    for first in range(len(mixed)):
        rows = [mixed[(first + i) % len(mixed)] for i in range(4)]
        for count in (1, 2, 3, 4):
            assert setting.distance(rows[:count], num_steps=1 + first % 4) <= 1e-5


def test_what_was_in_the_buffers_changes_nothing(setting: Setting) -> None:
    batches = [[*setting.held[:2], None], [None, None], setting.held[4:8], [setting.held[3]]]
    expected = [setting.sample(one) for one in batches]
    for one, wanted in zip(reversed(batches), reversed(expected), strict=True):
        setting.fixed.spoil()
        actions = setting.sample(one)
        assert actions is not None
        assert wanted is not None
        assert torch.equal(actions, wanted)


def test_buffers_that_are_spoilt_hold_nothing_that_a_call_could_use(setting: Setting) -> None:
    assert setting.sample([setting.held[0], None]) is not None
    setting.fixed.spoil()
    assert (setting.fixed._staging._device == 0xFF).all()
    assert setting.fixed._memory.view(torch.float32).isnan().all()
    room = setting.fixed._room
    assert room is not None
    changes = [*room.rows.values(), *room.images.values()]
    assert changes
    assert all(part.isnan().all() for change in changes for part in change if part is not None)


@pytest.mark.parametrize("images", GRIDS)
@pytest.mark.parametrize("targets", [["MLPs", "norms of the time"], ["language", "vision"]], ids=str)
def test_the_check_at_start_covers_adapters(
    targets: list[str], images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(tmp_path, targets, images)
    row = drawn_row(1, setting.grids, 3)

    def distance() -> float:
        some = setting.resident.sample()
        return fixed_distance(setting.fixed, setting.plain, [row], tiny_config(), some)

    assert distance() <= 1e-4
    gather = setting.resident.gather
    monkeypatch.setattr(setting.resident, "gather", lambda rows, *to: gather([*rows[1:], rows[0]], *to))
    seen_plainly = images == "prepared steps" and targets[0] == "language"
    assert (distance() <= 1e-4) == seen_plainly  # what is told operation by operation isn't gathered


def test_adapters_that_need_more_than_the_buffers_are_left_to_the_plain_path(tmp_path: Path) -> None:
    setting = Setting(tmp_path, ["MLPs"])
    whole = read_adapter(write(tmp_path / "whole", random_tensors(SAVED)), tiny_model())
    assert whole.alone
    assert setting.distance(setting.held) <= 1e-5
    for other in (whole, setting.adapter("MLPs", 8, rank=9), setting.adapter("self-attention", 9)):
        assert setting.sample([other]) is None
    assert setting.distance([None]) <= 1e-5


def test_adapters_that_came_later_and_fit_are_run_prepared(tmp_path: Path) -> None:
    setting = Setting(tmp_path, ["MLPs"])
    setting.held = [*setting.held, setting.adapter("MLPs", 7)]
    assert setting.distance([*setting.held, None]) <= 1e-5


def test_adapters_held_at_the_start_are_run_prepared_whoever_comes_and_goes(tmp_path: Path) -> None:
    setting = Setting(tmp_path, ["MLPs", "vision"])
    first, second = setting.held
    larger, other = setting.adapter("MLPs", 8, rank=9), setting.adapter("language", 9)
    for held in ([first], [second], [first, second, larger, other], [first, second]):
        setting.held = held
        setting.resident.groups([held[0]])
        for adapter in held:
            assert (setting.sample([adapter, None]) is None) == (adapter in {larger, other})
            if adapter in {first, second}:
                assert setting.distance([adapter, None, adapter]) <= 1e-5


def test_without_adapters_at_the_start_those_that_come_run_plain(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [])
    assert len(setting.fixed.graphs) == 2 * len(list(PLAN))
    assert setting.sample([setting.adapter("MLPs", 1)]) is None


def test_a_row_keeps_its_adapter_whatever_its_place(setting: Setting) -> None:
    pair = [setting.held[0], setting.held[5]]
    rows, noise = setting.batch(pair), drawn_noise(0, 1)
    ahead, behind = setting.fixed.sample(rows, noise, 3), setting.fixed.sample(rows[::-1], noise.flip(0), 3)
    assert ahead is not None
    assert behind is not None
    assert float((ahead - behind.flip(0)).abs().max() / ahead.std()) <= 1e-5
    swapped = [replace(one, adapter=other) for one, other in zip(rows, pair[::-1], strict=True)]
    other = setting.fixed.sample(swapped, noise, 3)
    assert other is not None
    assert float((ahead - other).abs().max() / ahead.std()) > 1e-3
