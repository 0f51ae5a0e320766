"""What one embodiment of a checkpoint sends and takes: its views, state and actions, and the statistics of each.

It stands in `experiment_cfg/conf.yaml` (keys, their order, how frames are cropped and resized, which actions are
offsets) and `experiment_cfg/metadata.json` (statistics and sizes); dreamzero: groot/vla/model/n1_5/sim_policy.py reads
the same entries. What a training run may say there and this server doesn't do is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from relay.engine.json_entries import Entries, did_you_mean, entry, entry_or
from relay.engine.statistics import damage, numbers
from relay.engine.weights import CheckpointError
from relay.models.dreamzero.config import DreamZeroConfig
from relay.models.dreamzero.frames import Views
from relay.protocol.wording import shown
from relay.robots.plain_yaml import InvalidYaml, load_yaml

FOLDER = "experiment_cfg"
CONF_FILE, METADATA_FILE = "conf.yaml", "metadata.json"

DROID = "oxe_droid"
"""The embodiment whose wrist camera stands above both exteriors."""


@dataclass(frozen=True, slots=True)
class Part:
    """One key of state or actions.

    Attributes:
        low, high: 1st and 99th percentile, float64 (width,), of actions also (action_horizon, width), by step.
        relative: the network gives offsets from the state of this key.
    """

    key: str
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    relative: bool = False

    @property
    def width(self) -> int:
        return self.low.shape[-1]


@dataclass(frozen=True, slots=True)
class Recipe:
    """One embodiment.

    Attributes:
        embodiment: its tag, such as `oxe_droid`.
        cameras: keys of the views, in the order that they are stitched in.
        horizon: actions of one answer.
        state_width, action_width: of the network, padded.
        formalize: instructions lose their punctuation.
    """

    embodiment: str
    cameras: tuple[str, ...]
    views: Views
    state: tuple[Part, ...]
    actions: tuple[Part, ...]
    horizon: int
    state_width: int
    action_width: int
    formalize: bool = False

    @property
    def action_dim(self) -> int:
        """Numbers of an action in the robot's units."""
        return sum(part.width for part in self.actions)


def read_conf(path: Path) -> dict[str, Any]:
    """The training run's configuration.

    Raises:
        CheckpointError: it is missing or no YAML of plain data.
    """
    if not path.is_file():
        raise CheckpointError(f"no {FOLDER}/{path.name} in {path.parent.parent}; copy it from where it was trained")
    try:
        content = load_yaml(path.read_text("utf-8"))
    except (InvalidYaml, UnicodeDecodeError, OSError) as error:
        raise CheckpointError(f"{path.name} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} holds {shown(content)}, expected a map")
    return cast("dict[str, Any]", content)


def find_embodiments(conf: Mapping[str, Any], metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """The embodiments that have both settings and statistics."""
    configs = conf.get("modality_configs")
    known = cast("Mapping[str, Any]", configs) if isinstance(configs, dict) else {}
    return tuple(tag for tag in metadata if tag in known or "video" in known)


def read_recipe(
    conf: Mapping[str, Any], metadata: Mapping[str, Any], embodiment: str, config: DreamZeroConfig
) -> Recipe:
    """One embodiment of a checkpoint.

    Args:
        conf: the content of `conf.yaml`; metadata: that of `metadata.json`.

    Raises:
        CheckpointError: naming what is missing, damaged or not done here.
    """
    if embodiment not in metadata:
        known = ", ".join(find_embodiments(conf, metadata)) or "none"
        hint = did_you_mean(embodiment, metadata)
        raise CheckpointError(f"embodiment {embodiment!r} is not one of this checkpoint's; it has {known}{hint}")
    own = entry(metadata, embodiment, dict, METADATA_FILE)
    modalities = entry(own, "modalities", dict, _at(embodiment))
    keys = _modality_keys(conf, embodiment)
    steps = _steps(conf, embodiment)
    _refuse_other_order(steps, keys)
    offsets = _relative_keys(conf)
    statistics = entry(own, "statistics", dict, _at(embodiment))
    place = f"{_at(embodiment)}.statistics"
    state = tuple(_part(statistics, "state", key, None, place) for key in keys["state"])
    actions = tuple(
        _part(statistics, "action", key, config.action_horizon, place, relative=key in offsets)
        for key in keys["action"]
    )
    _check_modes(steps, keys)
    _check_widths(state, actions, config)
    return Recipe(
        embodiment=embodiment,
        cameras=keys["video"],
        views=_views(keys["video"], modalities, steps, embodiment),
        state=state,
        actions=actions,
        horizon=config.action_horizon,
        state_width=config.state_dim,
        action_width=config.action_dim,
        formalize=_formalize(steps),
    )


_PREFIXES = {"video": "video.", "state": "state.", "action": "action."}


def _modality_keys(conf: Mapping[str, Any], embodiment: str) -> dict[str, tuple[str, ...]]:
    """By modality, the keys without their prefix, in order; one map for each embodiment, or one for the only one."""
    configs = entry(conf, "modality_configs", dict, CONF_FILE)
    own = entry(configs, embodiment, dict, f"{CONF_FILE}: modality_configs") if "video" not in configs else configs
    found: dict[str, tuple[str, ...]] = {}
    for modality, prefix in _PREFIXES.items():
        place = f"{CONF_FILE}: modality_configs.{embodiment}.{modality}"
        names = _texts(entry(own, modality, dict, place), "modality_keys", place)
        wrong = [name for name in names if not name.startswith(prefix)]
        if wrong or not names:
            told = shown(wrong[0]) if wrong else "no name"
            raise CheckpointError(f"{place}: modality_keys has {told}, expected names that begin with {prefix}")
        twice = [name for place, name in enumerate(names) if name in names[:place]]
        if twice:
            raise CheckpointError(f"{place}: modality_keys has {shown(twice[0])} twice")
        found[modality] = tuple(name.removeprefix(prefix) for name in names)
    return found


def _texts(values: Mapping[str, Any], key: str, place: str) -> list[str]:
    names = entry(values, key, list, place)
    for name in names:
        if not isinstance(name, str):
            raise CheckpointError(f"{place}: {key} holds {shown(name)}, expected text")
    return cast("list[str]", names)


def _steps(conf: Mapping[str, Any], embodiment: str) -> dict[str, list[dict[str, Any]]]:
    """The transforms of training by the last part of their name, those left out that change nothing at inference."""
    transforms = entry(conf, "transforms", dict, CONF_FILE)
    place = f"{CONF_FILE}: transforms.{embodiment}"
    found: dict[str, list[dict[str, Any]]] = {}
    for step in entry(entry(transforms, embodiment, dict, place), "transforms", list, place):
        if not isinstance(step, dict) or not isinstance(step.get("_target_"), str):
            raise CheckpointError(f"{place}: {shown(step)} is not a transform with a _target_")
        name = cast("str", step["_target_"]).rpartition(".")[2]
        if name not in _DONE and name not in _NOTHING_TO_DO:
            raise CheckpointError(f"{place}: {name} is not done by this server; it does {', '.join(_DONE)}")
        if name in _DONE:
            found.setdefault(name, []).append(cast("dict[str, Any]", step))
    return found


_DONE = (
    "VideoCrop",
    "VideoResize",
    "StateActionTransform",
    "PerHorizonActionTransform",
    "ConcatTransform",
    "DreamTransform",
)
_NOTHING_TO_DO = (
    "VideoToTensor",
    "VideoToNumpy",
    "VideoColorJitter",
    "VideoRandomGrayscale",
    "VideoRandomPosterize",
    "StateActionToTensor",
)
"""Changes of type, and colours that are varied in training only."""


def _refuse_other_order(steps: Mapping[str, list[dict[str, Any]]], keys: Mapping[str, tuple[str, ...]]) -> None:
    for step in steps.get("ConcatTransform", []):
        for modality, prefix in _PREFIXES.items():
            order = step.get(f"{modality}_concat_order")
            if order is not None and order != [prefix + key for key in keys[modality]]:
                raise CheckpointError(
                    f"{CONF_FILE}: {modality}_concat_order is {order}, but modality_keys says another order"
                )


def _relative_keys(conf: Mapping[str, Any]) -> frozenset[str]:
    """Keys whose actions are offsets from the state."""
    wanted = any(entry_or(conf, name, False, CONF_FILE) for name in ("relative_action", "relative_action_per_horizon"))
    if not wanted or conf.get("relative_action_keys") is None:
        return frozenset()
    return frozenset(_texts(conf, "relative_action_keys", CONF_FILE))


def _check_modes(steps: Mapping[str, list[dict[str, Any]]], keys: Mapping[str, tuple[str, ...]]) -> None:
    """Every key is scaled by its percentiles; the reference knows other ways, which no released checkpoint uses."""
    modes: dict[str, Any] = {}
    for name in ("StateActionTransform", "PerHorizonActionTransform"):
        for step in steps.get(name, []):
            modes |= entry_or(step, "normalization_modes", {}, f"{CONF_FILE}: {name}")
            if step.get("target_rotations"):
                raise CheckpointError(f"{CONF_FILE}: {name} has target_rotations, which this server doesn't do")
    for modality in ("state", "action"):
        for key in keys[modality]:
            mode = modes.get(f"{modality}.{key}")
            if mode != "q99":
                raise CheckpointError(
                    f"{CONF_FILE}: the normalization mode of {modality}.{key} is {shown(mode)}, expected 'q99'"
                )


def _part(
    statistics: Mapping[str, Any], modality: str, key: str, horizon: int | None, place: str, *, relative: bool = False
) -> Part:
    """One key with its percentiles; the statistics that are not used must be right too."""
    values = entry(entry(statistics, modality, dict, place), key, dict, f"{place}.{modality}")
    place = f"{place}.{modality}.{key}"
    low, high = (_cut(_vector(values, name, place), name, place, horizon) for name in ("q01", "q99"))
    if low.shape != high.shape:
        raise CheckpointError(f"{place}: q01 has shape {low.shape}, but q99 {high.shape}")
    unused = {name: _vector(values, name, place) for name in _UNUSED if values.get(name) is not None}
    if wrong := damage({"q01": low, "q99": high, **unused}, key):
        raise CheckpointError(f"{place}: {wrong}; take the file of the training run, or compute it anew")
    return Part(key, low, high, relative)


_UNUSED = ("min", "max", "mean", "std")


def _vector(values: Mapping[str, Any], name: str, place: str) -> NDArray[np.float64]:
    array = numbers(entry(values, name, list, place))
    if array is None:
        raise CheckpointError(f"{place}: {name} is not a list of numbers")
    return array


def _cut(array: NDArray[np.float64], name: str, place: str, horizon: int | None) -> NDArray[np.float64]:
    """(width,), or of actions (horizon, width)."""
    if array.ndim == 2 and horizon is not None:
        if len(array) < horizon:
            raise CheckpointError(f"{place}: {name} is of {len(array)} steps, but a chunk has {horizon}")
        array = array[:horizon]
    if array.ndim not in ((1,) if horizon is None else (1, 2)) or array.size == 0:
        raise CheckpointError(f"{place}: {name} has shape {array.shape}, expected one number per dimension")
    return array


def _check_widths(state: tuple[Part, ...], actions: tuple[Part, ...], config: DreamZeroConfig) -> None:
    for what, parts, width in (("state", state, config.state_dim), ("actions", actions, config.action_dim)):
        total = sum(part.width for part in parts)
        if total > width:
            raise CheckpointError(f"the {what} of {METADATA_FILE} have {total} numbers, but the network takes {width}")
    widths = {part.key: part.width for part in state}
    for part in actions:
        if part.relative and widths.get(part.key) != part.width:
            raise CheckpointError(
                f"{CONF_FILE}: {part.key} is one of relative_action_keys and has {part.width} numbers, but the state "
                f"has {widths.get(part.key, 'none')} of that key to start from"
            )


def _views(
    cameras: tuple[str, ...],
    modalities: Mapping[str, Any],
    steps: Mapping[str, list[dict[str, Any]]],
    embodiment: str,
) -> Views:
    place = f"{_at(embodiment)}.modalities.video"
    video = entry(modalities, "video", dict, place)
    sizes = {_resolution(video, camera, place) for camera in cameras}
    if len(sizes) != 1:
        raise CheckpointError(f"{place}: the views have the resolutions {sorted(sizes)}, expected one for all")
    ((width, height),) = sizes
    crop = _only(steps, "VideoCrop", embodiment).number("scale", _LEAST_CROP, 1)
    resize = _only(steps, "VideoResize", embodiment)
    if resize.values.get("interpolation", "linear") != "linear" or resize.values.get("antialias", True) is not True:
        raise CheckpointError(f"{CONF_FILE}: VideoResize is expected to be linear with antialias")
    tile = tuple(resize.count(side, _MOST_PIXELS) for side in ("height", "width"))
    droid = embodiment == DROID
    if len(cameras) > 3 or (droid and len(cameras) != 3):
        stitched = "three" if droid else "up to three"
        raise CheckpointError(f"{place}: {embodiment} has {len(cameras)} views; {stitched} can be stitched")
    return Views((height, width), crop, (tile[0], tile[1]), len(cameras), wrist_on_top=droid)


_LEAST_PIXELS, _MOST_PIXELS = 16, 4096
_LEAST_CROP = 0.1


def _resolution(video: Mapping[str, Any], camera: str, place: str) -> tuple[int, int]:
    """(width, height)."""
    own = f"{place}.{camera}"
    sides = entry(entry(video, camera, dict, place), "resolution", list, own)
    if len(sides) != 2 or not all(type(side) is int and _LEAST_PIXELS <= side <= _MOST_PIXELS for side in sides):
        raise CheckpointError(
            f"{own}: resolution is {sides}, expected [width, height] of {_LEAST_PIXELS} to {_MOST_PIXELS:,} pixels"
        )
    return sides[0], sides[1]


def _formalize(steps: Mapping[str, list[dict[str, Any]]]) -> bool:
    formalize = False
    for step in steps.get("DreamTransform", []):
        if entry_or(step, "always_use_default_instruction", False, f"{CONF_FILE}: DreamTransform"):
            raise CheckpointError(f"{CONF_FILE}: always_use_default_instruction is set, which this server doesn't do")
        formalize = entry_or(step, "formalize_language", False, f"{CONF_FILE}: DreamTransform")
    return formalize


def _only(steps: Mapping[str, list[dict[str, Any]]], name: str, embodiment: str) -> Entries:
    found = steps.get(name, [])
    if len(found) != 1:
        raise CheckpointError(f"{CONF_FILE}: transforms.{embodiment} has {len(found)} {name}, expected one")
    return Entries(found[0], f"{CONF_FILE}: {name}")


def _at(embodiment: str) -> str:
    return f"{METADATA_FILE}: {embodiment}"
