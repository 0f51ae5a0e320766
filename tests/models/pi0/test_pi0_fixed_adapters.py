"""Adapters over fixed buffers: what the plain path gives with them, whatever the buffers held before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lora import EXPERT_ATTENTION, LANGUAGE, VISION, random_factors, write_peft
from test_pi0_fixed_shapes import MEGABYTE, PLAN, noise, row
from tiny import tiny_model
from torch import Tensor

from relay.engine.chunking import Chunking
from relay.models.pi0.adapters import Pi0Adapter, read_adapter
from relay.models.pi0.assemble import assemble
from relay.models.pi0.fixed_shapes import FixedShapes
from relay.models.pi0.guidance import LeftOver
from relay.models.pi0.resident import ResidentAdapters
from relay.models.pi0.self_check import fixed_distance
from relay.models.pi0.transforms import Pi0Prepared

FAMILIES = ("pi0", "pi05")
TIME = {"pi0": "action_time_mlp_in", "pi05": "time_mlp_out"}
PREFIX = [f"{LANGUAGE}{layer}.self_attn.{part}_proj" for layer in range(3) for part in "qkv"]


class Setting:
    """Three adapters on a tiny network: of the expert, of the time and of the prefix."""

    def __init__(self, family: str, folder: Path, reuse_bytes: int = 0) -> None:
        self.family, self.folder, self.model = family, folder, tiny_model(family)
        targets = [EXPERT_ATTENTION, [*EXPERT_ATTENTION, TIME[family], "action_out_proj"], PREFIX]
        self.held = tuple(self.adapter(names, seed) for seed, names in enumerate(targets))
        self.resident = ResidentAdapters(self.model, lambda: self.held, 2**30)
        self.fixed = FixedShapes(self.model, PLAN, capture=False, reuse_bytes=reuse_bytes, resident=self.resident)
        self.fixed.prepare(lambda phase, share: None)

    def adapter(self, names: Sequence[str], seed: int, rank: int = 4) -> Pi0Adapter:
        factors = random_factors(self.family, names, seed=seed, rank=rank)
        config = {"r": rank, "lora_alpha": 2 * rank}
        return read_adapter(write_peft(self.folder / f"{seed}-{rank}", factors, config=config), self.model)

    def plain(self, rows: Sequence[Pi0Prepared]) -> Tensor:
        fresh = ResidentAdapters(self.model, lambda: self.held, 2**30)
        inputs = assemble(self.model, rows, noise(rows))
        network, inputs = fresh.apply(inputs, [r.adapter for r in rows], [len(r.images) for r in rows])
        return network.sample_actions(inputs)

    def sample(self, rows: Sequence[Pi0Prepared]) -> Tensor | None:
        return self.fixed.sample(rows, noise(rows))

    def distance(self, rows: Sequence[Pi0Prepared]) -> float:
        actions, plain = self.sample(rows), self.plain(rows)
        assert actions is not None
        return float((actions - plain).abs().max() / plain.std())


@pytest.fixture(params=FAMILIES)
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> Setting:
    return Setting(request.param, tmp_path)


def rows(adapters: Sequence[Pi0Adapter | None], **sizes: int) -> list[Pi0Prepared]:
    return [replace(row(seed, **sizes), adapter=adapter) for seed, adapter in enumerate(adapters)]


def test_a_batch_with_three_adapters_and_none_gives_what_the_plain_path_gives(setting: Setting) -> None:
    assert setting.distance(rows([*setting.held, None])) <= 1e-4


def test_each_adapter_alone_gives_what_the_plain_path_gives(setting: Setting) -> None:
    for adapter in setting.held:
        assert setting.distance(rows([adapter])) <= 1e-4


def test_rows_of_different_steps_keep_their_adapters(setting: Setting) -> None:
    batch = [replace(r, num_steps=2 + i) for i, r in enumerate(rows([setting.held[1], None, setting.held[1]]))]
    assert setting.distance(batch) <= 1e-4


def test_rows_with_adapters_and_without_are_guided_alike(setting: Setting) -> None:
    kept = LeftOver(noise(rows([None]))[0].numpy(), Chunking().weights(2, 6, 10), Chunking())
    batch = [replace(r, left_over=kept if i != 1 else None) for i, r in enumerate(rows([*setting.held, None]))]
    assert setting.distance(batch) <= 1e-4
    alone = torch.cat([setting.plain([r]) for r in batch])
    actions = setting.sample(batch)
    assert actions is not None
    assert float((actions - alone).abs().max() / alone.std()) <= 1e-4


def test_what_was_in_the_buffers_changes_nothing(setting: Setting) -> None:
    batches = [rows([setting.held[0], setting.held[2]]), rows([None, None]), rows([setting.held[1]])]
    expected = [setting.sample(batch) for batch in batches]
    for batch, wanted in zip(reversed(batches), reversed(expected), strict=True):
        setting.fixed.spoil()
        actions = setting.sample(batch)
        assert actions is not None
        assert wanted is not None
        assert torch.equal(actions, wanted)


def test_the_check_at_start_covers_adapters(setting: Setting) -> None:
    assert fixed_distance(setting.fixed, setting.model, setting.resident) <= 1e-4
    for change in setting.fixed._changes.values():  # pyright: ignore  # what a wrong gather would leave
        for part in change:
            if part is not None:
                part.add_(1)
    setting.resident.gather = lambda *arguments: True  # pyright: ignore
    assert not fixed_distance(setting.fixed, setting.model, setting.resident) <= 1e-1


def test_adapters_that_need_more_than_the_buffers_are_left_to_the_plain_path(setting: Setting) -> None:
    eyes = setting.adapter([f"{VISION}encoder.layers.0.mlp.fc1"], seed=7)
    wider = setting.adapter(EXPERT_ATTENTION, seed=8, rank=9)
    assert setting.sample(rows([eyes, None])) is None
    assert setting.sample(rows([wider])) is None
    assert setting.sample(rows([None])) is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_is_kept_for_rows_whose_adapters_do_not_touch_it(family: str, tmp_path: Path) -> None:
    setting = Setting(family, tmp_path, reuse_bytes=MEGABYTE)

    def ask(adapter: Pi0Adapter | None) -> int:
        before = setting.fixed.reused_prefixes
        batch = [replace(row(1), image_ids=(b"a", b"b"), adapter=adapter)]
        assert setting.distance(batch) <= 1e-4
        return setting.fixed.reused_prefixes - before

    expert, _, prefix = setting.held
    assert ask(None) == 0
    assert ask(expert) == (1 if family == "pi05" else 0)  # π0's state token runs through the expert
    assert ask(prefix) == 0
    assert ask(prefix) == 1
    assert ask(None) == 0
