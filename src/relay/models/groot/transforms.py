"""One observation to what the network takes, and the network's actions back into the robot's units.

Checked, decoded, resized, tokenized and scaled on the CPU, with no shared state. `observation.py` reads the forms that
clients send, `units.py` holds both directions of the robot's units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relay.engine.base import Note
from relay.engine.frames import Decode, each_frame, read_frame
from relay.models.groot.images import cropped_size, prepare_frame, vision_size
from relay.models.groot.inputs import GrootRow
from relay.models.groot.observation import Reading, read_observation
from relay.models.groot.prompt import PromptTokenizer, check_length, formalize, image_tokens
from relay.models.groot.recipe import Recipe
from relay.models.groot.units import outside, to_network, to_robot_units
from relay.protocol.errors import ObservationError
from relay.protocol.images import decode_frame
from relay.protocol.messages import Observation, Options
from relay.side_by_side import side_by_side

MOST_STEPS = 50
"""Denoising steps; up to here all implementations of the sampler agree on the time of each."""


@dataclass(frozen=True, slots=True)
class GrootPrepared:
    """One observation, ready for the device.

    Attributes:
        row: what the network takes.
        raw_state: by key, (state_steps, width) float32 in the robot's units, which relative actions start from.
        flat: the observation came with flat keys, so the reply's keys are `action.<key>`.
        num_steps: denoising steps asked for; None for the checkpoint's own.
        notes: what the caller should know.
        ignored: keys of the observation that mean nothing to this policy.
        adapter: the adapter to run it with.
    """

    row: GrootRow
    raw_state: Mapping[str, NDArray[np.float32]]
    flat: bool = False
    num_steps: int | None = None
    notes: tuple[Note, ...] = ()
    ignored: tuple[str, ...] = ()
    adapter: Any = None


def prepare(
    observation: Observation,
    options: Options,
    recipe: Recipe,
    tokenizer: PromptTokenizer,
    *,
    default_prompt: str | None = None,
    decode: Decode = decode_frame,
    fast_resize: bool = False,
) -> GrootPrepared:
    """Validate and convert one observation.

    Args:
        default_prompt: the instruction of observations that have none.
        decode: what decodes encoded frames.
        fast_resize: as `fast` in `images.prepare_frame`.

    Raises:
        ObservationError: one sentence naming the field, what came and what is expected.
    """
    reading = read_observation(observation, recipe, default_prompt)
    _check_options(options, recipe)
    _check_poses(reading, recipe)
    frames = each_frame(lambda value, name: read_frame(value, name, decode), reading.frames)
    sizes = [_size(frame, name, recipe) for frame, name in zip(frames, reading.frames, strict=True)]
    check_length([image_tokens(*size) for size in sizes])  # before a long strip of pixels is made
    text = formalize(reading.prompt) if recipe.formalize_language else reading.prompt
    if not text.strip():
        raise ObservationError("prompt has no letters or digits; it is the task in plain language")
    tokens = tokenizer(text, sizes)
    row = GrootRow(
        tokens=tokens,
        images=tuple(side_by_side(lambda frame: prepare_frame(frame, recipe.image, fast=fast_resize), frames)),
        state=to_network(reading.state, recipe),
        slot=recipe.embodiment.slot,
    )
    return GrootPrepared(
        row,
        raw_state=reading.state,
        flat=reading.flat,
        num_steps=options.num_steps,
        notes=(*reading.notes, *_note_outside(reading, recipe)),
        ignored=reading.ignored,
    )


def to_robot(actions: NDArray[np.float32], prepared: GrootPrepared, recipe: Recipe) -> dict[str, NDArray[np.float32]]:
    """The network's actions (action_horizon, max_action_dim) as the client expects them: each (1, horizon, width)."""
    groups = to_robot_units(actions, prepared.raw_state, recipe)
    return {f"action.{key}" if prepared.flat else key: values[None] for key, values in groups.items()}


def resting_state(recipe: Recipe) -> dict[str, NDArray[np.float32]]:
    """A state that every check lets through: zeros, and poses without rotation."""
    state = {part.key: np.zeros((recipe.state_steps, part.width), np.float32) for part in recipe.state}
    for group in recipe.actions:
        if group.relative in _AT_REST:
            state[group.state_key][:] = _AT_REST[group.relative]
    return state


_AT_REST = {
    "xyz_rot6d": np.array([0, 0, 0, 1, 0, 0, 0, 1, 0], np.float32),
    "matrix": np.eye(4, dtype=np.float32).ravel(),
}


def _size(frame: NDArray[np.uint8], name: str, recipe: Recipe) -> tuple[int, int]:
    height, width = frame.shape[:2]
    if max(height, width) > _MOST_STRETCHED * min(height, width):
        raise ObservationError(
            f"{name} is {height}x{width} pixels; one side may be at most {_MOST_STRETCHED} times as long as the other"
        )
    return vision_size(*cropped_size(height, width, recipe.image))


_MOST_STRETCHED = 200
"""As in the Qwen3-VL image processor."""


def _note_outside(reading: Reading, recipe: Recipe) -> tuple[Note, ...]:
    remark = None if recipe.exclude_state else outside(reading.state, recipe)
    return (Note(remark, about="state outside the trained range"),) if remark else ()


def _check_options(options: Options, recipe: Recipe) -> None:
    if options.num_steps is not None and not 1 <= options.num_steps <= MOST_STEPS:
        raise ObservationError(f"num_steps must be between 1 and {MOST_STEPS}, got {options.num_steps}")
    expected = (recipe.action_horizon, recipe.max_action_dim)
    if options.noise is not None and options.noise.shape != expected:
        raise ObservationError(f"noise: expected {expected} float32, got {options.noise.shape}")


def _check_poses(reading: Reading, recipe: Recipe) -> None:
    """Rotations that actions are relative to must be some: of zeros nothing can be made."""
    for group in recipe.actions:
        if group.relative == "xyz_rot6d":
            first, second = reading.state[group.state_key][-1, 3:].astype(np.float64).reshape(2, 3)
            least = np.linalg.norm(np.cross(first, second))
            told = "its last six numbers are two rows of a rotation matrix, and must not be zeros or parallel"
        elif group.relative == "matrix":
            least = abs(np.linalg.det(reading.state[group.state_key][-1].astype(np.float64).reshape(4, 4)[:3, :3]))
            told = "its first three rows and columns are a rotation, and must not be singular"
        else:
            continue
        if least < _FLAT:
            raise ObservationError(f"state[{group.state_key!r}]: {told}")


_FLAT = 1e-6
