"""A DreamZero checkpoint as tables and problems, without reading its weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from relay.engine.doubts import doubts
from relay.engine.normalization import Statistics
from relay.engine.weights import CheckpointError, TensorSource
from relay.models.dreamzero.checkpoint import load_prompts
from relay.models.dreamzero.config import DreamZeroConfig
from relay.models.dreamzero.footprint import footprint
from relay.models.dreamzero.inspection import Inspection, complete_settings, inspect_checkpoint, is_dreamzero
from relay.models.dreamzero.observation import camera_keys, state_key
from relay.models.dreamzero.preview import preview
from relay.models.dreamzero.recipe import DROID, Part, Recipe
from relay.models.dreamzero.settings import SETTINGS_FILE
from relay.models.dreamzero.weights import Network, do_not_fit, empty_network, find_problems, unused_names
from relay.models.report import Cell, Report, Sample, Section
from relay.protocol.errors import ObservationError

_TOLERANCES = {("float32", "float32"): 1e-4}
"""bfloat16 has not been measured at full size."""


def inspect(
    name: str | None,
    folder: Path,
    *,
    embodiment: str | None = None,
    cameras: str | None = None,
    tokenizer: Path | None = None,
    sample: Sample | None = None,
) -> Report:
    """Everything about a folder and one of its embodiments, and what would become of a sample."""
    found = inspect_checkpoint(folder, embodiment=embodiment, cameras=cameras, tokenizer=tokenizer)
    problems = list(found.problems)
    sections, network = [_checkpoint(found)], None
    if found.config is not None and found.tensors is not None:
        try:
            network = empty_network(found.config, found.tensors.shapes, torch.bfloat16)
            misfits = find_problems(network, found.tensors.shapes, found.tensors.dtypes)
            problems += [do_not_fit(misfits)] if misfits else []
        except CheckpointError as error:
            problems.append(str(error))
    sections += _sections(found, network)
    frames, refused = {}, None
    if not found.problems and found.recipe is not None:
        try:
            prompts, _ = load_prompts(found)
            if sample is not None:
                seen = preview(found.recipe, prompts, found.camera_set, sample)
                sections += seen.sections
                frames = seen.frames
        except CheckpointError as error:
            problems.append(str(error))
        except ObservationError as error:
            refused = str(error)
    known = found.known or _holds_dreamzero(folder)
    return Report(
        model="dreamzero" if known else None,
        sections=sections,
        problems=problems,
        refused=refused,
        settings=None if problems else complete_settings(found),
        settings_file=folder / SETTINGS_FILE,
        frames=frames,
        tolerances=_TOLERANCES,
    )


def _holds_dreamzero(folder: Path) -> bool:
    """Whether folders below it are DreamZero's, so that its problem is to be told here."""
    return folder.is_dir() and any(is_dreamzero(place) for place in folder.glob("*/"))


def _sections(found: Inspection, network: Network | None) -> list[Section]:
    sections: list[Section] = []
    if found.config is not None:
        sections.append(_network(found.config))
    if found.tensors is not None:
        sections.append(_tensors(found.tensors, found.config))
    if found.recipe is not None:
        recipe = found.recipe
        sections += [_cameras(recipe, found.camera_set), _actions(recipe)]
        sections += [_statistics("state", recipe.state), _statistics("actions", recipe.actions)]
    if found.config is not None and network is not None:
        sections.append(_memory(found.config, network))
    return sections


def _checkpoint(found: Inspection) -> Section:
    rows: list[tuple[Cell, ...]] = [
        ("folder", str(found.folder)),
        ("model", "DreamZero" if found.known else "not known"),
        ("embodiment", found.recipe.embodiment if found.recipe else "not known"),
        ("embodiments", ", ".join(found.tags) or "none"),
        ("prompts", "the released model's" if _released(found) else "its own" if found.prompts else "none"),
        ("tokenizer", str(found.tokenizer) if found.tokenizer else "none"),
    ]
    return Section("Checkpoint", rows)


def _released(found: Inspection) -> bool:
    return found.prompts is not None and "prompts" not in found.settings


def _network(config: DreamZeroConfig) -> Section:
    dit, text, image, video = config.dit, config.text, config.image, config.video
    rows: list[tuple[Cell, ...]] = [
        ("transformer", f"width {dit.width}, depth {dit.depth}, MLP {dit.mlp}, {dit.heads} heads"),
        ("sees the first frame beside others", dit.sees_first_frame),
        ("text encoder", f"UMT5, width {text.width}, depth {text.depth}, {text.vocab_size:,} tokens"),
        ("image encoder", f"CLIP, width {image.width}, {image.depth} blocks"),
        ("video encoder", f"Wan {video.version}, {video.latent_channels} channels"),
        ("tokens of a latent frame", dit.frame_tokens),
        ("window", f"{config.window_frames} latent frames, {config.window_tokens:,} tokens"),
        ("widths of state and action", f"{config.state_dim} and {config.action_dim}, padded"),
        ("action horizon", config.action_horizon),
        ("video stops at noise level", config.video_final_noise),
    ]
    return Section("Network", rows)


def _tensors(tensors: TensorSource, config: DreamZeroConfig | None) -> Section:
    shapes, dtypes = tensors.shapes, tensors.dtypes
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}
    counts = Counter(str(dtype).removeprefix("torch.") for dtype in dtypes.values())
    unused = unused_names(config, shapes) if config else []
    rows: list[tuple[Cell, ...]] = [
        ("tensors", len(shapes)),
        ("size", _bytes(sum(sizes.values()))),
        ("dtypes", ", ".join(f"{count} {dtype}" for dtype, count in counts.most_common())),
        ("of no use to actions", f"{len(unused)}, {_bytes(sum(sizes[name] for name in unused))}"),
    ]
    return Section("Tensors", rows)


def _cameras(recipe: Recipe, camera_set: str) -> Section:
    views = recipe.views
    places = ("bottom left", "bottom right", "top") if views.wrist_on_top else ("top left", "bottom left", "top right")
    keys = camera_keys(recipe, camera_set)
    rows = [(camera, keys[camera], places[place]) for place, camera in enumerate(recipe.cameras)]
    sizes = [f"{width}x{height}" for height, width in (views.received, views.tile, views.picture)]
    remarks = [f"frames are padded to {sizes[0]}, cropped to {views.crop:g}, resized to {sizes[1]}; in all {sizes[2]}"]
    if recipe.embodiment == DROID:
        remarks.append(f"exteriors are numbered as in {camera_set}; --cameras tells which")
    return Section("Cameras", rows, ("camera", "clients' key", "place"), remarks)


def _actions(recipe: Recipe) -> Section:
    rows = [
        (part.key, part.width, "offsets from the state" if part.relative else "absolute") for part in recipe.actions
    ]
    keys = ", ".join(f"{state_key(part)} ({part.width})" for part in recipe.state)
    remarks = [f"a chunk is ({recipe.horizon}, {recipe.action_dim}), in this order", f"state: {keys}"]
    return Section("Actions", rows, ("key", "numbers", "network gives"), remarks)


def _statistics(what: str, parts: Sequence[Part]) -> Section:
    rows: list[tuple[Cell, ...]] = []
    by_step = False
    for part in parts:
        low, high = part.low, part.high
        if low.ndim == 2:
            by_step, low, high = True, low.min(0), high.max(0)
        suspicions = doubts(Statistics(q01=low, q99=high), "quantile")
        for index, doubt in enumerate(suspicions):
            remark = "never changed in training" if low[index] == high[index] else doubt
            rows.append((f"{part.key}[{index}]", float(low[index]), float(high[index]), remark))
    remarks = ["by step: the widest of all steps is shown"] if by_step else []
    return Section(f"Statistics of {what}", rows, ("name", "q01", "q99", "suspicious"), remarks)


def _memory(config: DreamZeroConfig, network: Network) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for dtype in (torch.bfloat16, torch.float32):
        needed = footprint(config, dtype, network)
        rows.append(
            (
                str(dtype).removeprefix("torch."),
                *(_bytes(count) for count in needed.weights.values()),
                _bytes(needed.network),
                _bytes(needed.session),
                _bytes(needed.work),
                _bytes(needed.least),
            )
        )
    columns = ("served in", *needed.weights, "all weights", "a session", "work", "with one session")
    remark = (
        "a session that waits can be set aside: its few megabytes of observed latents make its keys and values anew. "
        "Work is an estimate, and the device's libraries come on top"
    )
    return Section("Memory", rows, columns, [remark])


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
