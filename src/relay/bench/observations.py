"""What is sent to a server whose latency is measured: synthetic frames, a state and a prompt, as its policy takes them.

No two observations are alike, so that nothing a server keeps of one answers another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relay.protocol import msgpack_numpy
from relay.protocol.errors import InvalidPayload
from relay.protocol.images import is_image_key

PI0_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
"""For servers that tell how wide the state is and not what the cameras are called."""

PROMPT = "put the red cube on the yellow plate"
_SCENES = 8


def observations(
    metadata: Mapping[str, Any], *, robot: str | None, file: Path | None, prompt: str, size: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Observations for the policy at hand, without an end.

    Args:
        metadata: what the server said about its policy.
        robot: profile whose keys the observations have, by name or as a YAML file; None for the model's own.
        file: one observation, packed as a client sends it, to send again and again with its arrays of frames shifted.
        prompt: the task; not for `file`, which holds its own.
        size: height and width of the frames; not for `file`.
        seed: of frames and state.

    Raises:
        ValueError: the server doesn't say what its policy takes, and nobody else does; or the file is no observation.
        OSError: the file cannot be read.
    """
    if robot is not None and file is not None:
        raise ValueError("give either a robot or an observation file; the file has its own keys")
    if file is not None:
        example = _read(file)
        return (_shifted(example, number) for number in count())
    slots, state = _robot_keys(robot) if robot is not None else _model_keys(metadata)
    session = {"session_id": "bench"} if metadata.get("needs_session_id") else {}
    return _synthetic(slots, state, {"prompt": prompt, **session}, size, seed)


def camera_frames(seed: int, observations: int = 8, cameras: int = 3, size: int = 224) -> NDArray[np.uint8]:
    """Views of a table with coloured boxes, lit unevenly and with sensor noise: `(observations, cameras, H, W, 3)`."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:size, 0:size] / size
    frames = np.empty((observations, cameras, size, size, 3), np.uint8)
    for index in np.ndindex(observations, cameras):
        light = 0.7 + 0.3 * np.cos(3 * (rows - random.random()) + 2 * (columns - random.random()))
        frame = light[..., None] * random.uniform(90, 200, 3)
        for _ in range(12):
            top, left = random.uniform(0, 0.85, 2)
            height, width = random.uniform(0.05, 0.35, 2)
            inside = (rows > top) & (rows < top + height) & (columns > left) & (columns < left + width)
            frame[inside] = light[inside][:, None] * random.uniform(20, 255, 3)
        frames[index] = np.clip(frame + random.normal(0, 2, frame.shape), 0, 255)
    return frames


def _synthetic(
    slots: tuple[str, ...], state: Mapping[str, int], told: Mapping[str, Any], size: int, seed: int
) -> Iterator[dict[str, Any]]:
    scenes = camera_frames(seed, _SCENES, len(slots), size)
    random = np.random.default_rng(seed)
    for number in count():
        observation: dict[str, Any] = dict(told)
        for slot, frame in zip(slots, scenes[number % _SCENES], strict=True):
            _put(observation, slot, np.roll(frame, number // _SCENES, axis=1))
        for key, width in state.items():
            _put(observation, key, random.uniform(-0.5, 0.5, width).astype(np.float32))
        yield observation


def _model_keys(metadata: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, int]]:
    """The keys of the frames, and the width of each part of the state, in the model's own format."""
    widths = (metadata.get(key) for key in ("state_dim", "max_action_dim", "action_dim"))
    width = next((width for width in widths if isinstance(width, int)), None)
    if width is None:
        raise ValueError(
            "the server's metadata does not say what its policy takes; name the robot that it serves (--robot), or "
            "give one observation as a file (--observation)"
        )
    cameras = metadata.get("cameras")
    names = tuple(map(str, cameras)) if isinstance(cameras, list) and cameras else PI0_CAMERAS
    return tuple(f"image/{name}" for name in names), {"state": width}


def _robot_keys(robot: str) -> tuple[tuple[str, ...], dict[str, int]]:
    try:
        from relay.robots.profile_file import load_profile
    except ModuleNotFoundError as missing:
        raise ValueError(
            f"robot profiles need {missing.name}; install it with: pip install 'relay-robotics[cli]'"
        ) from None
    profile = load_profile(robot)
    return tuple(camera.keys[0] for camera in profile.cameras), {
        part.keys[0]: len(part.names) for part in profile.state
    }


def _put(observation: dict[str, Any], key: str, value: NDArray[Any]) -> None:
    """`image/top` and `images/top` are entries of a map; every other key stands for itself."""
    outer, slash, inner = key.partition("/")
    if slash and outer in ("image", "images"):
        observation.setdefault(outer, {})[inner] = value
    else:
        observation[key] = value


def _read(file: Path) -> dict[str, Any]:
    try:
        value = msgpack_numpy.unpack(file.read_bytes())
    except InvalidPayload as error:
        raise ValueError(f"{file} is no packed observation: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}; expected an observation, which is a map")
    return value


def _shifted(value: Any, by: int, key: object = None) -> Any:
    """The same observation with its arrays of frames moved sideways, so that no two are alike."""
    if isinstance(value, dict):
        return {
            name: _shifted(part, by, key if key is not None and is_image_key(key) else name)
            for name, part in value.items()
        }
    if isinstance(value, np.ndarray) and value.ndim >= 3 and value.dtype == np.uint8 and is_image_key(key):
        return np.roll(value, by, axis=-2)
    return value
