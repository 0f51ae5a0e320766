"""What a checkpoint says of one embodiment: its cameras, state, action groups, statistics and image settings.

Read from `processor_config.json`, `statistics.json` and `embodiment_id.json` (Isaac-GR00T:
gr00t/model/gr00t_n1d7/processing_gr00t_n1d7.py and gr00t/data/state_action/state_action_processor.py). Knows no folder
and no observation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from relay.engine.json_entries import did_you_mean, entry, entry_or
from relay.engine.statistics import damage, numbers
from relay.engine.weights import CheckpointError
from relay.models.groot.embodiments import Embodiment, resolve
from relay.protocol.wording import shown

PROCESSOR_FILE, STATISTICS_FILE = "processor_config.json", "statistics.json"

StateEncoding = Literal["sin_cos", "mean_std", "min_max"]
ActionScaling = Literal["mean_std", "min_max"]
Relative = Literal["joints", "xyz_rot6d", "xyz_rotvec", "matrix"]
"""How a relative group is made absolute: by adding, or by composing poses with a rotation in one of three forms."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One key of the state.

    Attributes:
        key: its name.
        width: numbers in it, in the robot's units.
        encoding: how it is brought into the network's range.
        low, high: (width,) float64: the ends of the range, or mean and deviation for `mean_std`; zeros for `sin_cos`.
    """

    key: str
    width: int
    encoding: StateEncoding
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    @property
    def encoded_width(self) -> int:
        return 2 * self.width if self.encoding == "sin_cos" else self.width


@dataclass(frozen=True, slots=True)
class ActionGroup:
    """One group of the actions.

    Attributes:
        key: its name.
        width: columns of the network's output that it takes.
        scaling: how it leaves the network's range.
        low, high: float64, (width,) or one row per step (horizon, width): the ends of the range, or mean and
            deviation for `mean_std`.
        relative: how it is made absolute; None for values that are given as they are.
        state_key: the part of the state that relative actions start from.
        delta: the values are steps from one action to the next, which nobody but the robot's own code adds up.
    """

    key: str
    width: int
    scaling: ActionScaling
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    relative: Relative | None = None
    state_key: str = ""
    delta: bool = False


@dataclass(frozen=True, slots=True)
class ImageRecipe:
    """How frames are cropped and resized before the vision tower's own resize.

    Attributes:
        kind: `area` (N1.7's, `use_albumentations`), `torchvision` (Isaac-GR00T's other one) or `lerobot` (lerobot's
            own version of that).
        letterbox: pad to a square with black first.
        shortest_edge: of the kinds `area` and `lerobot`; None in `area` resizes to `target` exactly.
        crop_fraction: of the kinds `area` and `lerobot`: how much of each side is kept.
        target, crop: (height, width); of `torchvision`, and of `area` without `shortest_edge`.
    """

    kind: Literal["area", "torchvision", "lerobot"]
    letterbox: bool = False
    shortest_edge: int | None = None
    crop_fraction: float = 1.0
    target: tuple[int, int] | None = None
    crop: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """One embodiment of one checkpoint.

    Attributes:
        embodiment: its tag and its slot.
        cameras: keys in the order the network takes them.
        frames: offsets in control steps of the frames of each camera, oldest first, such as (-15, 0).
        language_key: the key of the instruction.
        state: its parts in order.
        state_steps: how many states in time, oldest first.
        exclude_state: the network was trained without the state; it gets zeros.
        clip: whether states scaled to a range are cut off at its ends.
        actions: the groups in order.
        horizon: steps in a chunk, at most the network's.
        max_state_dim, max_action_dim, action_horizon: the network's own sizes.
        image: how frames are resized.
        formalize_language: whether instructions are lower-cased and lose their punctuation.
    """

    embodiment: Embodiment
    cameras: tuple[str, ...]
    frames: tuple[int, ...]
    language_key: str
    state: tuple[StatePart, ...]
    state_steps: int
    exclude_state: bool
    clip: bool
    actions: tuple[ActionGroup, ...]
    horizon: int
    max_state_dim: int
    max_action_dim: int
    action_horizon: int
    image: ImageRecipe
    formalize_language: bool


def read_recipe(
    processor: Mapping[str, Any],
    statistics: Mapping[str, Any],
    embodiment_ids: Mapping[str, Any] | None,
    tag: str,
    *,
    max_state_dim: int,
    max_action_dim: int,
    action_horizon: int,
    state_history_length: int | None = None,
) -> Recipe:
    """One embodiment's recipe, checked against the network's sizes.

    Args:
        processor: `processor_kwargs` of `processor_config.json`.
        statistics: `statistics.json`, by tag.
        embodiment_ids: `embodiment_id.json`, if there is one.
        tag: the embodiment's tag or name.
        state_history_length: states in time that the network takes; None leaves it to the caller.

    Raises:
        CheckpointError: an unknown embodiment, an entry that is missing or does not fit, statistics that are absent or
            hold values that are no numbers.
    """
    robots: dict[str, Any] = entry(processor, "modality_configs", dict, PROCESSOR_FILE)
    embodiment = resolve(tag, embodiment_ids or {}, list(robots))
    tag = embodiment.tag
    modalities: dict[str, Any] = entry(robots, tag, dict, PROCESSOR_FILE)
    if tag not in statistics:
        there = ", ".join(statistics) or "none"
        raise CheckpointError(
            f"{STATISTICS_FILE} has no statistics of the embodiment {tag!r}, only of: {there}; take the file of the "
            "training run that this checkpoint comes from"
        )
    if processor.get("use_tactile"):
        raise CheckpointError(f"{PROCESSOR_FILE}: use_tactile is on; tactile inputs are not supported")
    _check_sizes(processor, max_state_dim, max_action_dim, action_horizon)
    numbers = _Numbers(entry(statistics, tag, dict, STATISTICS_FILE), tag)
    video, state, action, language = (_Modality(modalities, name, tag) for name in _MODALITIES)
    if len(language.indices) != 1:
        raise CheckpointError(f"{language.place}: delta_indices has {len(language.indices)} entries, expected one")
    steps = len(state.indices)
    if state_history_length not in (None, steps):
        raise CheckpointError(
            f"{state.place}: delta_indices has {steps} entries, but the network takes {state_history_length}"
        )
    horizon = len(action.indices)
    if horizon > action_horizon:
        raise CheckpointError(
            f"{action.place}: {horizon} steps, but the network gives {action_horizon}; this embodiment needs a model "
            "that was trained with a longer horizon"
        )
    parts = tuple(_read_part(key, state, numbers, processor) for key in state.keys)
    groups = tuple(
        _read_group(key, told, action, numbers, processor, parts, horizon)
        for key, told in zip(action.keys, action.representations, strict=True)
    )
    _fits(f"{state.place}: {sum(part.encoded_width for part in parts)} values", max_state_dim, parts)
    _fits(f"{action.place}: {sum(group.width for group in groups)} values", max_action_dim, groups)
    return Recipe(
        embodiment=embodiment,
        cameras=tuple(video.keys),
        frames=tuple(video.indices),
        language_key=language.keys[0],
        state=parts,
        state_steps=steps,
        exclude_state=entry_or(processor, "exclude_state", False, PROCESSOR_FILE) or state.flag("exclude_state"),
        clip=entry_or(processor, "clip_outliers", True, PROCESSOR_FILE),
        actions=groups,
        horizon=horizon,
        max_state_dim=max_state_dim,
        max_action_dim=max_action_dim,
        action_horizon=action_horizon,
        image=read_image_recipe(processor),
        formalize_language=entry_or(processor, "formalize_language", True, PROCESSOR_FILE),
    )


_MODALITIES = ("video", "state", "action", "language")


def _check_sizes(processor: Mapping[str, Any], state: int, action: int, horizon: int) -> None:
    for key, size in (("max_state_dim", state), ("max_action_dim", action), ("max_action_horizon", horizon)):
        if processor.get(key) not in (None, size):
            raise CheckpointError(
                f"{PROCESSOR_FILE} says {key} {shown(processor[key])}, but the network has {size}; "
                "take both files from one training run"
            )


def _fits(told: str, room: int, parts: Sequence[StatePart | ActionGroup]) -> None:
    width = sum(part.encoded_width if isinstance(part, StatePart) else part.width for part in parts)
    if width > room:
        raise CheckpointError(f"{told}, but the network has room for {room}")


class _Modality:
    """One of the four parts of an embodiment's settings."""

    def __init__(self, modalities: Mapping[str, Any], name: str, tag: str) -> None:
        self.place = f"{PROCESSOR_FILE}, {name} of {tag}"
        self._told: dict[str, Any] = entry(modalities, name, dict, f"{PROCESSOR_FILE}, {tag}")
        self.keys = self._texts("modality_keys")
        if not self.keys:
            raise CheckpointError(f"{self.place}: modality_keys is empty")
        indices = entry(self._told, "delta_indices", list, self.place)
        if not indices or any(type(index) is not int for index in indices):
            raise CheckpointError(f"{self.place}: delta_indices is {shown(indices)}, expected at least one integer")
        self.indices = cast("list[int]", indices)

    def among(self, name: str, key: str) -> bool:
        """Whether a list of keys, which may be missing, holds this one."""
        return self._told.get(name) is not None and key in self._texts(name)

    def flag(self, name: str) -> bool:
        return entry_or(self._told, name, False, self.place)

    @property
    def representations(self) -> list[Mapping[str, Any]]:
        """Of each key, what its values mean."""
        told = self._told.get("action_configs")
        if told is None:
            return [{"rep": "ABSOLUTE"}] * len(self.keys)
        if not isinstance(told, list) or len(cast("list[Any]", told)) != len(self.keys):
            raise CheckpointError(f"{self.place}: action_configs needs one entry for each of {len(self.keys)} keys")
        for one in cast("list[Any]", told):
            if not isinstance(one, dict):
                raise CheckpointError(f"{self.place}: action_configs holds {shown(one)}, expected objects")
        return cast("list[Mapping[str, Any]]", told)

    def _texts(self, name: str) -> list[str]:
        texts = entry(self._told, name, list, self.place)
        for text in texts:
            if not isinstance(text, str):
                raise CheckpointError(f"{self.place}: {name} holds {shown(text)}, expected text")
        return cast("list[str]", texts)


def _read_part(key: str, state: _Modality, numbers: _Numbers, processor: Mapping[str, Any]) -> StatePart:
    encode_angles = entry_or(processor, "apply_sincos_state_encoding", False, PROCESSOR_FILE)
    if encode_angles and state.among("sin_cos_embedding_keys", key):
        width = numbers.width("state", key)
        return StatePart(key, width, "sin_cos", np.zeros(width), np.zeros(width))
    if state.among("mean_std_embedding_keys", key):
        mean, deviation = numbers.pair("state", key, "mean", "std")
        return StatePart(key, len(mean), "mean_std", mean, deviation)
    low, high = numbers.pair("state", key, *_ends(processor))
    return StatePart(key, len(low), "min_max", low, high)


def _read_group(
    key: str,
    told: Mapping[str, Any],
    action: _Modality,
    numbers: _Numbers,
    processor: Mapping[str, Any],
    parts: Sequence[StatePart],
    horizon: int,
) -> ActionGroup:
    """One group; relative ones have statistics of their own, whose extremes count whatever the other groups' do."""
    place = f"{action.place}, {key}"
    representation = _enumerated(told, "rep", ("ABSOLUTE", "RELATIVE", "DELTA"), place)
    relative = representation == "RELATIVE" and entry(processor, "use_relative_action", bool, PROCESSOR_FILE)
    width = numbers.width("action", key)
    normal = action.among("mean_std_embedding_keys", key)
    names = ("mean", "std") if normal else ("min", "max") if relative else _ends(processor)
    low, high = numbers.pair("relative_action" if relative else "action", key, *names)
    if low.shape[-1] != width:
        raise CheckpointError(
            f"{STATISTICS_FILE}: relative_action of {key!r} has {low.shape[-1]} values a step, action has {width}"
        )
    if low.ndim == 2:
        if len(low) < horizon:
            raise CheckpointError(
                f"{STATISTICS_FILE}: relative_action of {key!r} has {len(low)} steps, this embodiment's actions "
                f"{horizon}"
            )
        low, high = low[:horizon], high[:horizon]
    scaling: ActionScaling = "mean_std" if normal else "min_max"
    if not relative:
        return ActionGroup(key, width, scaling, low, high, delta=representation == "DELTA")
    how = _read_relative(told, width, place)
    state_key = key if told.get("state_key") is None else str(told["state_key"])
    start = next((part for part in parts if part.key == state_key), None)
    if start is None or start.width != width:
        found = "which is no key of the state" if start is None else f"which has {start.width} values"
        raise CheckpointError(f"{place}: its {width} values are relative to the state's {state_key!r}, {found}")
    return ActionGroup(key, width, scaling, low, high, how, state_key)


def _ends(processor: Mapping[str, Any]) -> tuple[str, str]:
    return ("q01", "q99") if entry(processor, "use_percentiles", bool, PROCESSOR_FILE) else ("min", "max")


_POSES: Mapping[str, tuple[Relative, int]] = {
    "XYZ_ROT6D": ("xyz_rot6d", 9),
    "XYZ_ROTVEC": ("xyz_rotvec", 6),
    "DEFAULT": ("matrix", 16),
}
"""By the file's name of a pose's form, ours and its width."""


def _read_relative(told: Mapping[str, Any], width: int, place: str) -> Relative:
    form = _enumerated(told, "format", tuple(_POSES), place)
    if _enumerated(told, "type", ("EEF", "NON_EEF"), place) == "NON_EEF":
        if form != "DEFAULT":
            raise CheckpointError(f"{place}: format {form} is one of poses, but type says NON_EEF")
        return "joints"
    relative, expected = _POSES[form]
    if width != expected:
        raise CheckpointError(f"{place}: poses of format {form} have {expected} values, the statistics {width}")
    return relative


def _enumerated(told: Mapping[str, Any], key: str, names: Sequence[str], place: str) -> str:
    """A value of one of Isaac-GR00T's enumerations, by its name or its value."""
    value = told.get(key)
    name = value.upper().replace("+", "_") if isinstance(value, str) else ""
    if name not in names:
        raise CheckpointError(f"{place}: {key} is {shown(value)}, expected one of {', '.join(names)}")
    return name


@dataclass(frozen=True, slots=True)
class _Numbers:
    """An embodiment's entry of `statistics.json`."""

    told: Mapping[str, Any]
    tag: str

    def width(self, modality: str, key: str) -> int:
        values = self._of(modality, key)
        for name in _STATISTICS:
            if values.get(name) is not None:
                return self._vector(modality, key, name).shape[-1]
        raise CheckpointError(f"{self._place(modality, key)} has none of {', '.join(_STATISTICS)}")

    def pair(self, modality: str, key: str, first: str, second: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Two statistics of a key, either its ends or its mean and deviation; the unused ones must be right too."""
        place, told = self._place(modality, key), self._of(modality, key)
        low, high = self._vector(modality, key, first), self._vector(modality, key, second)
        if low.shape != high.shape:
            raise CheckpointError(f"{place}: {first} has shape {low.shape}, but {second} {high.shape}")
        given = {name: self._vector(modality, key, name) for name in _STATISTICS if told.get(name) is not None}
        if wrong := damage(given, key):
            raise CheckpointError(f"{place}: {wrong}; take the file of the training run, or compute it anew")
        return low, high

    def _vector(self, modality: str, key: str, name: str) -> NDArray[np.float64]:
        place = self._place(modality, key)
        value = self._of(modality, key).get(name)
        if value is None:
            raise CheckpointError(f"{place} has no {name}")
        vector = numbers(value)
        if vector is None:
            raise CheckpointError(f"{place}: {name} is not a list of numbers")
        most = 2 if modality == "relative_action" else 1
        if not 1 <= vector.ndim <= most or vector.size == 0:
            raise CheckpointError(f"{place}: {name} has shape {vector.shape}, expected one entry per value")
        return vector

    def _of(self, modality: str, key: str) -> Mapping[str, Any]:
        place = f"{STATISTICS_FILE}, {self.tag}"
        keys: dict[str, Any] = entry(self.told, modality, dict, place)
        return cast("dict[str, Any]", entry(keys, key, dict, f"{place}, {modality}"))

    def _place(self, modality: str, key: str) -> str:
        return f"{STATISTICS_FILE}: {modality} of {key!r} of {self.tag}"


def unread_settings(processor: Mapping[str, Any]) -> tuple[str, ...]:
    """A sentence for each of `processor_kwargs` that is neither read here nor of training alone."""
    return tuple(
        f"{PROCESSOR_FILE}: {key} is not known and has no effect here{did_you_mean(key, _READ)}"
        for key in processor
        if key not in _READ and key not in _OF_TRAINING
    )


_READ = (
    "modality_configs",
    "use_percentiles",
    "clip_outliers",
    "use_relative_action",
    "apply_sincos_state_encoding",
    "exclude_state",
    "formalize_language",
    "image_crop_size",
    "image_target_size",
    "shortest_image_edge",
    "crop_fraction",
    "letter_box_transform",
    "use_albumentations",
    "use_tactile",
    "max_state_dim",
    "max_action_dim",
    "max_action_horizon",
)
_OF_TRAINING = (
    "random_rotation_angle",
    "color_jitter_params",
    "extra_augmentation_config",
    "state_dropout_prob",
    "use_mean_std",  # written down, but every key says itself how it is scaled
    "model_name",
    "model_type",
    "transformers_loading_kwargs",
    "tactile_state_keys",
    "tactile_input_shape",
    "tactile_embed_dim",
)
"""Arguments of Isaac-GR00T's processor; those of tactile inputs mean nothing where `use_tactile` is off."""


_STATISTICS = ("min", "max", "mean", "std", "q01", "q99")


def read_image_recipe(processor: Mapping[str, Any]) -> ImageRecipe:
    """How frames are resized.

    Args:
        processor: as in `read_recipe`; `lerobot_frames` tells that lerobot trained on these settings, which reads some
            of them in another way.

    Raises:
        CheckpointError: an entry is missing or contradicts another.
    """
    target, crop = _pair(processor, "image_target_size"), _pair(processor, "image_crop_size")
    letterbox = entry_or(processor, "letter_box_transform", False, PROCESSOR_FILE)
    area = entry(processor, "use_albumentations", bool, PROCESSOR_FILE)
    by_lerobot = entry_or(processor, "lerobot_frames", False, PROCESSOR_FILE)
    if not area and not by_lerobot:
        if target is None or crop is None:
            missing = "image_crop_size" if target else "image_target_size"
            raise CheckpointError(f"{PROCESSOR_FILE}: {missing} is missing, expected height and width")
        if crop[0] > target[0] or crop[1] > target[1]:
            raise CheckpointError(f"{PROCESSOR_FILE}: image_crop_size {crop} is larger than image_target_size {target}")
        return ImageRecipe("torchvision", letterbox, target=target, crop=crop)
    edge = processor.get("shortest_image_edge")
    if edge is not None and (type(edge) is not int or edge < 1):
        raise CheckpointError(f"{PROCESSOR_FILE}: shortest_image_edge is {shown(edge)}, expected pixels")
    fraction = processor.get("crop_fraction")
    if fraction is None and by_lerobot and crop is None:
        fraction = 1.0
    if fraction is None:
        if target is None or crop is None:
            raise CheckpointError(
                f"{PROCESSOR_FILE}: neither crop_fraction nor image_crop_size and image_target_size say what is kept"
            )
        fraction = crop[0] / target[0]
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise CheckpointError(f"{PROCESSOR_FILE}: the crop keeps {shown(fraction)} of a side, expected 0 to 1")
    if (edge is None or by_lerobot) and target is None:
        raise CheckpointError(f"{PROCESSOR_FILE}: image_target_size is missing, expected height and width")
    if by_lerobot and edge is None:
        edge = cast("tuple[int, int]", target)[0]
    return ImageRecipe("area" if area else "lerobot", letterbox, edge, float(fraction), target, crop)


def _pair(processor: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    value = processor.get(key)
    if value is None:
        return None
    sides = cast("list[Any]", value) if isinstance(value, list) else []
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise CheckpointError(f"{PROCESSOR_FILE}: {key} is {shown(value)}, expected height and width in pixels")
    return sides[0], sides[1]
