"""The GR00T N1.7 network and its flow-matching sampler.

One file reads as one inference: `sample_actions` looks at the observation once and calls `denoise_step` num_steps
times. Written after "GR00T N1" (arXiv 2503.14734) and NVIDIA/Isaac-GR00T (gr00t/model/gr00t_n1d7); time runs from
0 (noise) to 1 (actions).

Knows nothing of observations, cameras, prompts' text or units: it takes image patches and token ids.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from relay.models.groot.config import GrootConfig
from relay.models.groot.dit import (
    SAME_DIT,
    SAME_TIME,
    DiffusionTransformer,
    DitChange,
    Look,
    Modulation,
    TimeChange,
    modulations,
    time_code,
)
from relay.models.groot.embodiment_maps import EmbodimentMaps
from relay.models.groot.features import FeatureAdaptation
from relay.models.groot.language import LanguageModel
from relay.models.groot.layers import BlockChange, key_bias
from relay.models.groot.vision import SAME_VISION, Grid, VisionChange, VisionTower

TABULATED_STEPS = 256
"""Most steps whose tables are kept: 55 MB at full size."""


class TokensOfKind(NamedTuple):
    """The text or the image tokens of each row.

    Attributes:
        places: (rows * n,) int64 into all rows' tokens, flattened; padding points at the row's own first token.
        lengths: (rows,) int64, tokens of each row; None when all have the same number.
    """

    places: Tensor
    lengths: Tensor | None


@dataclass(frozen=True, slots=True)
class GrootInputs:
    """A batch of rows of one embodiment on the device, padded at the end of each row.

    Attributes:
        patches: (images, patches, 3 * patch * patch) uint8, as the vision tower takes them, row after row.
        grids: of each image, in patches.
        tokens: (rows, n) int64.
        positions: (rows, n, 3) int64: time, height and width.
        lengths: (rows,) int64, tokens of each row; None when all have the same number.
        image_places: (m,) int64, where the image tokens stand in the flattened `tokens`.
        text, images: the tokens of each kind, for the diffusion transformer.
        state: (rows, state_width) float32.
        noise: (rows, action_horizon, max_action_dim).
        slot: whose maps are used.
        num_steps: denoising steps.
        change: what the rows' adapters change.
        schedule: what each row is told of the time, where adapters change that; else the network's own.
    """

    patches: Tensor
    grids: Sequence[Grid]
    tokens: Tensor
    positions: Tensor
    lengths: Tensor | None
    image_places: Tensor
    text: TokensOfKind
    images: TokensOfKind
    state: Tensor
    noise: Tensor
    slot: int
    num_steps: int
    change: NetworkChange | None = None
    schedule: Schedule | None = None


@dataclass(frozen=True, slots=True)
class NetworkChange:
    """What adapters change, row by row, without what depends on the time alone: that is told by `Step`.

    Attributes:
        vision: by image.
        language, adaptation: for each block; empty where no row changes any.
    """

    vision: VisionChange = SAME_VISION
    language: Sequence[BlockChange] = ()
    adaptation: Sequence[BlockChange] = ()
    dit: DitChange = SAME_DIT


NO_CHANGE = NetworkChange()


class Observed(NamedTuple):
    """What the denoising steps need of the observations; a row's part of each tensor stands behind that of the last.

    Attributes:
        text, images: keys and values that the diffusion transformer looks at, as its `look` makes them.
        text_bias, image_bias: the padding's masks; None where there is none.
        state: (rows, 1, width), the state's token.
    """

    text: Tensor
    images: Tensor
    text_bias: Tensor | None
    image_bias: Tensor | None
    state: Tensor


class Seen(NamedTuple):
    """The same as the steps take it.

    Attributes:
        looks: of each block that looks at the observation.
        state: (rows, 1, width), the state's token.
        positions: (rows * action_horizon, width), added to each action.
        change: what adapters change about the diffusion transformer.
    """

    looks: list[Look]
    state: Tensor
    positions: Tensor
    change: DitChange


class Step(NamedTuple):
    """What one denoising step knows of the time: the norms, and what is added inside the action encoder."""

    modulations: list[Modulation]
    time_bias: Tensor


class Schedule(NamedTuple):
    """What the steps of a call know of the time.

    Attributes:
        table: (steps, 2 * norms + 1, width), or where adapters make rows differ (steps, 2 * norms + 1, rows, 1, width).
        steps: the same, step by step, as `read_step` reads it.
    """

    table: Tensor
    steps: list[Step]


class Groot(nn.Module):
    """Backbone, feature adaptation, diffusion transformer, and the maps of some embodiments.

    Args:
        slots: of the embodiments that are served.
    """

    def __init__(self, config: GrootConfig, slots: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.vision = VisionTower(config.vision)
        self.language = LanguageModel(config.text, config.select_layer)
        self.adaptation = FeatureAdaptation(config.vl)
        self.dit = DiffusionTransformer(config)
        self.maps = nn.ModuleDict({str(slot): EmbodimentMaps(config) for slot in slots})
        self.action_positions = nn.Parameter(torch.empty(config.max_seq_len, config.input_embedding_dim))
        self._schedules: dict[tuple[int, int], Schedule] = {}

    @property
    def dtype(self) -> torch.dtype:
        return self.action_positions.dtype

    @property
    def device(self) -> torch.device:
        return self.action_positions.device

    @property
    def slots(self) -> list[int]:
        """The embodiments that are served."""
        return [int(slot) for slot in self.maps]

    @torch.inference_mode()
    def sample_actions(self, inputs: GrootInputs) -> Tensor:
        """Integrate the flow from noise to actions, (rows, action_horizon, max_action_dim) float32, normalized."""
        positions = self.positions(inputs.slot, len(inputs.tokens))
        seen = self.see(self.observe(inputs), positions, (inputs.change or NO_CHANGE).dit)
        x = inputs.noise.to(torch.float32).flatten(0, 1)  # float32 whatever the weights are
        for step in self.schedule_of(inputs).steps:
            velocity = self.denoise_step(x, step, seen, inputs.slot)
            x = torch.add(x, velocity, alpha=1 / inputs.num_steps)
        return x.view(inputs.noise.shape)

    def observe(self, inputs: GrootInputs) -> Observed:
        """Everything that is computed once per request."""
        rows, change = len(inputs.tokens), inputs.change or NO_CHANGE
        features = self.adapt(self.backbone(inputs), inputs)
        text, images = (features.index_select(0, kind.places) for kind in (inputs.text, inputs.images))
        return Observed(
            *self.dit.look(text, images, change.dit),
            self._bias(inputs.text.lengths, len(text) // rows),
            self._bias(inputs.images.lengths, len(images) // rows),
            self._maps(inputs.slot).embed_state(inputs.state.to(self.dtype))[:, None],
        )

    def see(self, observed: Observed, positions: Tensor, change: DitChange = SAME_DIT) -> Seen:
        """What is computed once per request as the steps take it, as views."""
        text, images, text_bias, image_bias, state = observed
        return Seen(self.dit.looks(text, images, len(state), text_bias, image_bias), state, positions, change)

    def positions(self, slot: int, rows: int) -> Tensor:
        """What is added to each action of a batch, (rows * action_horizon, width)."""
        positions = self.action_positions[: self.config.action_horizon] + self._maps(slot).action_out.bias
        return positions if rows == 1 else positions.repeat(rows, 1)

    def backbone(self, inputs: GrootInputs) -> Tensor:
        """Features of all tokens, (rows * n, backbone_embedding_dim)."""
        change = inputs.change or NO_CHANGE
        seen = self.vision(inputs.patches, inputs.grids, change.vision)
        return self.language(
            inputs.tokens, inputs.positions, inputs.image_places, seen.tokens, seen.deepstack, change.language
        )

    def adapt(self, features: Tensor, inputs: GrootInputs) -> Tensor:
        """The backbone's features as the diffusion transformer sees them, of the same shape."""
        rows, longest = inputs.tokens.shape
        changes = (inputs.change or NO_CHANGE).adaptation
        return self.adaptation(features, rows, self._bias(inputs.lengths, longest), changes)

    def denoise_step(self, x: Tensor, step: Step, seen: Seen, slot: int) -> Tensor:
        """The velocity at x (rows * action_horizon, max_action_dim) float32, same shape, in the weights' dtype."""
        maps, rows = self._maps(slot), len(seen.state)
        actions = maps.embed_actions(x.to(self.dtype), step.time_bias, seen.positions)
        sequence = torch.cat((seen.state, actions.view(rows, -1, actions.shape[-1])), 1)
        out = self.dit(sequence.flatten(0, 1), step.modulations, seen.looks, seen.change)
        of_actions = out.view(rows, -1, out.shape[-1])[:, 1:].flatten(0, 1)  # (rows * action_horizon, hidden_size)
        return maps.decode(of_actions)

    def schedule_of(self, inputs: GrootInputs) -> Schedule:
        """What a batch's rows are told of the time."""
        return inputs.schedule or self.schedule(inputs.num_steps, inputs.slot)

    def schedule(self, num_steps: int, slot: int) -> Schedule:
        """The schedule of so many steps; made once, and kept while there is room."""
        schedule = self._schedules.pop((num_steps, slot), None) or self.make_schedule(num_steps, slot)
        self._schedules[num_steps, slot] = schedule
        while sum(steps for steps, _ in self._schedules) > TABULATED_STEPS and len(self._schedules) > 1:
            del self._schedules[next(iter(self._schedules))]  # the one that was used longest ago
        return schedule

    def make_schedule(self, num_steps: int, slot: int, change: TimeChange = SAME_TIME) -> Schedule:
        """A schedule of so many steps, with what an adapter changes about it."""
        whole = [int(i / num_steps * self.config.num_timestep_buckets) for i in range(num_steps)]
        times = torch.tensor(whole, dtype=torch.float32, device=self.device)
        codes = time_code(times, self.config.input_embedding_dim).to(self.dtype)
        norms, biases = self.dit.modulate(times, change), self._maps(slot).time_bias(codes)
        return _schedule(torch.cat((norms, biases[:, None]), 1))

    def with_parameters(self, changed: Mapping[str, Tensor]) -> Groot:
        """A network with other values for some parameters, by name, which shares all others with this one."""
        shared: dict[int, Any] = {id(parameter): parameter for parameter in self.parameters()}
        other = copy.deepcopy(self, {**shared, id(self._schedules): {}, id(self.vision._places): {}})
        for name, value in changed.items():
            owner, _, attribute = name.rpartition(".")
            setattr(other.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))
        return other

    def _maps(self, slot: int) -> EmbodimentMaps:
        return cast(EmbodimentMaps, self.maps[str(slot)])

    def _bias(self, lengths: Tensor | None, longest: int) -> Tensor | None:
        return None if lengths is None else key_bias(lengths, longest, self.dtype)


def beside_each_other(schedules: Sequence[Schedule]) -> Schedule:
    """The schedule of rows with one each, of one number of steps and embodiment."""
    if all(schedule is schedules[0] for schedule in schedules):
        return schedules[0]
    table = torch.stack([schedule.table for schedule in schedules], -2)  # (steps, 2 * norms + 1, rows, width)
    return _schedule(table[..., None, :])


def read_step(told: Tensor) -> Step:
    """One step of a schedule's table, as views of it."""
    *norms, time_bias = told.unbind(0)
    return Step(modulations(norms), time_bias.view(-1, told.shape[-1])[0])  # the last is the same for all rows


def _schedule(table: Tensor) -> Schedule:
    return Schedule(table, [read_step(told) for told in table.unbind(0)])
