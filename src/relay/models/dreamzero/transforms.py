"""An observation to what the network takes: checked, decoded, stitched, scaled, tokenized. CPU only, no shared state.

What it makes is complete but for the session's part: which of the pictures belong to the call is told by the session's
`frames.RecentFrames`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relay.engine.base import Note
from relay.engine.frames import Decode, each_frame, read_frame
from relay.models.dreamzero.frames import fit, stitch
from relay.models.dreamzero.observation import read_observation
from relay.models.dreamzero.recipe import Recipe
from relay.models.dreamzero.schedule import COMPUTED
from relay.models.dreamzero.tokenizer import PromptTokenizer
from relay.models.dreamzero.units import outside, to_network
from relay.protocol.errors import ObservationError
from relay.protocol.images import decode_frame
from relay.protocol.messages import Observation, Options


@dataclass(frozen=True, slots=True)
class DreamZeroPrepared:
    """One observation, ready for its session and the device.

    Attributes:
        pictures: all that came, stitched, uint8 (T, height, width, 3), oldest first.
        state: scaled and padded, float32 (state_width,).
        robot_state: by key, (width,) float64 in the robot's units, which relative actions start from.
        prompt: token ids, without padding.
        num_steps: passes of the network that the request asks for; None leaves them to the server.
        notes: what the caller should know.
        ignored: keys of the observation that mean nothing to this policy.
    """

    pictures: NDArray[np.uint8]
    state: NDArray[np.float32]
    robot_state: Mapping[str, NDArray[np.float64]]
    prompt: tuple[int, ...]
    num_steps: int | None = None
    notes: tuple[Note, ...] = ()
    ignored: tuple[str, ...] = ()


def prepare(
    observation: Observation,
    options: Options,
    recipe: Recipe,
    tokenizer: PromptTokenizer,
    *,
    camera_set: str = "roboarena",
    default_prompt: str | None = None,
    decode: Decode = decode_frame,
) -> DreamZeroPrepared:
    """Validate and convert one observation.

    Args:
        camera_set: one of `observation.CAMERA_SETS`.
        default_prompt: the instruction of observations that have none.
        decode: what decodes encoded frames.

    Raises:
        ObservationError: one sentence naming the field, what came and what is expected.
    """
    _check_options(options, recipe)
    reading = read_observation(observation, recipe, camera_set=camera_set, default_prompt=default_prompt)
    prompt = tokenizer(reading.prompt)
    views = [reading.frames.get(camera, {}) for camera in recipe.cameras]
    named = {name: frame for view in views for name, frame in view.items()}
    frames = dict(zip(named, each_frame(lambda frame, name: read_frame(frame, name, decode), named), strict=True))
    tiles = [fit([frames[name] for name in view], recipe.views) if view else None for view in views]
    return DreamZeroPrepared(
        pictures=stitch(tiles, recipe.views),
        state=to_network(reading.state, recipe),
        robot_state=reading.state,
        prompt=prompt,
        num_steps=options.num_steps,
        notes=(*reading.notes, *outside(reading.state, recipe)),
        ignored=reading.ignored,
    )


def _check_options(options: Options, recipe: Recipe) -> None:
    if options.num_steps is not None and options.num_steps not in COMPUTED:
        known = ", ".join(map(str, COMPUTED))
        raise ObservationError(f"num_steps is {options.num_steps}; this policy runs its network {known} times")
    expected = (recipe.horizon, recipe.action_width)
    if options.noise is not None and options.noise.shape != expected:
        raise ObservationError(f"noise: expected {expected} float32, that of the actions, got {options.noise.shape}")
