"""Everything that a DreamZero checkpoint folder says of one embodiment, without reading its weights.

Problems are collected, so that all of them are told at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relay.engine.attempts import Attempts
from relay.engine.json_entries import read_json
from relay.engine.weights import CheckpointError, SafetensorsSource, TensorSource
from relay.models.dreamzero.config import DreamZeroConfig, read_config
from relay.models.dreamzero.prompts import PROMPTS_FILE, RELEASED, Prompts, read_prompts
from relay.models.dreamzero.recipe import (
    CONF_FILE,
    DROID,
    FOLDER,
    METADATA_FILE,
    Recipe,
    find_embodiments,
    read_conf,
    read_recipe,
)
from relay.models.dreamzero.settings import check_camera_set, read_settings
from relay.models.dreamzero.tokenizer import find_tokenizer

CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that is known about a folder without reading its weights; None is what could not be found out.

    Attributes:
        known: it is a DreamZero checkpoint.
        tags: the embodiments that the folder has settings and statistics of.
        recipe: the one that is served.
        camera_set: how clients number DROID's exteriors.
        settings: of `relay.json`.
        problems: why the folder cannot be served, a sentence each with its remedy.
    """

    folder: Path
    known: bool = False
    config: DreamZeroConfig | None = None
    tags: tuple[str, ...] = ()
    recipe: Recipe | None = None
    prompts: Prompts | None = None
    camera_set: str = "roboarena"
    tokenizer: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    tensors: TensorSource | None = field(default=None, repr=False)


def is_dreamzero(folder: Path) -> bool:
    """Whether the folder is a DreamZero checkpoint, by the class that its action head names."""
    try:
        head = read_json(folder / CONFIG_FILE).get("action_head_cfg")
    except CheckpointError:
        return False
    return isinstance(head, dict) and str(head.get("_target_", "")).endswith("WANPolicyHead")


def inspect_checkpoint(
    folder: Path, *, embodiment: str | None = None, cameras: str | None = None, tokenizer: Path | None = None
) -> Inspection:
    """Find out everything about a folder but its weights.

    Args:
        embodiment: which of the robots it was trained on; None takes that of `relay.json`, or the only one there is.
        cameras: one of `observation.CAMERA_SETS`; None takes that of `relay.json`, or RoboArena's.
        tokenizer: a tokenizer file elsewhere; by default the one in the folder.
    """
    attempt = Attempts(CheckpointError)
    if not is_dreamzero(folder):
        return Inspection(folder, problems=(_not_one(folder),))
    told = attempt(read_settings, folder)
    settings = told or {}
    tensors = attempt(SafetensorsSource, folder)
    config = attempt(_read_config, folder, settings)
    files = attempt(_read_files, folder)
    vocabulary = tokenizer or attempt(find_tokenizer, folder)
    camera_set = attempt(_camera_set, cameras, settings) or "roboarena"
    tags: tuple[str, ...] = ()
    recipe: Recipe | None = None
    prompts: Prompts | None = None
    if files is not None:
        tags = find_embodiments(*files)
        tag = attempt(_choose, embodiment or settings.get("embodiment"), tags)
        if tag is not None and told is not None:  # whose digests count is not known otherwise
            prompts = attempt(read_prompts, folder / PROMPTS_FILE, tag, {**RELEASED, **settings.get("prompts", {})})
        if tag is not None and config is not None:
            recipe = attempt(read_recipe, *files, tag, config)
    if recipe is not None and config is not None:
        attempt(_check_picture, recipe, config)
    if cameras is not None and recipe is not None and recipe.embodiment != DROID:
        attempt(_refuse_cameras, cameras, recipe)
    return Inspection(
        folder,
        known=True,
        config=config,
        tags=tags,
        recipe=recipe,
        prompts=prompts,
        camera_set=camera_set,
        tokenizer=vocabulary,
        settings=settings,
        problems=attempt.problems,
        tensors=tensors,
    )


def complete_settings(found: Inspection) -> dict[str, Any]:
    """What a `relay.json` must hold for the folder to be served without further options."""
    told: dict[str, Any] = {}
    if found.recipe is not None:
        told["embodiment"] = found.recipe.embodiment
        if found.recipe.embodiment == DROID:
            told["cameras"] = found.camera_set
    return {**found.settings, **told}


def _not_one(folder: Path) -> str:
    if not folder.is_dir():
        return f"no checkpoint folder at {folder}"
    meant = [place for place in [*sorted(folder.glob("*/")), *sorted(folder.glob("*/*/"))] if is_dreamzero(place)]
    if meant:
        return f"{folder} is not a checkpoint; did you mean {meant[-1]}?"
    try:
        read_json(folder / CONFIG_FILE)
    except CheckpointError as error:
        return f"{folder} is not a DreamZero checkpoint: {error}"
    return (
        f"{folder} is not a DreamZero checkpoint: its {CONFIG_FILE} names no action head of the class WANPolicyHead; "
        "take the folder that holds it"
    )


def _read_config(folder: Path, settings: Mapping[str, Any]) -> DreamZeroConfig:
    return read_config(read_json(folder / CONFIG_FILE), settings.get("encoders"))


def _read_files(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What training said of the robots, and their statistics."""
    home = folder / FOLDER
    conf = read_conf(home / CONF_FILE)
    if not (home / METADATA_FILE).is_file():
        raise CheckpointError(f"no {FOLDER}/{METADATA_FILE} in {folder}; copy it from where it was trained")
    return conf, read_json(home / METADATA_FILE)


def _camera_set(given: str | None, settings: Mapping[str, Any]) -> str:
    if given is not None:
        return check_camera_set(given, "--cameras")
    return settings.get("cameras", "roboarena")


def _choose(given: str | None, tags: tuple[str, ...]) -> str:
    """The embodiment that is asked for, or the only one that there is."""
    if given is not None:
        return given
    if len(tags) == 1:
        return tags[0]
    if tags:
        raise CheckpointError(f"--embodiment is needed, since this checkpoint knows several: {', '.join(tags)}")
    raise CheckpointError(
        f"{CONF_FILE} and {METADATA_FILE} have no embodiment in common; take both from one training run"
    )


def _refuse_cameras(cameras: str, recipe: Recipe) -> None:
    raise CheckpointError(
        f"--cameras {cameras}: only clients of {DROID} number their cameras in two ways; leave the option out for "
        f"{recipe.embodiment}"
    )


def _check_picture(recipe: Recipe, config: DreamZeroConfig) -> None:
    """Pictures must make as many tokens as the network was trained with."""
    height, width = config.video_size or recipe.views.picture
    step = 2 * config.video.space  # tokens are squares of 2 x 2 latents
    tokens = (height // step) * (width // step)
    if height % step or width % step or tokens != config.dit.frame_tokens:
        raise CheckpointError(
            f"{CONF_FILE}: pictures of {height}x{width} make {tokens} tokens, but {CONFIG_FILE} says frame_seqlen "
            f"{config.dit.frame_tokens}; take both from one training run"
        )
