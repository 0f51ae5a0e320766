"""Train the demo policy from nothing on a CPU: `python -m relay.demo.train --output DIR`.

The output folder becomes a checkpoint that `relay serve demo --checkpoint DIR` takes. With `--adapter` the shipped
policy stays as it is and gets a LoRA adapter for the second robot instead, in a folder that `relay serve demo --adapter
NAME=DIR` takes. A run saves its state every few minutes and goes on from it when started again with the same folder.
Needs the `demo` extra.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from relay.demo.adapter_learning import AdapterLearner
from relay.demo.learning import Batch, Learner, initialize, total_loss
from relay.demo.samples import Sample, sample_stream
from relay.demo.tabletop import ROBOTS, known_robot
from relay.demo.vocabulary import write_tokenizer
from relay.engine.weights import SafetensorsSource
from relay.models.pi0.config import DEMO
from relay.models.pi0.tokenizer import PromptTokenizer, load_vocabulary
from relay.models.pi0.weights import load_weights, save_weights

SHIPPED = Path(str(files("relay.demo").joinpath("weights")))
SAVE_EVERY_S = 300.0
REPORT_EVERY = 50


@dataclass(frozen=True, slots=True)
class Recipe:
    """Every number of the training run.

    Attributes:
        adapter: train a LoRA adapter of the shipped policy; other numbers then have other defaults.
        robot: whose camera the samples are seen from.
        observations: how many observations are trained on in all; it sets the learning-rate schedule.
        batch: observations per step.
        draws: noise and time draws per observation; they share its prefix. The first is at the time of pure noise.
        learning_rate: held for the first 40 %, then a cosine to 1 % of it.
        buffer: ring buffer of samples; `fresh` new ones come in for every observation trained on. Seeing samples
            more often than about one and a half times overfits.
        average: decay of the averaged weights, which are the ones exported.
        threads: torch threads.
    """

    output: Path = Path("relay-demo-training")
    adapter: bool = False
    robot: str = ROBOTS[0]
    observations: int = 90_000
    batch: int = 64
    draws: int = 4
    learning_rate: float = 1.5e-3
    warm_up_steps: int = 100
    weight_decay: float = 1e-4
    buffer: int = 4_000
    fresh: float = 2 / 3
    average: float = 0.999
    seed: int = 0
    threads: int = 2


ADAPTER_RECIPE = Recipe(output=Path("relay-demo-adapter"), adapter=True, robot="cross", observations=24_000, threads=1)
"""The defaults with `--adapter`."""


def train(recipe: Recipe) -> None:
    """Run or resume the recipe; leaves the checkpoint, or the adapter, in `recipe.output`."""
    known_robot(recipe.robot)
    torch.set_num_threads(recipe.threads)
    recipe.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(recipe.seed)
    run = Run(recipe, new_adapter(recipe) if recipe.adapter else new_policy(recipe))
    run.resume()
    print(f"{run.trained:,} parameters to train, {run.total_steps} steps", flush=True)

    batches = Batches(recipe, seed=recipe.seed + run.step)
    losses: list[Tensor] = []
    last_save = time.monotonic()
    while run.step < run.total_steps:
        run.set_learning_rate()
        parts = run.learner(next(batches))
        total_loss(*parts).backward()
        run.update()
        losses.append(torch.stack(parts).detach())
        if run.step % REPORT_EVERY == 0:
            flow, cell, named, offset = torch.stack(losses).mean(0).tolist()
            losses.clear()
            print(
                f"step {run.step}/{run.total_steps} {run.seconds():.0f} s  flow {flow:.4f}  cell {cell:.3f}  "
                f"named {named:.3f}  offset {offset:.4f}  {batches.generated:,} distinct samples",
                flush=True,
            )
        if time.monotonic() - last_save > SAVE_EVERY_S:
            run.save()
            last_save = time.monotonic()
    run.save()
    print(f"trained {run.step * recipe.batch:,} observations in {run.seconds() / 60:.1f} minutes", flush=True)


def new_policy(recipe: Recipe) -> Learner:
    """A policy that knows nothing, and its tokenizer in the output folder."""
    write_tokenizer(recipe.output / "tokenizer.json")
    learner = Learner()
    initialize(learner, torch.Generator().manual_seed(recipe.seed))
    return learner


def new_adapter(recipe: Recipe) -> AdapterLearner:
    """The shipped policy with an adapter that changes nothing yet."""
    weights = SafetensorsSource(SHIPPED / "model.safetensors")
    policy = load_weights(DEMO, weights, torch.device("cpu"), torch.float32, lambda phase, share: None)
    return AdapterLearner(policy, torch.Generator().manual_seed(recipe.seed))


class Run:
    """Weights, optimizer, averaged weights and clock of one run, and their copy on disk."""

    def __init__(self, recipe: Recipe, learner: Learner | AdapterLearner) -> None:
        self.recipe, self.learner = recipe, learner
        self.total_steps = recipe.observations // recipe.batch
        self.step = 0
        self._state_file = recipe.output / "training.pt"
        self._seconds_before, self._started = 0.0, time.monotonic()
        self._parameters = _trained(learner)
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        )
        self._average = [p.detach().clone() for p in self._parameters]

    @property
    def trained(self) -> int:
        """How many numbers are trained, those of the auxiliary heads included."""
        return sum(parameter.numel() for parameter in self._parameters)

    def seconds(self) -> float:
        """Training time so far, earlier parts of a resumed run included."""
        return self._seconds_before + time.monotonic() - self._started

    def set_learning_rate(self) -> None:
        """Warm up, hold for 40 %, then fall to 1 % along a cosine."""
        progress = self.step / self.total_steps
        fall = 1.0 if progress < 0.4 else 0.5 * (1 + math.cos(math.pi * (progress - 0.4) / 0.6)) + 0.01
        rate = self.recipe.learning_rate * min(1.0, (self.step + 1) / self.recipe.warm_up_steps) * fall
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def update(self) -> None:
        """One optimizer step from the gradients at hand."""
        torch.nn.utils.clip_grad_norm_([p for p in self._parameters if p.grad is not None], 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        decay = min(self.recipe.average, self.step / (self.step + 20))
        with torch.no_grad():
            for average, parameter in zip(self._average, self._parameters, strict=True):
                average.lerp_(parameter, 1 - decay)

    def save(self) -> None:
        """Write the resumable state, and the checkpoint or the adapter with the averaged weights."""
        state = {
            "step": self.step,
            "seconds": self.seconds(),
            "learner": self.learner.state_dict(),
            "average": self._average,
            "optimizer": self._optimizer.state_dict(),
        }
        unfinished = self._state_file.with_suffix(".part")
        torch.save(state, unfinished)
        unfinished.replace(self._state_file)
        averaged = self.averaged()
        if isinstance(averaged, AdapterLearner):
            averaged.save(self.recipe.output)
        else:
            export(averaged, self.recipe.output)
        record = {name: value for name, value in asdict(self.recipe).items() if name != "output"}
        record |= {"step": self.step, "minutes": round(self.seconds() / 60, 2), "torch": torch.__version__}
        (self.recipe.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")

    def resume(self) -> None:
        """Go on from the state on disk, if there is any."""
        if not self._state_file.is_file():
            return
        state: dict[str, Any] = torch.load(self._state_file, weights_only=True)
        self.learner.load_state_dict(state["learner"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._average = state["average"]
        self.step, self._seconds_before = state["step"], state["seconds"]
        print(f"resuming at step {self.step}", flush=True)

    def averaged(self) -> Learner | AdapterLearner:
        """A copy of what is trained that holds the averaged weights."""
        averaged = copy.deepcopy(self.learner)
        with torch.no_grad():
            for target, value in zip(_trained(averaged), self._average, strict=True):
                target.copy_(value)
        return averaged


def _trained(learner: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in learner.parameters() if parameter.requires_grad]


def export(learner: Learner, folder: Path) -> None:
    """Write the policy in openpi's names, bfloat16, with what its tensors do not say."""
    save_file(save_weights(learner.policy, torch.bfloat16), folder / "model.safetensors")
    relay_json = {
        "model": DEMO.family,
        "action_horizon": DEMO.action_horizon,
        "action_dim": DEMO.action_dim,
        "state_dim": DEMO.state_dim,
        "heads": DEMO.heads,
        "vision_heads": DEMO.vision.heads,
        "head_dim": DEMO.head_dim,
        "state_in_prompt": DEMO.state_in_prompt,
        "max_token_len": DEMO.max_token_len,
        "num_steps": DEMO.num_steps,
    }
    (folder / "relay.json").write_text(json.dumps(relay_json, indent=2) + "\n")
    (folder / "norm_stats.json").write_text((SHIPPED / "norm_stats.json").read_text("utf-8"))


class Batches:
    """Random batches from a ring buffer that a second process keeps filling."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self.recipe = recipe
        self.generated = 0
        self._rng = np.random.default_rng([seed, 1])
        vocabulary = load_vocabulary((SHIPPED if recipe.adapter else recipe.output) / "tokenizer.json")
        self._tokenizer = PromptTokenizer(vocabulary, DEMO.max_token_len, DEMO.state_in_prompt)
        loader = DataLoader(SampleSet(seed, recipe.robot), batch_size=None, num_workers=1, prefetch_factor=128)
        self._stream = iter(loader)
        self._buffer: list[tuple[Tensor, ...]] = []
        self._prompt_length: int | None = None
        self._time = torch.distributions.Beta(1.5, 1.0)
        self._add(recipe.batch * 10)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        recipe = self.recipe
        self._add(math.ceil(recipe.batch * recipe.fresh))
        chosen = self._rng.integers(0, len(self._buffer), recipe.batch)
        columns = zip(*(self._buffer[i] for i in chosen), strict=True)
        samples = [torch.stack(column) for column in columns]
        shape = (recipe.batch, recipe.draws)
        time = self._time.sample(shape) * 0.999 + 0.001
        time[:, 0] = 1.0  # where every sampler starts, and all that a sampler of one step sees
        return Batch(*samples, noise=torch.randn(*shape, DEMO.action_horizon, DEMO.action_dim), time=time)

    def _add(self, count: int) -> None:
        while count > 0:
            row = self._tensors(next(self._stream))
            self._prompt_length = self._prompt_length or len(row[1])
            if len(row[1]) != self._prompt_length:
                continue  # a state below the first bin takes two tokens; too rare to pad every prompt for
            count -= 1
            if len(self._buffer) < self.recipe.buffer:
                self._buffer.append(row)
            else:
                self._buffer[self.generated % self.recipe.buffer] = row
            self.generated += 1

    def _tensors(self, sample: Sample) -> tuple[Tensor, ...]:
        tokens = self._tokenizer(sample.prompt, sample.state).tokens
        named = sample.cells[:, [sample.plate, sample.cube]]
        arrays = (sample.frames, np.array(tokens), sample.actions, sample.cells, sample.offsets, named)
        return tuple(torch.from_numpy(array) for array in arrays)


class SampleSet(IterableDataset[Sample]):
    """The endless sample stream of a robot, for the loader's process."""

    def __init__(self, seed: int, robot: str) -> None:
        self._seed, self._robot = seed, robot

    def __iter__(self) -> Iterator[Sample]:
        return sample_stream(np.random.default_rng(self._seed), self._robot)


def main() -> None:
    """Command line: every field of `Recipe` is an option, and `--adapter` chooses the defaults of the others."""
    import tyro

    default = ADAPTER_RECIPE if "--adapter" in sys.argv[1:] else Recipe()
    train(tyro.cli(Recipe, default=default, description=__doc__))


if __name__ == "__main__":
    main()
