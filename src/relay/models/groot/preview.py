"""What the network would see of a GR00T observation: frames after the whole resize chain, the state, the prompt.

Goes the way of a real request, through `transforms.prepare`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relay.engine.test_card import draw_test_card
from relay.models.groot.prompt import PromptTokenizer
from relay.models.groot.recipe import Recipe, StatePart
from relay.models.groot.transforms import prepare, resting_state
from relay.models.report import Cell, Sample, Section
from relay.protocol.errors import ObservationError
from relay.protocol.images import decode_frame
from relay.protocol.messages import Options


@dataclass(frozen=True, slots=True)
class Preview:
    """Frames are by camera, the last one in time where there are several."""

    sections: Sequence[Section]
    frames: Mapping[str, NDArray[np.uint8]]


def preview(recipe: Recipe, tokenizer: PromptTokenizer, sample: Sample) -> Preview:
    """Prepare a sample for an inspected checkpoint without problems.

    Raises:
        ObservationError: the sample is not one of this checkpoint's.
    """
    given = _frames(recipe.cameras, sample.frames)
    observation = {
        "video": {camera: [frame] * len(recipe.frames) for camera, frame in given.items()},
        "state": _state(recipe, sample.state),
        "prompt": sample.prompt,
    }
    prepared = prepare(
        observation, Options(), recipe, tokenizer, default_prompt=None, decode=decode_frame, fast_resize=False
    )
    last = prepared.row.images[-len(recipe.cameras) :]  # time is outermost
    frames = dict(zip(recipe.cameras, last, strict=True))
    sections = [
        _frames_section(given, frames, bool(sample.frames)),
        _state_section(recipe, observation["state"], prepared.row.state),
        _prompt_section(prepared.row.tokens, tokenizer, sample.prompt),
    ]
    return Preview(sections, frames)


def _frames(cameras: Sequence[str], files: Sequence[bytes]) -> dict[str, NDArray[np.uint8]]:
    """A frame for every camera; each is needed."""
    if not files:
        return {camera: draw_test_card(camera) for camera in cameras}
    if len(files) != len(cameras):
        raise ObservationError(f"{len(files)} frames for {len(cameras)} cameras: {', '.join(cameras)}")
    return {camera: decode_frame(file, camera) for camera, file in zip(cameras, files, strict=True)}


def _state(recipe: Recipe, given: Sequence[float] | None) -> dict[str, NDArray[np.float32]]:
    """The sample by key, the same at every step; without one, the middle of the training data."""
    if given is None:
        poses = {group.state_key for group in recipe.actions if group.relative not in (None, "joints")}
        rest = resting_state(recipe)  # the middle of rotations is none
        middles = {part.key: np.tile(_middle(part), (recipe.state_steps, 1)) for part in recipe.state}
        return {key: rest[key] if key in poses else middle for key, middle in middles.items()}
    width = sum(part.width for part in recipe.state)
    if len(given) != width:
        parts = ", ".join(f"{part.key} ({part.width})" for part in recipe.state)
        raise ObservationError(f"--state has {len(given)} values; this embodiment expects {width}: {parts}")
    values = iter(given)
    return {
        part.key: np.tile(np.array([next(values) for _ in range(part.width)], np.float32), (recipe.state_steps, 1))
        for part in recipe.state
    }


def _middle(part: StatePart) -> NDArray[np.float32]:
    """(width,) float32."""
    middle = part.low if part.encoding == "mean_std" else (part.low + part.high) / 2
    return middle.astype(np.float32)


def _frames_section(given: Mapping[str, NDArray[Any]], frames: Mapping[str, NDArray[Any]], from_files: bool) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for camera, seen in frames.items():
        height, width, _ = given[camera].shape
        size = f"{width}x{height} to {seen.shape[1]}x{seen.shape[0]}"
        rows.append((camera, "file" if from_files else "test card", size))
    return Section("What the model sees: frames", rows, ("camera", "frame", "cropped and resized"))


def _state_section(recipe: Recipe, given: Mapping[str, NDArray[Any]], normalized: NDArray[np.float32]) -> Section:
    """By number of the network's state of the last step, its padding left out."""
    last = normalized[-recipe.max_state_dim :]
    rows: list[tuple[Cell, ...]] = []
    place = 0
    for part in recipe.state:
        for index in range(part.encoded_width):
            robot = float(given[part.key][-1][index % part.width])
            name = part.key if part.encoding != "sin_cos" else f"{('sin', 'cos')[index // part.width]} {part.key}"
            rows.append((place, f"{name}[{index % part.width}]", robot, float(last[place])))
            place += 1
    return Section("What the model sees: state", rows, ("index", "name", "robot", "normalized"))


def _prompt_section(tokens: NDArray[np.int64], tokenizer: PromptTokenizer, prompt: str) -> Section:
    rows: list[tuple[Cell, ...]] = []
    start = 0
    while start < len(tokens):
        end = start + 1
        while end < len(tokens) and tokens[end] == tokens[start]:
            end += 1
        rows.append((start, int(tokens[start]), tokenizer.piece(int(tokens[start])), end - start))
        start = end
    remark = f"{len(tokens)} tokens from {prompt[:200]!r}"
    return Section("What the model sees: prompt", rows, ("place", "id", "piece", "times"), [remark])
