"""What GR00T's clients send, in any of their forms, as frames, state and instruction by the recipe's keys.

Four forms are read: Isaac-GR00T's nested maps (`video`, `state`, `language`), its simulators' flat keys (`video.<key>`,
`state.<key>`), vLLM-Omni's (`images` and `prompt`) and lerobot's, whose `images` is a list in the cameras' order.
Leading axes that are missing are added, numbers become float32; everything else that does not fit is refused by name.
Decodes and resizes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from relay.engine.base import Note
from relay.engine.frames import BATCH_ADVICE, EXPECTED
from relay.models.groot.recipe import Recipe, StatePart
from relay.protocol.errors import ObservationError
from relay.protocol.images import decoded_bytes
from relay.protocol.limits import MAX_DECODED_BYTES, MAX_PROMPT_BYTES
from relay.protocol.messages import Observation
from relay.protocol.numbers import as_numbers
from relay.protocol.wording import child_path, quoted, shown


@dataclass(frozen=True, slots=True)
class Reading:
    """One observation by the recipe's keys.

    Attributes:
        frames: by what messages call them, each still encoded or an array; time outermost, camera innermost.
        state: by key, (state_steps, width) float32 in the robot's units.
        prompt: the instruction as it came.
        flat: the observation has flat keys.
        notes: what the caller should know.
        ignored: keys that mean nothing to this policy.
    """

    frames: Mapping[str, Any]
    state: Mapping[str, NDArray[np.float32]]
    prompt: str
    flat: bool
    notes: tuple[Note, ...]
    ignored: tuple[str, ...]


def read_observation(observation: Observation, recipe: Recipe, default_prompt: str | None = None) -> Reading:
    """Check an observation and bring it into one form.

    Args:
        default_prompt: the instruction of observations that have none.

    Raises:
        ObservationError: one sentence naming the field, what came and what is expected.
    """
    _refuse_others(observation)
    used: set[str] = set()
    cameras, video_key = _find_cameras(observation, recipe, used)
    frames, notes = _read_frames(cameras, video_key, recipe)
    state, spare = _read_state(observation, recipe, used)
    prompt = _read_prompt(observation, recipe, default_prompt, used)
    unknown = tuple(key for key in observation if key not in used)
    return Reading(
        frames=frames,
        state=state,
        prompt=prompt,
        flat=any(key.startswith(_FLAT_VIDEO) or key.startswith(_FLAT_STATE) for key in used),
        notes=(*notes, *_note_other_robot(observation, recipe)),
        ignored=(*unknown, *spare),
    )


_FLAT_VIDEO, _FLAT_STATE = "video.", "state."
_FOREIGN_FRAMES = ("observation/", "observation.images")
_LANGUAGE_ALIASES = ("task", "annotation.human.coarse_action")
"""The simulators' two spellings of one key (Isaac-GR00T: gr00t/policy/gr00t_policy.py, Gr00tSimPolicyWrapper)."""


def _refuse_others(observation: Observation) -> None:
    """What other models' clients send, and this one would run without."""
    if "image_mask" in observation:
        raise ObservationError(
            "image_mask: this model has no mask of cameras, each of them is required; leave the key out"
        )
    for key in ("tokenized_prompt", "tokenized_prompt_mask"):
        if key in observation:
            raise ObservationError(f"{key}: this model takes the instruction as text, under 'prompt' or 'language'")


def _find_cameras(observation: Observation, recipe: Recipe, used: set[str]) -> tuple[Any, str]:
    """What holds the frames, a map by camera or a list in their order, and the key it came under."""
    flat = {key.removeprefix(_FLAT_VIDEO): key for key in observation if key.startswith(_FLAT_VIDEO)}
    found = [key for key in ("video", "images") if key in observation]
    foreign = [key for key in observation if key == "image" or key.startswith(_FOREIGN_FRAMES)]
    forms = [*found, *[next(iter(keys)) for keys in (flat.values(), foreign) if keys]]
    if len(forms) > 1:
        raise ObservationError(
            f"{quoted(forms[0])} beside {quoted(forms[1])}: send frames under one of the two, not both"
        )
    cameras = ", ".join(recipe.cameras)
    if foreign:
        raise ObservationError(
            f"{quoted(foreign[0])} is not a key of this policy; send frames as a map 'video' of {cameras}"
        )
    if flat:
        used.update(flat.values())
        return {camera: observation[key] for camera, key in flat.items()}, _FLAT_VIDEO
    if not found:
        raise ObservationError(f"{_missing('video', observation)}; it maps {cameras} to frames")
    used.add(found[0])
    return observation[found[0]], found[0]


def _read_frames(cameras: Any, key: str, recipe: Recipe) -> tuple[dict[str, Any], tuple[Note, ...]]:
    """Every frame by name, time outermost, and what was assumed of the cameras."""
    if isinstance(cameras, Mapping):
        found, notes = _match(cast("Mapping[Any, Any]", cameras), key, recipe)
    else:
        found, notes = _in_order(cameras, key, recipe), ()
    size = sum(decoded_bytes(value, name) for name, value in found.items())
    if size > MAX_DECODED_BYTES:
        raise ObservationError(
            f"{key.rstrip('.')}: the frames hold {size >> 20} MiB of pixels, at most {MAX_DECODED_BYTES >> 20} MiB are "
            "taken"
        )
    columns = [_in_time(value, name, recipe) for name, value in found.items()]
    single = len(recipe.frames) == 1
    frames: dict[str, Any] = {}
    for step in range(len(recipe.frames)):
        for name, column in zip(found, columns, strict=True):
            frames[name if single else f"{name}[{step}]"] = column[step]
    return frames, notes


def _match(cameras: Mapping[Any, Any], key: str, recipe: Recipe) -> tuple[dict[str, Any], tuple[Note, ...]]:
    """What came by camera, under the names that messages use; foreign names are taken in their order."""

    def name(camera: Any) -> str:
        return f"{key}{quoted(str(camera))[1:-1]}" if key == _FLAT_VIDEO else child_path(key, camera)

    if all(camera in cameras for camera in recipe.cameras):
        unknown = next((camera for camera in cameras if camera not in recipe.cameras), None)
        if unknown is None:
            return {name(camera): cameras[camera] for camera in recipe.cameras}, ()
        raise ObservationError(
            f"{name(unknown)} is not a camera of this policy; it takes {', '.join(recipe.cameras)} and no other"
        )
    missing = next(camera for camera in recipe.cameras if camera not in cameras)
    if len(cameras) != len(recipe.cameras) or any(camera in cameras for camera in recipe.cameras):
        raise ObservationError(_wrong_cameras(cameras, missing, name, recipe))
    for place, camera in enumerate(cameras):
        near = get_close_matches(str(camera), recipe.cameras, n=1, cutoff=_ALIKE)
        if near and near[0] != recipe.cameras[place]:
            raise ObservationError(_wrong_cameras(cameras, missing, name, recipe))
    taken = ", ".join(f"{quoted(str(camera))} as {own}" for camera, own in zip(cameras, recipe.cameras, strict=True))
    note = Note(f"cameras taken in the order they came: {taken}")
    return {name(camera): value for camera, value in cameras.items()}, (note,)


_ALIKE = 0.8
"""Of two names, from which on one is taken for a misspelling of the other."""


def _wrong_cameras(cameras: Mapping[Any, Any], missing: str, name: Any, recipe: Recipe) -> str:
    unknown = next((camera for camera in cameras if camera not in recipe.cameras), None)
    count = len(recipe.cameras)
    expected = f"this policy needs {count} camera{'s' if count > 1 else ''}: {', '.join(recipe.cameras)}"
    if unknown is None:
        return f"{name(missing)} is missing; {expected}"
    near = get_close_matches(str(unknown), [own for own in recipe.cameras if own not in cameras], n=1)
    hint = f", did you mean {near[0]!r}?" if near else ""
    return f"{name(unknown)} is not a camera of this policy{hint}; {expected}"


def _in_order(value: Any, key: str, recipe: Recipe) -> dict[str, Any]:
    """A list of cameras in the recipe's order; of a single camera also the frame itself."""
    if isinstance(value, list | tuple):
        several = cast("Sequence[Any]", value)
        if len(several) == len(recipe.cameras):
            return {child_path(key, place): part for place, part in enumerate(several)}
        raise ObservationError(
            f"{key} is a list of {len(several)}; as a list it holds one entry per camera, in the order "
            f"{', '.join(recipe.cameras)}"
        )
    if len(recipe.cameras) == 1 and isinstance(value, np.ndarray | bytes):
        return {key: value}
    raise ObservationError(
        f"{key}: expected a map of camera name to frames ({', '.join(recipe.cameras)}), got {shown(value)}"
    )


def _in_time(value: Any, name: str, recipe: Recipe) -> Sequence[Any]:
    """The frames of one camera, oldest first, one for each of the recipe's offsets."""
    steps = len(recipe.frames)
    axes, frames = _leading_axes(value)
    if axes > 2 or (axes == 2 and len(frames) != 1):
        got = f"{len(frames)} observations" if axes == 2 else shown(value)
        raise ObservationError(f"{name}: {_frames_expected(recipe)}, got {got}; {BATCH_ADVICE}")
    while axes > 1:
        axes, frames = axes - 1, frames[0]
    if axes == 0:
        frames = [frames]
    if len(frames) != steps:
        raise ObservationError(f"{name} holds {_count(len(frames))}; {_frames_expected(recipe)}")
    return frames


def _leading_axes(value: Any) -> tuple[int, Any]:
    """How many axes stand before those of a frame: of an array, of a list of frames, or of both."""
    if isinstance(value, np.ndarray):
        return max(0, cast("NDArray[Any]", value).ndim - 3), value
    if isinstance(value, list | tuple):
        parts = cast("Sequence[Any]", value)
        return 1 + (_leading_axes(parts[0])[0] if parts else 0), parts
    return 0, value


def _frames_expected(recipe: Recipe) -> str:
    if len(recipe.frames) == 1:
        return f"this policy takes one frame of each camera: {EXPECTED}"
    offsets = ", ".join(map(str, recipe.frames))
    return (
        f"this policy takes {len(recipe.frames)} frames of each camera, of the control steps {offsets} (0 is now), "
        f"oldest first: ({len(recipe.frames)}, H, W, 3) uint8 RGB, or a list of JPEG, PNG or WebP files as bytes"
    )


def _count(frames: int) -> str:
    return f"{frames} frame{'' if frames == 1 else 's'}"


def _read_state(
    observation: Observation, recipe: Recipe, used: set[str]
) -> tuple[dict[str, NDArray[np.float32]], tuple[str, ...]]:
    """Every part of the state, and what else was there."""
    flat = {key.removeprefix(_FLAT_STATE): key for key in observation if key.startswith(_FLAT_STATE)}
    sizes = ", ".join(f"{part.key} ({part.width})" for part in recipe.state)
    if "state" in observation and flat:
        first = next(iter(flat.values()))
        raise ObservationError(f"'state' beside {quoted(first)}: send one of the two, not both")
    if flat:
        parts: Mapping[Any, Any] = {key: observation[whole] for key, whole in flat.items()}
    elif "state" in observation:
        value = observation["state"]
        parts = cast("Mapping[Any, Any]", value) if isinstance(value, Mapping) else _split(value, recipe, sizes)
    else:
        raise ObservationError(f"{_missing('state', observation)}; it maps each part to its values: {sizes}")
    used.update(flat.values() or ["state"])

    def name(key: Any) -> str:
        return f"{_FLAT_STATE}{quoted(str(key))[1:-1]}" if flat else child_path("state", key)

    for part in recipe.state:
        if part.key not in parts:
            own = {part.key for part in recipe.state}
            near = get_close_matches(part.key, [str(key) for key in parts if key not in own][:_COMPARED], n=1)
            hint = f" ({quoted(near[0])} came, did you mean {part.key!r}?)" if near else ""
            raise ObservationError(f"{name(part.key)} is missing{hint}; this policy needs {sizes}")
    own = {part.key: _read_part(parts[part.key], part, name(part.key), recipe.state_steps) for part in recipe.state}
    return own, tuple(name(key) for key in parts if key not in own)


def _split(value: Any, recipe: Recipe, sizes: str) -> dict[str, Any]:
    """A state that came as one vector, whose parts follow each other in the recipe's order."""
    numbers = as_numbers(value)
    width = sum(part.width for part in recipe.state)
    if numbers is None or numbers.ndim == 0 or numbers.shape[-1] != width:
        raise ObservationError(
            f"state: expected a map of its parts ({sizes}) or all {width} numbers in this order, got {shown(value)}"
        )
    parts: dict[str, Any] = {}
    column = 0
    for part in recipe.state:
        parts[part.key] = numbers[..., column : column + part.width]
        column += part.width
    return parts


def _read_part(value: Any, part: StatePart, name: str, steps: int) -> NDArray[np.float32]:
    """One part as (steps, width); a number, a vector and whatever has leading axes of 1 are taken."""
    numbers = as_numbers(value)
    shape = f"({steps}, {part.width})" if steps > 1 else f"({part.width},)"
    if numbers is None or numbers.dtype.kind == "b":
        raise ObservationError(f"{name}: expected {shape} numbers, got {shown(value)}")
    values = numbers.reshape(1) if numbers.ndim == 0 and part.width == 1 else numbers
    if values.ndim == 3 and len(values) > 1:
        raise ObservationError(f"{name} has shape {numbers.shape}, expected {shape}; {BATCH_ADVICE}")
    if values.ndim == 3 and len(values) == 1:
        values = values[0]
    if values.ndim == 1:
        values = values[None]
    if values.shape != (steps, part.width):
        raise ObservationError(f"{name} has shape {numbers.shape}, expected {shape}")
    with np.errstate(over="ignore"):
        result = values.astype(np.float32)
    if not np.isfinite(result).all():
        step, column = (int(axis[0]) for axis in np.nonzero(~np.isfinite(result)))
        raise ObservationError(
            f"{name}: value {column} is {values[step, column]}; every value must be a finite float32"
        )
    return result


def _read_prompt(observation: Observation, recipe: Recipe, default_prompt: str | None, used: set[str]) -> str:
    """The instruction, from wherever it came; two that differ are refused."""
    came = _instructions(observation, recipe, used)
    texts = {name: _as_text(value, name) for name, value in came.items() if value is not None}
    if len(set(texts.values())) > 1:
        first, second = list(texts)[:2]
        raise ObservationError(f"{first} and {second} hold different instructions; send one")
    name, text = next(iter(texts.items()), ("prompt", None))
    if text is None or not text.strip():
        if default_prompt is not None:
            return default_prompt
        if text is None:
            raise ObservationError(f"{_missing('prompt', observation)}; it is the task in plain language")
        raise ObservationError(f"{name} is empty; it is the task in plain language")
    length = len(text.encode("utf-8", "surrogatepass"))
    if length > MAX_PROMPT_BYTES:
        raise ObservationError(f"{name} has {length} bytes of UTF-8; at most {MAX_PROMPT_BYTES} are taken")
    return text


def _instructions(observation: Observation, recipe: Recipe, used: set[str]) -> dict[str, Any]:
    """By what messages call them, the values that may be the instruction."""
    aliases = _LANGUAGE_ALIASES if recipe.language_key in _LANGUAGE_ALIASES else ()
    keys = [key for key in dict.fromkeys((recipe.language_key, *aliases, "prompt")) if key in observation]
    used.update(keys)
    came = {key: observation[key] for key in keys}
    if "language" not in observation:
        return came
    used.add("language")
    language = observation["language"]
    if not isinstance(language, Mapping):
        return {**came, "language": language}
    entries = cast("Mapping[Any, Any]", language)
    key = next((key for key in (recipe.language_key, *aliases) if key in entries), None)
    if key is None:
        told = ", ".join(quoted(str(other)) for other in list(entries)[:8]) or "nothing"
        raise ObservationError(f"language holds {told}; this policy reads {recipe.language_key!r}")
    return {**came, child_path("language", key): entries[key]}


def _as_text(value: Any, name: str) -> str:
    """Text, bytes, or either in lists of one, as the reference form has it by batch and time."""
    part = value
    while isinstance(part, list | tuple):
        parts = cast("Sequence[Any]", part)
        if len(parts) != 1:
            raise ObservationError(
                f"{name}: expected one instruction as text, got a list of {len(parts)}; "
                "an observation holds one: for a batch, open one connection per robot, and the server merges their "
                "requests"
            )
        part = parts[0]
    if isinstance(part, bytes):
        try:
            part = part.decode("utf-8")
        except UnicodeDecodeError:
            raise ObservationError(f"{name}: these bytes are not UTF-8") from None
    if not isinstance(part, str):
        raise ObservationError(f"{name}: expected text, got {shown(value)}")
    return part


def _note_other_robot(observation: Observation, recipe: Recipe) -> tuple[Note, ...]:
    """lerobot's and vLLM-Omni's clients name the robot they are for."""
    own = recipe.embodiment
    for key in ("embodiment", "embodiment_tag"):
        told = observation.get(key)
        if isinstance(told, str) and told.lower() not in (own.tag.lower(), own.name.lower()):
            return (Note(f"{key} is {quoted(told)}, but this server runs {own.tag}"),)
    return ()


def _missing(key: str, observation: Observation) -> str:
    known = [name for name in observation if name not in _KEYS][:_COMPARED]
    near = get_close_matches(key, known, n=1)
    came = f"; {quoted(near[0])} is not a key of this policy, did you mean {key!r}?" if near else ""
    return f"{key!r} is missing{came}"


_KEYS = ("video", "images", "state", "language", "prompt")
_COMPARED = 64
"""Keys among which the nearest to a missing one is looked for; each comparison takes time."""
