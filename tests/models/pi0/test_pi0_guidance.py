"""Real-time chunking of the networks: against an Euler loop in NumPy, in mixed batches, in a robot's units."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny import golden, golden_inputs, image, tiny_model

from relay.demo.vocabulary import write_tokenizer
from relay.engine.base import Chunk, Work
from relay.engine.chunking import SCHEDULES, Chunking, Schedule
from relay.engine.normalization import Normalization, Statistics
from relay.models.pi0.config import CAMERAS, Pi0Config
from relay.models.pi0.engine import Pi0Engine
from relay.models.pi0.left_over import read_left_over
from relay.models.pi0.tokenizer import PromptTokenizer, load_vocabulary
from relay.models.pi0.units import RobotUnits
from relay.protocol.errors import ObservationError
from relay.protocol.messages import Options
from relay.robots.profile import ActionDimension, Camera, RobotProfile, StatePart
from relay.robots.profile_file import load_profile

Floats = NDArray[np.floating[Any]]
HORIZON, WIDTH = 10, 32
RANDOM = np.random.default_rng(0).standard_normal((HORIZON, WIDTH)).astype(np.float32)

LEFT_OVERS: dict[str, tuple[Floats, int, int]] = {
    "full": (RANDOM, 3, 7),
    "of the whole horizon": (RANDOM, 0, HORIZON),
    "all executed meanwhile": (RANDOM, HORIZON, HORIZON),
    "short": (RANDOM[:4], 2, 8),
    "shorter than the delay": (RANDOM[:2], 3, 6),
    "narrow": (RANDOM[:, :7], 2, 6),
    "short and narrow": (RANDOM[:5, :8], 1, 9),
}
"""Left-over, delay, execution horizon."""


@pytest.fixture(scope="module", params=["pi0", "pi05"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    write_tokenizer(path)
    return PromptTokenizer(load_vocabulary(path), 40, state_in_prompt=False)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "prepared shapes"])
def engine(request: pytest.FixtureRequest, family: str, tokenizer: PromptTokenizer) -> Pi0Engine:
    model = copy.copy(tiny_model(family))
    model.config = replace(model.config, state_in_prompt=False, num_steps=5)
    engine = Pi0Engine(family, model, tokenizer, max_batch=3, graphs=request.param)
    engine.warm_up(lambda phase, share: None)
    assert (engine.fixed is not None) == request.param
    return engine


@pytest.fixture
def scheduled(engine: Pi0Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[[Chunking], Pi0Engine]:
    """The engine with another schedule, which costs no new start."""

    def choose(chunking: Chunking) -> Pi0Engine:
        monkeypatch.setattr(engine, "_chunking", chunking)
        return engine

    return choose


def observation(family: str, row: int) -> dict[str, Any]:
    gold = golden(family)
    return {
        "image": {camera: image(row, i) for i, camera in enumerate(CAMERAS) if gold[f"mask_{camera}"][row]},
        "state": gold["state"][row],
        "tokenized_prompt": gold["tokens"][row],
        "tokenized_prompt_mask": gold["token_mask"][row],
    }


def guided(left_over: Floats, delay: int, execution_horizon: int, **options: Any) -> Options:
    return Options(
        prev_actions=left_over.astype(np.float32),
        inference_delay=delay,
        execution_horizon=execution_horizon,
        **options,
    )


def infer(engine: Pi0Engine, *requests: tuple[int, Options]) -> list[NDArray[np.float32]]:
    family = engine.spec.model
    work = [Work(engine.prepare(observation(family, row), options), options) for row, options in requests]
    chunks = engine.infer(work)
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    return [np.asarray(chunk.actions) for chunk in chunks if isinstance(chunk, Chunk)]


def euler(
    family: str, row: int, steps: int, left_over: Floats, delay: int, end: int, schedule: str, bound: float
) -> Floats:
    """The guided flow as published, with the network's velocity: arXiv 2506.07339, without the Jacobian."""
    model, inputs = tiny_model(family), golden_inputs(family, [row], steps)
    previous = np.zeros((HORIZON, WIDTH), np.float32)
    previous[: len(left_over), : left_over.shape[1]] = left_over
    end = min(end, len(left_over))
    start = min(delay, end)
    w = np.zeros(HORIZON)
    ramp = np.array([(end - i) / (end - start + 1) for i in range(start, end)])
    w[start:end] = {"linear": ramp, "exp": ramp * (np.exp(ramp) - 1) / (math.e - 1), "ones": 1, "zeros": 0}[schedule]
    w[:start] = 1
    x = golden(family)["noise"][row].astype(np.float32)
    with torch.inference_mode():
        seen = model.embed_prefix(inputs, model.new_cache(*inputs.layout.index.shape))
        for step in range(steps):
            t, tau = 1 - step / steps, step / steps
            v = model.denoise_step(torch.from_numpy(x)[None], model.condition(torch.tensor([t])), *seen)[0].numpy()
            g = bound if tau == 0 else min(bound, (1 - tau) / tau * ((1 - tau) ** 2 + tau**2) / (1 - tau) ** 2)
            v = v - g * (previous - (x - t * v)) * w[:, None]
            x = (x - v / steps).astype(np.float32)
    return x


def distance(actions: Floats, reference: Floats) -> float:
    return float(np.abs(actions - reference).max() / reference.std())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", LEFT_OVERS)
def test_a_guided_chunk_is_that_of_an_euler_loop(
    scheduled: Callable[[Chunking], Pi0Engine], family: str, schedule: Schedule, kind: str
) -> None:
    left_over, delay, end = LEFT_OVERS[kind]
    noise = golden(family)["noise"][1]
    options = guided(left_over, delay, end, noise=noise, num_steps=10)
    (actions,) = infer(scheduled(Chunking(schedule)), (1, options))
    reference = euler(family, 1, 10, left_over, delay, end, schedule, 10.0)
    assert distance(actions, reference) <= 1e-5


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("bound", [0.5, 25.0])
def test_the_bound_and_any_number_of_steps_go_into_the_guidance(
    scheduled: Callable[[Chunking], Pi0Engine], family: str, steps: int, bound: float
) -> None:
    left_over, delay, end = LEFT_OVERS["full"]
    noise = golden(family)["noise"][0]
    (actions,) = infer(
        scheduled(Chunking(max_weight=bound)), (0, guided(left_over, delay, end, noise=noise, num_steps=steps))
    )
    reference = euler(family, 0, steps, left_over, delay, end, "linear", bound)
    assert distance(actions, reference) <= 1e-5


def test_the_executed_steps_are_kept_and_the_unguided_ones_are_free(engine: Pi0Engine) -> None:
    plain, kept = infer(engine, (0, Options(seed=1))), infer(engine, (0, guided(RANDOM, 4, 6, seed=1)))
    before, after = np.abs(plain[0] - RANDOM), np.abs(kept[0] - RANDOM)
    assert after[:4].mean() < 0.2 * before[:4].mean()
    assert after[6:].mean() > 0.5 * before[6:].mean()


def test_rows_with_and_without_a_left_over_share_a_batch(engine: Pi0Engine) -> None:
    requests = [
        (0, guided(RANDOM, 3, 7, seed=1)),
        (1, Options(seed=2, num_steps=3)),
        (1, guided(RANDOM[:4, :7], 1, 5, seed=3, num_steps=7)),
    ]
    keys = {engine.batch_key(engine.prepare(observation(engine.spec.model, row), options)) for row, options in requests}
    assert len(keys) == 1
    together = np.stack(infer(engine, *requests))
    alone = np.stack([infer(engine, request)[0] for request in requests])
    assert distance(together, alone) <= 1e-5


def test_a_row_without_a_left_over_has_the_same_bytes_beside_one_with(engine: Pi0Engine) -> None:
    plain = infer(engine, (0, Options(seed=1)), (1, Options(seed=2)))
    mixed = infer(engine, (0, guided(RANDOM, 3, 7, seed=1)), (1, Options(seed=2)))
    assert mixed[1].tobytes() == plain[1].tobytes()
    assert not np.array_equal(mixed[0], plain[0])


def test_a_guided_batch_leaves_nothing_behind(engine: Pi0Engine) -> None:
    before = infer(engine, (0, Options(seed=1)))[0]
    infer(engine, (0, guided(RANDOM, 3, 7, seed=1)))
    assert infer(engine, (0, Options(seed=1)))[0].tobytes() == before.tobytes()


# ---- refusals


@pytest.fixture(scope="module")
def config() -> Pi0Config:
    return tiny_model("pi05").config


BAD: dict[str, tuple[Options, str]] = {
    "too long": (guided(np.zeros((11, 32)), 1, 5), r"prev_actions has 11 rows; a chunk of this policy has 10"),
    "too wide": (guided(np.zeros((3, 33)), 1, 3), r"prev_actions has 33 columns; this policy's actions have 32"),
    "no width": (guided(np.zeros((3, 0)), 1, 3), r"prev_actions has 0 columns; this policy's actions have 32"),
    "beyond the chunk": (guided(RANDOM, 1, 11), r"execution_horizon is 11; a chunk of this policy has 10 steps"),
    "late": (guided(RANDOM, 6, 5), r"inference_delay is 6, more than the execution_horizon of 5"),
    "huge": (guided(RANDOM * 1e30, 1, 5), r"prev_actions\[\d, \d+\] is .*e\+3\d.* expected actions of a chunk"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_a_left_over_is_refused_by_its_name(config: Pi0Config, kind: str) -> None:
    options, text = BAD[kind]
    with pytest.raises(ObservationError, match=text):
        read_left_over(options, config, Chunking(), None, None)


@pytest.mark.parametrize("columns", [7, 9, 32])
def test_under_a_profile_the_width_is_the_robots(config: Pi0Config, columns: int) -> None:
    with pytest.raises(ObservationError, match=f"prev_actions has {columns} columns; actions of droid have 8"):
        read_left_over(guided(np.zeros((3, columns)), 1, 3), config, Chunking(), units("droid"), np.zeros(8))


# ---- a robot's units


def units(robot: str, kind: Any = "quantile", style: Any = "openpi") -> RobotUnits:
    profile = load_profile(robot)
    random = np.random.default_rng(3)

    def statistics(width: int) -> Statistics:
        low = random.normal(size=width)
        return Statistics(mean=low, std=0.5 + random.random(width), q01=low, q99=low + 0.5 + random.random(width))

    return RobotUnits(
        profile, Normalization(kind, style, statistics(profile.state_dim), statistics(profile.action_dim))
    )


def droid_jointpos(actions: Floats, state: Floats) -> Floats:
    return actions - np.r_[state[:7], 0]


def libero_delta(actions: Floats, state: Floats) -> Floats:
    return actions - np.r_[state[:6], 0]


def aloha(actions: Floats, state: Floats) -> Floats:
    """openpi: src/openpi/policies/aloha_policy.py, with the state of the robot as it sent it."""
    joints = [*range(6), *range(7, 13)]
    signs = np.array([1, -1, -1, 1, 1, 1] * 2)
    result = np.empty_like(actions)
    result[:, joints] = (actions[:, joints] - state[joints]) * signs
    result[:, [6, 13]] = actions[:, [6, 13]] * (1.4910 + 0.6213) - 0.6213 - 0.5476
    return result


OFFSETS = {"droid-jointpos": droid_jointpos, "libero-delta": libero_delta, "aloha": aloha}
SCALES = {
    ("quantile", "openpi"): lambda x, s: (x - s.q01) / (s.q99 - s.q01 + 1e-6) * 2 - 1,
    ("z_score", "openpi"): lambda x, s: (x - s.mean) / (s.std + 1e-6),
    ("quantile", "lerobot"): lambda x, s: 2 * (x - s.q01) / (s.q99 - s.q01) - 1,
    ("z_score", "lerobot"): lambda x, s: (x - s.mean) / (s.std + 1e-8),
}


@pytest.mark.parametrize("robot", OFFSETS)
@pytest.mark.parametrize(("kind", "style"), SCALES)
def test_a_left_over_in_robot_units_starts_from_this_requests_state(
    config: Pi0Config, robot: str, kind: str, style: str
) -> None:
    random = np.random.default_rng(1)
    own = units(robot, kind, style)
    state = random.random(own.profile.state_dim)
    actions = random.normal(size=(4, own.profile.action_dim)).astype(np.float32)
    policy_state = own.profile.read(robot_observation(robot, state)).state
    left_over = read_left_over(guided(actions, 2, 3), config, Chunking(), own, policy_state)
    assert left_over is not None
    expected = SCALES[kind, style](OFFSETS[robot](actions, state), own.normalization.actions)
    np.testing.assert_allclose(left_over.actions[:4, : expected.shape[1]], expected, atol=2e-5)
    assert not left_over.actions[4:].any()
    assert not left_over.actions[:, expected.shape[1] :].any()


@pytest.mark.parametrize("robot", ["droid", *OFFSETS, "aloha-sim", "libero"])
def test_a_left_over_in_robot_units_is_the_inverse_of_the_answer(config: Pi0Config, robot: str) -> None:
    own = units(robot)
    state = np.random.default_rng(1).random(own.profile.state_dim)
    given = np.zeros((HORIZON, WIDTH), np.float32)
    given[:, : own.profile.action_dim] = RANDOM[:, : own.profile.action_dim]
    left_over = read_left_over(guided(own.to_robot(given, state), 2, 3), config, Chunking(), own, state)
    assert left_over is not None
    np.testing.assert_allclose(left_over.actions, given, atol=1e-5)


def robot_observation(robot: str, state: Floats) -> dict[str, Any]:
    frame = np.zeros((8, 8, 3), np.uint8)
    if robot.startswith("droid"):
        arm, gripper = state[:7], state[7:]
        keys = {"observation/joint_position": arm, "observation/gripper_position": gripper}
        return {"observation/exterior_image_1_left": frame, **keys}
    if robot.startswith("libero"):
        return {"observation/image": frame, "observation/state": state}
    return {"images": {"cam_high": frame.transpose(2, 0, 1)}, "state": state}


def test_a_model_format_left_over_is_taken_as_it_came(config: Pi0Config) -> None:
    left_over = read_left_over(guided(RANDOM, 2, 3), config, Chunking(), units("droid-jointpos"), None)
    assert left_over is not None
    np.testing.assert_array_equal(left_over.actions, RANDOM)


# ---- continuity in robot units

SPEED = 0.1
STEPS, DELAY, GUIDED = 20, 4, 12


@pytest.fixture
def arm(tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch) -> Pi0Engine:
    """A policy that always wants to move on from where the arm is, `SPEED` a step, as offsets from the state."""
    profile = RobotProfile(
        name="toy",
        cameras=(Camera("base_0_rgb", ("front",)),),
        state=(StatePart(("joint",), ("joint",), ("rad",)),),
        actions=(ActionDimension("joint", kind="position", relative=True),),
    )
    ends = Statistics(q01=np.zeros(1), q99=np.full(1, 4.0))
    own = RobotUnits(profile, Normalization("quantile", "openpi", ends, ends))
    model = copy.copy(tiny_model("pi05"))
    model.config = replace(model.config, state_in_prompt=False, num_steps=10, state_dim=1, action_horizon=STEPS)
    ramp = own.normalization.normalize_actions(SPEED * np.arange(1, STEPS + 1)[:, None])
    target = torch.zeros(1, STEPS, WIDTH)
    target[0, :, :1] = torch.from_numpy(ramp)
    calls = iter(range(10**6))

    def straight_to_the_target(x: torch.Tensor, *seen: Any) -> torch.Tensor:
        time = 1 - next(calls) % 10 / 10
        return (x - target) / time

    monkeypatch.setattr(model, "denoise_step", straight_to_the_target, raising=False)
    return Pi0Engine("pi05", model, tokenizer, robot=own, max_batch=1)


def drive(arm: Pi0Engine, *, guide: bool, rebase: bool = True, requests: int = 8) -> tuple[Floats, list[int]]:
    """The executed actions, and at which of them a new chunk begins; the joint is half a step ahead of its target.

    The next chunk is asked for two steps after the one before has come, and comes `DELAY` steps later.
    """
    executed: list[float] = [0.0]
    seams: list[int] = []
    chunk, base = np.empty((0, 1), np.float32), 0.0
    for _ in range(requests):
        joint = executed[-1] + 0.5 * SPEED
        left_over = chunk if rebase else chunk - base + joint  # the network would see what it gave, from the old base
        options = guided(left_over, DELAY, GUIDED, seed=1) if guide and len(chunk) else Options(seed=1)
        seen = {"front": np.zeros((8, 8, 3), np.uint8), "joint": joint, "prompt": "go"}
        (answer,) = arm.infer([Work(arm.prepare(seen, options), options)])
        assert isinstance(answer, Chunk)
        start = min(DELAY, len(chunk))
        executed += chunk[:start, 0].tolist()
        seams.append(len(executed))
        fresh = np.asarray(answer.actions)
        executed += fresh[start : start + 2, 0].tolist()
        chunk, base = fresh[start + 2 :], joint
    return np.array(executed), seams[1:]


def worst_seam(executed: Floats, seams: list[int]) -> float:
    steps = np.abs(np.diff(executed))
    return max(steps[seam - 1] for seam in seams) / float(np.median(steps))


def test_a_constant_velocity_goes_on_across_chunks(arm: Pi0Engine) -> None:
    assert worst_seam(*drive(arm, guide=True)) <= 1.2


def test_without_guidance_the_same_arm_jumps(arm: Pi0Engine) -> None:
    assert worst_seam(*drive(arm, guide=False)) > 1.4


def test_with_the_old_base_the_same_arm_jumps(arm: Pi0Engine) -> None:
    assert worst_seam(*drive(arm, guide=True, rebase=False)) > 1.4
