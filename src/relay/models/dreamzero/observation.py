"""What DreamZero's clients send, by the recipe's keys: frames of every camera, parts of the state, the instruction.

Two sets of camera keys exist for DROID, RoboArena's (exteriors 0 and 1) and DROID's own (1 and 2), and one of the keys
means the left camera in the one and the right camera in the other. Which set is meant is therefore told, never guessed.
Decodes and resizes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from relay.engine.base import Note
from relay.engine.frames import BATCH_ADVICE, EXPECTED
from relay.models.dreamzero.frames import COUNTS
from relay.models.dreamzero.recipe import DROID, Part, Recipe
from relay.protocol.errors import ObservationError
from relay.protocol.images import decoded_bytes
from relay.protocol.limits import MAX_DECODED_BYTES, MAX_PROMPT_BYTES
from relay.protocol.messages import Observation
from relay.protocol.numbers import as_numbers
from relay.protocol.wording import child_path, quoted, shown

CAMERA_SETS = ("roboarena", "droid")
"""How a client may number DROID's exteriors: from 0, or from 1."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One observation by the recipe's keys.

    Attributes:
        frames: by camera of the recipe, by what messages call them, each still encoded or an array; oldest first, as
            many for each camera. An exterior that is missing has none.
        state: by key, (width,) float64 in the robot's units.
        prompt: the instruction as it came.
        notes: what the caller should know.
        ignored: keys that mean nothing to this policy.
    """

    frames: Mapping[str, Mapping[str, Any]]
    state: Mapping[str, NDArray[np.float64]]
    prompt: str
    notes: tuple[Note, ...]
    ignored: tuple[str, ...]


def camera_keys(recipe: Recipe, camera_set: str) -> dict[str, str]:
    """What clients call each camera of the recipe; `camera_set` is one of `CAMERA_SETS` and matters to DROID alone."""
    less = 1 if recipe.embodiment == DROID and camera_set == "roboarena" else 0
    return {
        camera: _PREFIX + re.sub(r"(?<=exterior_image_)\d+", lambda number: str(int(number[0]) - less), camera)
        for camera in recipe.cameras
    }


def state_key(part: Part) -> str:
    """What clients call a part of the state."""
    return _PREFIX + part.key


def read_observation(
    observation: Observation, recipe: Recipe, *, camera_set: str = "roboarena", default_prompt: str | None = None
) -> Reading:
    """Check an observation and bring it into one form.

    Args:
        camera_set: one of `CAMERA_SETS`.
        default_prompt: the instruction of observations that have none.

    Raises:
        ObservationError: one sentence naming the field, what came and what is expected.
    """
    keys = camera_keys(recipe, camera_set)
    own = {*keys.values(), *(state_key(part) for part in recipe.state), *_UNUSED, "prompt"}
    _refuse_other_cameras(observation, keys, own, recipe, camera_set)
    others = [str(key) for key in observation if key not in own]
    frames, notes = _read_cameras(observation, keys, recipe, others)
    return Reading(
        frames=frames,
        state={part.key: _read_part(observation, part, others) for part in recipe.state},
        prompt=_read_prompt(observation, default_prompt, others),
        notes=notes,
        ignored=tuple(others),
    )


_PREFIX = "observation/"
_UNUSED = (_PREFIX + "cartesian_position",)
"""What RoboArena's clients send and this model was not trained with."""


def _refuse_other_cameras(
    observation: Observation, keys: Mapping[str, str], own: set[str], recipe: Recipe, camera_set: str
) -> None:
    """Frames under any other key would be lost without a word."""
    for key, value in observation.items():
        if key in own or not _holds_frames(value):
            continue
        near = get_close_matches(str(key), [known for known in keys.values() if known not in observation], n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        numbering = ""
        if recipe.embodiment == DROID:
            other = next(name for name in CAMERA_SETS if name != camera_set)
            numbering = f". This server numbers exteriors as {_OWNERS[camera_set]}"
            if key in camera_keys(recipe, other).values():
                hint, numbering = "", f"{numbering}; --cameras {other} is for the other numbering"
        raise ObservationError(
            f"{quoted(str(key))} is not a camera of this policy{hint}; it takes {', '.join(keys.values())}{numbering}"
        )


_OWNERS = {"roboarena": "RoboArena does, from 0", "droid": "DROID does, from 1"}


def _holds_frames(value: Any) -> bool:
    while isinstance(value, list | tuple) and value:
        value = cast("Sequence[Any]", value)[0]
    return isinstance(value, bytes) or (isinstance(value, np.ndarray) and cast("NDArray[Any]", value).ndim >= 3)


def _read_cameras(
    observation: Observation, keys: Mapping[str, str], recipe: Recipe, others: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], tuple[Note, ...]]:
    """The frames of every camera that came, and what is black instead."""
    missing = [camera for camera in recipe.cameras if keys[camera] not in observation]
    spared = [camera for camera in missing if recipe.embodiment == DROID and "exterior" in camera]
    needed = next((camera for camera in missing if camera not in spared), None)
    if needed is None and spared and len(spared) == len(recipe.cameras) - 1:
        needed = spared[0]  # one exterior was left out in training, never both
    if needed is not None:
        raise ObservationError(f"{_missing(keys[needed], others)}; this policy needs {' and '.join(keys.values())}")
    present = {camera: observation[key] for camera, key in keys.items() if camera not in missing}
    size = sum(decoded_bytes(value, keys[camera]) for camera, value in present.items())
    if size > MAX_DECODED_BYTES:
        raise ObservationError(
            f"{keys[next(iter(present))]}: the frames of all cameras hold {size >> 20} MiB of pixels, at most "
            f"{MAX_DECODED_BYTES >> 20} MiB are taken"
        )
    frames = {camera: _in_time(value, keys[camera]) for camera, value in present.items()}
    _check_counts({keys[camera]: len(column) for camera, column in frames.items()})
    notes = tuple(Note(f"{keys[camera]!r} is missing: the network sees black there") for camera in spared)
    return frames, notes


def _in_time(value: Any, name: str) -> dict[str, Any]:
    """The frames of one camera by name, oldest first."""
    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        parts: Sequence[Any] = list(array) if array.ndim == 4 else [array]
        if array.ndim == 3:
            return {name: array}
    elif isinstance(value, list | tuple):
        parts = cast("Sequence[Any]", value)
    else:
        return {name: value}
    nested = next((part for part in parts if isinstance(part, list | tuple)), None)
    if nested is not None or (isinstance(value, np.ndarray) and cast("NDArray[Any]", value).ndim > 4):
        raise ObservationError(
            f"{name}: expected frames in time, (T, H, W, 3) or a list of JPEG, PNG or WebP files as bytes, got "
            f"{shown(value)}; {BATCH_ADVICE}"
        )
    if isinstance(value, np.ndarray) and cast("NDArray[Any]", value).ndim < 3:
        raise ObservationError(f"{name}: {EXPECTED}, got {shown(value)}")
    return {child_path(name, step): part for step, part in enumerate(parts)}


def _check_counts(counts: Mapping[str, int]) -> None:
    """As many frames of each camera, and a number that the model knows how to take."""
    (first, count), *others = counts.items()
    for name, other in others:
        if other != count:
            raise ObservationError(
                f"{name} holds {other} frame{'' if other == 1 else 's'}, but {first} {count}; send as many of each "
                "camera"
            )
    if count not in COUNTS:
        allowed = f"{', '.join(map(str, COUNTS[:-1]))} or {COUNTS[-1]}"
        raise ObservationError(f"{first} holds {count} frames; {allowed} are taken, oldest first")


def _read_part(observation: Observation, part: Part, others: Sequence[str]) -> NDArray[np.float64]:
    """One part of the state, (width,); leading axes of 1 are taken, and a number for a width of 1."""
    name = state_key(part)
    if name not in observation:
        raise ObservationError(f"{_missing(name, others)}; it has {_values(part.width)} in the robot's units")
    value = observation[name]
    numbers = as_numbers(value)
    if numbers is None or numbers.dtype.kind == "b":
        raise ObservationError(f"{name}: expected {_values(part.width)}, got {shown(value)}")
    if numbers.size != part.width or any(side != 1 for side in numbers.shape[:-1]):
        raise ObservationError(f"{name} has shape {numbers.shape}, expected ({part.width},)")
    values = numbers.reshape(part.width).astype(np.float64)
    with np.errstate(over="ignore"):
        sound = np.isfinite(values.astype(np.float32))
    if not sound.all():
        index = int(np.flatnonzero(~sound)[0])
        raise ObservationError(f"{name}[{index}] is {values[index]}; every value must be a finite float32")
    return values


def _values(count: int) -> str:
    return "one number" if count == 1 else f"{count} numbers"


def _read_prompt(observation: Observation, default_prompt: str | None, others: Sequence[str]) -> str:
    value = observation.get("prompt")
    if isinstance(value, list | tuple) and len(cast("Sequence[Any]", value)) == 1:
        value = cast("Sequence[Any]", value)[0]
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError:
            raise ObservationError("prompt: these bytes are not UTF-8") from None
    if value is not None and not isinstance(value, str):
        raise ObservationError(f"prompt: expected a string, got {shown(value)}")
    if value is None or not value.strip():
        if default_prompt is not None:
            return default_prompt
        if value is None:
            raise ObservationError(f"{_missing('prompt', others)}; it is the task in plain language")
        raise ObservationError("prompt is empty; it is the task in plain language")
    length = len(value.encode("utf-8", "surrogatepass"))
    if length > MAX_PROMPT_BYTES:
        raise ObservationError(f"prompt has {length} bytes of UTF-8; at most {MAX_PROMPT_BYTES} are taken")
    return value


def _missing(key: str, others: Sequence[str]) -> str:
    """That a key is missing, and which of the keys that mean nothing here may have been meant for it."""
    near = get_close_matches(key, others[:_COMPARED], n=1)
    came = f" ({quoted(near[0])} came, did you mean {key!r}?)" if near else ""
    return f"{key!r} is missing{came}"


_COMPARED = 64
"""Keys among which the nearest to a missing one is looked for; each comparison takes time."""
