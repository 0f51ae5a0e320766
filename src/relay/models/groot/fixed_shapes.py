"""The denoising steps of `model.py` over buffers of fixed shapes, so that a GPU can replay them.

One step is prepared for every shape. A call looks at its observations as ever, with the tokens of each kind padded
behind the self-attention that would see the padding; what the steps need of them is copied into the buffers, and the
step replayed as often as the batch asks for, with what it knows of the time copied in between, so that any number of
steps runs on what was prepared. Four steps are most of what a call launches; the rest is told kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from relay.engine.adapter_rows import by_layer
from relay.engine.base import Progress
from relay.engine.graphs import Graphs
from relay.engine.staging import Field, carve, size_of
from relay.models.groot.adapters import GrootAdapter
from relay.models.groot.assemble import assemble
from relay.models.groot.changes import network_change
from relay.models.groot.model import Groot, GrootInputs, Observed, Seen, read_step
from relay.models.groot.resident import ResidentAdapters
from relay.models.groot.shapes import Shape, ShapePlan
from relay.models.groot.transforms import GrootPrepared


class FixedShapes:
    """One network's denoising steps for the shapes of a plan.

    Args:
        slot: of the embodiment that is served.
        capture: replay CUDA graphs; without it the same buffers are used and the same functions called.
        budget_bytes: most device memory for graphs; shapes beyond it are not prepared.
        resident: adapters on the device; where some are held, the step is prepared once more, with room for what they
            change in each row.
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
        self._resident = resident
        self._changes = resident.buffers(plan.largest.rows) if resident else None
        self._model, self._slot = model, slot
        self.graphs = Graphs(model.device, capture=capture, budget_bytes=budget_bytes)
        self._positions = model.positions(slot, plan.largest.rows)
        # One shape is in use at a time, so all share the memory that the largest needs.
        self._memory = torch.zeros(size_of(self._fields(plan.largest)), dtype=torch.uint8, device=model.device)
        self._buffers: dict[Shape, Mapping[str, Tensor]] = {}

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
        if not self._bring_adapters(adapters, shape):
            return None
        inputs = assemble(self._model, rows, noise, num_steps, shape)
        if self._resident is not None:
            _, inputs = self._resident.apply(inputs, adapters, [len(row.images) for row in rows])
        return self.sample_actions(inputs, shape)

    @torch.inference_mode()
    def sample_actions(self, inputs: GrootInputs, shape: Shape) -> Tensor:
        """The same from what was assembled for a prepared shape."""
        kept = self._buffers[shape]
        for name, made in self._model.observe(inputs)._asdict().items():
            kept[name][: len(made)].copy_(made)
        noise = inputs.noise.flatten(0, 1)
        x = kept["x"][: len(noise)]
        x.copy_(noise)
        kept["step_size"].fill_(1 / inputs.num_steps)
        part, room, table = "step", kept["told"], self._model.schedule_of(inputs).table
        if inputs.change is not None:
            part, room = "adapted step", kept["told_by_row"][:, : len(inputs.tokens)]
            table = table if table.dim() == 5 else table[:, :, None, None]  # the same for all rows
        for told in table.unbind(0):
            room.copy_(told)
            self.graphs.replay((part, shape))
        return x.view(inputs.noise.shape).to("cpu", copy=True)  # waits for the device

    def spoil(self) -> None:
        """Leave NaN in every buffer, as what no call may depend on; for checks."""
        self._memory.view(torch.float32).fill_(float("nan"))
        for change in (self._changes or {}).values():
            for part in change:
                if part is not None:
                    part.fill_(float("nan"))

    def _bring_adapters(self, adapters: Sequence[GrootAdapter | None], shape: Shape) -> bool:
        """Fill in what the rows' adapters change at each step; False if there is no room prepared for it."""
        if not any(adapters):
            return True
        if self._resident is None or self._changes is None:
            return False
        return self._resident.gather(adapters, shape.rows, self._changes)

    def _prepare_shape(self, shape: Shape) -> None:
        kept = carve(self._memory, self._fields(shape))
        observed = Observed(**{name: kept[name] for name in Observed._fields})
        seen = self._model.see(observed, self._positions[: shape.rows * self._model.config.action_horizon])
        self.graphs.prepare(("step", shape), lambda: self._run_step(kept, kept["told"], seen))
        if self._changes is not None:
            layers = {kind: by_layer(change, lambda t: t[: shape.rows]) for kind, change in self._changes.items()}
            adapted = seen._replace(change=network_change(layers, {}).dit)
            self.graphs.prepare(("adapted step", shape), lambda: self._run_step(kept, kept["told_by_row"], adapted))
        self._buffers[shape] = kept

    def _run_step(self, kept: Mapping[str, Tensor], told: Tensor, seen: Seen) -> None:
        velocity = self._model.denoise_step(kept["x"], read_step(told), seen, self._slot)
        kept["x"].addcmul_(velocity.float(), kept["step_size"])

    def _fields(self, shape: Shape) -> dict[str, Field]:
        """What the steps read and write; the parts of `Observed` under their names."""
        config, dit, dtype = self._model.config, self._model.dit, self._model.dtype
        text, images = dit.text_keys_values.weight.shape[1], dit.image_keys_values.weight.shape[1]
        width, norms = config.input_embedding_dim, len(dit.modulation_weight)
        told_by_row = {} if self._changes is None else {"told_by_row": ((2 * norms + 1, shape.rows, 1, width), dtype)}
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
