"""What four published clients put on the wire and read from it, byte by byte, as their sources have it.

Nothing of `relay` is used here: messages are written with MessagePack's own rules, and replies are read as those
clients read them. Sources: dreamzero `eval_utils/policy_client.py` and `test_client_AR.py`; vllm-omni
`examples/online_serving/{dreamzero,gr00t}/openpi_client.py`; lerobot `src/lerobot/policies/vllm/client.py` and
`modeling_vllm.py` there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray
from websockets.sync.client import ClientConnection, connect
from websockets.version import version

ROBOARENA_KEYS = {
    "image_resolution",
    "needs_wrist_camera",
    "n_external_cameras",
    "needs_stereo_camera",
    "needs_session_id",
    "action_space",
}
"""The fields of the configuration that dreamzero's client makes of the metadata; any other key is a TypeError there."""

NO_DEFLATE: dict[str, Any] = {"compression": None, "max_size": None}
"""As dreamzero's client and vllm-omni's DreamZero example connect."""

OFFERS_DEFLATE: dict[str, Any] = {"max_size": 64 * 1024 * 1024}
"""As vllm-omni's GR00T example and lerobot connect: with the library's own compression."""


@contextmanager
def connected(url: str, options: dict[str, Any]) -> Iterator[ClientConnection]:
    # Before version 15, websockets knew no proxies.
    no_proxy = {"proxy": None} if int(version.split(".")[0]) >= 15 else {}
    with connect(url, **options, **no_proxy) as websocket:
        yield websocket


# ---- observations, with their keys in the order in which the clients build them


def dreamzero_observation(frames: NDArray[np.uint8], session_id: str) -> dict[str, Any]:
    """As both DreamZero clients send video: `frames` is (H, W, 3) or (4, H, W, 3), the same for all cameras here."""
    return {
        "observation/exterior_image_0_left": frames,
        "observation/exterior_image_1_left": frames,
        "observation/wrist_image_left": frames,
        "observation/joint_position": np.zeros(7, np.float32),
        "observation/cartesian_position": np.zeros(6, np.float32),
        "observation/gripper_position": np.zeros(1, np.float32),
        "prompt": "brush the pan",
        "session_id": session_id,
        "endpoint": "infer",
    }


def dreamzero_zeros(session_id: str) -> dict[str, Any]:
    """As dreamzero's client sends with `--use-zero-images`: the session id comes before the state."""
    observation = dreamzero_observation(np.zeros((180, 320, 3), np.uint8), session_id)
    cameras = [key for key in observation if "image" in key]
    state = [key for key in observation if key.endswith("_position")]
    return {key: observation[key] for key in (*cameras, "session_id", *state, "prompt", "endpoint")}


def groot_observation(images: dict[str, NDArray[np.uint8]]) -> dict[str, Any]:
    """As vllm-omni's GR00T example: states are lists of floats, images a map, no endpoint is named."""
    ends = {"eef_9d": (0, 9), "gripper_position": (9, 10), "joint_position": (10, 17)}
    modality = {key: {"start": start, "end": end} for key, (start, end) in ends.items()}
    return {
        "session_id": "c0a8012e-0000-4000-8000-000000000000",
        "embodiment": "oxe_droid_relative_eef_relative_joint",
        "modality_config": {"state": modality, "action": modality},
        "prompt": "pick up the cube and place it on the plate",
        "state": {
            "eef_9d": [0.0] * 9,
            "gripper_position": [0.5],
            "joint_position": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7],
        },
        "images": images,
    }


def lerobot_observation(images: list[NDArray[np.uint8]], seed: int | None = None) -> dict[str, Any]:
    """As lerobot's `vllm` policy for LIBERO: images are a list in camera order, the seed comes last if there is one."""
    state = {"x": 0.1, "y": 0.2, "z": 0.3, "roll": 0.0, "pitch": 0.0, "yaw": 0.0}
    spans = {key: {"start": index, "end": index + 1} for index, key in enumerate(state)}
    return {
        "session_id": "c0a8012e-0000-4000-8000-000000000001",
        "embodiment": "libero_sim",
        "modality_config": {
            "state": {**spans, "gripper": {"start": 6, "end": 8}},
            "action": {**spans, "gripper": {"start": 6, "end": 7}},
        },
        "prompt": "put the bowl on the plate",
        "state": {**{key: [value] for key, value in state.items()}, "gripper": [0.04, -0.04]},
        "images": images,
        **({} if seed is None else {"seed": seed}),
    }


RESET = {"endpoint": "reset"}


# ---- bytes


def written(value: Any) -> bytes:
    """MessagePack as msgpack-python writes it by default, with openpi-client's marker for arrays."""
    match value:
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int():
            return _integer(value)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str():
            text = value.encode()
            return _head(len(text), [(31, 0xA0), (0xFF, b"\xd9"), (0xFFFF, b"\xda"), (0xFFFFFFFF, b"\xdb")]) + text
        case bytes():
            return _head(len(value), [(0xFF, b"\xc4"), (0xFFFF, b"\xc5"), (0xFFFFFFFF, b"\xc6")]) + value
        case list() | tuple():
            items = b"".join(written(item) for item in value)
            return _head(len(value), [(15, 0x90), (0xFFFF, b"\xdc"), (0xFFFFFFFF, b"\xdd")]) + items
        case dict():
            pairs = b"".join(written(key) + written(item) for key, item in value.items())
            return _head(len(value), [(15, 0x80), (0xFFFF, b"\xde"), (0xFFFFFFFF, b"\xdf")]) + pairs
        case np.ndarray():
            marker = {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
            return written(marker)
    raise TypeError(type(value).__name__)


def _head(size: int, forms: list[tuple[int, int | bytes]]) -> bytes:
    """The smallest of the forms that holds this size: one byte with the size in it, or a byte and a big-endian size."""
    most, form = next((most, form) for most, form in forms if size <= most)
    if isinstance(form, int):
        return bytes([form | size])
    return form + size.to_bytes((most.bit_length() + 7) // 8, "big")


def _integer(value: int) -> bytes:
    if not 0 <= value < 2**32:
        raise ValueError(f"these clients send no {value}")
    return bytes([value]) if value < 128 else _head(value, [(0xFF, b"\xcc"), (0xFFFF, b"\xcd"), (0xFFFFFFFF, b"\xce")])


def read(frame: bytes | str) -> Any:
    """As these clients read a reply: only the marker with bytes keys is an array, and text is no reply."""
    assert isinstance(frame, bytes), frame
    return msgpack.unpackb(frame, object_hook=_array)


def _array(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        return np.ndarray(buffer=value[b"data"], dtype=np.dtype(value[b"dtype"]), shape=value[b"shape"])
    assert b"__npgeneric__" not in value, "a reply holds no NumPy scalars"
    return value
