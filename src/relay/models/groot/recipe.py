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
from relay.engine.weights import CheckpointError
from relay.models.groot.embodiment_statistics import EmbodimentStatistics
from relay.models.groot.embodiments import Embodiment, resolve
from relay.models.groot.formats import PROCESSOR_FILE, STATISTICS_FILE
from relay.models.groot.image_recipe import ImageRecipe, read_image_recipe
from relay.protocol.wording import shown

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
    numbers = EmbodimentStatistics(entry(statistics, tag, dict, STATISTICS_FILE), tag)
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


def _read_part(key: str, state: _Modality, numbers: EmbodimentStatistics, processor: Mapping[str, Any]) -> StatePart:
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
    numbers: EmbodimentStatistics,
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
