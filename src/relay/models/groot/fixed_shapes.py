"""The sampler of `model.py` over buffers of fixed shapes, so that a GPU can replay it instead of being told it anew.

Two parts are prepared for every shape: all that is computed once per request, and one denoising step. A call replays
the first once and the second as often as the batch asks for, with what a step knows of the time copied in between, so
that any number of steps runs on what was prepared.

The first part is prepared for images of certain sizes. With others, and with adapters that change that part, it is told
operation by operation, and what the steps need of it is copied into the buffers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from relay.engine.base import Progress
from relay.engine.graphs import Graphs
from relay.engine.staging import Field, Staging, carve, size_of
from relay.models.groot.adapters import GrootAdapter
from relay.models.groot.assemble import LENGTHS, arrange, as_inputs, assemble, pack_patches
from relay.models.groot.inputs import GrootRow
from relay.models.groot.model import (
    NO_CHANGE,
    Groot,
    GrootInputs,
    NetworkChange,
    Observed,
    Schedule,
    Seen,
    read_step,
)
from relay.models.groot.prompt import image_tokens
from relay.models.groot.resident import ResidentAdapters
from relay.models.groot.shapes import Pictures, Shape, ShapePlan
from relay.models.groot.transforms import GrootPrepared
from relay.models.groot.vision import Grid


class FixedShapes:
    """One network's sampler for the shapes of a plan.

    Args:
        slot: of the embodiment that is served.
        capture: replay CUDA graphs; without it the same buffers are used and the same functions called.
        budget_bytes: most device memory for graphs; shapes beyond it are not prepared.
        resident: adapters on the device; where some are held, both parts are prepared once more, with room for what
            they change in each row.
    """

    def __init__(
        self,
        model: Groot,
        slot: int,
        plan: ShapePlan,
        *,
        capture: bool,
        budget_bytes: int | None = None,
        resident: ResidentAdapters | None = None,
    ) -> None:
        self.plan = plan
        self._model, self._slot, self._resident = model, slot, resident
        self._room = resident.buffers(plan.largest.rows, plan.most_images) if resident else None
        self.graphs = Graphs(model.device, capture=capture, budget_bytes=budget_bytes)
        self._positions = model.positions(slot, plan.largest.rows)
        # A graph reads the tables at the addresses that they have now.
        self._tables = [model.vision.tabulated(self._grid(pictures)) for pictures in plan.pictures.values()]
        # One shape is in use at a time, so all share the memory that the largest needs.
        self._memory = torch.zeros(size_of(self._kept_fields(plan.largest)), dtype=torch.uint8, device=model.device)
        whole = [shape for shape in plan if shape.images in plan.pictures]
        head = max((size_of(self._staged_fields(shape)) for shape in whole), default=0)
        patches = max((math.prod(self._patches(shape)[:2]) for shape in whole), default=0)
        self._staging = Staging(model.device, head, ((patches, 3 * model.config.vision.patch**2), torch.uint8))
        self._buffers: dict[Shape, _Buffers] = {}

    @torch.inference_mode()
    def prepare(self, progress: Progress) -> None:
        """Capture everything, the largest first; a shape that finds no more memory is left out."""
        shapes = list(self.plan)
        for done, shape in enumerate(shapes):
            progress(f"capturing {shape}", done / len(shapes))
            if self.graphs.full:
                break
            self._prepare_shape(shape)

    @property
    def left_out(self) -> list[Shape]:
        """Shapes of the plan that are not prepared, for want of memory."""
        return [shape for shape in self.plan if shape not in self._buffers]

    @torch.inference_mode()
    def sample(self, batch: Sequence[GrootPrepared], noise: Tensor, num_steps: int) -> Tensor | None:
        """As `Groot.sample_actions`; None if no prepared shape holds these rows.

        Args:
            noise: (rows, action_horizon, max_action_dim) on any device.

        Returns:
            (rows, action_horizon, max_action_dim) float32 on the CPU; the device has caught up.
        """
        rows, adapters = [one.row for one in batch], [one.adapter for one in batch]
        shape = self.plan.fit(rows)
        if shape is None or shape not in self._buffers:
            return None
        whole, adapted = self.plan.whole(rows, shape), any(adapters)
        if adapted and not self._bring_adapters(adapters, shape, self._images(shape) if whole else 0):
            return None
        if whole:
            self._stage(rows, shape)
            self.graphs.replay(("adapted look" if adapted else "look", shape))
        else:
            inputs = assemble(self._model, rows, noise, num_steps, shape)
            if self._resident is not None:
                _, inputs = self._resident.apply(inputs, adapters, [len(row.images) for row in rows])
            self.look(inputs, shape)
        if adapted and self._resident is not None:
            schedule = self._resident.schedule(adapters, num_steps, self._slot)
        else:
            schedule = self._model.schedule(num_steps, self._slot)
        return self.denoise(noise, schedule, shape, adapted=adapted)

    @torch.inference_mode()
    def look(self, inputs: GrootInputs, shape: Shape) -> None:
        """Compute what the steps need of inputs that were assembled for a prepared shape."""
        self._look(inputs, self._buffers[shape].kept)

    @torch.inference_mode()
    def denoise(self, noise: Tensor, schedule: Schedule, shape: Shape, *, adapted: bool = False) -> Tensor:
        """As `sample`, for what was looked at last."""
        kept, rows = self._buffers[shape].kept, len(noise)
        x = kept["x"][: rows * noise.shape[1]]
        x.copy_(noise.flatten(0, 1))
        kept["step_size"].fill_(1 / len(schedule.table))
        part, room, table = "step", kept["told"], schedule.table
        if adapted:
            part, room = "adapted step", kept["told_by_row"][:, :rows]
            table = table if table.dim() == 5 else table[:, :, None, None]  # the same for all rows
        for told in table.unbind(0):
            room.copy_(told)
            self.graphs.replay((part, shape))
        return x.view(noise.shape).to("cpu", copy=True)  # waits for the device

    def spoil(self) -> None:
        """Leave in every buffer what no call may depend on: NaN, and full bytes in what is uploaded; for checks."""
        self._staging.fill(0xFF)
        self._memory.view(torch.float32).fill_(float("nan"))
        if self._room is not None:
            self._room.fill(float("nan"))

    def _bring_adapters(self, adapters: Sequence[GrootAdapter | None], shape: Shape, images: int) -> bool:
        """Fill in what the rows' adapters change, and so many images of each; False if there is no room for it."""
        if self._resident is None or self._room is None:
            return False
        return self._resident.gather(adapters, shape.rows, images, self._room)

    def _stage(self, rows: Sequence[GrootRow], shape: Shape) -> None:
        """Send the batch to the device, in one copy from page-locked memory."""
        buffers, config = self._buffers[shape], self._model.config
        # Rows that only fill up the shape have the first one's prompt; nobody reads them.
        filled = [*rows, *[rows[0]] * (shape.rows - len(rows))]
        for name, array in arrange(filled, config, shape, shape.text + shape.images).items():
            buffers.host[name][...] = array
        images = [image for row in rows for image in row.images]
        _, each, width = size = self._patches(shape)
        patches = self._staging.bulk_host[: math.prod(size[:2])].reshape(-1, each, width)
        pack_patches(images, config, patches[: len(images)])
        self._staging.upload(buffers.fields, len(images) * each)

    def _prepare_shape(self, shape: Shape) -> None:
        kept = carve(self._memory, self._kept_fields(shape))
        observed = Observed(**{name: kept[name] for name in Observed._fields})
        seen = self._model.see(observed, self._positions[: shape.rows * self._model.config.action_horizon])
        fields = self._staged_fields(shape) if shape.images in self.plan.pictures else {}
        staged = self._staging.view(fields)
        variants = [("", NO_CHANGE, kept["told"])]
        if self._room is not None:
            change = self._room.change(shape.rows, shape.rows * self._images(shape))
            variants.append(("adapted ", change, kept["told_by_row"]))
        for kind, change, told in variants:
            if fields:
                inputs = self._inputs(shape, staged.device, kept["x"], change)
                self.graphs.prepare((f"{kind}look", shape), partial(self._look, inputs, kept))
            changed = seen._replace(change=change.dit)
            self.graphs.prepare((f"{kind}step", shape), partial(self._run_step, kept, told, changed))
        self._buffers[shape] = _Buffers(fields, staged.host, kept)

    def _look(self, inputs: GrootInputs, kept: Mapping[str, Tensor]) -> None:
        for name, made in self._model.observe(inputs)._asdict().items():
            kept[name][: len(made)].copy_(made)

    def _run_step(self, kept: Mapping[str, Tensor], told: Tensor, seen: Seen) -> None:
        velocity = self._model.denoise_step(kept["x"], read_step(told), seen, self._slot)
        kept["x"].addcmul_(velocity.float(), kept["step_size"])

    def _inputs(self, shape: Shape, staged: Mapping[str, Tensor], noise: Tensor, change: NetworkChange) -> GrootInputs:
        """What is staged, as the network takes it."""
        size = self._patches(shape)
        patches = self._staging.bulk[: math.prod(size[:2])].view(size)
        grids = [self._grid(self.plan.pictures[shape.images])] * size[0]
        return replace(as_inputs({**staged, "patches": patches}, grids, noise, self._slot, 0), change=change)

    def _images(self, shape: Shape) -> int:
        """Images of a row that is prepared from the start of a call; 0 where none is."""
        return self.plan.pictures[shape.images].images if shape.images in self.plan.pictures else 0

    def _grid(self, pictures: Pictures) -> Grid:
        side = self._model.config.vision.patch
        return pictures.height // side, pictures.width // side

    def _patches(self, shape: Shape) -> tuple[int, int, int]:
        """(images, patches of each, 3 * patch * patch)."""
        pictures = self.plan.pictures[shape.images]
        return shape.rows * pictures.images, math.prod(self._grid(pictures)), 3 * self._model.config.vision.patch**2

    def _staged_fields(self, shape: Shape) -> dict[str, Field]:
        """What comes from the CPU with every batch, beside the images: as `arrange` makes it."""
        rows, tokens = shape.rows, shape.text + shape.images
        pictures = self.plan.pictures[shape.images]
        of_images = pictures.images * image_tokens(pictures.height, pictures.width)
        whole: dict[str, tuple[int, ...]] = {
            "tokens": (rows, tokens),
            "positions": (rows, tokens, 3),
            "image_places": (rows * of_images,),
            "text": (rows * shape.text,),
            "images": (rows * shape.images,),
            **dict.fromkeys(LENGTHS, (rows,)),
        }
        state = ((rows, self._model.config.state_width), torch.float32)
        return {**{name: (size, torch.int64) for name, size in whole.items()}, "state": state}

    def _kept_fields(self, shape: Shape) -> dict[str, Field]:
        """What one part leaves on the device for the next; the parts of `Observed` under their names."""
        config, dit, dtype = self._model.config, self._model.dit, self._model.dtype
        text, images = dit.text_keys_values.weight.shape[1], dit.image_keys_values.weight.shape[1]
        width, norms = config.input_embedding_dim, len(dit.modulation_weight)
        told_by_row = {} if self._room is None else {"told_by_row": ((2 * norms + 1, shape.rows, 1, width), dtype)}
        return {
            "text": ((shape.rows * shape.text, text), dtype),
            "images": ((shape.rows * shape.images, images), dtype),
            "text_bias": ((shape.rows, 1, 1, shape.text), dtype),
            "image_bias": ((shape.rows, 1, 1, shape.images), dtype),
            "state": ((shape.rows, 1, width), dtype),
            "x": ((shape.rows * config.action_horizon, config.max_action_dim), torch.float32),
            "told": ((2 * norms + 1, width), dtype),
            **told_by_row,
            "step_size": ((1,), torch.float32),
        }


@dataclass(frozen=True, slots=True)
class _Buffers:
    """One shape's memory: what is staged, on the CPU, and what is kept between parts; nothing is staged for steps."""

    fields: Mapping[str, Field]
    host: Mapping[str, NDArray[Any]]
    kept: Mapping[str, Tensor]
