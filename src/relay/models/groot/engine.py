"""The GR00T N1.7 engine: observations of one embodiment to its action groups, in the robot's units.

`prepare` runs on any thread and is CPU work only; `infer` runs on the device thread and answers all its rows together.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relay.engine.adapter_folders import AdapterChoice
from relay.engine.adapter_store import AdapterStore
from relay.engine.base import Chunk, Failure, Note, PolicySpec, Progress, Work
from relay.engine.decode import DECODERS, choose_decoder
from relay.engine.device import choose_device
from relay.engine.fast_path import TOLERANCES, checked
from relay.engine.frames import Decode
from relay.engine.graphs import graph_budget
from relay.engine.weights import CheckpointError
from relay.engine.worker import NonFiniteActions
from relay.models.groot.adapters import read_adapter, with_changes
from relay.models.groot.assemble import assemble
from relay.models.groot.checkpoint import load_checkpoint
from relay.models.groot.fixed_shapes import FixedShapes
from relay.models.groot.handshake import IMAGE_RESOLUTION, openpi_metadata, vllm_handshake
from relay.models.groot.model import Groot
from relay.models.groot.prompt import PromptTokenizer
from relay.models.groot.recipe import Recipe
from relay.models.groot.resident import ResidentAdapters
from relay.models.groot.self_check import fixed_distance
from relay.models.groot.shapes import FRAMES, ShapePlan
from relay.models.groot.transforms import GrootPrepared, prepare, resting_state, to_robot
from relay.protocol.images import Codec, decode_frame, encode_frame
from relay.protocol.messages import Observation, Options

OPTIONS = frozenset({"num_steps", "seed", "noise"})
NO_ADAPTERS = AdapterChoice()

_NUDGE = 0.01
"""In the network's units: small for poses, and large beside what float32 rounds."""

logger = logging.getLogger(__name__)


def load(
    name: str,
    folder: Path,
    *,
    embodiment: str | None,
    tokenizer: Path | None,
    device: str,
    dtype: str,
    num_steps: int | None,
    max_batch: int,
    default_prompt: str | None,
    adapters: AdapterChoice,
    graphs: str,
    decode: str,
    resize: str,
    progress: Progress,
) -> GrootEngine:
    """Load a checkpoint folder and make it ready to warm up."""
    for option, value, choices in (
        ("graphs", graphs, ("auto", "off")),
        ("decode", decode, DECODERS),
        ("resize", resize, ("exact", "fast")),
        ("dtype", dtype, ("auto", "float32", "bfloat16")),
    ):
        if value not in choices:
            raise CheckpointError(f"--{option} must be {' or '.join(choices)}, got {value!r}")
    if num_steps is not None and not 1 <= num_steps <= 50:
        raise CheckpointError(f"--num-steps must be between 1 and 50, got {num_steps}")
    place = choose_device(device)
    precision = dtype if dtype != "auto" else "bfloat16" if place.type == "cuda" else "float32"
    checkpoint = load_checkpoint(
        folder,
        embodiment=embodiment,
        tokenizer=tokenizer,
        device=place,
        dtype=getattr(torch, precision),
        progress=progress,
    )
    if num_steps is not None:
        checkpoint.model.config = replace(checkpoint.model.config, num_steps=num_steps)
    if adapters.any:
        progress("loading adapters", 0.0)
    return GrootEngine(
        name,
        checkpoint.model,
        checkpoint.tokenizer,
        checkpoint.recipe,
        adapters=adapters,
        tags=checkpoint.tags,
        metadata=checkpoint.metadata,
        remarks=checkpoint.remarks,
        max_batch=max_batch,
        default_prompt=default_prompt,
        decode=decode,
        fast_resize=resize == "fast",
        graphs=graphs == "auto" and place.type == "cuda",
    )


class GrootEngine:
    """One loaded network with the recipe of the embodiment that it serves.

    Args:
        recipe: the embodiment's cameras, state, actions and statistics.
        adapters: those that requests may ask for.
        tags: all embodiments that the checkpoint has statistics of.
        metadata: the checkpoint's own, for OpenPI's handshake.
        remarks: what should be known of the checkpoint.
        decode: what decodes JPEG frames, as in `choose_decoder`.
        fast_resize: frames are resized faster, a grey level or two off.
        graphs: prepare denoising steps of fixed shapes at warm-up and replay them, as CUDA graphs where the device has
            them.

    Attributes:
        model: the network.
        fixed: its prepared steps, from warm-up on; None without them.
        remarks: sentences on what runs otherwise than it could, for the log and the health check.
        unprepared: how many batches fitted no prepared shape, and ran without.
    """

    def __init__(
        self,
        name: str,
        model: Groot,
        tokenizer: PromptTokenizer,
        recipe: Recipe,
        *,
        adapters: AdapterChoice = NO_ADAPTERS,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        remarks: Sequence[str] = (),
        max_batch: int = 8,
        default_prompt: str | None = None,
        decode: str = "cpu",
        fast_resize: bool = False,
        graphs: bool = False,
    ) -> None:
        self.unprepared = 0
        self.fixed: FixedShapes | None = None
        self._graphs = graphs
        base = model
        self._adapters = AdapterStore(adapters, lambda folder: read_adapter(folder, base))
        self._merged = adapters.merged
        if self._merged:
            model = with_changes(base, self._adapters.adapters[0])
        # A merged adapter is in the weights: nothing is asked for beside it.
        self._resident = ResidentAdapters(
            model, lambda: () if self._merged else self._adapters.adapters, adapters.memory_bytes
        )
        self.model = model
        self.remarks = list(remarks)
        if fast_resize:
            self.remarks.append("--resize fast: frames differ from training's by a grey level or two")
        self._tokenizer, self._recipe = tokenizer, recipe
        self._default_prompt, self._fast_resize = default_prompt, fast_resize
        self._decode_choice = decode
        self._decode: Decode = decode_frame
        told = {"default_prompt": default_prompt} if default_prompt else {}
        self.spec = PolicySpec(
            model=name,
            cameras=recipe.cameras,
            state_dim=sum(part.width for part in recipe.state),
            action_horizon=recipe.horizon,
            action_dim=sum(group.width for group in recipe.actions),
            num_steps=model.config.num_steps,
            max_batch=max_batch,
            image_resolution=IMAGE_RESOLUTION,
            supported_options=OPTIONS | ({"adapter"} if adapters.any else set()),
            metadata={**openpi_metadata(recipe, tags), **told, **(metadata or {})},
            handshake=vllm_handshake(recipe, tags),
            untold=frozenset({"state_dim", "action_dim"}),  # both are maps of parts
        )

    def prepare(self, observation: Observation, options: Options) -> GrootPrepared:
        """Validate, decode, resize, tokenize and normalize."""
        prepared = prepare(
            observation,
            options,
            self._recipe,
            self._tokenizer,
            default_prompt=self._default_prompt,
            decode=self._decode,
            fast_resize=self._fast_resize,
        )
        chosen = self._adapters.choose(options.adapter)
        if chosen is None:
            return prepared
        name, adapter = chosen
        notes = tuple(Note(f"adapter {name} {text}") for text in adapter.notes)
        return replace(prepared, adapter=None if self._merged else adapter, notes=(*prepared.notes, *notes))

    def batch_key(self, prepared: GrootPrepared) -> Hashable:
        """Rows of one embodiment, number of steps and set of image sizes share a batch, whatever prompts and adapters.

        Except with adapters that need a network of their own.
        """
        sizes = tuple(image.shape for image in prepared.row.images)
        alone = prepared.adapter if prepared.adapter and prepared.adapter.alone else None
        return prepared.row.slot, self._steps(prepared), sizes, alone

    def infer(self, batch: Sequence[Work]) -> Sequence[Chunk | Failure]:
        """A map of float32 arrays (1, horizon, k) for every row, one for each action group, in the robot's units."""
        answers: dict[int, Chunk | Failure] = {}
        for numbers in self._resident.groups([work.prepared.adapter for work in batch]):
            prepared: list[GrootPrepared] = [batch[number].prepared for number in numbers]
            noise = torch.stack([self._noise(batch[number].options) for number in numbers])
            actions = self._sample(prepared, noise).float().cpu().numpy()  # (rows, action_horizon, max_action_dim)
            for number, row, one in zip(numbers, actions, prepared, strict=True):
                answers[number] = self._answer(row, one)
        return [answers[number] for number in range(len(batch))]

    @property
    def adapters(self) -> Sequence[str]:
        """The names that requests may ask for."""
        return self._adapters.names

    def load_adapter(self, name: str, folder: Path) -> None:
        """Hold one more adapter, or another one under a name; any thread, requests go on."""
        self._adapters.load(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Hold an adapter no more; any thread, requests that have it are answered."""
        self._adapters.unload(name)

    def rescan_adapters(self) -> None:
        """Look through the adapters' folders again; any thread, requests go on."""
        self._adapters.rescan()

    def action_scale(self, prepared: GrootPrepared) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What the network's 0 is in the units of this row's answer, and how long its 1 is there.

        Both (horizon, dimensions), the groups side by side. Comparisons need it: a robot's dimensions have different
        units. Poses are no affine function of the network's numbers, so the length is that of their slope at 0.
        """
        width = sum(group.width for group in self._recipe.actions)
        still = np.zeros((self._recipe.action_horizon, self._recipe.max_action_dim), np.float32)
        zero = self._side_by_side(still, prepared)
        squares = np.zeros_like(zero)
        for column in range(width):
            moved = still.copy()
            moved[:, column] = _NUDGE
            squares += ((self._side_by_side(moved, prepared) - zero) / _NUDGE) ** 2
        return zero, np.sqrt(squares)

    def _side_by_side(self, actions: NDArray[np.float32], prepared: GrootPrepared) -> NDArray[np.float64]:
        parts = to_robot(actions, prepared, self._recipe).values()
        return np.concatenate([part[0] for part in parts], axis=-1).astype(np.float64)

    def warm_up(self, progress: Progress) -> None:
        """Capture every shape and run every batch size once, so that no first request waits for kernels or tables."""
        self._decode, remark = choose_decoder(self._decode_choice, self.model.device)
        self.remarks += [remark] if remark else []
        prepared = self._touch_preparation()
        if self._graphs:
            self.fixed = self._prepare_shapes(progress)
        for rows in range(1, self.spec.max_batch + 1):
            progress("warming up", rows / self.spec.max_batch)
            noise = torch.stack([self._noise(Options(seed=0))] * rows)
            if not self._sample([prepared] * rows, noise).isfinite().all():
                raise CheckpointError("this checkpoint gives actions that are not finite: its weights are damaged")
        self._warm_up_adapters(prepared, progress)
        for remark in self.remarks:
            logger.warning("%s", remark)

    def _warm_up_adapters(self, prepared: GrootPrepared, progress: Progress) -> None:
        """Bring the adapters to the device, so that their first requests need not wait for that."""
        held = () if self._merged else self._adapters.names
        noise = self._noise(Options(seed=0))[None]
        for done, name in enumerate(held):
            progress("warming up adapters", done / len(held))
            if not self._sample([replace(prepared, adapter=self._adapters.get(name))], noise).isfinite().all():
                raise CheckpointError(f"adapter {name} gives actions that are not finite: its weights are damaged")

    def _prepare_shapes(self, progress: Progress) -> FixedShapes | None:
        """The fast path, if it can be had and gives what the plain one gives; else a remark why not."""
        usual = [self._at_rest(np.zeros((*frame, 3), np.uint8)).row for frame in FRAMES]
        sizes = {row.images[0].shape: row for row in usual}.values()
        fixed, remarks = checked(
            "prepared shapes",
            lambda: self._captured(progress),
            lambda fixed: fixed_distance(fixed, self._plain, [*sizes], self.model.config, self._resident.sample()),
            TOLERANCES[self.model.dtype],
        )
        self.remarks += remarks
        return fixed

    def _captured(self, progress: Progress) -> FixedShapes:
        device, plan = self.model.device, ShapePlan.of(self._recipe, self.spec.max_batch)
        fixed = FixedShapes(
            self.model,
            self._recipe.embodiment.slot,
            plan,
            capture=device.type == "cuda",
            budget_bytes=graph_budget(device),
            resident=self._resident,
        )
        fixed.prepare(progress)
        return fixed

    def free_memory(self) -> None:
        """Give the allocator's unused blocks back, which may be too small, and the adapters' room."""
        self._resident.forget()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _sample(self, prepared: Sequence[GrootPrepared], noise: Tensor) -> Tensor:
        """(rows, action_horizon, max_action_dim) in the network's units; all rows have the same batch key."""
        num_steps = self._steps(prepared[0])
        if self.fixed is not None:
            actions = self.fixed.sample(prepared, noise, num_steps)
            if actions is not None:
                return actions
            self.unprepared += 1
        return self._plain(prepared, noise, num_steps)

    def _plain(self, prepared: Sequence[GrootPrepared], noise: Tensor, num_steps: int) -> Tensor:
        """As `_sample`, without prepared shapes; with adapters, whatever they change."""
        rows = [one.row for one in prepared]
        inputs = assemble(self.model, rows, noise, num_steps)
        network, inputs = self._resident.apply(
            inputs, [one.adapter for one in prepared], [len(row.images) for row in rows]
        )
        return network.sample_actions(inputs)

    def _steps(self, prepared: GrootPrepared) -> int:
        return self.model.config.num_steps if prepared.num_steps is None else prepared.num_steps

    def _answer(self, actions: NDArray[np.float32], prepared: GrootPrepared) -> Chunk | Failure:
        if not np.isfinite(actions).all():  # the cut to -1 and 1 would hide infinity
            return Failure(
                NonFiniteActions("the network's actions are not finite; such a chunk is not sent to a robot")
            )
        try:
            return Chunk(to_robot(actions, prepared, self._recipe))
        except (ValueError, FloatingPointError) as error:  # one row's state must not cost the others their answers
            return Failure(error)

    def _noise(self, options: Options) -> Tensor:
        """Starting noise (action_horizon, max_action_dim) of this row alone, so that it doesn't depend on the batch.

        Drawn as vllm-omni draws it (vllm_omni/diffusion/models/gr00t): bfloat16 on the device, whatever the model's
        dtype, so that the same seed gives the same noise on the same kind of device.
        """
        config, device = self.model.config, self.model.device
        if options.noise is not None:
            return torch.tensor(options.noise, dtype=torch.float32, device=device)
        generator = torch.Generator(device)
        if options.seed is None:
            generator.seed()
        else:
            generator.manual_seed(options.seed)
        shape = (1, config.action_horizon, config.max_action_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)[0].float()

    def _touch_preparation(self) -> GrootPrepared:
        """Decoders, resizing and tokenizer load on first use; returns a row of the handshake's frame size."""
        black = np.zeros((*IMAGE_RESOLUTION, 3), np.uint8)
        rows = [self._at_rest(encode_frame(black, codec)) for codec in (Codec.JPEG_Q90, Codec.LOSSLESS)]
        return rows[0]

    def _at_rest(self, frame: bytes | NDArray[np.uint8]) -> GrootPrepared:
        """A row of a robot that stands still and sees nothing but this."""
        recipe = self._recipe
        observation = {
            "video": {camera: [frame] * len(recipe.frames) for camera in recipe.cameras},
            "state": resting_state(recipe),
            "prompt": "warm up",
        }
        return replace(self.prepare(observation, Options()), adapter=None)  # the default one is warmed up by its name
