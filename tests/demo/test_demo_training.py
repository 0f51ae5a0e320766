"""The training script: losses that fall, runs that resume, checkpoints that the server loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from relay.demo.adapter_learning import AdapterLearner
from relay.demo.learning import Batch, GrowingCache, Learner, initialize, total_loss
from relay.demo.train import ADAPTER_RECIPE, Batches, Recipe, Run, main, new_adapter, train
from relay.demo.vocabulary import write_tokenizer
from relay.engine.adapter_folders import AdapterChoice
from relay.engine.base import Chunk, Work
from relay.models.pi0.adapters import read_adapter, with_changes
from relay.models.pi0.config import DEMO
from relay.models.registry import load
from relay.protocol.messages import Options

TINY = {"batch": 4, "draws": 2, "buffer": 40, "threads": 1, "warm_up_steps": 2}


def random_batch(rows: int = 2, draws: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(0)
    cells = torch.randint(0, 64, (rows, 2, 5), generator=generator)
    cells[0, 0, 0] = -100
    return Batch(
        frames=torch.randint(0, 256, (rows, 2, 224, 224, 3), generator=generator, dtype=torch.uint8),
        tokens=torch.randint(0, 512, (rows, 21), generator=generator),
        actions=torch.randn(rows, 16, 4, generator=generator),
        cells=cells,
        offsets=torch.rand(rows, 2, 5, 2, generator=generator) - 0.5,
        named=cells[:, :, :2],
        noise=torch.randn(rows, draws, 16, 4, generator=generator),
        time=torch.rand(rows, draws, generator=generator),
    )


def new_learner() -> Learner:
    learner = Learner()
    initialize(learner, torch.Generator().manual_seed(0))
    with torch.no_grad():
        learner.policy.modulation_weight.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
    return learner


def test_the_training_velocity_is_the_serving_networks() -> None:
    """One denoising step of the sampler from t = 1 must give noise − velocity."""
    from relay.models.pi0.model import Inputs
    from relay.models.pi0.prefix import RowTokens, lay_out

    learner, batch = new_learner(), random_batch(rows=2, draws=1)
    batch = Batch(batch.frames, batch.tokens, batch.actions * 0, batch.cells, batch.offsets, batch.named, batch.noise,
                  torch.ones(2, 1))  # fmt: skip
    layout = lay_out([RowTokens([True, True], [True] * 21)] * 2, DEMO.vision.tokens)
    inputs = Inputs(batch.frames.flatten(0, 1), batch.tokens.flatten(), layout, batch.noise[:, 0], [1, 1])
    velocity = batch.noise[:, 0] - learner.policy.sample_actions(inputs)
    served_loss = torch.mean((velocity - batch.noise[:, 0]) ** 2)
    assert torch.allclose(learner(batch)[0], served_loss, rtol=1e-4)


def test_every_parameter_gets_a_gradient_but_the_unused_last_layer() -> None:
    learner = new_learner()
    total_loss(*learner(random_batch())).backward()
    without = {name for name, p in learner.named_parameters() if p.grad is None or not p.grad.any()}
    assert without == {
        f"policy.language.2.{part}" for part in ("mlp_norm", "out.weight", "gate_up.weight", "down.weight")
    }


def test_a_few_steps_lower_the_loss_on_one_batch() -> None:
    learner, batch = new_learner(), random_batch()
    optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-3)
    losses: list[float] = []
    for _ in range(8):
        loss = total_loss(*learner(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_draws_share_their_observations_prefix() -> None:
    cache = GrowingCache(depth=1, draws=2)
    prefix = torch.arange(2.0).reshape(2, 1, 1)
    cache.append(0, prefix, prefix)
    cache.freeze_prefix()
    keys, _ = cache.append(0, torch.full((4, 1, 1), 9.0), torch.zeros(4, 1, 1))
    assert keys[:, 0, :, 0].tolist() == [[0, 9], [0, 9], [1, 9], [1, 9]]


def trained_adapter(steps: int) -> AdapterLearner:
    """An adapter after a few steps on one batch."""
    learner, batch = new_adapter(ADAPTER_RECIPE), random_batch()
    optimizer = torch.optim.AdamW([p for p in learner.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        total_loss(*learner(batch)).backward()
        optimizer.step()
    return learner


def test_an_adapter_begins_with_the_answers_of_its_base() -> None:
    learner, batch = new_adapter(ADAPTER_RECIPE), random_batch()
    assert torch.equal(learner(batch)[0], learner.learner(batch)[0])


def test_training_an_adapter_leaves_its_base_as_it_is() -> None:
    before = new_adapter(ADAPTER_RECIPE).learner.policy.state_dict()
    after = trained_adapter(steps=2).learner.policy.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_both_transformers_are_adapted_and_nothing_else() -> None:
    policy = new_adapter(ADAPTER_RECIPE).learner.policy
    linears = {f"{tower}.{layer}.{name}.weight" for tower in ("language", "expert") for layer in range(3)
               for name in ("qkv", "out", "gate_up", "down")}  # fmt: skip
    assert new_adapter(ADAPTER_RECIPE).merged().keys() == linears
    assert linears <= dict(policy.named_parameters()).keys()


def test_a_few_steps_lower_an_adapters_loss_on_one_batch() -> None:
    batch = random_batch()
    before, after = new_adapter(ADAPTER_RECIPE)(batch)[0], trained_adapter(steps=8)(batch)[0]
    assert after < 0.95 * before


def test_a_saved_adapter_serves_the_weights_that_were_trained(tmp_path: Path) -> None:
    learner = trained_adapter(steps=2)
    learner.save(tmp_path)
    policy = learner.learner.policy
    adapter = read_adapter(tmp_path, policy)
    assert not any((adapter.alone, adapter.own_vision, adapter.own_time))
    served = with_changes(policy, adapter.source)
    for name, trained in learner.merged().items():
        change = trained.detach() - policy.get_parameter(name)
        assert change.any() or name.startswith("language.2.")  # of the last layer only keys and values are used
        assert torch.allclose(served.get_parameter(name), trained, rtol=0, atol=0.02 * float(change.abs().max()))


@pytest.mark.parametrize(
    ("arguments", "recipe"),
    [
        ((), Recipe()),
        (("--adapter",), ADAPTER_RECIPE),
        (("--seed", "3", "--adapter"), replace(ADAPTER_RECIPE, seed=3)),
    ],
)
def test_the_adapter_option_chooses_the_other_defaults(
    arguments: tuple[str, ...], recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Recipe] = []
    monkeypatch.setattr("relay.demo.train.train", asked.append)
    monkeypatch.setattr("sys.argv", ["train", *arguments])
    main()
    assert asked == [recipe]


@pytest.mark.slow
def test_an_adapters_run_resumes_where_it_stopped_and_the_demo_serves_it(tmp_path: Path) -> None:
    recipe = replace(ADAPTER_RECIPE, output=tmp_path, observations=8, **TINY)
    train(recipe)
    longer = replace(recipe, observations=16)
    resumed = Run(longer, new_adapter(longer))
    resumed.resume()
    assert (resumed.step, resumed.total_steps) == (2, 4)
    record = json.loads((tmp_path / "training.json").read_text())
    assert (record["step"], record["robot"], record["adapter"]) == (2, "cross", True)
    assert load("demo", checkpoint=None, adapters=AdapterChoice({"mine": tmp_path})).adapters == ("mine",)


@pytest.mark.slow
def test_a_run_resumes_where_it_stopped_and_its_checkpoint_serves(tmp_path: Path) -> None:
    recipe = Recipe(output=tmp_path, observations=8, **TINY)
    train(recipe)
    resumed = Run(Recipe(output=tmp_path, observations=16, **TINY), Learner())
    resumed.resume()
    assert (resumed.step, resumed.total_steps) == (2, 4)
    assert json.loads((tmp_path / "training.json").read_text())["step"] == 2

    engine = load("demo", checkpoint=tmp_path)
    observation = {
        "image": {"base_0_rgb": np.zeros((224, 224, 3), np.uint8)},
        "state": np.zeros(4),
        "prompt": "put the red cube on the yellow plate",
    }
    (chunk,) = engine.infer([Work(engine.prepare(observation, Options(seed=0)), Options(seed=0))])
    assert isinstance(chunk, Chunk)
    assert np.isfinite(np.asarray(chunk.actions)).all()


@pytest.mark.slow
def test_batches_come_from_fresh_samples(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    batches = Batches(Recipe(output=tmp_path, **TINY), seed=0)
    before = batches.generated
    batch = next(batches)
    assert batches.generated == before + 3  # two new samples for every three trained on, rounded up
    assert batch.frames.shape == (4, 2, 224, 224, 3)
    assert batch.tokens.shape == (4, 21)
    assert 0.001 <= batch.time.min() <= batch.time.max() <= 1
