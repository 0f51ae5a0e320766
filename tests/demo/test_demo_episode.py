"""The closed loop: how often it asks, what it sends, when it ends, and what an ablation takes away."""

import math

import numpy as np
import pytest
from expert_policy import ExpertPolicy, IdlePolicy

from relay.demo.drawing import render_all
from relay.demo.episode import GREY, Ablation, run_episode, task_of
from relay.demo.robot import PROMPTS, robot_state, state_to_model
from relay.demo.tabletop import MAX_STEPS, Tabletop

SEED = (0, 3)


def test_a_good_policy_succeeds() -> None:
    episode = run_episode(ExpertPolicy([SEED]), SEED)
    assert episode.success
    assert episode.steps < 60


def test_an_idle_policy_fails_when_time_is_up() -> None:
    episode = run_episode(IdlePolicy(), SEED)
    assert not episode.success
    assert episode.steps == MAX_STEPS


@pytest.mark.parametrize("replan_every", [1, 4, 16])
def test_it_asks_again_after_as_many_actions_as_told(replan_every: int) -> None:
    episode = run_episode(ExpertPolicy([SEED], replan_every), SEED, replan_every=replan_every)
    assert [request.step for request in episode.requests] == list(range(0, episode.steps, replan_every))
    assert episode.success


def test_the_policy_sees_the_scene_and_the_task() -> None:
    policy = IdlePolicy()
    table = Tabletop(np.random.default_rng(SEED))
    episode = run_episode(policy, SEED)
    seen = policy.asked[0]
    assert np.array_equal(np.stack(list(seen["image"].values())), render_all(table))
    assert np.array_equal(seen["state"], state_to_model(robot_state(table)))
    assert seen["prompt"] == episode.prompt
    assert "num_steps" not in seen


def test_num_steps_is_asked_for() -> None:
    policy = IdlePolicy()
    run_episode(policy, SEED, num_steps=2)
    assert {seen["num_steps"] for seen in policy.asked} == {2}


def test_the_second_robot_sends_what_its_own_camera_sees() -> None:
    policy = IdlePolicy()
    run_episode(policy, SEED, robot="cross")
    table = Tabletop(np.random.default_rng(SEED), "cross")
    assert np.array_equal(np.stack(list(policy.asked[0]["image"].values())), render_all(table))


def test_an_adapter_is_asked_for_in_every_request() -> None:
    policy = IdlePolicy()
    run_episode(policy, SEED, adapter="demo-cross")
    assert {seen["adapter_dir"] for seen in policy.asked} == {"demo-cross"}


def test_no_adapter_is_named_unless_wanted() -> None:
    policy = IdlePolicy()
    run_episode(policy, SEED)
    assert not any("adapter_dir" in seen for seen in policy.asked)


def test_noise_seeds_repeat_with_the_scene_and_differ_within_it() -> None:
    first, second = IdlePolicy(), IdlePolicy()
    for policy in (first, second):
        run_episode(policy, SEED)
    seeds = [seen["seed"] for seen in first.asked]
    assert seeds == [seen["seed"] for seen in second.asked]
    assert len(set(seeds)) == len(seeds)


def test_no_noise_seed_is_sent_unless_wanted() -> None:
    policy = IdlePolicy()
    run_episode(policy, SEED, seeded=False)
    assert not any("seed" in seen for seen in policy.asked)


def test_a_prompt_changes_which_cube_moves() -> None:
    for prompt in PROMPTS:
        episode = run_episode(ExpertPolicy([SEED]), SEED, prompt=prompt, record=True)
        before, after = episode.states[0].cubes, episode.states[-1].cubes
        assert episode.success
        assert {name for name in before if before[name] != after[name]} == {task_of(prompt)[0]}


def test_an_unknown_prompt_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="nearest is 'put the red cube on the yellow plate'"):
        run_episode(IdlePolicy(), SEED, prompt="put the red cub on the yellow plate")


def test_ablating_the_prompt_sends_random_ones() -> None:
    asked = asked_under("prompt")
    assert {seen["prompt"] for seen in asked} == set(PROMPTS)


def test_ablating_the_cameras_sends_grey() -> None:
    for seen in asked_under("cameras"):
        assert all((frame == GREY).all() for frame in seen["image"].values())


def test_ablating_the_state_sends_another_one_every_time() -> None:
    states = np.stack([seen["state"] for seen in asked_under("state")])
    assert len(np.unique(states, axis=0)) > 20
    assert np.abs(states[:, :3]).max() < 1.5


@pytest.mark.parametrize("ablation", ["prompt", "cameras", "state"])
def test_an_ablation_takes_one_thing_only(ablation: Ablation) -> None:
    whole, ablated = IdlePolicy(), IdlePolicy()
    run_episode(whole, SEED)
    run_episode(ablated, SEED, ablate=ablation)
    for kept in {"prompt", "cameras", "state"} - {ablation}:
        key = "image" if kept == "cameras" else kept
        for one, other in zip(whole.asked, ablated.asked, strict=True):
            np.testing.assert_equal(one[key], other[key])


def test_states_are_kept_only_when_recorded() -> None:
    assert run_episode(ExpertPolicy([SEED]), SEED).states == ()
    recorded = run_episode(ExpertPolicy([SEED]), SEED, record=True)
    assert [table.steps for table in recorded.states] == list(range(recorded.steps + 1))


def test_each_step_is_shown_with_what_is_left_of_the_plan() -> None:
    left: list[int] = []
    run_episode(ExpertPolicy([SEED]), SEED, on_step=lambda table, plan: left.append(len(plan)))
    assert left[:6] == [0, 15, 14, 13, 12, 15]


def test_requests_hold_plan_times_and_sizes() -> None:
    episode = run_episode(ExpertPolicy([SEED], notes=("prompt truncated",)), SEED, record=True)
    request = episode.requests[1]
    assert request.plan.shape == (16, 4)
    assert request.plan[3, :3] == pytest.approx(episode.states[request.step + 4].tool, abs=2e-3)
    assert request.round_trip_ms > 0
    assert (request.server_ms, request.bytes_sent, request.notes) == (1.5, 20_000, ("prompt truncated",))


def test_a_reply_without_timing_leaves_the_server_time_unknown() -> None:
    assert math.isnan(run_episode(IdlePolicy(), SEED).requests[0].server_ms)


@pytest.mark.parametrize("shape", [(50, 32), (3, 4), (4,)])
def test_a_chunk_for_another_robot_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"this robot takes \(4 or more, 4\)"):
        run_episode(IdlePolicy(shape), SEED)


def test_actions_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        run_episode(IdlePolicy(value=math.nan), SEED)


def asked_under(ablation: Ablation) -> list[dict]:
    policy = IdlePolicy()
    run_episode(policy, SEED, ablate=ablation)
    return policy.asked
