"""The closed loop: look, ask the policy, execute the first actions of its chunk, ask again. Knows no server."""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from relay.demo.drawing import render_all
from relay.demo.expert import expert_command
from relay.demo.robot import (
    ACTION_DIM,
    PROMPTS,
    actions_from_model,
    chunk_to_commands,
    observation,
    robot_state,
    task_prompt,
)
from relay.demo.tabletop import CUBES, MAX_STEPS, PLATES, ROBOTS, Tabletop

Ablation: TypeAlias = Literal["prompt", "cameras", "state"]
"""What is taken from the policy, to see what it is worth.

* prompt: one of the six prompts by chance at every request;
* cameras: grey pictures;
* state: that of another scene at another time, at every request.
"""

GREY = 127
REPLAN_EVERY = 4


class Policy(Protocol):
    """What the loop needs of a policy; `relay.Policy` has it."""

    def infer(self, observation: dict[str, Any], /) -> Mapping[str, Any]:
        """Answer an observation with at least `actions`, float32 (horizon, 4)."""
        ...

    @property
    def last(self) -> CallFacts | None:
        """About the last call."""
        ...


class CallFacts(Protocol):
    """What the report tells about a call beyond its time."""

    @property
    def bytes_sent(self) -> int: ...
    @property
    def notes(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Request:
    """One question to the policy and its answer.

    Attributes:
        step: the step of the episode it was asked at.
        plan: the answer in robot units, float32 (horizon, 4): tool x, y, z in metres on the table and gripper opening.
        round_trip_ms: time from asking to having the answer.
        server_ms: time in the server's engine; NaN if the reply doesn't say.
        bytes_sent: size of the request.
        notes: the server's remarks.
    """

    step: int
    plan: NDArray[np.float32]
    round_trip_ms: float
    server_ms: float
    bytes_sent: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Episode:
    """What came of one attempt.

    Attributes:
        seed: the scene's seed.
        prompt: the task.
        success: whether the named cube was released on the named plate.
        steps: steps taken, 0.1 s each.
        requests: every exchange with the policy.
        states: the table before the first step and after each one, to draw from; empty unless recorded.
    """

    seed: tuple[int, ...]
    prompt: str
    success: bool
    steps: int
    requests: tuple[Request, ...]
    states: tuple[Tabletop, ...] = ()


def run_episode(
    policy: Policy,
    seed: tuple[int, ...],
    *,
    robot: str = ROBOTS[0],
    adapter: str | None = None,
    prompt: str | None = None,
    replan_every: int = REPLAN_EVERY,
    num_steps: int | None = None,
    ablate: Ablation | None = None,
    seeded: bool = True,
    record: bool = False,
    on_step: Callable[[Tabletop, NDArray[np.float32]], None] | None = None,
) -> Episode:
    """Let the policy try one task, for at most `MAX_STEPS` steps.

    Args:
        policy: answers observations in the demo robot's model units.
        seed: lays out the scene; numpy's `default_rng` takes it.
        robot: one of `tabletop.ROBOTS`.
        adapter: the LoRA adapter to ask for; None leaves it to the server.
        prompt: one of `robot.PROMPTS` instead of the scene's own.
        replan_every: actions executed from each chunk.
        num_steps: denoising steps to ask for; None leaves it to the server.
        ablate: what to take from the policy.
        seeded: whether to send a noise seed drawn from the scene's with every request, which makes the episode
            repeatable to the bit.
        record: whether to keep the table's states.
        on_step: called with the table before the first step and after each one, and with what is left of the plan,
            (n, 4) as `Request.plan`.

    Raises:
        ValueError: for a prompt that is not a task of this robot, or a reply that is not a chunk for it.
    """
    table = Tabletop(np.random.default_rng(seed), robot)
    if prompt is not None:
        table.cube, table.plate = task_of(prompt)
    prompt = task_prompt(table.cube, table.plate)
    ablation_rng, noise_rng = np.random.default_rng((*seed, 1)), np.random.default_rng((*seed, 2))
    requests: list[Request] = []
    states: list[Tabletop] = []

    def show(plan: NDArray[np.float32]) -> None:
        if record:
            states.append(table.copy())
        if on_step is not None:
            on_step(table, plan)

    show(np.empty((0, ACTION_DIM), np.float32))
    while not table.succeeded and table.steps < MAX_STEPS:
        seen = _look(table, prompt, ablate, ablation_rng)
        if num_steps is not None:
            seen["num_steps"] = num_steps
        if adapter is not None:
            seen["adapter_dir"] = adapter
        if seeded:
            seen["seed"] = int(noise_rng.integers(2**31))
        actions, request = _ask(policy, seen, table, replan_every)
        requests.append(request)
        for executed, command in enumerate(chunk_to_commands(actions[:replan_every], table.tool), 1):
            table.step(command)
            show(request.plan[executed:])
            if table.succeeded or table.steps == MAX_STEPS:
                break
    return Episode(seed, prompt, table.succeeded, table.steps, tuple(requests), tuple(states))


def task_of(prompt: str) -> tuple[str, str]:
    """The cube and the plate that a prompt names.

    Raises:
        ValueError: if it is none of the robot's six tasks; the message holds the nearest.
    """
    for cube in CUBES:
        for plate in PLATES:
            if prompt == task_prompt(cube, plate):
                return cube, plate
    nearest = difflib.get_close_matches(prompt, PROMPTS, n=1, cutoff=0.0)[0]
    raise ValueError(f"prompt {prompt!r} is not a task of this robot; the nearest is {nearest!r}")


def _look(table: Tabletop, prompt: str, ablate: Ablation | None, rng: np.random.Generator) -> dict[str, Any]:
    frames, state = render_all(table), robot_state(table)
    match ablate:
        case "prompt":
            prompt = PROMPTS[rng.integers(len(PROMPTS))]
        case "cameras":
            frames = np.full_like(frames, GREY)
        case "state":
            state = robot_state(_another_time(rng))
        case None:
            pass
    return observation(frames, state, prompt)


def _another_time(rng: np.random.Generator) -> Tabletop:
    """Another scene, some way into its episode."""
    table = Tabletop(rng)
    for _ in range(rng.integers(30)):
        table.step(expert_command(table))
    return table


def _ask(policy: Policy, seen: dict[str, Any], table: Tabletop, needed: int) -> tuple[NDArray[np.float32], Request]:
    asked = time.perf_counter()
    reply = policy.infer(seen)
    round_trip_ms = (time.perf_counter() - asked) * 1e3
    actions = np.asarray(reply["actions"])
    if actions.ndim != 2 or actions.shape[0] < needed or actions.shape[1] != ACTION_DIM:
        raise ValueError(
            f"the policy answered actions of shape {actions.shape}; this robot takes ({needed} or more, {ACTION_DIM})"
            " as the model 'demo' gives them"
        )
    if not np.isfinite(actions).all():
        raise ValueError("the policy answered actions that are not finite; the robot stays where it is")
    plan = actions_from_model(actions) + np.array([*table.tool, 0.0], np.float32)
    server_ms = float(reply.get("server_timing", {}).get("infer_ms", math.nan))
    facts = policy.last
    bytes_sent, notes = (facts.bytes_sent, facts.notes) if facts else (0, ())
    return actions, Request(table.steps, plan, round_trip_ms, server_ms, bytes_sent, notes)
