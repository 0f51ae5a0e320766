"""Everything that a GR00T checkpoint folder says of one embodiment, without reading its weights.

Problems are collected, so that all of them are told at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relay.engine.attempts import Attempts
from relay.engine.json_entries import entry, read_json
from relay.engine.statistics import StatisticsError
from relay.engine.weights import CheckpointError, SafetensorsSource, TensorSource
from relay.models.groot.config import GrootConfig, read_config
from relay.models.groot.formats import (
    CONFIG_FILE,
    EMBODIMENTS_FILE,
    PROCESSOR_FILE,
    STATISTICS_FILE,
    Format,
    find_tokenizer,
    processor_file,
    recognise,
)
from relay.models.groot.lerobot import PREPROCESSOR_FILE, LerobotTensors, read_lerobot
from relay.models.groot.recipe import Recipe, read_recipe, unread_settings
from relay.models.groot.settings import SETTINGS_FILE, read_settings
from relay.models.groot.weights import canonical_names
from relay.protocol.wording import shown


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that is known about a folder without reading its weights; None is what could not be found out.

    Attributes:
        tags: the embodiments that the folder has statistics of.
        recipe: the one that is served.
        statistics: where the statistics stand.
        settings: of `relay.json`.
        remarks: what the training side does besides, or its files say, and this server doesn't do.
        problems: why the folder cannot be served, a sentence each with its remedy.
    """

    folder: Path
    form: Format | None = None
    config: GrootConfig | None = None
    tags: tuple[str, ...] = ()
    recipe: Recipe | None = None
    statistics: Path | None = None
    tokenizer: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    tensors: TensorSource | None = field(default=None, repr=False)


def inspect_checkpoint(folder: Path, *, embodiment: str | None = None, tokenizer: Path | None = None) -> Inspection:
    """Find out everything about a folder but its weights.

    Args:
        embodiment: which of the robots it was trained on; None takes that of `relay.json`, or the only one there is.
        tokenizer: a tokenizer file elsewhere; by default the one in the folder.
    """
    attempt = Attempts(CheckpointError, StatisticsError)
    recognised = attempt(recognise, folder)
    if recognised is None:
        return Inspection(folder, problems=attempt.problems)
    form, stated = recognised
    tensors = attempt(_open_tensors, folder, form)
    settings = attempt(read_settings, folder) or {}
    files = attempt(_read_files, folder, form, stated, settings)
    vocabulary = tokenizer or attempt(find_tokenizer, folder)
    config = attempt(read_config, files.config, settings.get("backbone")) if files else None
    recipe: Recipe | None = None
    tags: tuple[str, ...] = ()
    if files is not None and config is not None:
        tags = _tags(files)
        recipe = attempt(_recipe, files, config, embodiment or settings.get("embodiment"))
    return Inspection(
        folder,
        form,
        config,
        tags=tags,
        recipe=recipe,
        statistics=files.place if files else None,
        tokenizer=vocabulary,
        settings=settings,
        remarks=files.remarks if files else (),
        problems=attempt.problems,
        tensors=tensors,
    )


def complete_settings(found: Inspection) -> dict[str, Any]:
    """What a `relay.json` must hold for the folder to be served without further options."""
    told = {} if found.recipe is None else {"embodiment": found.recipe.embodiment.tag}
    return {**told, **{key: value for key, value in found.settings.items() if key != "embodiment"}}


@dataclass(frozen=True, slots=True)
class _Files:
    """The contents of a folder's files, in Isaac-GR00T's form.

    Attributes:
        place: the file of the statistics.
    """

    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    statistics: Mapping[str, Any]
    embodiment_ids: Mapping[str, Any] | None
    place: Path
    remarks: tuple[str, ...] = ()


def _read_files(folder: Path, form: Format, stated: Mapping[str, Any], settings: Mapping[str, Any]) -> _Files:
    if form == "lerobot":
        policy = read_lerobot(folder, stated, settings.get("config", {}))
        return _Files(
            policy.config,
            policy.processor,
            policy.statistics,
            policy.embodiment_ids,
            folder / PREPROCESSOR_FILE,
            policy.remarks,
        )
    if "config" in settings:
        raise CheckpointError(
            f"{SETTINGS_FILE}: 'config' is for lerobot folders; this folder's own {CONFIG_FILE} says it"
        )
    processor = entry(read_json(processor_file(folder, PROCESSOR_FILE)), "processor_kwargs", dict, PROCESSOR_FILE)
    place = processor_file(folder, STATISTICS_FILE)
    ids = read_json(processor_file(folder, EMBODIMENTS_FILE)) if _has_ids(folder) else None
    _agree(stated, processor)
    return _Files(stated, processor, read_json(place), ids, place, unread_settings(processor))


def _has_ids(folder: Path) -> bool:
    try:
        processor_file(folder, EMBODIMENTS_FILE)
    except CheckpointError:
        return False
    return True


def _agree(config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
    """Both files say which of two ways frames go; `read_recipe` compares the sizes with the network's."""
    frames, other = processor.get("use_albumentations"), config.get("use_albumentations_transforms")
    if frames is not None and other is not None and frames != other:
        raise CheckpointError(
            f"{PROCESSOR_FILE} says use_albumentations {shown(frames)}, but {CONFIG_FILE} says "
            f"use_albumentations_transforms {shown(other)}; take both from one training run"
        )


def _recipe(files: _Files, config: GrootConfig, embodiment: str | None) -> Recipe:
    if embodiment is None:
        embodiment = _only(files)
    recipe = read_recipe(
        files.processor,
        files.statistics,
        files.embodiment_ids,
        embodiment,
        max_state_dim=config.max_state_dim,
        max_action_dim=config.max_action_dim,
        action_horizon=config.action_horizon,
        state_history_length=config.state_history_length,
    )
    slot, count = recipe.embodiment.slot, config.max_num_embodiments
    if slot >= count:
        raise CheckpointError(
            f"{EMBODIMENTS_FILE}: the slot of {recipe.embodiment.tag} is {slot}, but the network has {count}, from 0 "
            f"to {count - 1}"
        )
    return recipe


def _only(files: _Files) -> str:
    """The one embodiment that there is."""
    tags = list(_tags(files))
    if not tags:
        raise CheckpointError(f"{files.place} has statistics of no embodiment; copy it from where it was trained")
    if len(tags) > 1:
        raise CheckpointError(f"--embodiment is needed, since this checkpoint knows several: {', '.join(tags)}")
    return tags[0]


def _tags(files: _Files) -> tuple[str, ...]:
    """The embodiments that have both statistics and settings."""
    robots = files.processor.get("modality_configs")
    return tuple(tag for tag in files.statistics if isinstance(robots, dict) and tag in robots)


def _open_tensors(folder: Path, form: Format) -> TensorSource:
    source = SafetensorsSource(folder)
    canonical_names(source.shapes)  # refuses a tensor that is there under both of its names
    return LerobotTensors(source) if form == "lerobot" else source
