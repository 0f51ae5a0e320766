"""DreamZero behind a real socket: episodes of several robots, what is refused on the way, and its published clients.

Episodes go to the golden network, whose frames and prompts are recorded; clients go to a checkpoint folder of DROID.
"""

from __future__ import annotations

import io
import resource
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dreamzero_folders import write_checkpoint
from example_traffic import (
    NO_DEFLATE,
    RESET,
    ROBOARENA_KEYS,
    connected,
    dreamzero_observation,
    dreamzero_zeros,
    read,
    written,
)
from golden_engine import CAMERA, golden_engine, observation, observed, undisturbed
from PIL import Image
from threaded_server import serving
from tiny_dreamzero import frames
from websockets.sync.client import ClientConnection

import relay
from relay.models import registry
from relay.models.dreamzero.engine import DreamZeroEngine

pytestmark = pytest.mark.dreamzero

ENDPOINT = "/v1/realtime/robot/openpi"
PATHS = ("", ENDPOINT)
PICTURES = frames("served", 9).numpy()


@pytest.fixture(scope="module", params=[None, 1], ids=["roomy", "one fits"])
def engine(request: pytest.FixtureRequest) -> DreamZeroEngine:
    """Around the golden network, on a device that holds all sessions or a single one."""
    return golden_engine(sessions=request.param)


@pytest.fixture(scope="module")
def url(engine: DreamZeroEngine) -> Iterator[str]:
    with serving(engine) as url:
        yield url


class Robot:
    """A connection, and what its sessions are answered; bare actions on both paths."""

    def __init__(self, websocket: ClientConnection) -> None:
        self.websocket = websocket
        self.told = read(websocket.recv(timeout=60))

    def ask(self, asked: dict[str, Any], **fields: Any) -> Any:
        self.websocket.send(written({**asked, **fields, "endpoint": "infer"}))
        reply = self.websocket.recv(timeout=120)
        return reply if isinstance(reply, str) else read(reply)

    def check(self, scenario: str, number: int, session: str = "arm") -> None:
        """A recorded call, which must be answered, to the bit, as if its session were alone."""
        given = self.ask(observation(scenario, number), session_id=session)
        assert isinstance(given, np.ndarray), given
        assert given.tobytes() == undisturbed(scenario)[number], f"{scenario}/{number}"

    def reset(self) -> Any:
        self.websocket.send(written(RESET))
        reply = self.websocket.recv(timeout=60)
        return reply if isinstance(reply, str) else read(reply)


@pytest.fixture
def dial(url: str) -> Iterator[Any]:
    """Opens connections that end with the test."""
    with ExitStack() as opened:
        yield lambda path="": Robot(opened.enter_context(connected(url + path, NO_DEFLATE)))


# ---- episodes


@pytest.mark.parametrize("path", PATHS)
def test_robots_on_one_connection_are_answered_as_if_each_were_alone(path: str, dial: Any) -> None:
    robot = dial(path)
    for number in range(4):
        robot.check("base", number, "left")
        robot.check("relang", number, "right")


@pytest.mark.parametrize("path", PATHS)
def test_connections_that_use_one_name_are_answered_as_if_each_were_alone(path: str, dial: Any) -> None:
    first, second = dial(path), dial(path)
    for number in range(4):
        first.check("base", number)
        second.check("relang", number)


def test_a_device_that_holds_one_session_loses_no_episode(engine: DreamZeroEngine, dial: Any) -> None:
    robots = [dial(path) for path in (*PATHS, *PATHS)]
    for number in range(3):
        for robot, scenario in zip(robots, ("base", "relang", "eight", "base"), strict=True):
            robot.check(scenario, number)
            if engine.residents.limit == engine.residents.session_bytes:
                assert len(engine.residents) == 1


@pytest.mark.parametrize("path", PATHS)
def test_reset_begins_with_the_newest_of_four_frames(path: str, dial: Any) -> None:
    robot = dial(path)
    for number in range(3):
        robot.check("base", number)
    robot.reset()
    four, one = (
        robot.ask(observed("x", clip), session_id=name) for clip, name in ((PICTURES[:4], "arm"), (PICTURES[3], "b"))
    )
    assert four.tobytes() == one.tobytes()


def test_a_new_session_begins_with_the_newest_of_four_frames(dial: Any) -> None:
    robot = dial()
    robot.check("base", 0)
    four, one = (
        robot.ask(observed("x", clip), session_id=name) for clip, name in ((PICTURES[:4], "a"), (PICTURES[3], "b"))
    )
    assert four.tobytes() == one.tobytes()
    robot.check("base", 1)


def test_a_connection_that_ends_frees_its_sessions(engine: DreamZeroEngine, url: str) -> None:
    with connected(url, NO_DEFLATE) as websocket:
        robot = Robot(websocket)
        for name in ("left", "right"):
            robot.check("base", 0, name)
    with connected(url, NO_DEFLATE) as websocket:  # whose request comes after their end
        Robot(websocket).check("base", 0)
        assert len(engine.residents) <= 2
    with connected(url, NO_DEFLATE) as websocket:
        Robot(websocket).check("base", 0)
        assert len(engine.residents) <= 2


# ---- what goes wrong in the middle of an episode

BAD = {
    "a frame that is cut short": ({CAMERA: [b"\xff\xd8\xff\xe0 cut"] * 4}, "observation/view"),
    "five frames": ({CAMERA: PICTURES[:5]}, "holds 5 frames; 1, 2, 3, 4, 8 or 9 are taken"),
    "a frame of floats": ({CAMERA: PICTURES[0] / 255.0}, "observation/view"),
    "a state that is not a number": ({"observation/state": np.full(64, np.nan)}, "observation/state[0] is nan"),
    "no prompt": ({"prompt": ""}, "prompt is empty"),
    "nine steps": ({"num_steps": 9}, "num_steps is 9; this policy runs its network 5, 6, 7, 8, 16 times"),
    "an adapter": ({"adapter_dir": "cups"}, "adapter 'cups' is not loaded; this server holds: none"),
    "noise of the video": ({"noise": np.zeros((2, 8), np.float32)}, "noise: expected (24, 32)"),
    "a chunk to go on from": (
        {"prev_actions": np.zeros((8, 32), np.float32), "inference_delay": 1, "execution_horizon": 4},
        "prev_actions is not an option of dreamzero; it takes: deadline_ms, noise, num_steps, seed",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_is_refused_in_mid_episode_leaves_the_episode_as_it_was(bad: str, dial: Any) -> None:
    robot = dial(ENDPOINT)
    changes, text = BAD[bad]
    robot.check("base", 0)
    robot.check("base", 1)
    refused = robot.ask({**observed("bad", PICTURES[:4], "B"), **changes}, session_id="arm")
    assert refused["type"] == "error"
    assert text in refused["message"]
    robot.check("base", 2)


def test_a_refused_first_observation_leaves_the_fresh_start_to_the_next(dial: Any) -> None:
    robot = dial(ENDPOINT)
    assert robot.ask(observed("bad", PICTURES[:5]), session_id="arm")["type"] == "error"
    robot.check("base", 0)


def test_encoded_frames_in_a_list_are_what_the_array_is(dial: Any) -> None:
    robot = dial()
    files = []
    for picture in observation("base", 1)[CAMERA]:
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "PNG")
        files.append(file.getvalue())
    robot.check("base", 0)
    given = robot.ask({**observation("base", 1), CAMERA: files}, session_id="arm")
    assert given.tobytes() == undisturbed("base")[1]


def test_an_episode_with_seeds_is_repeated_to_the_bit(dial: Any) -> None:
    def episode(robot: Robot) -> list[bytes]:
        return [robot.ask(observation("base", number), seed=number).tobytes() for number in range(3)]

    first = episode(dial())
    assert first == episode(dial(ENDPOINT))
    assert first[0] != undisturbed("base")[0]


@pytest.mark.parametrize("seed", [1, None])
def test_the_servers_seed_is_that_of_requests_without_one(seed: int | None) -> None:
    engine = golden_engine()
    with serving(engine, seed=7) as url, connected(url, NO_DEFLATE) as websocket:
        robot = Robot(websocket)
        asked, again = (
            robot.ask(observation("base", 0), session_id=name, **given)
            for name, given in (("a", {} if seed is None else {"seed": seed}), ("b", {"seed": 7}))
        )
    assert (asked.tobytes() == again.tobytes()) == (seed is None)


# ---- published clients, with a checkpoint folder of DROID

FRAME = np.arange(180 * 320 * 3, dtype=np.uint32).astype(np.uint8).reshape(180, 320, 3)
CLIP = np.stack([FRAME, FRAME[::-1], FRAME[:, ::-1], FRAME])
SESSION = "7d444840-9dc0-11d1-b245-5ffdce74fad2"
SIX_KEYS = {
    "image_resolution": [180, 320],
    "needs_wrist_camera": True,
    "n_external_cameras": 2,
    "needs_stereo_camera": False,
    "needs_session_id": True,
    "action_space": "joint_position",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("dreamzero"))


@pytest.fixture(scope="module")
def droid(folder: Path) -> Iterator[str]:
    with serving(registry.load("dreamzero", checkpoint=folder, device="cpu", num_steps=5)) as url:
        yield url


def chunk(websocket: ClientConnection, message: dict[str, Any]) -> np.ndarray:
    """The reply, which must be what dreamzero's client and vllm-omni's example assert."""
    websocket.send(written(message))
    actions = read(websocket.recv(timeout=120))
    assert isinstance(actions, np.ndarray)
    assert (actions.dtype, actions.shape) == (np.dtype("<f4"), (24, 8))
    assert np.isfinite(actions).all()
    return actions


def test_roboarenas_client_reads_exactly_its_six_keys(droid: str) -> None:
    with connected(droid, NO_DEFLATE) as websocket:
        told = read(websocket.recv(timeout=60))
    assert told.keys() == ROBOARENA_KEYS
    assert told == SIX_KEYS


def test_vllm_omnis_example_reads_the_same_and_what_our_servers_tell(droid: str) -> None:
    with connected(droid + ENDPOINT, NO_DEFLATE) as websocket:
        told = read(websocket.recv(timeout=60))
    assert {key: told[key] for key in told if key not in ("instance_id", "max_payload_bytes")} == SIX_KEYS


@pytest.mark.parametrize("path", PATHS)
def test_one_frame_and_then_four_are_answered_in_every_window(path: str, droid: str) -> None:
    with connected(droid + path, NO_DEFLATE) as websocket:
        websocket.recv(timeout=60)
        replies = [chunk(websocket, dreamzero_observation(clip, SESSION)) for clip in (FRAME, *[CLIP] * 5)]
    assert len({reply.tobytes() for reply in replies}) == 6


@pytest.mark.parametrize("path", PATHS)
def test_zero_frames_one_by_one_are_answered(path: str, droid: str) -> None:
    with connected(droid + path, NO_DEFLATE) as websocket:
        websocket.recv(timeout=60)
        for _ in range(3):
            chunk(websocket, dreamzero_zeros(SESSION))


@pytest.mark.parametrize(("path", "reply"), [("", "reset successful"), (ENDPOINT, {"status": "reset successful"})])
def test_reset_is_answered_in_each_paths_words_and_begins_anew(path: str, reply: Any, droid: str) -> None:
    with connected(droid + path, NO_DEFLATE) as websocket:
        websocket.recv(timeout=60)
        seeded = {**dreamzero_observation(CLIP, SESSION), "seed": 1}
        first = chunk(websocket, seeded)
        assert chunk(websocket, seeded).tobytes() != first.tobytes()
        websocket.send(written(RESET))
        answer = websocket.recv(timeout=60)
        assert (answer if isinstance(answer, str) else read(answer)) == reply
        assert chunk(websocket, seeded).tobytes() == first.tobytes()


def test_our_client_gets_the_map_and_the_same_actions(droid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {key: value for key, value in dreamzero_observation(FRAME, SESSION).items() if key != "endpoint"}
    with relay.Policy(droid, relay.Codec.RAW) as policy:
        mapped = policy.infer({**asked, "seed": 3})["actions"]
    monkeypatch.setenv("WALLE_URL", droid)
    with relay.PolicyClient("dreamzero", codec=relay.Codec.RAW) as client:
        bare = client.infer({**asked, "seed": 3})
    assert mapped.shape == (24, 8)
    assert mapped.tobytes() == np.asarray(bare).tobytes()


def test_droids_numbering_is_a_setting_and_the_other_one_is_refused(folder: Path, droid: str) -> None:
    roboarena = dreamzero_observation(FRAME, SESSION)
    left, right = roboarena["observation/exterior_image_0_left"], FRAME[::-1]
    roboarena["observation/exterior_image_1_left"] = right
    numbered = {key: value for key, value in roboarena.items() if "exterior" not in key}
    numbered |= {"observation/exterior_image_1_left": left, "observation/exterior_image_2_left": right}
    replies = []
    with serving(registry.load("dreamzero", checkpoint=folder, device="cpu", num_steps=5, cameras="droid")) as url:
        for server, asked, other in ((url, numbered, roboarena), (droid, roboarena, numbered)):
            with connected(server + ENDPOINT, NO_DEFLATE) as websocket:
                websocket.recv(timeout=60)
                replies.append(chunk(websocket, {**asked, "seed": 1}).tobytes())
                websocket.send(written(other))
                refused = read(websocket.recv(timeout=60))
            assert "is not a camera of this policy" in refused["message"]
            assert "--cameras" in refused["message"]
    assert replies[0] == replies[1]


# ---- many episodes


@pytest.mark.slow
def test_five_hundred_episodes_one_after_the_other_leave_the_memory_flat() -> None:
    sizes: list[int] = []
    engine = golden_engine()
    with serving(engine) as url:
        for _ in range(50):
            with connected(url, NO_DEFLATE) as websocket:
                robot = Robot(websocket)
                for episode in range(10):
                    for number in range(2):
                        actions = robot.ask(observation("base", number), session_id=str(episode), num_steps=5)
                        assert isinstance(actions, np.ndarray), actions
                    assert len(engine.residents) <= 2  # one of the connection before may not be closed yet
                    robot.reset()
            sizes.append(resident_set_bytes())
    assert max(sizes[5:]) <= 1.05 * sizes[5]


def resident_set_bytes() -> int:
    """What this process takes; the most it took so far where that isn't told."""
    if sys.platform.startswith("linux"):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
