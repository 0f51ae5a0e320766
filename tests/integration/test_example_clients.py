"""Clients that are on no package index, as their bytes: what they send is taken, what they insist on is answered.

`example_traffic.py` has the messages and how replies are read; the policy is a stub of the shape each client expects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import pytest
from example_traffic import (
    NO_DEFLATE,
    OFFERS_DEFLATE,
    RESET,
    ROBOARENA_KEYS,
    connected,
    dreamzero_observation,
    dreamzero_zeros,
    groot_observation,
    lerobot_observation,
    read,
    written,
)
from threaded_server import AnswersWhenPrepared, serving
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from relay.engine.base import Chunk, PolicySpec, Work
from relay.protocol.errors import ObservationError
from relay.protocol.messages import Actions, Observation, Options

ENDPOINT = "/v1/realtime/robot/openpi"
FRAME = np.arange(180 * 320 * 3, dtype=np.uint32).astype(np.uint8).reshape(180, 320, 3)
CLIP = np.stack([FRAME, FRAME[::-1], FRAME[:, ::-1], FRAME])
SESSION = "7d444840-9dc0-11d1-b245-5ffdce74fad2"
GROUPS = {"eef_9d": 9, "gripper_position": 1, "joint_position": 7}
GROUP_SHAPES = {key: (1, 40, width) for key, width in GROUPS.items()}
"""As vllm-omni 0.30 answers. Its older GR00T example looks for the horizon in the first place and takes neither."""

DREAMZERO = PolicySpec(
    "dreamzero",
    ("exterior_image_0_left", "exterior_image_1_left", "wrist_image_left"),
    state_dim=14,
    action_horizon=24,
    action_dim=8,
    num_steps=4,
    image_resolution=(180, 320),
    supported_options=frozenset(),
    handshake={
        "image_resolution": [180, 320],
        "needs_wrist_camera": True,
        "n_external_cameras": 2,
        "needs_stereo_camera": False,
        "needs_session_id": True,
        "action_space": "joint_position",
    },
)
GROOT = PolicySpec(
    "groot",
    ("external_0", "wrist"),
    state_dim=17,
    action_horizon=40,
    action_dim=17,
    num_steps=4,
    supported_options=frozenset({"seed"}),
    handshake={
        "image_resolution": [180, 320],
        "needs_session_id": True,
        "embodiment_tag": "oxe_droid_relative_eef_relative_joint",
        "action_horizon": 40,
        "action_keys": list(GROUPS),
    },
)


@dataclass(frozen=True, slots=True)
class Taken:
    """An observation that the policy did not refuse."""

    observation: Observation
    options: Options
    notes: Sequence[Any] = ()
    ignored: Sequence[str] = ()


@dataclass
class Remembering(AnswersWhenPrepared):
    """Fills its chunk with the number of this observation in its session; keeps what it was given."""

    spec: PolicySpec
    taken: list[Taken] = field(default_factory=list)

    def prepare(self, observation: Observation, options: Options) -> Taken:
        if observation.get("prompt") == "refuse":
            raise ObservationError("prompt 'refuse' is refused")
        self.taken.append(Taken(observation, options))
        return self.taken[-1]

    def infer(self, batch: Sequence[Work]) -> Sequence[Chunk]:
        return [Chunk(self._actions(work.session)) for work in batch]

    def open_session(self) -> list[int]:
        return []

    def close_session(self, session: list[int]) -> None:
        session.clear()

    def _actions(self, session: list[int]) -> Actions:
        session.append(len(session) + 1)
        if self.spec is GROOT:
            return {key: np.full(shape, session[-1], np.float32) for key, shape in GROUP_SHAPES.items()}
        return np.full((24, 8), session[-1], np.float32)


@pytest.fixture
def dreamzero() -> Iterator[tuple[str, Remembering]]:
    engine = Remembering(DREAMZERO)
    with serving(engine, handshake="roboarena") as url:
        yield url, engine


@pytest.fixture
def groot() -> Iterator[tuple[str, Remembering]]:
    engine = Remembering(GROOT)
    with serving(engine) as url:
        yield url, engine


def ask(websocket: ClientConnection, message: dict[str, Any]) -> bytes | str:
    websocket.send(written(message))
    return websocket.recv(timeout=30)


def chunk(websocket: ClientConnection, message: dict[str, Any]) -> np.ndarray:
    """The reply, which must be what dreamzero's client and vllm-omni's example assert."""
    actions = read(ask(websocket, message))
    assert isinstance(actions, np.ndarray)
    assert (actions.dtype, actions.shape) == (np.dtype("<f4"), (24, 8))
    assert np.isfinite(actions).all()
    return actions


# ---- dreamzero's own client, on the address without a path


def test_roboarenas_client_reads_exactly_its_six_keys(dreamzero: tuple[str, Remembering]) -> None:
    with connected(dreamzero[0], NO_DEFLATE) as websocket:
        metadata = read(websocket.recv(timeout=30))
    assert metadata.keys() == ROBOARENA_KEYS
    assert metadata == DREAMZERO.handshake


def test_roboarenas_client_sends_one_frame_then_four_and_gets_bare_chunks(dreamzero: tuple[str, Remembering]) -> None:
    url, engine = dreamzero
    with connected(url, NO_DEFLATE) as websocket:
        websocket.recv(timeout=30)
        counts = [chunk(websocket, dreamzero_observation(frames, SESSION))[0, 0] for frames in (FRAME, CLIP, CLIP)]
    assert counts == [1, 2, 3]
    np.testing.assert_array_equal(engine.taken[1].observation["observation/wrist_image_left"], CLIP)


def test_roboarenas_client_sends_zeros_with_its_keys_in_another_order(dreamzero: tuple[str, Remembering]) -> None:
    url, engine = dreamzero
    with connected(url, NO_DEFLATE) as websocket:
        websocket.recv(timeout=30)
        assert chunk(websocket, dreamzero_zeros(SESSION))[0, 0] == 1
    assert engine.taken[0].observation.keys() == dreamzero_zeros(SESSION).keys() - {"session_id", "endpoint"}


def test_roboarenas_reset_is_answered_in_text_and_starts_the_session_anew(dreamzero: tuple[str, Remembering]) -> None:
    with connected(dreamzero[0], NO_DEFLATE) as websocket:
        websocket.recv(timeout=30)
        chunk(websocket, dreamzero_observation(FRAME, SESSION))
        assert ask(websocket, RESET) == "reset successful"
        assert chunk(websocket, dreamzero_observation(FRAME, SESSION))[0, 0] == 1


def test_another_session_id_starts_anew_for_roboarenas_client(dreamzero: tuple[str, Remembering]) -> None:
    with connected(dreamzero[0], NO_DEFLATE) as websocket:
        websocket.recv(timeout=30)
        counts = [chunk(websocket, dreamzero_observation(FRAME, name))[0, 0] for name in ("a", "a", "b")]
    assert counts == [1, 2, 1]


def test_roboarenas_client_gets_text_for_what_is_refused(dreamzero: tuple[str, Remembering]) -> None:
    with connected(dreamzero[0], NO_DEFLATE) as websocket:
        websocket.recv(timeout=30)
        refused = ask(websocket, {**dreamzero_observation(FRAME, SESSION), "prompt": "refuse"})
        assert isinstance(refused, str)
        assert "prompt 'refuse' is refused" in refused
        with pytest.raises(ConnectionClosed):
            websocket.recv(timeout=30)


# ---- vllm-omni's DreamZero example, whose --path may be either


@pytest.mark.parametrize("path", [ENDPOINT, f"/dreamzero{ENDPOINT}", "/"])
def test_the_dreamzero_example_runs_to_its_end(dreamzero: tuple[str, Remembering], path: str) -> None:
    with connected(dreamzero[0] + path, NO_DEFLATE) as websocket:
        metadata = read(websocket.recv(timeout=30))
        assert metadata.keys() >= ROBOARENA_KEYS
        assert {key: metadata[key] for key in ROBOARENA_KEYS} == DREAMZERO.handshake
        counts = [chunk(websocket, dreamzero_observation(frames, SESSION))[0, 0] for frames in (FRAME, CLIP)]
        reset = ask(websocket, RESET)
        assert (reset if isinstance(reset, str) else read(reset)["status"]) == "reset successful"
        counts.append(chunk(websocket, dreamzero_observation(FRAME, SESSION))[0, 0])
    assert counts == [1, 2, 1]


def test_the_dreamzero_example_gets_its_reset_as_a_map_on_the_endpoint(dreamzero: tuple[str, Remembering]) -> None:
    with connected(dreamzero[0] + ENDPOINT, NO_DEFLATE) as websocket:
        websocket.recv(timeout=30)
        assert read(ask(websocket, RESET)) == {"status": "reset successful"}


# ---- vllm-omni's GR00T example and lerobot's `vllm` policy, which offer deflate


def test_offered_deflate_is_declined(groot: tuple[str, Remembering]) -> None:
    with connected(groot[0] + ENDPOINT, OFFERS_DEFLATE) as websocket:
        websocket.recv(timeout=30)
        assert websocket.request is not None
        assert "permessage-deflate" in websocket.request.headers["Sec-WebSocket-Extensions"]
        assert websocket.response is not None
        assert "Sec-WebSocket-Extensions" not in websocket.response.headers


@pytest.mark.parametrize("path", [ENDPOINT, f"/groot{ENDPOINT}"])
def test_the_groot_example_gets_one_array_for_each_action_key(groot: tuple[str, Remembering], path: str) -> None:
    url, engine = groot
    images = {"external_0": FRAME, "wrist": FRAME[::-1].copy()}
    with connected(url + path, OFFERS_DEFLATE) as websocket:
        metadata = read(websocket.recv(timeout=30))
        actions = read(ask(websocket, groot_observation(images)))
    assert list(actions) == list(metadata["action_keys"])
    for key, array in actions.items():
        assert isinstance(array, np.ndarray)
        assert (array.dtype, array.shape) == (np.dtype("<f4"), GROUP_SHAPES[key])
    taken = engine.taken[0].observation
    assert taken["state"] == groot_observation(images)["state"]
    np.testing.assert_array_equal(taken["images"]["wrist"], images["wrist"])


def test_lerobot_asks_for_the_image_size_on_a_connection_of_its_own(groot: tuple[str, Remembering]) -> None:
    with connected(groot[0] + ENDPOINT, OFFERS_DEFLATE) as websocket:
        metadata = read(websocket.recv(timeout=30))
    assert metadata["image_resolution"] == [180, 320]


def test_lerobot_connects_for_every_call_and_reads_nothing_but_arrays(groot: tuple[str, Remembering]) -> None:
    url, engine = groot
    for _ in range(3):
        with connected(url + ENDPOINT, OFFERS_DEFLATE) as websocket:
            websocket.recv(timeout=30)
            reply = read(ask(websocket, lerobot_observation([FRAME, FRAME], seed=7)))
        assert isinstance(reply, dict)
        assert reply.get("type") != "error"
        cast = {key: np.asarray(value, dtype=np.float32) for key, value in reply.items()}
        assert {key: array.shape for key, array in cast.items()} == GROUP_SHAPES
    assert [taken.options.seed for taken in engine.taken] == [7, 7, 7]
    assert [len(taken.observation["images"]) for taken in engine.taken] == [2, 2, 2]


def test_lerobot_is_told_of_an_error_in_a_map(groot: tuple[str, Remembering]) -> None:
    with connected(groot[0] + ENDPOINT, OFFERS_DEFLATE) as websocket:
        websocket.recv(timeout=30)
        refused = read(ask(websocket, {**lerobot_observation([FRAME]), "prompt": "refuse"}))
    assert refused == {"type": "error", "message": "prompt 'refuse' is refused"}


def test_what_lerobot_sends_gets_openpis_reply_on_openpis_path(groot: tuple[str, Remembering]) -> None:
    with connected(groot[0], OFFERS_DEFLATE) as websocket:
        websocket.recv(timeout=30)
        reply = read(ask(websocket, lerobot_observation([FRAME])))
    assert reply.keys() == {"actions", "policy_timing", "server_timing"}
    assert {key: array.shape for key, array in reply["actions"].items()} == {
        key: (1, 40, k) for key, k in GROUPS.items()
    }


# ---- the bytes themselves


def test_the_messages_are_what_msgpack_writes() -> None:
    def marker(value: Any) -> Any:
        assert isinstance(value, np.ndarray)
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}

    messages = [
        dreamzero_observation(CLIP, SESSION),
        dreamzero_zeros(SESSION),
        groot_observation({"external_0": FRAME}),
        lerobot_observation([FRAME], seed=70_000),
        RESET,
    ]
    assert [written(message) for message in messages] == [
        msgpack.packb(message, default=marker) for message in messages
    ]
