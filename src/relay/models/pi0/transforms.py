"""An observation to what the network takes: checked, decoded, resized, tokenized.

What is checked here is model format: openpi's camera keys, the state normalized. `units.py` brings a robot's own keys
and units into it first. CPU only, no shared state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relay.engine.base import Note
from relay.engine.chunking import Chunking
from relay.engine.frames import Decode, each_frame, read_frame, resize_with_pad
from relay.models.pi0.adapters import Pi0Adapter
from relay.models.pi0.config import Pi0Config
from relay.models.pi0.guidance import LeftOver
from relay.models.pi0.left_over import read_left_over
from relay.models.pi0.tokenizer import Prompt, PromptTokenizer
from relay.models.pi0.units import RobotUnits, to_model_format
from relay.protocol.errors import ObservationError
from relay.protocol.images import decode_frame, decoded_bytes
from relay.protocol.limits import MAX_DECODED_BYTES, MAX_PROMPT_BYTES
from relay.protocol.messages import Observation, Options
from relay.protocol.numbers import as_numbers

_KEYS = ("image", "image_mask", "state", "prompt", "tokenized_prompt", "tokenized_prompt_mask")
LEROBOTS_CHUNKING = Chunking()
_OTHER_IMAGE_KEYS = ("images", "observation/", "observation.images", "video")


@dataclass(frozen=True, slots=True)
class Pi0Prepared:
    """One observation, ready for the device.

    Attributes:
        images: (cameras present, height, width, 3) uint8, in the order of the configuration.
        tokens: the prompt's ids, without padding.
        state: (action_dim,) float32, padded with zeros.
        num_steps: denoising steps.
        robot_state: (state_dim,) in the robot's units, for actions in them; None for model format.
        image_ids: of each image a digest of the file it came as, by which it is known again; else empty.
        notes: what the caller should know.
        ignored: keys of the observation that mean nothing to this policy.
        adapter: the adapter to run it with.
        left_over: what it keeps to of the previous chunk.
    """

    images: NDArray[np.uint8]
    tokens: tuple[int, ...]
    state: NDArray[np.float32]
    num_steps: int
    robot_state: NDArray[np.float64] | None = None
    image_ids: tuple[bytes, ...] = ()
    notes: tuple[Note, ...] = ()
    ignored: tuple[str, ...] = ()
    adapter: Pi0Adapter | None = None
    left_over: LeftOver | None = None


def prepare(
    observation: Observation,
    options: Options,
    config: Pi0Config,
    tokenizer: PromptTokenizer,
    *,
    robot: RobotUnits | None = None,
    model_units: bool = True,
    default_prompt: str | None = None,
    decode: Decode = decode_frame,
    identify: bool = False,
    chunking: Chunking = LEROBOTS_CHUNKING,
) -> Pi0Prepared:
    """Validate and convert one observation.

    Args:
        robot: for observations in its keys and units; model format is taken besides.
        model_units: as in `units.to_model_format`.
        decode: what decodes encoded frames.
        identify: take digests of encoded frames, so that the engine can tell which it has seen before.
        chunking: how a request is guided that brings what is left of its previous chunk.

    Raises:
        ObservationError: one sentence naming the field, what came and what is expected.
    """
    translated = to_model_format(observation, robot, model_units=model_units)
    observation = translated.observation
    if "image" not in observation:
        raise ObservationError(_missing("image", observation) + f"; it maps {', '.join(config.cameras)} to frames")
    foreign = [key for key in observation if key.startswith(_OTHER_IMAGE_KEYS)]
    if foreign:
        raise ObservationError(f"{foreign[0]!r} beside 'image': send frames under one of the two, not both")
    present, notes = _find_cameras(observation["image"], observation.get("image_mask"), config, translated.slots)
    side = config.vision.image_size
    images = each_frame(lambda frame, name: resize_with_pad(read_frame(frame, name, decode), side, side), present)
    state = _read_state(observation, config) if translated.state is None else translated.state
    prompt = _read_prompt(observation, state, config, tokenizer, default_prompt)
    return Pi0Prepared(
        images=np.stack(images),
        tokens=prompt.tokens,
        state=np.pad(state.astype(np.float32), (0, config.action_dim - len(state))),
        num_steps=_check_options(options, config),
        robot_state=translated.robot_state,
        image_ids=_digests(present.values()) if identify else (),
        notes=(*translated.notes, *notes, *prompt.notes),
        ignored=(*translated.ignored, *(key for key in observation if key not in _KEYS)),
        left_over=read_left_over(options, config, chunking, robot, translated.robot_state),
    )


def _find_cameras(
    frames: Any, mask: Any, config: Pi0Config, slots: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[Note, ...]]:
    """The frames that count, as they came, by what messages call them; in the configuration's order."""
    if not isinstance(frames, Mapping):
        raise ObservationError(f"image: expected a map of camera name to frame, got {type(frames).__name__}")
    for camera in frames:
        if camera not in config.cameras:
            raise ObservationError(
                f"image[{camera!r}] is not a camera of this policy{_nearest(camera, config.cameras)}; "
                f"it takes {', '.join(config.cameras)}"
            )
    present = _read_mask(mask, frames, config)
    if not present:
        raise ObservationError(f"image: no camera; send at least one of {', '.join(config.cameras)}")
    names = {camera: slots.get(camera, f"image[{camera!r}]") for camera in present}
    size = sum(decoded_bytes(frames[camera], name) for camera, name in names.items())
    if size > MAX_DECODED_BYTES:
        raise ObservationError(
            f"image: the frames hold {size >> 20} MiB of pixels, at most {MAX_DECODED_BYTES >> 20} MiB are taken"
        )
    masked = [camera for camera in config.cameras if camera not in present]
    notes = (Note(f"cameras masked: {', '.join(masked)}"),) if masked else ()
    return {name: frames[camera] for camera, name in names.items()}, notes


def _digests(frames: Collection[Any]) -> tuple[bytes, ...]:
    """What tells these frames from others: digests of the files they came as; none if one came as an array.

    An array of 224 pixels a side takes 0.2 ms to digest, a JPEG of it 0.02: too much for what hardly ever comes twice.
    """
    if not all(isinstance(frame, bytes | memoryview) for frame in frames):
        return ()
    return tuple(blake2b(frame, digest_size=16).digest() for frame in frames)


def _read_mask(mask: Any, frames: Mapping[str, Any], config: Pi0Config) -> list[str]:
    """The cameras that count, in the configuration's order; a caller's mask wins over what is in `image`."""
    if mask is None:
        return [camera for camera in config.cameras if camera in frames]
    if not isinstance(mask, Mapping):
        raise ObservationError(f"image_mask: expected a map of camera name to bool, got {type(mask).__name__}")
    for camera, value in mask.items():
        if camera not in config.cameras:
            raise ObservationError(
                f"image_mask[{camera!r}] is not a camera of this policy{_nearest(camera, config.cameras)}"
            )
        if not _is_bool(value):
            raise ObservationError(f"image_mask[{camera!r}]: expected a bool, got {_describe(value)}")
        if value and camera not in frames:
            raise ObservationError(f"image_mask[{camera!r}] is true but image holds no frame for it")
    return [camera for camera in config.cameras if camera in frames and mask.get(camera, True)]


def _read_state(observation: Observation, config: Pi0Config) -> NDArray[np.float32]:
    """The state at its real width; a padded one is cut to it, never guessed from trailing zeros."""
    real, padded = config.state_dim, config.action_dim
    if "state" not in observation:
        raise ObservationError(_missing("state", observation) + f"; it has {real} values, normalized")
    values = as_numbers(observation["state"])
    if values is None or values.dtype.kind == "b":
        raise ObservationError(f"state: expected {real} numbers, got {_describe(observation['state'])}")
    state = values.astype(np.float32)
    widths = f"{real}" if real == padded else f"{real} values, or {padded} padded with zeros after normalizing"
    if state.shape not in ((real,), (padded,)):
        what = f"{state.shape[0]} values" if state.ndim == 1 else f"shape {state.shape}"
        raise ObservationError(f"state has {what}; this policy expects {widths}")
    if not np.isfinite(state).all():
        where = int(np.flatnonzero(~np.isfinite(state))[0])
        raise ObservationError(f"state[{where}] is {state[where]}; every value must be finite")
    if state[real:].any():
        where = real + int(np.flatnonzero(state[real:])[0])
        raise ObservationError(
            f"state[{where}] is {state[where]:g}; behind this policy's {real} values only zeros may stand"
        )
    return state[:real]


def _read_prompt(
    observation: Observation,
    state: NDArray[np.floating[Any]],
    config: Pi0Config,
    tokenizer: PromptTokenizer,
    default_prompt: str | None,
) -> Prompt:
    if "tokenized_prompt" in observation or "tokenized_prompt_mask" in observation:
        if "prompt" in observation:
            raise ObservationError("'prompt' beside 'tokenized_prompt': send one of the two, not both")
        return _read_tokens(observation, config)
    text = observation.get("prompt")
    if default_prompt is not None and (text is None or (isinstance(text, str | bytes) and not text.strip())):
        text = default_prompt
    if text is None:
        raise ObservationError(_missing("prompt", observation) + "; it is the task in plain language")
    if isinstance(text, list | tuple) and len(text) == 1:
        text = text[0]
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError:
            raise ObservationError("prompt: these bytes are not UTF-8") from None
    if not isinstance(text, str):
        raise ObservationError(f"prompt: expected a string, got {_describe(text)}")
    if not text.strip():
        raise ObservationError("prompt is empty; it is the task in plain language")
    length = len(text.encode("utf-8", "surrogatepass"))
    if length > MAX_PROMPT_BYTES:
        raise ObservationError(f"prompt has {length} bytes of UTF-8; at most {MAX_PROMPT_BYTES} are taken")
    return tokenizer(text, state)


def _read_tokens(observation: Observation, config: Pi0Config) -> Prompt:
    for key in ("tokenized_prompt", "tokenized_prompt_mask"):
        if key not in observation:
            raise ObservationError(f"{key} is missing; tokenized_prompt and tokenized_prompt_mask come together")
    tokens = as_numbers(observation["tokenized_prompt"])
    mask = as_numbers(observation["tokenized_prompt_mask"])
    if tokens is None or mask is None:
        kind = _describe(observation["tokenized_prompt" if tokens is None else "tokenized_prompt_mask"])
        raise ObservationError(f"tokenized_prompt or its mask: expected one dimension of numbers or bools, got {kind}")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or len(tokens) > config.max_token_len:
        raise ObservationError(
            f"tokenized_prompt: expected at most {config.max_token_len} integers in one dimension, "
            f"got {tokens.shape} {tokens.dtype}"
        )
    if mask.shape != tokens.shape or mask.dtype != np.bool_:
        raise ObservationError(f"tokenized_prompt_mask: expected {tokens.shape} bool, got {mask.shape} {mask.dtype}")
    kept = tokens[mask]
    if len(kept) == 0:
        raise ObservationError("tokenized_prompt_mask masks every token; the prompt is empty")
    if kept.min() < 0 or kept.max() >= config.vocab_size:
        wrong = kept[(kept < 0) | (kept >= config.vocab_size)][0]
        raise ObservationError(f"tokenized_prompt holds {wrong}; ids go from 0 to {config.vocab_size - 1}")
    return Prompt(tuple(int(token) for token in kept))


def _check_options(options: Options, config: Pi0Config) -> int:
    most = max(50, 4 * config.num_steps)
    num_steps = config.num_steps if options.num_steps is None else options.num_steps
    if not 1 <= num_steps <= most:
        raise ObservationError(f"num_steps must be between 1 and {most}, got {num_steps}")
    expected = (config.action_horizon, config.action_dim)
    if options.noise is not None and options.noise.shape != expected:
        raise ObservationError(f"noise: expected {expected} float32, got {options.noise.shape}")
    return num_steps


def _missing(key: str, observation: Observation) -> str:
    known = [name for name in observation if isinstance(name, str) and name not in _KEYS][:_COMPARED]
    near = get_close_matches(key, known, n=1)
    came = f"; {near[0]!r} is not a key of this policy, did you mean {key!r}?" if near else ""
    return f"{key!r} is missing{came}"


_COMPARED = 64
"""Keys among which the nearest to a missing one is looked for; each comparison takes time."""


def _nearest(name: Any, known: tuple[str, ...]) -> str:
    near = get_close_matches(str(name), known, n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_) or (
        isinstance(value, np.ndarray) and value.shape == () and value.dtype == bool
    )


def _describe(value: Any) -> str:
    """A short name for what came, never its content."""
    if isinstance(value, np.ndarray):
        return f"{value.shape} {value.dtype}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return type(value).__name__
