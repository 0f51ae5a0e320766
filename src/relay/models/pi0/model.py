"""The π0 and π0.5 network and its flow-matching sampler.

One file reads as one inference: `sample_actions` calls `embed_prefix` once and `denoise_step` num_steps times; the
names are those of openpi (src/openpi/models/pi0.py), so the two can be read side by side. Written after "π0"
(arXiv 2410.24164) and openpi; time runs from 1 (noise) to 0 (actions).

Knows nothing of observations, prompts, robots or units: it takes resized frames and token ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relay.models.pi0.config import Pi0Config
from relay.models.pi0.gemma import Cache, GemmaBlock, KeyValueCache, Modulation, Rotation, normalize, rotation
from relay.models.pi0.prefix import PrefixLayout
from relay.models.pi0.siglip import VisionTower

_SHORTEST_PERIOD, _LONGEST_PERIOD = 4e-3, 4.0


@dataclass(frozen=True, slots=True)
class Inputs:
    """A batch of rows on the device.

    Attributes:
        images: (n, height, width, 3) uint8: the frames that are present, row after row, each in camera order.
        tokens: (m,) int64: the prompts, row after row.
        layout: where each image and prompt token stands.
        noise: (rows, horizon, action_dim) float32.
        num_steps: denoising steps of each row.
        state: (rows, action_dim) float32, normalized and padded; π0 only.
    """

    images: Tensor
    tokens: Tensor
    layout: PrefixLayout
    noise: Tensor
    num_steps: Sequence[int]
    state: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepCondition:
    """What one denoising step knows of the time: π0.5's modulations or π0's additive vector."""

    blocks: list[tuple[Modulation, Modulation]] | None
    final: Modulation | None
    vector: Tensor | None


class Pi0(nn.Module):
    """Vision tower, prefix transformer, action expert and heads."""

    def __init__(self, config: Pi0Config) -> None:
        super().__init__()
        self.config = config
        self.modulated = config.family == "pi05"
        language, expert = config.language, config.expert
        self.vision = VisionTower(config.vision, language.width)
        self.token_embedding = nn.Parameter(torch.zeros(config.vocab_size, language.width))
        self.language = nn.ModuleList(
            GemmaBlock(language, config.heads, config.head_dim, modulated=False) for _ in range(language.depth)
        )
        self.expert = nn.ModuleList(
            GemmaBlock(expert, config.heads, config.head_dim, modulated=self.modulated) for _ in range(expert.depth)
        )
        self.action_in = nn.Linear(config.action_dim, expert.width)
        self.action_out = nn.Linear(expert.width, config.action_dim)
        if self.modulated:
            self.time_in = nn.Linear(expert.width, expert.width)
            self.time_out = nn.Linear(expert.width, expert.width)
            # One dense layer per adaptive norm: attention and MLP of each block, then the final norm.
            self.modulation_weight = nn.Parameter(torch.zeros(2 * expert.depth + 1, 3 * expert.width, expert.width))
            self.modulation_bias = nn.Parameter(torch.zeros(2 * expert.depth + 1, 3 * expert.width))
        else:
            self.expert_norm = nn.Parameter(torch.zeros(expert.width))
            self.state_in = nn.Linear(config.action_dim, expert.width)
            self.action_time_in = nn.Linear(2 * expert.width, expert.width)
            self.action_time_out = nn.Linear(expert.width, expert.width)
        self._step_tables: dict[int, list[StepCondition]] = {}

    def to_compute_dtype(self, dtype: torch.dtype) -> Pi0:
        """Keep the large matrices in `dtype`; transformer norms, patches, positions and small heads stay float32."""
        self.float()
        self.token_embedding.data = self.token_embedding.data.to(dtype)
        for module in (self.vision.blocks, self.vision.final_norm, self.vision.projector):
            module.to(dtype)
        for block in (*self.language, *self.expert):
            for linear in (block.qkv, block.out, block.gate_up, block.down):
                linear.to(dtype)
        self._step_tables.clear()
        return self

    @torch.inference_mode()
    def sample_actions(self, inputs: Inputs) -> Tensor:
        """Integrate the flow from noise to actions, (rows, horizon, action_dim) float32 in the model's units."""
        config, layout, device = self.config, inputs.layout, inputs.noise.device
        rows, horizon, _ = inputs.noise.shape
        state_tokens = 0 if self.modulated else 1
        suffix = state_tokens + horizon
        # Masked cameras and padding take no position; the suffix goes on where the row's own prefix ended.
        suffix_positions = layout.lengths[:, None] + torch.arange(suffix, device=device)
        tables = rotation(torch.cat((layout.positions, suffix_positions), 1), config.head_dim)
        prefix = layout.index.shape[1]
        key_mask = layout.valid
        if key_mask is not None:
            key_mask = F.pad(key_mask, (0, suffix), value=True)  # (rows, prefix + suffix)
        cache = KeyValueCache(
            config.language.depth,
            rows,
            prefix + suffix,
            config.head_dim,
            dtype=self.token_embedding.dtype,
            device=device,
        )

        self.embed_prefix(inputs, tables.at(0, prefix), cache)
        cache.start = prefix
        if not self.modulated:
            # The state token sees neither actions nor time, so its keys and values serve every step (exact).
            assert inputs.state is not None
            seen = None if key_mask is None else key_mask[:, : prefix + 1]
            self.embed_state(inputs.state, tables.at(prefix, prefix + 1), cache, seen)
            cache.start = prefix + 1

        suffix_tables = tables.at(cache.start, prefix + suffix)
        x = inputs.noise
        for condition, step_size in self.schedule(inputs.num_steps):
            velocity = self.denoise_step(x, condition, suffix_tables, cache, key_mask)
            x = x - step_size * velocity  # the integrator's state is float32 whatever the weights are
        return x

    def embed_prefix(self, inputs: Inputs, tables: Rotation, cache: Cache) -> None:
        """Run images and prompts through the prefix transformer; its keys and values go to the cache."""
        embedded = self.embed_tokens(self.vision(inputs.images), inputs.tokens, inputs.layout)
        self.run_prefix(embedded, tables, cache, inputs.layout.valid)

    def embed_tokens(self, image_tokens: Tensor, tokens: Tensor, layout: PrefixLayout) -> Tensor:
        """Lay image and prompt tokens out in rows, (rows, prefix, width); image tokens are not scaled, prompts are."""
        width = self.config.language.width
        prompt = F.embedding(tokens, self.token_embedding) * math.sqrt(width)  # (m, width)
        pool = torch.cat((image_tokens.reshape(-1, width), prompt))
        return pool.index_select(0, layout.index.flatten()).view(*layout.index.shape, width)

    def run_prefix(self, x: Tensor, tables: Rotation, cache: Cache, key_mask: Tensor | None) -> Tensor:
        """Fill the cache from embedded tokens; returns what enters the last layer, of which only K and V are used."""
        *blocks, last = cast("list[GemmaBlock]", list(self.language))
        for layer, block in enumerate(blocks):
            x = block(x, tables, cache, layer, key_mask)
        last.write_keys_values(x, tables, cache, len(blocks))
        return x

    def embed_state(self, state: Tensor, tables: Rotation, cache: Cache, key_mask: Tensor | None) -> None:
        """π0's state token, (rows, action_dim) float32 in: only its keys and values matter."""
        x = self.state_in(state)[:, None].to(self.token_embedding.dtype)  # (rows, 1, width)
        for layer, block in enumerate(self.expert):
            x = block(x, tables, cache, layer, key_mask)

    def denoise_step(
        self, x: Tensor, condition: StepCondition, tables: Rotation, cache: Cache, key_mask: Tensor | None
    ) -> Tensor:
        """The velocity at `x` (rows, horizon, action_dim) float32, same shape and dtype."""
        if condition.vector is not None:
            half = self.action_time_in.weight[:, : self.config.expert.width]
            hidden = F.silu(F.linear(self.action_in(x), half) + condition.vector)
            h = self.action_time_out(hidden)  # (rows, horizon, width)
        else:
            h = self.action_in(x)  # (rows, horizon, width)
        h = h.to(self.token_embedding.dtype)
        for layer, block in enumerate(self.expert):
            h = block(h, tables, cache, layer, key_mask, condition.blocks[layer] if condition.blocks else None)
        h = normalize(h, None if condition.final else self.expert_norm, condition.final)
        return self.action_out(h.float())

    def schedule(self, num_steps: Sequence[int]) -> list[tuple[StepCondition, float | Tensor]]:
        """Condition and step size of every denoising step; rows that need fewer steps stand still at the end."""
        for steps in set(num_steps):
            if steps not in self._step_tables:
                self._step_tables[steps] = self._step_table(steps)
        if len(set(num_steps)) == 1:
            return [(condition, 1 / num_steps[0]) for condition in self._step_tables[num_steps[0]]]
        device = self.action_in.weight.device
        schedule: list[tuple[StepCondition, float | Tensor]] = []
        for step in range(max(num_steps)):
            conditions = [self._step_tables[n][min(step, n - 1)] for n in num_steps]
            sizes = torch.tensor([1 / n if step < n else 0.0 for n in num_steps], device=device)
            schedule.append((_stack(conditions), sizes[:, None, None]))
        return schedule

    def condition(self, time: Tensor) -> StepCondition:
        """What the expert is told about `time` (rows,); depends on nothing else, so it can be tabulated.

        The sine is taken in float64, the closest to exact of the reference implementations' choices.
        """
        width = self.config.expert.width
        fraction = torch.linspace(0, 1, width // 2, dtype=torch.float64, device=time.device)
        period = _SHORTEST_PERIOD * (_LONGEST_PERIOD / _SHORTEST_PERIOD) ** fraction
        angle = 2 * math.pi * time[:, None].double() / period  # (rows, width / 2)
        embedding = torch.cat((angle.sin(), angle.cos()), 1).float()
        if not self.modulated:
            time_half = self.action_time_in.weight[:, width:]
            return StepCondition(None, None, F.linear(embedding, time_half, self.action_time_in.bias)[:, None])
        hidden = F.silu(self.time_out(F.silu(self.time_in(embedding))))  # (rows, width)
        table = torch.einsum("rc,koc->rko", hidden, self.modulation_weight) + self.modulation_bias
        scale, shift, gate = table[:, :, None].chunk(3, -1)  # each (rows, norms, 1, width)
        norms = [
            Modulation(*parts) for parts in zip((1 + scale).unbind(1), shift.unbind(1), gate.unbind(1), strict=True)
        ]
        return StepCondition(list(zip(norms[:-1:2], norms[1:-1:2], strict=True)), norms[-1], None)

    def _step_table(self, steps: int) -> list[StepCondition]:
        device = self.action_in.weight.device
        return [self.condition(torch.tensor([1 - step / steps], device=device)) for step in range(steps)]


def _stack(conditions: list[StepCondition]) -> StepCondition:
    """Conditions of single rows as one of many rows."""
    if conditions[0].vector is not None:
        vectors = [c.vector for c in conditions if c.vector is not None]
        return StepCondition(None, None, torch.cat(vectors))
    blocks = [
        (_cat([pair[0] for pair in pairs]), _cat([pair[1] for pair in pairs]))
        for pairs in zip(*(c.blocks for c in conditions if c.blocks is not None), strict=True)
    ]
    return StepCondition(blocks, _cat([c.final for c in conditions if c.final is not None]), None)


def _cat(modulations: list[Modulation]) -> Modulation:
    return Modulation(*(torch.cat(parts) for parts in zip(*modulations, strict=True)))
