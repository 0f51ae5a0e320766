"""The engine: rows in, chunks out, each on its own."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
from folders import write_json, write_openpi
from numpy.typing import NDArray
from tiny import golden, image, tiny_model

from relay.demo.vocabulary import write_tokenizer
from relay.engine.base import Chunk, Work
from relay.engine.chunking import Chunking
from relay.models import registry
from relay.models.pi0.config import CAMERAS
from relay.models.pi0.engine import Pi0Engine
from relay.models.pi0.tokenizer import PromptTokenizer, load_vocabulary
from relay.models.pi0.weights import CheckpointError
from relay.protocol.errors import ObservationError
from relay.protocol.messages import Options


@pytest.fixture(scope="module", params=["pi0", "pi05"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pi0Engine:
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    write_tokenizer(path)
    tokenizer = PromptTokenizer(load_vocabulary(path), 48, request.param == "pi05")
    return Pi0Engine(request.param, tiny_model(request.param), tokenizer, max_batch=4)


def observation(engine: Pi0Engine, row: int) -> dict[str, object]:
    """A golden observation as a client would send it, with token ids."""
    gold = golden(engine.spec.model)
    return {
        "image": {camera: image(row, i) for i, camera in enumerate(CAMERAS)},
        "image_mask": {camera: bool(gold[f"mask_{camera}"][row]) for camera in CAMERAS},
        "state": gold["state"][row],
        "tokenized_prompt": gold["tokens"][row],
        "tokenized_prompt_mask": gold["token_mask"][row],
    }


def infer(engine: Pi0Engine, *rows: tuple[int, Options]) -> list[NDArray[np.float32]]:
    work = [Work(engine.prepare(observation(engine, row), options), options) for row, options in rows]
    chunks = engine.infer(work)
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    return [np.asarray(chunk.actions) for chunk in chunks if isinstance(chunk, Chunk)]


def test_observations_with_given_noise_give_the_golden_actions(engine: Pi0Engine) -> None:
    gold = golden(engine.spec.model)
    actions = infer(engine, *[(row, Options(noise=gold["noise"][row])) for row in (0, 1)])
    reference = gold["actions_f32_10"]
    assert np.abs(np.stack(actions) - reference).max() / reference.std() <= 1e-4


def test_the_handshake_is_vllm_omnis_with_the_checkpoints_sizes(engine: Pi0Engine) -> None:
    spec = engine.spec
    expected = {
        "image_resolution": list(spec.image_resolution),
        "n_external_cameras": 1,
        "needs_wrist_camera": True,
        "needs_stereo_camera": False,
        "needs_session_id": False,
        "action_space": "joint_position",
        "action_horizon": spec.action_horizon,
        "action_dim": spec.action_dim,
        "max_cameras": 3,
    }
    if spec.model == "pi05":
        expected["max_action_dim"] = spec.action_dim
    assert spec.handshake == expected


def test_the_same_seed_gives_the_same_bytes(engine: Pi0Engine) -> None:
    first, second = infer(engine, (0, Options(seed=7))), infer(engine, (0, Options(seed=7)))
    assert first[0].tobytes() == second[0].tobytes()


def test_without_a_seed_every_request_draws_its_own(engine: Pi0Engine) -> None:
    first, second = infer(engine, (0, Options()), (0, Options()))
    assert not np.allclose(first, second)


@pytest.mark.parametrize("seed", [-(2**63), 0, 2**64 - 1])
def test_the_whole_range_of_seeds_is_taken(engine: Pi0Engine, seed: int) -> None:
    assert np.isfinite(infer(engine, (0, Options(seed=seed, num_steps=1)))[0]).all()


def test_rows_of_one_batch_do_not_depend_on_each_other(engine: Pi0Engine) -> None:
    requests = [(0, Options(seed=1)), (1, Options(seed=2, num_steps=3)), (1, Options(seed=1))]
    together = infer(engine, *requests)
    alone = [infer(engine, request)[0] for request in requests]
    assert np.abs(np.stack(together) - np.stack(alone)).max() / np.std(alone) <= 1e-5


def test_warm_up_reports_progress_up_to_the_end(engine: Pi0Engine) -> None:
    shares: list[float] = []
    engine.warm_up(lambda phase, share: shares.append(share))
    assert shares[-1] == 1.0


def test_the_options_of_real_time_chunking_reach_the_engine() -> None:
    served = registry.load("demo", checkpoint=None, device="cpu", rtc_schedule="exp", rtc_max_guidance_weight=3.0)
    assert served._chunking == Chunking("exp", 3.0)  # pyright: ignore
    assert {"prev_actions", "inference_delay", "execution_horizon"} <= served.spec.supported_options


def test_options_are_checked_before_the_device(engine: Pi0Engine) -> None:
    with pytest.raises(ObservationError, match="num_steps must be between"):
        engine.prepare(observation(engine, 0), Options(num_steps=1000))


def test_each_row_owns_its_answer(engine: Pi0Engine, tmp_path: Path) -> None:
    first, second = infer(engine, (0, Options(seed=1)), (0, Options(seed=1)))
    first[:] = 0
    assert second.any()


def test_damaged_weights_are_noticed_before_the_server_is_ready(engine: Pi0Engine) -> None:
    damaged = copy.deepcopy(tiny_model(engine.spec.model))
    damaged.action_out.weight.data[0, 0] = float("nan")
    broken = Pi0Engine("broken", damaged, engine._tokenizer, max_batch=1)
    with pytest.raises(CheckpointError, match="not finite"):
        broken.warm_up(lambda phase, share: None)


@pytest.mark.parametrize("keys", [("image", "wrist"), ("image/front", "image/wrist")], ids=["one key", "a map"])
def test_a_robot_with_a_key_image_of_its_own_is_served(keys: tuple[str, str], tmp_path: Path) -> None:
    folder = write_openpi(tmp_path, "pi05", action_horizon=15)
    cameras = dict(zip(("base_0_rgb", "left_wrist_0_rgb"), keys, strict=True))
    write_json(tmp_path / "arm.yaml", {"base": "droid", "cameras": cameras})  # JSON is YAML
    robot = str(tmp_path / "arm.yaml")
    served = registry.load("pi05", checkpoint=folder, config="pi05_droid", robot=robot, device="cpu", max_batch=1)
    served.warm_up(lambda phase, share: None)
    joints = {"observation/joint_position": np.zeros(7), "observation/gripper_position": 0.5}
    prepared = served.prepare({keys[0]: image(0, 0), **joints, "prompt": "pick"}, Options())
    (chunk,) = served.infer([Work(prepared, Options())])
    assert isinstance(chunk, Chunk)
    assert np.asarray(chunk.actions).shape == (15, 8)
