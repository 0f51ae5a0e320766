"""A GR00T N1.7 checkpoint as tables and problems, without reading its weights."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from relay.engine.weights import CheckpointError, TensorSource
from relay.models.groot.config import GrootConfig
from relay.models.groot.formats import is_groot
from relay.models.groot.image_recipe import ImageRecipe
from relay.models.groot.inspection import Inspection, complete_settings, inspect_checkpoint
from relay.models.groot.preview import preview
from relay.models.groot.prompt import load_tokenizer
from relay.models.groot.recipe import ActionGroup, Recipe, StatePart
from relay.models.groot.settings import SETTINGS_FILE
from relay.models.groot.weights import do_not_fit, find_problems, ignored_names
from relay.models.report import Cell, Report, Sample, Section
from relay.protocol.errors import ObservationError

_TOLERANCES = {("float32", "float32"): 1e-4}
"""bfloat16 has not been measured."""

_FORMATS = {"isaac": "Isaac-GR00T", "lerobot": "lerobot"}


def inspect(
    name: str | None, folder: Path, *, embodiment: str | None, tokenizer: Path | None, sample: Sample | None
) -> Report:
    """Everything about a folder and one of its embodiments, and what would become of a sample."""
    found = inspect_checkpoint(folder, embodiment=embodiment, tokenizer=tokenizer)
    problems = list(found.problems)
    if found.config is not None and found.tensors is not None:
        misfits = find_problems(found.config, found.tensors.shapes, found.tensors.dtypes)
        problems += [do_not_fit(misfits)] if misfits else []
    sections, frames, refused = _sections(found), {}, None
    if not found.problems and found.tokenizer is not None and found.recipe is not None:
        try:
            prompts = load_tokenizer(found.tokenizer)
            if sample is not None:
                seen = preview(found.recipe, prompts, sample)
                sections += seen.sections
                frames = seen.frames
        except CheckpointError as error:
            problems.append(str(error))
        except ObservationError as error:
            refused = str(error)
    known = found.form is not None or is_groot(folder) or _holds_groot(folder)
    return Report(
        model="groot" if known else None,
        sections=sections,
        problems=problems,
        refused=refused,
        settings=None if problems else complete_settings(found),
        settings_file=folder / SETTINGS_FILE,
        frames=frames,
        tolerances=_TOLERANCES,
    )


def _holds_groot(folder: Path) -> bool:
    """Whether folders below it are GR00T's, so that its problem is to be told here."""
    return folder.is_dir() and any(is_groot(place) for place in folder.glob("*/"))


def _sections(found: Inspection) -> list[Section]:
    sections = [_checkpoint(found)]
    if found.config is not None:
        sections.append(_network(found.config))
    if found.tensors is not None:
        sections.append(_tensors(found.tensors))
    if found.config is not None and found.tensors is not None:
        sections.append(_memory(found.config, found.tensors))
    recipe = found.recipe
    if recipe is not None:
        sections += [_cameras(recipe), _state(recipe), _actions(recipe)]
        sections += [_state_statistics(recipe.state), _action_statistics(recipe.actions)]
    return sections


def _checkpoint(found: Inspection) -> Section:
    rows: list[tuple[Cell, ...]] = [
        ("folder", str(found.folder)),
        ("format", _FORMATS[found.form] if found.form else "not known"),
        ("model", "GR00T N1.7" if found.form else "not known"),
        ("embodiment", found.recipe.embodiment.tag if found.recipe else "not known"),
        ("slot", found.recipe.embodiment.slot if found.recipe else "not known"),
        ("embodiments", ", ".join(found.tags) or "none"),
        ("statistics", str(found.statistics) if found.statistics else "none"),
        ("tokenizer", str(found.tokenizer) if found.tokenizer else "none"),
    ]
    return Section("Checkpoint", rows, remarks=found.remarks)


def _network(config: GrootConfig) -> Section:
    vision, text, dit = config.vision, config.text, config.dit
    rows: list[tuple[Cell, ...]] = [
        ("vision tower", f"width {vision.width}, depth {vision.depth}, MLP {vision.mlp}, {vision.heads} heads"),
        (
            "language model",
            f"width {text.width}, {config.select_layer} layers, MLP {text.mlp}, {text.heads} query heads of "
            f"{text.head_dim}, {text.kv_heads} key-value heads",
        ),
        ("vocabulary", f"{text.vocab_size:,} tokens"),
        ("feature self-attention", f"width {config.vl.width}, depth {config.vl.depth}"),
        ("diffusion transformer", f"width {dit.width}, depth {dit.depth}, {dit.heads} heads"),
        ("widths of state and action", f"{config.max_state_dim} and {config.max_action_dim}, padded"),
        ("action horizon", config.action_horizon),
        ("embodiment slots", config.max_num_embodiments),
        ("denoising steps", config.num_steps),
    ]
    return Section("Network", rows)


def _tensors(tensors: TensorSource) -> Section:
    shapes, dtypes = tensors.shapes, tensors.dtypes
    size = sum(math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items())
    counts = Counter(str(dtype).removeprefix("torch.") for dtype in dtypes.values())
    rows: list[tuple[Cell, ...]] = [
        ("tensors", len(shapes)),
        ("parameters", f"{sum(map(math.prod, shapes.values())):,}"),
        ("size", f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"),
        ("dtypes", ", ".join(f"{count} {dtype}" for dtype, count in counts.most_common())),
    ]
    return Section("Tensors", rows, remarks=[f"ignored: {name}" for name in ignored_names(shapes)])


def _memory(config: GrootConfig, tensors: TensorSource) -> Section:
    """What stays of the weights when one embodiment is served."""
    unused = ignored_names(tensors.shapes)
    count = 0
    for name, shape in tensors.shapes.items():
        maps = shape[:1] == (config.max_num_embodiments,) and _MAPS.search(name) is not None
        count += 0 if name in unused else math.prod(shape[1:] if maps else shape)
    rows: list[tuple[Cell, ...]] = [
        ("parameters of one embodiment", f"{count:,}"),
        ("weights in bfloat16", f"{2 * count / 1e9:.2f} GB"),
        ("weights in float32", f"{4 * count / 1e9:.2f} GB"),
    ]
    return Section("Memory", rows, remarks=["the device's libraries and the activations come on top"])


_MAPS = re.compile(r"action_head\.(state_encoder|action_encoder|action_decoder)\.")
"""Tensors with one slot for each embodiment, of which one is kept."""


def _cameras(recipe: Recipe) -> Section:
    rows = [(camera, ", ".join(map(str, recipe.frames))) for camera in recipe.cameras]
    remarks = [f"frames are control steps, 0 is now; {_image(recipe.image)}", f"instruction: {recipe.language_key}"]
    return Section("Cameras", rows, ("camera", "frames"), remarks)


def _image(image: ImageRecipe) -> str:
    box = "padded to a square, " if image.letterbox else ""
    if image.kind == "torchvision":
        return f"{box}resized to {image.target}, crop {image.crop}, as torchvision does"
    if image.kind == "lerobot":
        return (
            f"{box}resized to {image.shortest_edge}, crop {image.crop_fraction:g}, then to {image.target}, as lerobot's"
        )
    if image.shortest_edge is None:
        return f"{box}resized to {image.target}, crop {image.crop_fraction:g}"
    return f"{box}shorter side to {image.shortest_edge}, crop {image.crop_fraction:g}, as Isaac-GR00T's N1.7 does"


def _state(recipe: Recipe) -> Section:
    encodings = {"sin_cos": "sine and cosine", "mean_std": "mean and deviation", "min_max": "range"}
    rows = [(part.key, part.width, encodings[part.encoding]) for part in recipe.state]
    remarks = ["the network was trained without the state: it gets zeros"] if recipe.exclude_state else []
    return Section("State", rows, ("key", "numbers", "scaled by"), remarks)


def _actions(recipe: Recipe) -> Section:
    rows = [
        (group.key, group.width, _kind(group), group.state_key if group.relative else None) for group in recipe.actions
    ]
    remark = f"horizon {recipe.horizon}; offsets and poses are made absolute before they are sent"
    return Section("Actions", rows, ("group", "numbers", "network gives", "of the state"), [remark])


def _kind(group: ActionGroup) -> str:
    if group.relative is None:
        return "steps from one action to the next, sent as they are" if group.delta else "absolute"
    return "offsets from the state" if group.relative == "joints" else "poses seen from the state's pose"


def _state_statistics(parts: Sequence[StatePart]) -> Section:
    rows = [
        (f"{part.key}[{index}]", float(part.low[index]), float(part.high[index]))
        for part in parts
        if part.encoding != "sin_cos"
        for index in range(part.width)
    ]
    return Section("Statistics of state", rows, ("name", "low or mean", "high or deviation"))


def _action_statistics(groups: Sequence[ActionGroup]) -> Section:
    rows = [
        (
            f"{group.key}[{index}]",
            float(group.low[..., index].min()),
            float(group.high[..., index].max()),
            "yes" if group.low.ndim == 2 else None,
        )
        for group in groups
        for index in range(group.width)
    ]
    columns = ("name", "low or mean", "high or deviation", "by step")
    return Section("Statistics of actions", rows, columns, ["by step: the widest of all steps is shown"])
