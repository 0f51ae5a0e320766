"""Checkpoints in every real format behind a real socket: golden actions, and chunks in a robot's own units."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_policy import running
from folders import ORBAX_PYTHON, norm_stats, write_lerobot, write_openpi, write_openpi_jax, write_relay
from numpy.typing import NDArray
from reference import expected_frame, expected_model_state, expected_robot_actions
from robot_observations import observation_of
from tiny import golden, image

import relay
from relay.models import registry
from relay.models.pi0.config import CAMERAS

NOISE = np.random.default_rng(3).standard_normal((10, 32), np.float32)
"""Starting noise (horizon, action_dim) of the tiny networks."""


@asynccontextmanager
async def serving(family: str, folder: Path, **choices: Any) -> AsyncIterator[relay.AsyncPolicy]:
    """A client of a server with this checkpoint."""
    engine = registry.load(family, checkpoint=folder, dtype="float32", device="cpu", max_batch=2, **choices)
    async with running(engine) as server, relay.AsyncPolicy(f"ws://127.0.0.1:{server.port}", relay.Codec.RAW) as policy:
        yield policy


async def ask(policy: relay.AsyncPolicy, observation: dict[str, Any]) -> NDArray[np.float32]:
    return (await policy.infer({"noise": NOISE, **observation}))["actions"]


WIDE = {"wide": (32, 32)}
"""Statistics as wide as the golden states, which have no padding."""


def openpi(folder: Path, family: str) -> Path:
    return write_openpi(folder, family, assets=WIDE, settings=untold(family))


def jax(folder: Path, family: str) -> Path:
    require_orbax()
    return write_openpi_jax(folder, family, assets=WIDE, settings={**untold(family), "action_horizon": 10})


def lerobot(folder: Path, family: str) -> Path:
    return write_lerobot(folder, family, cameras=CAMERAS, empty_cameras=0, state_dim=32, action_dim=32)


def untold(family: str) -> dict[str, Any]:
    """What openpi's files don't say."""
    kind = "quantile" if family == "pi05" else "z_score"
    told = {"max_token_len": 200, "num_steps": 10, "state_in_prompt": family == "pi05", "normalization": kind}
    return {"vision_heads": 2, **told}


def require_orbax() -> None:
    pytest.importorskip("tensorstore")
    if not ORBAX_PYTHON.exists():
        pytest.skip("Orbax is not here; `make references` installs it")


@pytest.mark.parametrize("family", ["pi0", "pi05"])
@pytest.mark.parametrize("write", [write_relay, openpi, jax, lerobot])
async def test_the_golden_actions_come_over_the_wire(
    write: Callable[[Path, str], Path], family: str, tmp_path: Path
) -> None:
    gold = golden(family)
    folder = write(tmp_path / "checkpoint", family)
    async with serving(family, folder) as policy:
        replies = [
            await policy.infer(
                {
                    "image": {camera: image(row, i) for i, camera in enumerate(CAMERAS) if gold[f"mask_{camera}"][row]},
                    "state": gold["state"][row],
                    "tokenized_prompt": gold["tokens"][row],
                    "tokenized_prompt_mask": gold["token_mask"][row],
                    "noise": gold["noise"][row],
                }
            )
            for row in (0, 1)
        ]
    actions = np.stack([reply["actions"] for reply in replies])
    assert np.abs(actions - gold["actions_f32_10"]).max() / gold["actions_f32_10"].std() <= 1e-4
    assert not gold["mask_right_wrist_0_rgb"][0]
    assert "cameras masked: right_wrist_0_rgb" in replies[0]["notes"]


CASES = [
    ("droid", "pi05", "pi05_droid", {"droid": (8, 8)}),
    ("droid", "pi0", "pi0_droid", {"droid": (8, 8)}),
    ("droid-jointpos", "pi05", "pi05_droid_jointpos_polaris", {"droid": (8, 8)}),
    ("aloha", "pi0", "pi0_aloha", {"trossen": (14, 14)}),
    ("aloha", "pi05", "pi05_aloha", {"trossen": (14, 14)}),
    ("aloha-sim", "pi0", "pi0_aloha_sim", {"lerobot/aloha_sim_transfer_cube_human": (14, 14)}),
    ("libero", "pi05", "pi05_libero", {"physical-intelligence/libero": (8, 7)}),
    ("libero-delta", "pi0", "pi0_libero", {"physical-intelligence/libero": (8, 7)}),
]
"""Robot profile, family, named configuration, and the asset ids with their widths."""


@pytest.mark.parametrize(("robot", "family", "config", "assets"), CASES, ids=[case[2] for case in CASES])
async def test_a_robots_own_observation_gets_a_chunk_in_its_own_units(
    robot: str, family: str, config: str, assets: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    folder = write_openpi(
        tmp_path, family, assets=assets, action_horizon=10, settings={"vision_heads": 2, "action_horizon": 10}
    )
    (state_dim, action_dim), kind = next(iter(assets.values())), "z_score" if family == "pi0" else "quantile"
    statistics = {"state": norm_stats(state_dim), "actions": norm_stats(action_dim, shift=0.2)}
    own = observation_of(robot)
    async with serving(family, folder, config=config) as policy:
        in_robot_units = await ask(policy, own)
        in_model_units = await ask(policy, in_model_format(robot, own, statistics, kind))
        contract = policy.get_server_metadata()["robot"]
    expected = expected_robot_actions(robot, own, in_model_units, statistics, kind)
    assert in_robot_units.shape == expected.shape == (10, len(contract["actions"]))
    np.testing.assert_allclose(in_robot_units, expected, rtol=0, atol=1e-4)
    assert contract["normalization"] == kind


def in_model_format(robot: str, own: dict[str, Any], statistics: Any, kind: str) -> dict[str, Any]:
    """The same observation with everything done that the profile does."""
    keys = {
        "droid": ("observation/exterior_image_1_left", "observation/wrist_image_left"),
        "libero": ("observation/image", "observation/wrist_image"),
        "aloha": ("cam_high", "cam_left_wrist", "cam_right_wrist"),
    }[robot.partition("-")[0]]
    frames = own.get("images", own)
    state = expected_model_state(robot, own, statistics, kind)
    return {
        "image": {camera: expected_frame(frames[key]) for camera, key in zip(CAMERAS, keys, strict=False)},
        "state": np.pad(state, (0, 32 - len(state))),
        "prompt": own["prompt"],
    }


async def test_two_requests_in_flight_start_from_their_own_states(tmp_path: Path) -> None:
    settings = {"vision_heads": 2, "action_horizon": 10}
    folder = write_openpi(tmp_path, "pi0", assets={"trossen": (14, 14)}, settings=settings)
    own = [observation_of("aloha", seed) for seed in range(4)]
    async with serving("pi0", folder, config="pi0_aloha") as policy:
        alone = [await ask(policy, observation) for observation in own]
        together = await asyncio.gather(*(ask(policy, observation) for observation in own * 3))
    for index, actions in enumerate(together):
        np.testing.assert_allclose(actions, alone[index % 4], rtol=0, atol=1e-4)
    assert np.abs(alone[0] - alone[1]).max() > 0.1


async def test_a_lerobot_checkpoint_is_served_by_its_own_keys(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    front, wrist = (random.integers(0, 256, (48, 64, 3), np.uint8) for _ in range(2))
    state = random.normal(size=6).astype(np.float32)
    flat = {"observation.images.front": front, "observation.images.wrist": wrist, "observation.state": state}
    nested = {"images": {"front": front, "wrist": wrist}, "state": state.tolist()}
    folder = write_lerobot(tmp_path, "pi05")
    statistics = {"state": norm_stats(6), "actions": norm_stats(6, shift=0.2)}
    low, high = (np.array(statistics["state"][name]) for name in ("q01", "q99"))
    async with serving("pi05", folder) as policy:
        replies = [await ask(policy, {**form, "prompt": "pick"}) for form in (flat, nested)]
        normalized = np.pad(2 * (state - low) / (high - low) - 1, (0, 26)).astype(np.float32)
        frames = {"front": front, "wrist": wrist}
        model = await ask(policy, {"image": frames, "state": normalized, "prompt": "pick"})
    low, high = (np.array(statistics["actions"][name]) for name in ("q01", "q99"))
    expected = (model[:, :6] + 1) / 2 * (high - low) + low
    assert replies[0].shape == (10, 6)
    assert np.array_equal(*replies)
    np.testing.assert_allclose(replies[0], expected, rtol=0, atol=1e-4)


async def test_a_state_outside_the_trained_range_is_told_once_and_not_clipped(tmp_path: Path) -> None:
    folder = write_openpi(tmp_path, "pi0", settings={"vision_heads": 2, "action_horizon": 10})
    near, far, further = (observation_of("droid") for _ in range(3))
    near["observation/joint_position"] = np.zeros(7)
    far["observation/joint_position"] = np.full(7, 57.3)
    further["observation/joint_position"] = np.full(7, 114.6)
    async with serving("pi0", folder, config="pi0_droid") as policy:
        notes = [(await policy.infer(each)).get("notes", []) for each in (near, far, further, far)]
        chunks = [await ask(policy, each) for each in (far, further)]
    ranges = [[note for note in told if "of the training data" in note] for told in notes]
    assert [len(told) for told in ranges] == [0, 1, 0, 0]
    assert "joint_" in ranges[1][0]
    assert not np.array_equal(*chunks)


async def test_a_robots_keys_without_a_profile_are_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = write_openpi(tmp_path, "pi05", assets=WIDE, settings=untold("pi05"))
    async with serving("pi05", folder) as policy:
        with pytest.raises(RuntimeError, match="start it with --robot NAME"):
            await policy.infer(observation_of("droid"))
    async with serving("pi05", folder) as policy:
        with pytest.raises(RuntimeError, match="start it with --robot NAME"):
            await policy.infer({"images": {"base_0_rgb": image(0, 0)}, "state": np.zeros(32), "prompt": "pick"})


@pytest.mark.parametrize("flat", [True, False])
async def test_vllm_omnis_keys_mean_model_format_where_there_are_no_statistics(flat: bool, tmp_path: Path) -> None:
    state = np.linspace(-1, 1, 32)
    plain = {"image": {"base_0_rgb": image(0, 0)}, "state": state, "prompt": "pick"}
    frames = {"observation.images.base_0_rgb": image(0, 0)} if flat else {"images": plain["image"]}
    async with serving("pi05", write_relay(tmp_path, "pi05")) as policy:
        theirs = await ask(policy, {**frames, "state": state, "prompt": "pick"})
        assert np.array_equal(theirs, await ask(policy, plain))
