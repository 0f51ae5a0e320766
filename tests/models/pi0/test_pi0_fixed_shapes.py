"""The sampler over fixed buffers gives what the plain one gives, whatever the buffers held before."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny import golden, image, tiny_model
from torch import Tensor

from relay.models.pi0 import fixed_shapes
from relay.models.pi0.assemble import assemble
from relay.models.pi0.config import CAMERAS
from relay.models.pi0.fixed_shapes import FixedShapes
from relay.models.pi0.gemma import PLAIN, Between
from relay.models.pi0.shapes import Shape, ShapePlan
from relay.models.pi0.transforms import Pi0Prepared

FAMILIES = ("pi0", "pi05")
PLAN = ShapePlan(cameras=(1, 2, 3), prompts=(16, 32, 40), rows=(1, 2, 3, 4))
MEGABYTE = 2**20


def prepared(family: str, plan: ShapePlan = PLAN, **options: int) -> FixedShapes:
    fixed = FixedShapes(tiny_model(family), plan, capture=False, **options)
    fixed.prepare(lambda phase, share: None)
    return fixed


@cache
def shared(family: str) -> FixedShapes:
    return prepared(family)


def row(seed: int, *, cameras: int = 2, prompt: int = 20, num_steps: int = 3) -> Pi0Prepared:
    random = np.random.default_rng(seed)
    return Pi0Prepared(
        images=random.integers(0, 256, (cameras, 224, 224, 3), np.uint8),
        tokens=tuple(random.integers(1, 64, prompt).tolist()),
        state=random.standard_normal(32).astype(np.float32),
        num_steps=num_steps,
    )


def noise(rows: Sequence[Pi0Prepared]) -> Tensor:
    return torch.stack(
        [torch.from_numpy(np.random.default_rng(r.tokens).standard_normal((10, 32))) for r in rows]
    ).float()


def plain(family: str, rows: Sequence[Pi0Prepared]) -> Tensor:
    model = tiny_model(family)
    return model.sample_actions(assemble(model, rows, noise(rows)))


def sample(fixed: FixedShapes, rows: Sequence[Pi0Prepared]) -> Tensor:
    actions = fixed.sample(rows, noise(rows))
    assert actions is not None
    return actions


def distance(actions: Tensor, reference: Tensor) -> float:
    return float((actions - reference).abs().max() / reference.std())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_steps", [1, 2, 5, 10])
def test_golden_observations_give_the_golden_actions(family: str, num_steps: int) -> None:
    gold = golden(family)
    rows: list[Pi0Prepared] = []
    for number in (0, 1):
        present = [i for i, camera in enumerate(CAMERAS) if gold[f"mask_{camera}"][number]]
        tokens = gold["tokens"][number][gold["token_mask"][number]]
        frames = np.stack([image(number, i) for i in present])
        rows.append(Pi0Prepared(frames, tuple(tokens.tolist()), gold["state"][number], num_steps))
    actions = shared(family).sample(rows, torch.from_numpy(gold["noise"]))
    assert actions is not None
    reference: NDArray[np.float32] = gold[f"actions_f32_{num_steps}"]
    assert np.abs(actions.numpy() - reference).max() / reference.std() <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 31, 32, 33, 39, 40])
@pytest.mark.parametrize("cameras", [1, 3])
def test_padding_to_a_prepared_prompt_length_changes_nothing(family: str, prompt: int, cameras: int) -> None:
    rows = [row(prompt, cameras=cameras, prompt=prompt)]
    assert distance(sample(shared(family), rows), plain(family, rows)) <= 1e-5


BATCHES = {
    "full": [row(1), row(2), row(3), row(4)],
    "padded": [row(1), row(2), row(3, prompt=3)],
    "different cameras": [row(1, cameras=1), row(2, cameras=3), row(3, cameras=2)],
    "different prompts": [row(1, prompt=2), row(2, prompt=40)],
    "few cameras and a long prompt": [row(1, cameras=1, prompt=40), row(2, cameras=3, prompt=1)],
    "different steps": [row(1, num_steps=1), row(2, num_steps=7), row(3, num_steps=4)],
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", BATCHES)
def test_a_batch_gives_what_the_plain_path_gives(family: str, batch: str) -> None:
    rows = BATCHES[batch]
    assert distance(sample(shared(family), rows), plain(family, rows)) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_row_of_a_batch_gives_what_it_gives_alone(family: str, batch: str) -> None:
    rows = BATCHES[batch]
    alone = torch.cat([sample(shared(family), [one]) for one in rows])
    assert distance(sample(shared(family), rows), alone) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_what_earlier_batches_left_in_the_buffers_changes_nothing(family: str) -> None:
    fixed = shared(family)
    rows = [row(1), row(2, cameras=1, prompt=5), row(3, num_steps=2)]
    before = sample(fixed, rows)
    fixed.spoil()
    assert torch.equal(sample(fixed, rows), before)


def test_damage_in_one_row_stays_in_that_row() -> None:
    fixed = prepared("pi05", ShapePlan((2,), (32,), (2,)))
    whole = noise([row(1), row(2)])
    damaged = whole.clone()
    damaged[0] = float("nan")
    actions, expected = fixed.sample([row(1), row(2)], damaged), fixed.sample([row(1), row(2)], whole)
    assert actions is not None
    assert expected is not None
    assert torch.equal(actions[1], expected[1])


def test_any_number_of_steps_runs_on_what_is_prepared() -> None:
    fixed = shared("pi05")
    graphs = len(fixed.graphs)
    rows = [row(1, num_steps=50)]
    assert distance(sample(fixed, rows), plain("pi05", rows)) <= 1e-5
    assert len(fixed.graphs) == graphs


def test_a_batch_outside_the_plan_is_left_to_the_plain_path() -> None:
    fixed = prepared("pi05", ShapePlan((1, 2), (16,), (1, 2)))
    assert fixed.sample([row(1, prompt=17)], noise([row(1, prompt=17)])) is None
    assert fixed.sample([row(1, cameras=3, prompt=4)], noise([row(1, prompt=4)])) is None
    assert fixed.sample([row(1, prompt=4)] * 3, noise([row(1)] * 3)) is None


def test_without_memory_for_graphs_shapes_are_left_out_and_said() -> None:
    fixed = FixedShapes(tiny_model("pi05"), ShapePlan((1,), (16, 32), (1,)), capture=False, budget_bytes=0)
    fixed.prepare(lambda phase, share: None)
    assert [str(shape) for shape in fixed.left_out] == [
        "1 camera × 32 tokens × batch 1",
        "1 camera × 16 tokens × batch 1",
    ]
    assert fixed.sample([row(1, cameras=1, prompt=4)], noise([row(1)])) is None


@pytest.mark.parametrize("fails", [False, True], ids=["captured", "failed"])
def test_compiled_functions_are_used_while_shapes_are_prepared_and_never_after(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, compiled, during = tiny_model("pi05"), Between(*PLAIN), list[Between]()
    prepare_shape = FixedShapes._prepare_shape

    def watched(self: FixedShapes, shape: Shape) -> None:
        during.append(model.expert[0].between)
        prepare_shape(self, shape)
        if fails:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(FixedShapes, "_prepare_shape", watched)
    monkeypatch.setattr(fixed_shapes, "compiled", lambda: compiled)
    fixed = FixedShapes(model, ShapePlan(cameras=(1,), prompts=(16,), rows=(1,)), capture=False)
    fixed._fuse = True  # as where graphs can be captured
    with pytest.raises(RuntimeError) if fails else nullcontext():
        fixed.prepare(lambda phase, share: None)
    assert during[0] is compiled
    assert all(block.between is PLAIN for block in (*model.language, *model.expert))


def test_progress_names_the_shape() -> None:
    said: list[str] = []
    fixed = FixedShapes(tiny_model("pi05"), ShapePlan((2,), (32,), (4,)), capture=False)
    fixed.prepare(lambda phase, share: said.append(phase))
    assert "capturing 2 cameras × 32 tokens × batch 4" in said


def with_ids(prepared_row: Pi0Prepared, *ids: bytes) -> Pi0Prepared:
    return replace(prepared_row, image_ids=ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frame_that_came_before_is_not_embedded_again(family: str) -> None:
    fixed = prepared(family, ShapePlan((2,), (32,), (1,)), reuse_bytes=MEGABYTE)
    first = with_ids(row(1), b"a", b"b")
    moved = replace(first, images=np.stack([first.images[0], row(2).images[1]]), image_ids=(b"a", b"c"))
    sample(fixed, [first])
    actions = sample(fixed, [moved])
    assert fixed.reused_images == 1
    assert distance(actions, plain(family, [moved])) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_reused_frames_give_the_same_bytes(family: str) -> None:
    fixed = prepared(family, ShapePlan((2,), (32,), (1,)), reuse_bytes=MEGABYTE)
    one, other = with_ids(row(1), b"a", b"b"), with_ids(row(2), b"c", b"d")
    first = sample(fixed, [one])
    sample(fixed, [other])
    fixed.spoil()
    assert torch.equal(sample(fixed, [one]), first)
    assert fixed.reused_images == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_observation_with_other_noise_and_steps_keeps_its_prefix(family: str) -> None:
    fixed = prepared(family, ShapePlan((2,), (32,), (2,)), reuse_bytes=MEGABYTE)
    rows = [with_ids(row(1), b"a", b"b"), with_ids(row(2), b"c", b"d")]
    again = [replace(rows[0], num_steps=5), replace(rows[1], num_steps=2)]
    sample(fixed, rows)
    other = torch.flip(noise(rows), (0,))
    actions = fixed.sample(again, other)
    model = tiny_model(family)
    assert fixed.reused_prefixes == 1
    assert actions is not None
    assert distance(actions, model.sample_actions(assemble(model, again, other))) <= 1e-5


def test_another_prompt_makes_another_prefix() -> None:
    fixed = prepared("pi05", ShapePlan((2,), (32,), (1,)), reuse_bytes=MEGABYTE)
    first = with_ids(row(1), b"a", b"b")
    other = replace(first, tokens=row(2).tokens)
    sample(fixed, [first])
    assert distance(sample(fixed, [other]), plain("pi05", [other])) <= 1e-5
    assert fixed.reused_prefixes == 0


def test_another_state_makes_another_prefix_for_pi0() -> None:
    fixed = prepared("pi0", ShapePlan((2,), (32,), (1,)), reuse_bytes=MEGABYTE)
    first = with_ids(row(1), b"a", b"b")
    other = replace(first, state=row(2).state)
    sample(fixed, [first])
    assert distance(sample(fixed, [other]), plain("pi0", [other])) <= 1e-5


def test_a_batch_that_fails_between_two_equal_ones_takes_the_prefix_away(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = prepared("pi05", ShapePlan((2,), (32,), (1,)), reuse_bytes=MEGABYTE)
    one, other = with_ids(row(1), b"a", b"b"), with_ids(row(2), b"c", b"d")
    replay = fixed.graphs.replay

    def fail_behind_the_prefix(key: Any) -> None:
        replay(key)
        if key[0] == "prefix":
            raise RuntimeError("out of memory")

    sample(fixed, [one])
    monkeypatch.setattr(fixed.graphs, "replay", fail_behind_the_prefix)
    with pytest.raises(RuntimeError, match="out of memory"):
        sample(fixed, [other])
    monkeypatch.undo()
    assert distance(sample(fixed, [one]), plain("pi05", [one])) <= 1e-5


def test_a_batch_between_two_equal_ones_takes_the_prefix_away() -> None:
    fixed = prepared("pi05", ShapePlan((2,), (32,), (1,)), reuse_bytes=MEGABYTE)
    one, other = with_ids(row(1), b"a", b"b"), with_ids(row(2), b"c", b"d")
    for each in (one, other, one):
        assert distance(sample(fixed, [each]), plain("pi05", [each])) <= 1e-5
    assert fixed.reused_prefixes == 0


def test_two_robots_with_the_same_picture_share_its_tokens() -> None:
    fixed = prepared("pi05", ShapePlan((2,), (32,), (2,)), reuse_bytes=MEGABYTE)
    one = with_ids(row(1), b"a", b"b")
    other = replace(row(2), images=np.stack([row(2).images[0], one.images[0]]), image_ids=(b"c", b"a"))
    assert distance(sample(fixed, [one, other]), plain("pi05", [one, other])) <= 1e-5


def test_frames_without_an_id_are_never_taken_for_each_other() -> None:
    fixed = prepared("pi05", ShapePlan((2,), (32,), (1,)), reuse_bytes=MEGABYTE)
    sample(fixed, [row(1)])
    assert distance(sample(fixed, [row(2)]), plain("pi05", [row(2)])) <= 1e-5


def test_tokens_of_frames_are_forgotten_when_their_room_is_full() -> None:
    bytes_per_image = 256 * 64 * 4
    fixed = prepared("pi05", ShapePlan((1,), (32,), (1,)), reuse_bytes=2 * bytes_per_image)
    for name in (b"a", b"b", b"c", b"a"):
        sample(fixed, [with_ids(row(1, cameras=1), name)])
    assert fixed.reused_images == 0
