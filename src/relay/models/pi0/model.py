"""The π0 and π0.5 network and its flow-matching sampler.

One file reads as one inference: `sample_actions` calls `embed_prefix` once and `denoise_step` num_steps times; the
names are those of openpi (src/openpi/models/pi0.py), so the two can be read side by side. Written after "π0"
(arXiv 2410.24164) and openpi; time runs from 1 (noise) to 0 (actions).

Knows nothing of observations, prompts, robots or units: it takes resized frames and token ids.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relay.engine.adapter_rows import RowChange, adapted, add_change
from relay.models.pi0.config import Pi0Config
from relay.models.pi0.gemma import (
    UNCHANGED,
    Between,
    BlockChange,
    Cache,
    GemmaBlock,
    KeyValueCache,
    Modulation,
    Rotation,
    key_bias,
    normalize,
    rotation,
)
from relay.models.pi0.guidance import Guidance
from relay.models.pi0.prefix import PrefixLayout
from relay.models.pi0.siglip import VisionTower

_SHORTEST_PERIOD, _LONGEST_PERIOD = 4e-3, 4.0

STEP_SIZE_WIDTH = 4
"""Columns of a step table behind the condition: one is used, the others keep rows aligned to 16 bytes."""

_TABULATED_STEPS = 256
"""Most rows that are kept of all step tables together: 117 MB at full size."""


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
        image_tokens: (n, tokens, width): what the vision tower made of the images, where that is known already.
        change: what the rows' adapters change.
        step_tables: for each row what the expert is told at each step, where adapters change that; else the network's.
        guidance: what rows keep to of their previous chunks.
    """

    images: Tensor
    tokens: Tensor
    layout: PrefixLayout
    noise: Tensor
    num_steps: Sequence[int]
    state: Tensor | None = None
    image_tokens: Tensor | None = None
    change: NetworkChange | None = None
    step_tables: Sequence[StepTable] | None = None
    guidance: Guidance | None = None


class Seen(NamedTuple):
    """What the denoising steps know of an observation: the action tokens' rotary tables, the cache, the key bias.

    And what adapters change.
    """

    tables: Rotation
    cache: KeyValueCache
    key_bias: Tensor | None
    change: NetworkChange


@dataclass(frozen=True, slots=True)
class NetworkChange:
    """What adapters change, row by row; vision and time are not here: an adapter that changes those has its own.

    Attributes:
        language, expert: for each block; empty where no row changes any.
        action_time_in: of its action half.
    """

    language: Sequence[BlockChange] = ()
    expert: Sequence[BlockChange] = ()
    action_in: RowChange | None = None
    action_out: RowChange | None = None
    state_in: RowChange | None = None
    action_time_in: RowChange | None = None
    action_time_out: RowChange | None = None


NO_CHANGE = NetworkChange()


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
        self._step_tables: dict[int, StepTable] = {}

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

    def with_parameters(self, changed: Mapping[str, Tensor]) -> Pi0:
        """A network with other values for some parameters, by name, which shares all others with this one."""
        shared: dict[int, Any] = {id(parameter): parameter for parameter in self.parameters()}
        other = copy.deepcopy(self, {**shared, id(self._step_tables): {}})
        for name, value in changed.items():
            owner, _, attribute = name.rpartition(".")
            setattr(other.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))
        return other

    def run_between(self, between: Between) -> None:
        """Choose what runs between the matrix products of both transformers."""
        for block in (*self.language, *self.expert):
            cast(GemmaBlock, block).between = between

    @torch.inference_mode()
    def sample_actions(self, inputs: Inputs) -> Tensor:
        """Integrate the flow from noise to actions, (rows, horizon, action_dim) float32 in the model's units."""
        rows, prefix = inputs.layout.index.shape
        seen = self.embed_prefix(inputs, self.new_cache(rows, prefix))
        x = inputs.noise
        for step, (condition, step_size) in enumerate(self.schedule(inputs.num_steps, inputs.step_tables)):
            moved = step_size * self.denoise_step(x, condition, *seen)
            x = x - moved  # the integrator's state is float32 whatever the weights are
            if inputs.guidance is not None:
                inputs.guidance.draw(x, moved, step)
        return x

    def new_cache(self, rows: int, prefix: int) -> KeyValueCache:
        """Room for the keys and values of a prefix and what follows it."""
        weight = self.token_embedding
        return KeyValueCache(torch.empty(self.cache_shape(rows, prefix), dtype=weight.dtype, device=weight.device))

    def cache_shape(self, rows: int, prefix: int) -> tuple[int, int, int, int, int]:
        """Keys and values, layers, rows, tokens, width."""
        return (2, self.config.language.depth, rows, prefix + self.suffix, self.config.head_dim)

    @property
    def suffix(self) -> int:
        """Tokens behind the prefix: the actions, and π0's state."""
        return self.config.action_horizon + (0 if self.modulated else 1)

    def embed_prefix(self, inputs: Inputs, cache: KeyValueCache) -> Seen:
        """Run images and prompts through the prefix transformer, and π0's state through the expert, into the cache."""
        layout, prefix, suffix = inputs.layout, inputs.layout.index.shape[1], self.suffix
        # Masked cameras and padding take no position; the suffix goes on where the row's own prefix ended.
        suffix_positions = layout.lengths[:, None] + torch.arange(suffix, device=layout.lengths.device)
        tables = rotation(torch.cat((layout.positions, suffix_positions), 1), self.config.head_dim)
        bias = None if layout.valid is None else key_bias(layout.valid, suffix, self.token_embedding.dtype)

        image_tokens = self.vision(inputs.images) if inputs.image_tokens is None else inputs.image_tokens
        embedded = self.embed_tokens(image_tokens, inputs.tokens, layout)
        cache.start = 0
        change = inputs.change or NO_CHANGE
        self.run_prefix(embedded, tables.at(0, prefix), cache, None if bias is None else bias[..., :prefix], change)
        cache.start = prefix
        if not self.modulated:
            # The state token sees neither actions nor time, so its keys and values serve every step (exact).
            assert inputs.state is not None
            so_far = None if bias is None else bias[..., : prefix + 1]
            self.embed_state(inputs.state, tables.at(prefix, prefix + 1), cache, so_far, change)
            cache.start = prefix + 1
        return Seen(tables.at(cache.start, prefix + suffix), cache, bias, change)

    def embed_tokens(self, image_tokens: Tensor, tokens: Tensor, layout: PrefixLayout) -> Tensor:
        """Lay image and prompt tokens out in rows, (rows, prefix, width); image tokens are not scaled, prompts are."""
        width = self.config.language.width
        prompt = F.embedding(tokens, self.token_embedding) * math.sqrt(width)  # (m, width)
        pool = torch.cat((image_tokens.reshape(-1, width), prompt))
        return pool.index_select(0, layout.index.flatten()).view(*layout.index.shape, width)

    def run_prefix(
        self, x: Tensor, tables: Rotation, cache: Cache, key_bias: Tensor | None, change: NetworkChange = NO_CHANGE
    ) -> Tensor:
        """Fill the cache from embedded tokens; returns what enters the last layer, of which only K and V are used."""
        *blocks, last = cast("list[GemmaBlock]", list(self.language))
        changes = change.language or [UNCHANGED] * len(self.language)
        for layer, block in enumerate(blocks):
            x = block(x, tables, cache, layer, key_bias, change=changes[layer])
        last.write_keys_values(x, tables, cache, len(blocks), changes[-1])
        return x

    def embed_state(
        self,
        state: Tensor,
        tables: Rotation,
        cache: Cache,
        key_bias: Tensor | None,
        change: NetworkChange = NO_CHANGE,
    ) -> None:
        """π0's state token, (rows, action_dim) float32 in: only its keys and values matter."""
        x = adapted(self.state_in, state[:, None], change.state_in)  # (rows, 1, width)
        x = x.to(self.token_embedding.dtype)
        changes = change.expert or [UNCHANGED] * len(self.expert)
        for layer, block in enumerate(self.expert):
            x = block(x, tables, cache, layer, key_bias, change=changes[layer])

    def denoise_step(
        self,
        x: Tensor,
        condition: StepCondition,
        tables: Rotation,
        cache: Cache,
        key_bias: Tensor | None,
        change: NetworkChange = NO_CHANGE,
    ) -> Tensor:
        """The velocity at `x` (rows, horizon, action_dim) float32, same shape and dtype."""
        h = adapted(self.action_in, x, change.action_in)  # (rows, horizon, width)
        if condition.vector is not None:
            mixed = F.linear(h, self.action_time_in.weight[:, : self.config.expert.width])
            if change.action_time_in is not None:
                mixed = add_change(mixed, h, change.action_time_in)
            h = adapted(self.action_time_out, F.silu(mixed + condition.vector), change.action_time_out)
        h = h.to(self.token_embedding.dtype)
        modulations = condition.blocks or [None] * len(self.expert)
        changes = change.expert or [UNCHANGED] * len(self.expert)
        for layer, block in enumerate(self.expert):
            h = block(h, tables, cache, layer, key_bias, modulations[layer], changes[layer])
        h = normalize(h, None if condition.final else self.expert_norm, condition.final)
        return adapted(self.action_out, h.float(), change.action_out)

    def schedule(
        self, num_steps: Sequence[int], own: Sequence[StepTable] | None = None
    ) -> list[tuple[StepCondition, float | Tensor]]:
        """Condition and step size of every denoising step; rows that need fewer steps stand still at the end.

        Args:
            own: the tables of rows whose adapters change what the expert is told.
        """
        tables = [self.step_table(steps) for steps in num_steps] if own is None else own
        if all(table is tables[0] for table in tables):
            return [(condition, 1 / num_steps[0]) for condition in tables[0].conditions]
        rows = (torch.stack([t.rows[min(step, t.steps)] for t in tables]) for step in range(max(num_steps)))
        return [(self.read_condition(row), self.read_step_size(row)) for row in rows]

    def step_table(self, steps: int) -> StepTable:
        """Everything the expert is told in a call of this many steps; made once, and kept while there is room."""
        table = self._step_tables.pop(steps, None) or self._make_step_table(steps)
        self._step_tables[steps] = table
        while sum(self._step_tables) > _TABULATED_STEPS and len(self._step_tables) > 1:
            del self._step_tables[next(iter(self._step_tables))]  # the one that was used longest ago
        return table

    def condition(self, time: Tensor) -> StepCondition:
        """What the expert is told about `time` (rows,); depends on nothing else, so it can be tabulated."""
        return self.read_condition(self._condition_rows(time))

    def read_condition(self, rows: Tensor) -> StepCondition:
        """The condition in (rows, condition_width or more) float32, such as rows of a `StepTable`."""
        if not self.modulated:
            return StepCondition(None, None, rows[:, None, : self.condition_width])
        norms, width = self.modulation_bias.shape[0], self.config.expert.width
        table = rows[:, : self.condition_width].view(len(rows), norms, 3, 1, width)
        parts = table.unbind(2)  # scales, shifts and gates: each (rows, norms, 1, width)
        modulations = [Modulation(*norm) for norm in zip(*(part.unbind(1) for part in parts), strict=True)]
        return StepCondition(list(zip(modulations[:-1:2], modulations[1:-1:2], strict=True)), modulations[-1], None)

    def read_step_size(self, rows: Tensor) -> Tensor:
        """The step sizes in rows of a `StepTable`, (rows, 1, 1)."""
        return rows[:, self.condition_width, None, None]

    @property
    def condition_width(self) -> int:
        """Float32 values that say what one step knows of the time."""
        return self.modulation_bias.numel() if self.modulated else self.config.expert.width

    def _make_step_table(self, steps: int) -> StepTable:
        time = 1 - torch.arange(steps, dtype=torch.float64, device=self.action_in.weight.device) / steps
        told = self._condition_rows(time.float())
        rows = F.pad(told, (0, STEP_SIZE_WIDTH, 0, 1))  # the last row stays zero: nothing moves
        rows[:-1, self.condition_width] = 1 / steps
        return StepTable(steps, rows, [self.read_condition(row[None]) for row in rows[:-1]])

    def _condition_rows(self, time: Tensor) -> Tensor:
        """(rows, condition_width) float32; the sine in float64, the closest to exact of the references' choices."""
        width = self.config.expert.width
        fraction = torch.linspace(0, 1, width // 2, dtype=torch.float64, device=time.device)
        period = _SHORTEST_PERIOD * (_LONGEST_PERIOD / _SHORTEST_PERIOD) ** fraction
        angle = 2 * math.pi * time[:, None].double() / period  # (rows, width / 2)
        embedding = torch.cat((angle.sin(), angle.cos()), 1).float()
        if not self.modulated:
            return F.linear(embedding, self.action_time_in.weight[:, width:], self.action_time_in.bias)
        hidden = F.silu(self.time_out(F.silu(self.time_in(embedding))))  # (rows, width)
        table = torch.einsum("rc,koc->rko", hidden, self.modulation_weight) + self.modulation_bias
        scale, shift_and_gate = table.split((width, 2 * width), -1)
        return torch.cat((1 + scale, shift_and_gate), -1).flatten(1)


@dataclass(frozen=True, slots=True)
class StepTable:
    """A denoising schedule of so many steps, as numbers that can be copied and as conditions.

    Attributes:
        rows: (steps + 1, condition_width + STEP_SIZE_WIDTH) float32: the condition of each step, then its size; the
            last row is for a call that is done, and moves nothing.
        conditions: of each step.
    """

    steps: int
    rows: Tensor
    conditions: list[StepCondition]
