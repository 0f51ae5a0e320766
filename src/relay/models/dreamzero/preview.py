"""What the network would see of a DreamZero observation: the stitched picture, the state, the prompt.

Goes the way of a real request, through `transforms.prepare`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relay.engine.test_card import draw_test_card
from relay.models.dreamzero.observation import camera_keys, state_key
from relay.models.dreamzero.recipe import Recipe
from relay.models.dreamzero.tokenizer import PromptTokenizer
from relay.models.dreamzero.transforms import DreamZeroPrepared, prepare
from relay.models.report import Cell, Sample, Section
from relay.protocol.errors import ObservationError
from relay.protocol.images import decode_frame
from relay.protocol.messages import Options

PICTURE = "picture"


@dataclass(frozen=True, slots=True)
class Preview:
    """`frames` holds one: all cameras together."""

    sections: Sequence[Section]
    frames: Mapping[str, NDArray[np.uint8]]


def preview(recipe: Recipe, tokenizer: PromptTokenizer, camera_set: str, sample: Sample) -> Preview:
    """Prepare a sample for an inspected checkpoint without problems.

    Raises:
        ObservationError: the sample is not one of this checkpoint's.
    """
    keys = list(camera_keys(recipe, camera_set).values())
    frames = _frames(keys, sample.frames)
    state = _state(recipe, sample.state)
    prepared = prepare(
        {**frames, **state, "prompt": sample.prompt}, Options(), recipe, tokenizer, camera_set=camera_set
    )
    sections = [
        _frames_section(frames, recipe, bool(sample.frames)),
        _state_section(recipe, prepared),
        _prompt_section(tokenizer, sample.prompt, prepared.prompt),
    ]
    return Preview(sections, {PICTURE: prepared.pictures[-1]})


def resting_state(recipe: Recipe) -> dict[str, NDArray[np.float64]]:
    """The middle of the training data, by key."""
    return {part.key: (part.low + part.high) / 2 for part in recipe.state}


def _frames(keys: Sequence[str], files: Sequence[bytes]) -> dict[str, NDArray[np.uint8]]:
    if not files:
        return {key: draw_test_card(key) for key in keys}
    if len(files) != len(keys):
        raise ObservationError(f"{len(files)} frames for {len(keys)} cameras: {', '.join(keys)}")
    return {key: decode_frame(file, key) for key, file in zip(keys, files, strict=True)}


def _state(recipe: Recipe, given: Sequence[float] | None) -> dict[str, Any]:
    if given is None:
        middle = resting_state(recipe)
        return {state_key(part): middle[part.key] for part in recipe.state}
    width = sum(part.width for part in recipe.state)
    if len(given) != width:
        parts = ", ".join(f"{part.key} ({part.width})" for part in recipe.state)
        raise ObservationError(f"--state has {len(given)} values; this embodiment expects {width}: {parts}")
    values = iter(given)
    return {state_key(part): [next(values) for _ in range(part.width)] for part in recipe.state}


def _frames_section(frames: Mapping[str, NDArray[Any]], recipe: Recipe, from_files: bool) -> Section:
    height, width = recipe.views.tile
    rows: list[tuple[Cell, ...]] = [
        (key, "file" if from_files else "test card", f"{frame.shape[1]}x{frame.shape[0]} to {width}x{height}")
        for key, frame in frames.items()
    ]
    return Section("What the model sees: frames", rows, ("camera", "frame", "cropped and resized"))


def _state_section(recipe: Recipe, prepared: DreamZeroPrepared) -> Section:
    names = [(part.key, index) for part in recipe.state for index in range(part.width)]
    rows = [
        (place, f"{key}[{index}]", float(prepared.robot_state[key][index]), float(prepared.state[place]))
        for place, (key, index) in enumerate(names)
    ]
    return Section("What the model sees: state", rows, ("index", "name", "robot", "scaled and clipped"))


def _prompt_section(tokenizer: PromptTokenizer, instruction: str, tokens: Sequence[int]) -> Section:
    rows = [(place, token, tokenizer.vocabulary.piece(token)) for place, token in enumerate(tokens)]
    remark = f"{len(tokens)} tokens from {tokenizer.text(instruction)[:400]!r}"
    return Section("What the model sees: prompt", rows, ("place", "id", "piece"), [remark])
