"""The sampler of `model.py` over buffers of fixed shapes, so that a GPU can replay it instead of being told it anew.

Three parts are prepared: the vision tower for some numbers of images, the prefix and one denoising step for every
shape. A call replays them: tower once, prefix once, step as often as its rows need, with what a step knows of the time
copied in between, so that any number of steps runs on what was prepared. A graph of a whole call would be one launch
instead of a dozen (some 0.1 ms of 7) and would have to be prepared for each number of steps.

What two calls share is not computed twice: the tokens of frames whose bytes came before, and the whole prefix if the
batch differs from the last one in noise and steps only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relay.engine.adapter_rows import by_layer
from relay.engine.base import Progress
from relay.engine.graphs import Graphs
from relay.engine.prepared_sizes import at_least
from relay.engine.reuse import SizedCache
from relay.engine.staging import Field, Staging, carve, size_of
from relay.models.pi0.adapters import Pi0Adapter
from relay.models.pi0.gemma import PLAIN, KeyValueCache, Rotation, compiled
from relay.models.pi0.guidance import Guidance
from relay.models.pi0.model import NO_CHANGE, STEP_SIZE_WIDTH, Inputs, NetworkChange, Pi0, Seen
from relay.models.pi0.prefix import PrefixLayout
from relay.models.pi0.resident import ResidentAdapters, network_change
from relay.models.pi0.shapes import Shape, ShapePlan
from relay.models.pi0.transforms import Pi0Prepared


class FixedShapes:
    """One network's sampler for the shapes of a plan.

    Args:
        capture: replay CUDA graphs; without it the same buffers are used and the same functions called.
        fuse: have the functions between matrix products compiled while graphs are captured.
        reuse_bytes: device memory for the tokens of frames that were seen before; 0 turns reuse off.
        budget_bytes: most device memory for graphs; shapes beyond it are not prepared.
        resident: adapters on the device; where some are held, prefix and step are prepared once more, with room for
            what they change in each row.
    """

    def __init__(
        self,
        model: Pi0,
        plan: ShapePlan,
        *,
        capture: bool,
        fuse: bool = False,
        reuse_bytes: int = 0,
        budget_bytes: int | None = None,
        resident: ResidentAdapters | None = None,
    ) -> None:
        self.plan = plan
        self._resident = resident
        self._changes = resident.buffers(plan.largest.rows) if resident else None
        self._model, self._fuse = model, fuse and capture
        weight = model.token_embedding
        self.graphs = Graphs(weight.device, capture=capture, budget_bytes=budget_bytes)
        self.reused_images = self.reused_prefixes = 0
        self._seen_images: SizedCache[Hashable, Tensor] = SizedCache(reuse_bytes, lambda tokens: tokens.nbytes)
        self._last_prefix: Hashable = None
        self._reuse = reuse_bytes > 0

        vision, largest = model.config.vision, plan.largest
        side = vision.image_size
        frames = ((plan.images[-1], side, side, 3), torch.uint8)
        self._staging = Staging(weight.device, max(size_of(self._staged_fields(shape)) for shape in plan), frames)
        self._image_tokens = torch.zeros(
            plan.images[-1], vision.tokens, model.config.language.width, dtype=weight.dtype, device=weight.device
        )
        # One shape is in use at a time, so all share the memory that the largest needs.
        self._memory = torch.zeros(size_of(self._kept_fields(largest)), dtype=torch.uint8, device=weight.device)
        self._buffers: dict[Shape, _Buffers] = {}

    def prepare(self, progress: Progress) -> None:
        """Capture everything, the largest first; a shape that finds no more memory is left out."""
        fused = compiled() if self._fuse else PLAIN
        shapes = list(self.plan)
        self._model.run_between(fused)
        try:
            for images in reversed(self.plan.images):
                progress(f"capturing {images} images", 0.0)
                self._prepare_images(images)
            for done, shape in enumerate(shapes):
                progress(f"capturing {shape}", done / len(shapes))
                if self.graphs.full:
                    break
                self._prepare_shape(shape)
        finally:
            self._model.run_between(PLAIN)  # what is not prepared must not wait for a compiler

    @property
    def left_out(self) -> list[Shape]:
        """Shapes of the plan that are not prepared, for want of memory."""
        return [shape for shape in self.plan if shape not in self._buffers]

    @torch.inference_mode()
    def sample(self, rows: Sequence[Pi0Prepared], noise: Tensor) -> Tensor | None:
        """As `Pi0.sample_actions`; None if no prepared shape holds these rows.

        Args:
            noise: (rows, horizon, action_dim) float32 on the CPU.

        Returns:
            (rows, horizon, action_dim) float32 on the CPU; the device has caught up.
        """
        shape = self.plan.fit(rows)
        if shape is None or shape not in self._buffers:
            return None
        if not self._bring_adapters(shape, rows):
            return None
        buffers, adapters = self._buffers[shape], [row.adapter for row in rows]
        # Made before anything is started, because it waits for the device.
        left_overs, num_steps = [row.left_over for row in rows], [row.num_steps for row in rows]
        guidance = Guidance.of(left_overs, num_steps, buffers.kept["x"].device, padded=shape.rows)
        adapted_prefix = any(adapter and self._changes_prefix(adapter) for adapter in adapters)
        prefix = self._prefix_key(shape, rows, adapters if adapted_prefix else None)
        known, self._last_prefix = prefix is not None and prefix == self._last_prefix, None
        pictures = self._sort_images(rows)
        self._stage(shape, rows, noise, pictures)
        self._staging.upload(buffers.fields, 0 if known else len(pictures.new))
        if not known:
            self._embed_images(pictures)
            self.graphs.replay(("adapted prefix" if adapted_prefix else "prefix", shape))
        self.reused_prefixes += known
        self._last_prefix = prefix
        actions = self._denoise(shape, buffers, rows, guidance)[: len(rows)]
        return actions.to("cpu", copy=True)  # waits for the device

    def forget(self) -> None:
        """Let go of what is kept for reuse."""
        self._seen_images.clear()
        self._last_prefix = None

    def spoil(self) -> None:
        """Leave in every buffer what no call may depend on: NaN, and full bytes in what is uploaded; for checks."""
        self._staging.fill(0xFF)
        self._memory.view(torch.float32).fill_(float("nan"))
        self._image_tokens.fill_(float("nan"))
        for change in (self._changes or {}).values():
            for part in change:
                if part is not None:
                    part.fill_(float("nan"))
        self._last_prefix = None

    def _bring_adapters(self, shape: Shape, rows: Sequence[Pi0Prepared]) -> bool:
        """Fill in what the rows' adapters change; False if there is no room prepared for it."""
        adapters = [row.adapter for row in rows]
        if not any(adapters):
            return True
        if self._resident is None or self._changes is None or ("adapted step", shape) not in self.graphs:
            return False
        return self._resident.gather(adapters, shape.rows, self._changes)

    def _changes_prefix(self, adapter: Pi0Adapter) -> bool:
        parts = ("language.",) if self._model.modulated else ("language.", "expert.", "state_in")
        return any(kind.startswith(parts) for kind in adapter.changes)

    def _denoise(
        self, shape: Shape, buffers: _Buffers, rows: Sequence[Pi0Prepared], guidance: Guidance | None
    ) -> Tensor:
        x, condition = buffers.kept["x"], buffers.kept["condition"]
        x.copy_(buffers.inputs.noise)
        num_steps, adapters = [row.num_steps for row in rows], [row.adapter for row in rows]
        if self._resident is not None and any(adapters):
            part, tables = "adapted step", self._resident.step_tables(adapters, num_steps)
        else:
            part, tables = "step", [self._model.step_table(steps) for steps in num_steps]
        tables += tables[:1] * (shape.rows - len(tables))
        for step in range(max(num_steps)):
            if all(table is tables[0] for table in tables):
                condition.copy_(tables[0].rows[step])
            else:
                torch.stack([table.rows[min(step, table.steps)] for table in tables], out=condition)
            self.graphs.replay((part, shape))
            if guidance is not None:  # outside the graph, so that other batches don't pay for it
                guidance.draw(x, buffers.kept["moved"], step)
        return x

    def _sort_images(self, rows: Sequence[Pi0Prepared]) -> _Pictures:
        """Which of the batch's images the tower has to see, each once, and which it has seen before."""
        pictures = _Pictures({}, {})
        for image, key in _images(rows):
            if key in pictures.new or key in pictures.known:
                continue
            tokens = self._seen_images.get(key)
            if tokens is None:
                pictures.new[key] = image
            else:
                pictures.known[key] = tokens
        return pictures

    def _embed_images(self, pictures: _Pictures) -> None:
        """Fill the image tokens: those of new images from the tower, those of known ones from memory."""
        if pictures.new:
            self.graphs.replay(("images", at_least(self.plan.images, len(pictures.new))))
        for key, place in pictures.places.items():
            if key in pictures.known:
                self._image_tokens[place].copy_(pictures.known[key])
                self.reused_images += 1
            elif isinstance(key, bytes):  # a digest; other keys mean something in this batch only
                self._seen_images.put(key, self._image_tokens[place].clone())

    def _stage(self, shape: Shape, rows: Sequence[Pi0Prepared], noise: Tensor, pictures: _Pictures) -> None:
        """Write the batch into the page-locked block."""
        host = self._buffers[shape].host
        tokens_per_image = self._model.config.vision.tokens
        for place, image in enumerate(pictures.new.values()):
            self._staging.bulk_host[place] = image
        for name in ("tokens", "index", "positions"):
            host[name].fill(0)
        host["valid"].fill(True)  # rows that only fill up the shape see what they like; nobody reads them
        host["lengths"].fill(shape.cameras * tokens_per_image + shape.prompt)
        prompt_start = shape.images * tokens_per_image
        places = pictures.places
        for row, prepared in enumerate(rows):
            prompt = len(prepared.tokens)
            host["tokens"][row, :prompt] = prepared.tokens
            starts = [places[_key(prepared, row, camera)] for camera in range(len(prepared.images))]
            image_index = np.add.outer(tokens_per_image * np.array(starts), np.arange(tokens_per_image))
            own = np.r_[image_index.ravel(), prompt_start + row * shape.prompt + np.arange(prompt)]
            host["index"][row] = own[0]
            host["index"][row, : len(own)] = own
            host["positions"][row] = np.minimum(np.arange(host["positions"].shape[1]), len(own) - 1)
            host["valid"][row, len(own) :] = False
            host["lengths"][row] = len(own)
            if "state" in host:
                host["state"][row] = prepared.state
        host["noise"][: len(rows)] = noise.numpy()

    def _prefix_key(
        self, shape: Shape, rows: Sequence[Pi0Prepared], adapters: Sequence[Pi0Adapter | None] | None
    ) -> Hashable:
        """What the prefix depends on; None if it cannot be known."""
        if not self._reuse or not all(row.image_ids for row in rows):
            return None
        states = () if self._model.modulated else tuple(row.state.tobytes() for row in rows)
        return shape, tuple((row.image_ids, row.tokens) for row in rows), states, adapters and tuple(adapters)

    @torch.inference_mode()
    def _prepare_images(self, images: int) -> None:
        frames, tokens = self._staging.bulk[:images], self._image_tokens[:images]
        self.graphs.prepare(("images", images), lambda: tokens.copy_(self._model.vision(frames)))

    @torch.inference_mode()
    def _prepare_shape(self, shape: Shape) -> None:
        buffers = self._make_buffers(shape)
        self.graphs.prepare(("prefix", shape), lambda: self._run_prefix(buffers, NO_CHANGE))
        self.graphs.prepare(("step", shape), lambda: self._run_step(buffers, NO_CHANGE))
        if self._changes is not None:
            layers = {kind: by_layer(change, lambda t: t[: shape.rows]) for kind, change in self._changes.items()}
            change = network_change(layers)
            self.graphs.prepare(("adapted prefix", shape), lambda: self._run_prefix(buffers, change))
            self.graphs.prepare(("adapted step", shape), lambda: self._run_step(buffers, change))
        self._buffers[shape] = buffers
        self._last_prefix = None

    def _run_prefix(self, buffers: _Buffers, change: NetworkChange) -> None:
        seen = self._model.embed_prefix(replace(buffers.inputs, change=change), buffers.seen.cache)
        buffers.seen.tables.cos.copy_(seen.tables.cos)
        buffers.seen.tables.sin.copy_(seen.tables.sin)
        assert seen.key_bias is not None
        assert buffers.seen.key_bias is not None
        buffers.seen.key_bias.copy_(seen.key_bias)

    def _run_step(self, buffers: _Buffers, change: NetworkChange) -> None:
        x, rows = buffers.kept["x"], buffers.kept["condition"]
        velocity = self._model.denoise_step(x, self._model.read_condition(rows), *buffers.seen._replace(change=change))
        x.sub_(torch.mul(self._model.read_step_size(rows), velocity, out=buffers.kept["moved"]))

    def _make_buffers(self, shape: Shape) -> _Buffers:
        fields = self._staged_fields(shape)
        staged, kept = self._staging.view(fields), carve(self._memory, self._kept_fields(shape))
        device = staged.device
        inputs = Inputs(
            images=self._staging.bulk[: shape.images],
            tokens=device["tokens"].flatten(),
            layout=PrefixLayout(device["index"], device["valid"], device["positions"], device["lengths"]),
            noise=device["noise"],
            num_steps=[],
            state=device.get("state"),
            image_tokens=self._image_tokens[: shape.images],
        )
        keys = kept["cache"].shape[3]
        seen = Seen(
            Rotation(kept["cos"], kept["sin"]), KeyValueCache(kept["cache"]), kept["bias"][..., :keys], NO_CHANGE
        )
        return _Buffers(fields, staged.host, kept, inputs, seen)

    def _staged_fields(self, shape: Shape) -> dict[str, Field]:
        """What comes from the CPU with every batch, beside the frames."""
        config = self._model.config
        rows, prefix = shape.rows, shape.cameras * config.vision.tokens + shape.prompt
        fields: dict[str, Field] = {
            "tokens": ((rows, shape.prompt), torch.int64),
            "index": ((rows, prefix), torch.int64),
            "positions": ((rows, prefix), torch.int64),
            "lengths": ((rows,), torch.int64),
            "valid": ((rows, prefix), torch.bool),
            "noise": ((rows, config.action_horizon, config.action_dim), torch.float32),
        }
        if not self._model.modulated:
            fields["state"] = ((rows, config.action_dim), torch.float32)
        return fields

    def _kept_fields(self, shape: Shape) -> dict[str, Field]:
        """What one part leaves on the device for the next."""
        config, dtype = self._model.config, self._model.token_embedding.dtype
        cache = self._model.cache_shape(shape.rows, shape.cameras * config.vision.tokens + shape.prompt)
        table = ((shape.rows, config.action_horizon, 1, config.head_dim), torch.float32)
        actions = ((shape.rows, config.action_horizon, config.action_dim), torch.float32)
        return {
            "cache": (cache, dtype),
            "bias": ((shape.rows, 1, 1, (cache[3] + 7) // 8 * 8), dtype),
            "cos": table,
            "sin": table,
            "x": actions,
            "moved": actions,
            "condition": ((shape.rows, self._model.condition_width + STEP_SIZE_WIDTH), torch.float32),
        }


@dataclass(frozen=True, slots=True)
class _Buffers:
    """One shape's memory: what is staged (on the CPU and on the device), what is kept between parts, as the model's."""

    fields: Mapping[str, Field]
    host: Mapping[str, NDArray[Any]]
    kept: Mapping[str, Tensor]
    inputs: Inputs
    seen: Seen


@dataclass(frozen=True, slots=True)
class _Pictures:
    """The different images of a batch by key: pixels of those to embed, tokens of those that were embedded before."""

    new: dict[Hashable, NDArray[np.uint8]]
    known: dict[Hashable, Tensor]

    @property
    def places(self) -> dict[Hashable, int]:
        """Where each image's tokens go: the new ones first, as the tower leaves them."""
        return {key: place for place, key in enumerate((*self.new, *self.known))}


def _images(rows: Sequence[Pi0Prepared]) -> Iterator[tuple[NDArray[np.uint8], Hashable]]:
    for number, row in enumerate(rows):
        for camera, image in enumerate(row.images):
            yield image, _key(row, number, camera)


def _key(row: Pi0Prepared, number: int, camera: int) -> Hashable:
    """What tells an image from others: its digest, or without one its place in the batch."""
    return row.image_ids[camera] if row.image_ids else (number, camera)
