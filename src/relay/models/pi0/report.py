"""A checkpoint of π0 or π0.5 as tables and problems, without reading its weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from relay.engine.doubts import doubts, never_computed
from relay.engine.normalization import PAIRS, Kind, Statistics
from relay.engine.weights import CheckpointError, TensorSource
from relay.models.pi0 import memory
from relay.models.pi0.checkpoint import load_tokenizer
from relay.models.pi0.config import Family, Pi0Config
from relay.models.pi0.inspection import Inspection, complete_settings, inspect_checkpoint
from relay.models.pi0.preview import preview
from relay.models.pi0.settings import SETTINGS_FILE
from relay.models.pi0.weights import Sizes, do_not_fit, ignored_names
from relay.models.report import Cell, Report, Sample, Section
from relay.protocol.errors import ObservationError
from relay.robots.profile import RobotProfile

_FORMATS = {
    "relay": "relay",
    "openpi-jax": "openpi, JAX (Orbax)",
    "openpi-pytorch": "openpi, PyTorch",
    "lerobot": "lerobot",
}

_DROID_CAMERAS, _DROID_PROMPT = 2, 51

_TOLERANCES: dict[Family, dict[tuple[str, str], float]] = {
    "pi05": {("float32", "float32"): 1e-4, ("float32", "bfloat16"): 1.1e-2, ("bfloat16", "float32"): 2.1e-2},
    "pi0": {("float32", "float32"): 1e-4, ("float32", "bfloat16"): 2.3e-2, ("bfloat16", "float32"): 2.9e-2},
}
"""Measured on tiny random networks at ten steps, between openpi in JAX and in PyTorch, and lerobot: float32 runs are
up to 8.5e-5 apart; bfloat16 runs are at best 1.1e-2 and 2.3e-2 from JAX in float32, at worst 2.1e-2 and 2.9e-2 from
any other."""


def inspect(
    name: str | None,
    folder: Path,
    *,
    config: str | None,
    robot: str | None,
    tokenizer: Path | None,
    sample: Sample | None,
) -> Report:
    """Everything about a folder, and what would become of a sample."""
    family: Family | None = None if name is None else "pi0" if name == "pi0" else "pi05"
    found = inspect_checkpoint(folder, config=config, robot=robot, tokenizer=tokenizer, family=family)
    problems = list(found.problems)
    misfits = found.tensor_problems()
    if misfits and found.sizes:
        problems.append(do_not_fit(found.sizes.family, misfits))
    sections = _sections(found)
    frames, refused = {}, None
    if not found.problems:
        try:
            prompts = load_tokenizer(found)
            if sample is not None:
                seen = preview(found, prompts, sample)
                sections += seen.sections
                frames = seen.frames
        except CheckpointError as error:
            problems.append(str(error))
        except ObservationError as error:
            refused = str(error)
    return Report(
        model=found.sizes.family if found.sizes else None,
        sections=sections,
        problems=problems,
        refused=refused,
        settings=None if problems else complete_settings(found),
        settings_file=folder / SETTINGS_FILE,
        profile=found.profile,
        frames=frames,
        tolerances=_tolerances(found.sizes.family) if found.sizes else {},
    )


def _tolerances(family: Family) -> dict[tuple[str, str], float]:
    known = _TOLERANCES[family]
    return {**known, ("bfloat16", "bfloat16"): known["bfloat16", "float32"]}


def _sections(found: Inspection) -> list[Section]:
    sections = [_checkpoint(found)]
    if found.sizes is not None:
        sections.append(_network(found.sizes, found.config))
    if found.tensors is not None:
        sections.append(_tensors(found.tensors))
    if found.settings:
        rows = [(key, str(setting.value), setting.source) for key, setting in found.settings.items()]
        sections.append(Section("Settings", rows, ("setting", "value", "from")))
    sections += _statistics(found)
    if found.profile is not None:
        sections += _robot(found.profile)
    if found.config is not None:
        sections.append(_memory(found.config))
    return sections


def _checkpoint(found: Inspection) -> Section:
    rows: list[tuple[Cell, ...]] = [
        ("folder", str(found.folder)),
        ("format", _FORMATS[found.form] if found.form else "not known"),
        ("model", found.sizes.family if found.sizes else "not known"),
        ("tokenizer", str(found.tokenizer) if found.tokenizer else "none"),
        ("robot", found.profile.name if found.profile else "none: model format only"),
    ]
    return Section("Checkpoint", rows)


def _network(sizes: Sizes, config: Pi0Config | None) -> Section:
    heads = f", {config.vision.heads} heads" if config else ""
    side = f"{sizes.image_size}x{sizes.image_size} pixels, patches of {sizes.patch}"
    rows: list[tuple[Cell, ...]] = [
        (
            "vision tower",
            f"width {sizes.vision_width}, depth {sizes.vision_depth}, MLP {sizes.vision_mlp}{heads}; {side}",
        ),
        ("prefix transformer", _size(sizes.language.width, sizes.language.depth, sizes.language.mlp)),
        ("action expert", _size(sizes.expert.width, sizes.expert.depth, sizes.expert.mlp)),
        ("attention", f"{sizes.query_width // sizes.head_dim} query heads of {sizes.head_dim}, one key-value head"),
        ("vocabulary", f"{sizes.vocab_size:,} tokens"),
        ("action width", sizes.action_dim),
    ]
    if config is not None:
        rows.append(("action horizon", config.action_horizon))
        rows.append(("parameters", f"{memory.parameters(config):,}"))
    return Section("Network", rows)


def _size(width: int, depth: int, mlp: int) -> str:
    return f"width {width}, depth {depth}, MLP {mlp}"


def _tensors(tensors: TensorSource) -> Section:
    shapes, dtypes = tensors.shapes, tensors.dtypes
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}
    counts = Counter(str(dtype).removeprefix("torch.") for dtype in dtypes.values())
    ignored = ignored_names(shapes)
    rows: list[tuple[Cell, ...]] = [
        ("tensors", len(shapes)),
        ("size", _bytes(sum(sizes.values()))),
        ("dtypes", ", ".join(f"{count} {dtype}" for dtype, count in counts.most_common())),
        ("ignored", f"{len(ignored)}, {_bytes(sum(sizes[name] for name in ignored))}"),
    ]
    return Section("Tensors", rows, remarks=[f"ignored: {name}" for name in ignored])


def _statistics(found: Inspection) -> list[Section]:
    normalization, profile = found.normalization, found.profile
    if normalization is None or (normalization.kind == "none" and normalization.actions_kind in (None, "none")):
        text = "none: state and actions are not scaled" if found.config else "not known"
        return [Section("Statistics", [("kind", text), ("asset ids", ", ".join(found.assets) or "none")])]
    actions_kind = normalization.actions_kind or normalization.kind
    kinds = (
        normalization.kind if actions_kind == normalization.kind else f"{normalization.kind}, actions {actions_kind}"
    )
    rows = [("kind", kinds), ("arithmetic", f"{normalization.style}'s")]
    rows += [("file", str(file)) for file in dict.fromkeys(found.statistics)]
    rows += [("asset ids", ", ".join(found.assets))] if found.assets else []
    state_names = profile.state_names if profile else ()
    state_units = [unit for part in profile.state for unit in part.units] if profile else []
    action_names = [action.name for action in profile.actions] if profile else ()
    return [
        Section("Statistics", rows),
        _dimensions("state", normalization.state, normalization.kind, state_names, state_units),
        _dimensions("actions", normalization.actions, actions_kind, action_names, ()),
    ]


def _dimensions(what: str, statistics: Statistics, kind: Kind, names: Sequence[str], units: Sequence[str]) -> Section:
    if kind == "none":
        return Section(f"Statistics of {what}", [("kind", "not scaled")])
    first, second = statistics.pair(kind)
    suspicions = doubts(statistics, kind, units)
    rows = [
        (index, names[index] if index < len(names) else f"{what}_{index}", float(low), float(high), suspicions[index])
        for index, (low, high) in enumerate(zip(first, second, strict=True))
    ]
    remarks = (
        ["these are the values of statistics that were never computed"] if never_computed(statistics, kind) else []
    )
    return Section(f"Statistics of {what}", rows, ("index", "name", *PAIRS[kind], "suspicious"), remarks)


def _robot(profile: RobotProfile) -> list[Section]:
    cameras = [(camera.name, " or ".join(camera.keys)) for camera in profile.cameras]
    state = [
        (name, unit, " or ".join(part.keys))
        for part in profile.state
        for name, unit in zip(part.names, part.units, strict=True)
    ]
    actions = [
        (
            index,
            action.name,
            action.unit if action.scale == 1 else f"{action.scale:g} {action.unit}",
            action.kind,
            action.relative,
            f"{action.limits[0]:g} to {action.limits[1]:g}" if action.limits else None,
            f"closed {action.gripper.closed_at:g}, open {action.gripper.open_at:g}" if action.gripper else None,
        )
        for index, action in enumerate(profile.actions)
    ]
    rate = "not known" if profile.control_hz is None else f"{profile.control_hz:g} Hz"
    columns = ("index", "name", "unit", "kind", "offset from the state", "limits", "gripper")
    return [
        Section("Robot: cameras", cameras, ("the model's", "the robot's key"), [f"control rate: {rate}"]),
        Section("Robot: state", state, ("name", "unit", "the robot's key")),
        Section("Robot: actions", actions, columns),
    ]


def _memory(config: Pi0Config) -> Section:
    cameras, prompt = min(_DROID_CAMERAS, len(config.cameras)), min(_DROID_PROMPT, config.max_token_len)
    rows = [
        (
            str(dtype).removeprefix("torch."),
            _bytes(memory.weight_bytes(config, dtype)),
            _bytes(memory.cache_bytes(config, dtype, cameras=cameras, prompt=prompt)),
            _bytes(memory.activation_bytes(config, dtype, cameras=cameras, prompt=prompt)),
        )
        for dtype in (torch.bfloat16, torch.float32)
    ]
    columns = ("served in", "weights", "keys and values per row", "activations per row")
    remark = (
        f"rows of {cameras} cameras and {prompt} prompt tokens; activations are an estimate, and the device's "
        "libraries come on top"
    )
    return Section("Memory", rows, columns, [remark])


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
