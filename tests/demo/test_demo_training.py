"""The training script: losses that fall, runs that resume, checkpoints that the server loads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from relay.demo.learning import Batch, GrowingCache, Learner, initialize, total_loss
from relay.demo.train import Batches, Recipe, Run, train
from relay.demo.vocabulary import write_tokenizer
from relay.engine.base import Chunk, Work
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
