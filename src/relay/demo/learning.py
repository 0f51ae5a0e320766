"""What the demo policy is trained on: the flow-matching loss and two auxiliary losses, on the serving network itself.

The auxiliary losses stand in for the pretraining that a three-billion-parameter model brings: *where is each object*,
read from the vision tower's output, and *which objects does the prompt name*, read from what enters the last language
layer (the action expert never sees that layer's output, so a loss there would teach it nothing). Their heads are
dropped on export.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relay.demo.vocabulary import FIRST_STATE_BIN
from relay.models.pi0.config import DEMO
from relay.models.pi0.gemma import rotation
from relay.models.pi0.model import Pi0
from relay.models.pi0.prefix import RowTokens, lay_out
from relay.models.pi0.tokenizer import STATE_BINS

CAMERAS, OBJECTS = 2, 5
OUT_OF_VIEW = -100
_CELL_WEIGHT, _NAMED_WEIGHT, _OFFSET_WEIGHT = 0.3, 0.4, 0.2


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples as tensors, with `k` draws of noise and time for each of `b` observations.

    Attributes:
        frames: (b, 2, 224, 224, 3) uint8.
        tokens: (b, n) int64, all prompts of one length.
        actions: (b, 16, 4) float32 in model units.
        cells: (b, 2, 5) int64, the patch each object is in, or -100.
        offsets: (b, 2, 5, 2) float32 from the middle of that patch.
        named: (b, 2, 2) int64, the patch of the named plate and of the named cube, or -100.
        noise: (b, k, 16, 4) float32.
        time: (b, k) float32, 1 is noise.
    """

    frames: Tensor
    tokens: Tensor
    actions: Tensor
    cells: Tensor
    offsets: Tensor
    named: Tensor
    noise: Tensor
    time: Tensor


class Learner(nn.Module):
    """The policy network with the auxiliary heads."""

    def __init__(self, policy: Pi0 | None = None) -> None:
        super().__init__()
        self.policy = Pi0(DEMO) if policy is None else policy
        width = DEMO.language.width
        self.cell_head = nn.Linear(width, OBJECTS)
        self.offset_head = nn.Linear(width, 2 * OBJECTS)
        self.named_head = nn.Linear(width, 2)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Flow, cell, named-object and offset losses, each a scalar."""
        policy, config = self.policy, self.policy.config
        rows, draws = batch.time.shape
        row = RowTokens([True] * CAMERAS, [True] * batch.tokens.shape[1])
        layout = lay_out([row] * rows, config.vision.tokens)
        prefix = layout.index.shape[1]
        tables = rotation(torch.arange(prefix + config.action_horizon)[None], config.head_dim)

        seen = policy.vision(batch.frames.flatten(0, 1))  # (b * cameras, tokens, width)
        cache = GrowingCache(config.language.depth, draws)
        x = policy.embed_tokens(seen, batch.tokens.flatten(), layout)
        x = policy.run_prefix(x, tables.at(0, prefix), cache, None)
        cell, offset = self._where(seen.unflatten(0, (rows, CAMERAS)), batch)
        named = self._named(x[:, : CAMERAS * config.vision.tokens], batch)

        cache.freeze_prefix()
        time = batch.time.flatten()[:, None, None]  # (b * k, 1, 1)
        noise, actions = batch.noise.flatten(0, 1), batch.actions.repeat_interleave(draws, 0)
        noisy = time * noise + (1 - time) * actions
        condition = policy.condition(batch.time.flatten())
        suffix_tables = tables.at(prefix, prefix + config.action_horizon)
        velocity = policy.denoise_step(noisy, condition, suffix_tables, cache, None)
        return F.mse_loss(velocity, noise - actions), cell, named, offset

    def _where(self, seen: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Which patch each object is in, and where inside it."""
        logits = self.cell_head(seen).transpose(2, 3)  # (b, cameras, objects, tokens)
        cell = F.cross_entropy(logits.flatten(0, 2), batch.cells.flatten(), ignore_index=OUT_OF_VIEW)
        offsets = self.offset_head(seen).unflatten(-1, (OBJECTS, 2)).transpose(2, 3)  # (b, cameras, objects, tokens, 2)
        index = batch.cells.clamp(min=0)[..., None, None].expand(-1, -1, -1, 1, 2)
        at_cell = offsets.gather(3, index)[:, :, :, 0]  # (b, cameras, objects, 2)
        visible = (batch.cells != OUT_OF_VIEW).float()
        error = F.smooth_l1_loss(at_cell, batch.offsets, reduction="none", beta=0.2).sum(-1)
        return cell, (error * visible).sum() / visible.sum().clamp(min=1)

    def _named(self, x: Tensor, batch: Batch) -> Tensor:
        """Which patches hold the objects that the prompt names."""
        normed = F.rms_norm(x, x.shape[-1:]).unflatten(1, (CAMERAS, -1))  # (b, cameras, tokens, width)
        logits = self.named_head(normed).transpose(2, 3)  # (b, cameras, 2, tokens)
        return F.cross_entropy(logits.flatten(0, 2), batch.named.flatten(), ignore_index=OUT_OF_VIEW)


def total_loss(flow: Tensor, cell: Tensor, named: Tensor, offset: Tensor) -> Tensor:
    """The weighted sum that is minimized."""
    return flow + _CELL_WEIGHT * cell + _NAMED_WEIGHT * named + _OFFSET_WEIGHT * offset


class GrowingCache:
    """Keys and values that gradients flow through: appended, never overwritten.

    Every draw of noise and time shares its observation's prefix, which is computed once.
    """

    def __init__(self, depth: int, draws: int) -> None:
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * depth
        self._draws = draws
        self._frozen = False

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        past = self._layers[layer]
        if past is None:
            self._layers[layer] = (k, v)
            return k[:, None], v[:, None]
        assert self._frozen, "the prefix is written once"
        return torch.cat((past[0], k), 1)[:, None], torch.cat((past[1], v), 1)[:, None]

    def freeze_prefix(self) -> None:
        """The prefix is complete: repeat its rows for every draw; what comes now is not kept."""
        self._layers = [
            (k.repeat_interleave(self._draws, 0), v.repeat_interleave(self._draws, 0))
            for k, v in (pair for pair in self._layers if pair is not None)
        ]
        self._frozen = True


def initialize(learner: Learner, generator: torch.Generator) -> None:
    """Fill all weights; positions and state bins start as smooth functions of place and value."""
    for name, parameter in learner.named_parameters():
        if parameter.ndim >= 2 and "modulation" not in name:
            fan_in = parameter[0].numel()
            with torch.no_grad():
                parameter.normal_(0, 1 / math.sqrt(3 * fan_in), generator=generator)
        elif "bias" in name:
            nn.init.zeros_(parameter)
    policy = learner.policy
    with torch.no_grad():
        policy.vision.position_embedding.copy_(
            0.3 * _grid_waves(policy.config.vision.tokens, policy.config.vision.width)
        )
        policy.token_embedding.normal_(0, 0.08, generator=generator)
        value = torch.linspace(-1, 1, STATE_BINS)[:, None]
        phase = math.pi * value * 2.0 ** torch.arange(-1, 6)
        features = torch.cat((phase.sin(), phase.cos(), value), 1)  # (bins, features)
        mix = torch.randn(features.shape[1], policy.config.language.width, generator=generator)
        policy.token_embedding[FIRST_STATE_BIN:] = 0.3 * features @ mix / math.sqrt(features.shape[1])


def _grid_waves(tokens: int, width: int) -> Tensor:
    """Sines and cosines of a patch's row and column, (tokens, width)."""
    side = math.isqrt(tokens)
    place = (torch.arange(side) + 0.5) / side * 2 - 1
    angles = place[:, None] * 2.0 ** torch.linspace(0, 4, width // 4) * math.pi / 2
    waves = torch.cat((angles.sin(), angles.cos()), 1)  # (side, width / 2)
    rows, columns = waves[:, None].expand(-1, side, -1), waves[None].expand(side, -1, -1)
    return torch.cat((rows, columns), -1).reshape(tokens, width)
