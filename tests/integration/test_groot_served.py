"""GR00T checkpoints behind a real socket: every form of observation, both protocols, every client, every refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from groot_folders import (
    ACTION_WIDTHS,
    CAMERAS,
    DROID,
    HORIZONS,
    IDS,
    LANGUAGE,
    LIBERO,
    STATE_WIDTHS,
    WIDTHS,
    observation,
    write_isaac,
    write_lerobot,
)
from step_by_step import IDENTITY, expected_actions
from stock_environment import needs_stock, run_script
from threaded_server import serving

import relay
from relay.models import registry

pytestmark = pytest.mark.vocab

TAGS = [DROID, LIBERO]
SIZE = (64, 80)
POSE = np.array([0, 0, 0, 1, 0, 0, 0, 1, 0])
"""At the origin, unturned, in DROID's form."""


def load(folder: Path, **choices: Any) -> Any:
    return registry.load("groot", checkpoint=folder, device="cpu", **{"dtype": "float32", "max_batch": 1, **choices})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two embodiments, in shards."""
    return write_isaac(tmp_path_factory.mktemp("groot"), tags=TAGS, shards=2)


@pytest.fixture(scope="module", params=TAGS)
def tag(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def url(folder: Path, tag: str) -> Iterator[str]:
    with serving(load(folder, embodiment=tag)) as url:
        yield url


@pytest.fixture
def policy(url: str) -> Iterator[relay.Policy]:
    with relay.Policy(url, relay.Codec.RAW) as policy:
        yield policy


def ask(policy: relay.Policy, asked: Mapping[str, Any], seed: int = 7) -> dict[str, Any]:
    return policy.infer({**asked, "seed": seed})["actions"]


def as_bytes(actions: Mapping[str, Any]) -> dict[str, bytes]:
    return {key.removeprefix("action."): value.tobytes() for key, value in actions.items()}


def flat(asked: Mapping[str, Any]) -> dict[str, Any]:
    """As Isaac-GR00T's simulator wrapper sends it."""
    video = {f"video.{camera}": frames for camera, frames in asked["video"].items()}
    state = {f"state.{key}": value for key, value in asked["state"].items()}
    return {**video, **state, **{key: text[0] for key, text in asked["language"].items()}}


def vllm(asked: Mapping[str, Any]) -> dict[str, Any]:
    """As vLLM-Omni's example sends it: frames under `images`, the text as `prompt`."""
    return {"images": asked["video"], "state": asked["state"], "prompt": text_of(asked)}


def lerobot(asked: Mapping[str, Any]) -> dict[str, Any]:
    """As lerobot's client for vLLM-Omni sends it: a list of cameras, and lists of numbers."""
    images = [frames[0] if frames.shape[1] > 1 else frames[0, 0] for frames in asked["video"].values()]
    state = {key: value[0, 0].tolist() for key, value in asked["state"].items()}
    return {"images": images, "state": state, "prompt": text_of(asked)}


def bare(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Without leading axes, in float64, single numbers as such."""
    state = {key: value[0, 0].astype(np.float64) for key, value in asked["state"].items()}
    state = {key: float(value[0]) if len(value) == 1 else value for key, value in state.items()}
    video = {camera: frames[0] if frames.shape[1] > 1 else frames[0, 0] for camera, frames in asked["video"].items()}
    return {"video": video, "state": state, "language": text_of(asked)}


def text_of(asked: Mapping[str, Any]) -> str:
    (((text,),),) = asked["language"].values()
    return text


@pytest.mark.parametrize("form", [flat, vllm, lerobot, bare])
def test_every_form_gets_the_same_bytes(form: Any, policy: relay.Policy, tag: str) -> None:
    asked = observation(tag)
    assert as_bytes(ask(policy, form(asked))) == as_bytes(ask(policy, asked))


def test_the_flat_form_is_answered_with_flat_keys(policy: relay.Policy, tag: str) -> None:
    assert list(ask(policy, flat(observation(tag)))) == [f"action.{key}" for key in ACTION_WIDTHS[tag]]


def test_the_reply_has_one_float32_array_per_action_group(policy: relay.Policy, tag: str) -> None:
    actions = ask(policy, observation(tag))
    assert {key: value.shape for key, value in actions.items()} == {
        key: (1, HORIZONS[tag], width) for key, width in ACTION_WIDTHS[tag].items()
    }
    assert {value.dtype for value in actions.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize(("side", "seed"), [(256, 11), (512, 12)])
def test_a_reply_is_what_a_step_by_step_computation_gives(side: int, seed: int, tag: str, tmp_path: Path) -> None:
    folder = write_isaac(tmp_path, tags=[tag], processor=IDENTITY)
    asked = observation(tag, seed, (side, side))
    with serving(load(folder)) as url, relay.Policy(url, relay.Codec.RAW) as policy:
        actions = ask(policy, asked, seed)
    expected = expected_actions(folder, tag, IDS[tag], asked, seed)
    assert actions.keys() == expected.keys()
    for key, values in expected.items():
        assert np.abs(actions[key] - values).max() <= 1e-4, key
        assert values.std(axis=1).min() > 1e-3, key  # steps differ, so that a wrong order would show


def test_jpeg_frames_are_taken_as_they_are(policy: relay.Policy, url: str, tag: str) -> None:
    asked = observation(tag)
    with relay.Policy(url, relay.Codec.LOSSLESS) as lossless:
        assert as_bytes(ask(lossless, asked)) == as_bytes(ask(policy, asked))


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(policy: relay.Policy, tag: str) -> None:
    asked = observation(tag)
    first = as_bytes(ask(policy, asked, 3))
    assert as_bytes(ask(policy, asked, 4)) != first
    assert as_bytes(ask(policy, asked, 3)) == first


def test_a_seed_is_bfloat16_noise_of_the_models_own_shape(policy: relay.Policy, tag: str) -> None:
    shape = (1, WIDTHS["action_horizon"], WIDTHS["max_action_dim"])
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.bfloat16)
    asked = observation(tag)
    with_noise = policy.infer({**asked, "noise": drawn[0].float().numpy()})["actions"]
    assert as_bytes(with_noise) == as_bytes(ask(policy, asked, 5))


def test_requests_without_a_seed_differ(policy: relay.Policy, tag: str) -> None:
    asked = observation(tag)
    first, second = (as_bytes(policy.infer(asked)["actions"]) for _ in range(2))
    assert first != second


def test_steps_are_those_that_are_asked_for(policy: relay.Policy, tag: str) -> None:
    asked = observation(tag)
    assert as_bytes(ask(policy, {**asked, "num_steps": 4})) == as_bytes(ask(policy, asked))
    assert as_bytes(ask(policy, {**asked, "num_inference_steps": 2})) != as_bytes(ask(policy, asked))


def test_a_state_in_other_units_is_answered_with_a_note_once_a_session(policy: relay.Policy, tag: str) -> None:
    key = "joint_position" if tag == DROID else "roll"
    asked = changed(tag, "state", key, np.full((1, 1, STATE_WIDTHS[tag][key]), 57.3))
    (note,) = policy.infer({**asked, "session_id": "degrees"})["notes"]
    assert note.startswith(f"state['{key}'][")
    assert "is 57.3, far outside" in note
    assert note.endswith("of the training data; units?")
    assert "notes" not in policy.infer({**asked, "session_id": "degrees"})
    assert "notes" not in policy.infer({**observation(tag), "session_id": "radians"})


def test_two_sessions_on_one_connection_do_not_mix(policy: relay.Policy, tag: str) -> None:
    left, right = observation(tag, 1), observation(tag, 2)
    alone = as_bytes(ask(policy, left)), as_bytes(ask(policy, right))
    asked = [({**left, "session_id": "left"}, 0), ({**right, "session_id": "right"}, 1)] * 2
    for one, which in asked:
        assert as_bytes(ask(policy, one)) == alone[which]


def test_the_openpi_handshake_tells_what_a_loop_needs(policy: relay.Policy, tag: str) -> None:
    told = policy.get_server_metadata()
    observed = {
        "video": {
            camera: [np.zeros((*told["image_resolution"], 3), np.uint8)] * len(told["frames"])
            for camera in told["cameras"]
        },
        "state": {part["key"]: POSE if "form" in part else np.zeros(part["dim"]) for part in told["state"]},
        "language": {told["language_key"]: "open the drawer"},
    }
    actions = ask(policy, observed)
    for group in told["actions"]:
        assert actions[group["key"]].shape == (1, told["action_horizon"], group["dim"])
        assert group["kind"] == "absolute"


def test_the_openpi_handshake_has_the_checkpoints_values(policy: relay.Policy, tag: str) -> None:
    told = policy.get_server_metadata()
    assert told["model"] == "groot"
    assert told["cameras"] == list(CAMERAS[tag])
    assert told["embodiment_tag"] == tag
    assert told["supported_embodiments"] == TAGS
    assert told["num_steps"] == 4
    assert {part["key"]: part["dim"] for part in told["state"]} == STATE_WIDTHS[tag]
    assert {group["key"]: group["dim"] for group in told["actions"]} == ACTION_WIDTHS[tag]
    assert told["frames"] == ([-15, 0] if tag == DROID else [0])
    assert "state_dim" not in told


def test_the_vllm_handshake_has_its_documented_keys(url: str, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WALLE_URL", url)
    with relay.PolicyClient("groot") as client:
        told = client.get_server_metadata()
    ours = {"instance_id", "max_payload_bytes"}
    assert {key: value for key, value in told.items() if key not in ours} == {
        "image_resolution": [180, 320],
        "needs_session_id": True,
        "embodiment_tag": tag,
        "action_horizon": HORIZONS[tag],
        "action_keys": list(ACTION_WIDTHS[tag]),
        "supported_embodiments": TAGS,
    }


def test_policy_client_returns_the_bare_map(
    url: str, policy: relay.Policy, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WALLE_URL", url)
    asked = {**observation(tag), "seed": 7, "session_id": "arm"}
    with relay.PolicyClient("groot") as client:
        actions = client.infer(asked)
    assert isinstance(actions, dict)
    assert as_bytes(actions) == as_bytes(ask(policy, observation(tag)))


def test_async_policy_gets_the_map(url: str, policy: relay.Policy, tag: str) -> None:
    async def infer() -> dict[str, Any]:
        async with relay.AsyncPolicy(url, relay.Codec.RAW) as client:
            return (await client.infer({**observation(tag), "seed": 7}))["actions"]

    assert as_bytes(asyncio.run(infer())) == as_bytes(ask(policy, observation(tag)))


@needs_stock
def test_the_stock_openpi_client_gets_the_map(url: str, policy: relay.Policy, tag: str, tmp_path: Path) -> None:
    asked = flat(observation(tag))
    np.savez(tmp_path / "asked.npz", **{key: value for key, value in asked.items() if key != LANGUAGE[tag]})
    told = run_script("stock_groot_client.py", url, str(tmp_path / "asked.npz"), LANGUAGE[tag], asked[LANGUAGE[tag]][0])
    expected = ask(policy, asked)
    assert {key: np.array(value, np.float32).tobytes() for key, value in told["actions"].items()} == {
        key: value.tobytes() for key, value in expected.items()
    }
    assert told["metadata"]["embodiment_tag"] == tag


def refused(url: str, asked: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """The sentence that vLLM-Omni's path answers with."""
    monkeypatch.setenv("WALLE_URL", url)
    with relay.PolicyClient("groot") as client:
        answer = client.infer(asked)
        assert isinstance(answer, dict)
        assert answer["type"] == "error"
    return str(answer["message"])


def changed(tag: str, part: str, key: str, value: Any) -> dict[str, Any]:
    """The reference form with one entry of a map replaced, or left out for None."""
    asked = observation(tag)
    entries = {**asked[part], key: value}
    return {**asked, part: {name: entry for name, entry in entries.items() if entry is not None}}


def test_a_wrong_number_of_frames_is_refused(url: str, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    camera, wanted = CAMERAS[tag][0], "2 frames" if tag == DROID else "one frame"
    message = refused(url, changed(tag, "video", camera, np.zeros((1, 3, *SIZE, 3), np.uint8)), monkeypatch)
    assert camera in message
    assert "holds 3 frames" in message
    assert f"takes {wanted} of each camera" in message


def test_a_missing_part_of_the_state_is_refused(url: str, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = next(iter(STATE_WIDTHS[tag]))
    assert key in refused(url, changed(tag, "state", key, None), monkeypatch)


def test_foreign_joint_names_are_refused_with_the_expected_ones(
    url: str, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refused(url, {**observation(tag), "state": {"shoulder_pan": [0.1]}}, monkeypatch)
    assert all(key in message for key in STATE_WIDTHS[tag])


def test_a_wrong_width_of_the_state_is_refused(url: str, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key, width = next(iter(STATE_WIDTHS[tag].items()))
    message = refused(url, changed(tag, "state", key, np.zeros(width + 2)), monkeypatch)
    assert key in message
    assert str(width + 2) in message
    assert str(width) in message


def test_a_missing_camera_is_refused(url: str, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CAMERAS[tag][1] in refused(url, changed(tag, "video", CAMERAS[tag][1], None), monkeypatch)


def test_an_unknown_camera_is_refused_with_the_known_ones(url: str, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = observation(tag)["video"][CAMERAS[tag][0]]
    message = refused(url, changed(tag, "video", "wrist_imaje", frames), monkeypatch)
    assert "wrist_imaje" in message
    assert CAMERAS[tag][1] in message


def test_a_wrong_number_of_cameras_in_a_list_is_refused(url: str, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = lerobot(observation(tag))
    message = refused(url, {**asked, "images": asked["images"][:1]}, monkeypatch)
    assert "images" in message
    assert CAMERAS[tag][1] in message


@pytest.mark.parametrize("text", [{}, {"prompt": ""}, {"promt": "pick up the fork"}])
def test_an_observation_without_an_instruction_is_refused(
    text: dict[str, str], url: str, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {key: value for key, value in observation(tag).items() if key != "language"}
    assert "prompt" in refused(url, {**asked, **text}, monkeypatch)


@pytest.mark.parametrize("noise", [np.zeros((16, 7), np.float32), np.zeros((40, 132), np.float32)])
def test_noise_of_another_shape_is_refused_with_the_models(
    noise: Any, url: str, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refused(url, {**observation(tag), "noise": noise}, monkeypatch)
    assert "noise" in message
    assert "(40, 20)" in message


def test_a_refused_request_leaves_the_connection_usable(url: str, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WALLE_URL", url)
    with relay.PolicyClient("groot") as client:
        assert client.infer({"prompt": "pick"})["type"] == "error"
        assert isinstance(client.infer(observation(tag)), dict)
        assert "type" not in client.infer(observation(tag))


def test_rows_that_share_a_batch_get_what_they_get_alone(folder: Path) -> None:
    engine = load(folder, embodiment=DROID, max_batch=4)
    asked = [observation(DROID, seed) for seed in range(4)]
    asked[1]["language"] = {LANGUAGE[DROID]: [["a much longer instruction about bowls and plates and cups"]]}
    with serving(engine) as url:
        with relay.Policy(url, relay.Codec.RAW) as policy:
            alone = [ask(policy, one) for one in asked]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda one: once(url, one), asked * 3))
    for number, actions in enumerate(together):
        for key, values in alone[number % 4].items():
            assert np.abs(actions[key] - values).max() <= 1e-4, key


def once(url: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    with relay.Policy(url, relay.Codec.RAW) as policy:
        return ask(policy, asked)


@pytest.mark.parametrize("flat_statistics", [False, True])
def test_a_lerobot_folder_is_served(flat_statistics: bool, tmp_path: Path) -> None:
    engine = load(write_lerobot(tmp_path, flat=flat_statistics))
    asked = observation(LIBERO)
    if flat_statistics:
        joined = np.concatenate([value[0, 0] for value in asked["state"].values()])
        asked = {"video": asked["video"], "state": {"state": joined}, "prompt": "pick"}
    with serving(engine) as url, relay.Policy(url) as policy:
        actions = ask(policy, asked)
    shapes = {"action": (1, 16, 7)} if flat_statistics else {key: (1, 16, 1) for key in ACTION_WIDTHS[LIBERO]}
    assert {key: value.shape for key, value in actions.items()} == shapes


def test_a_lerobot_folder_answers_as_the_same_weights_of_isaac(tmp_path: Path) -> None:
    replies: list[dict[str, bytes]] = []
    for write in (write_isaac, write_lerobot):
        with serving(load(write(tmp_path / write.__name__))) as url, relay.Policy(url, relay.Codec.RAW) as policy:
            replies.append(as_bytes(ask(policy, observation(LIBERO))))
    assert replies[0] == replies[1]


def test_a_default_prompt_answers_for_a_missing_one_and_is_told(tmp_path: Path) -> None:
    engine = load(write_isaac(tmp_path), default_prompt="Pick up the black bowl!")
    asked = observation(LIBERO)
    with serving(engine) as url, relay.Policy(url, relay.Codec.RAW) as policy:
        assert policy.get_server_metadata()["default_prompt"] == "Pick up the black bowl!"
        without = {key: value for key, value in asked.items() if key != "language"}
        assert as_bytes(ask(policy, without)) == as_bytes(ask(policy, asked))
