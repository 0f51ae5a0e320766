"""Guidance by two workers: each computes one branch, and the actions are those of one worker that computes both."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from tiny_dreamzero import SCENARIOS, distance, prompt
from tiny_dreamzero_model import model, noise, recorded, seen

from relay.models.dreamzero.branches import Pair
from relay.models.dreamzero.memory import SessionMemory
from relay.models.dreamzero.model import DreamZero, Imagined, Steps
from relay.models.dreamzero.schedule import DynamicSteps, FixedSteps

pytestmark = pytest.mark.dreamzero


class Workers:
    """Two networks with the same weights and a session on each."""

    def __init__(self) -> None:
        self.pair = Pair(patience=60)
        self.networks = [DreamZero(model().network, prompt("NEG"), plan) for plan in self.pair.plans]
        self.memories = [SessionMemory(), SessionMemory()]

    def ask(
        self, scenario: str, number: int, steps: Callable[[], Steps] | None = None, *, want_video: bool = False
    ) -> tuple[Imagined, Imagined]:
        def work(place: int) -> Imagined:
            chosen = steps() if steps else FixedSteps(8)
            memory, asked = self.memories[place], seen(scenario, number)
            return self.networks[place].infer(memory, asked, noise(), chosen, want_video=want_video)

        answers = self.pair.run(work)
        for memory, answer in zip(self.memories, answers, strict=True):
            memory.episode = answer.episode
        return answers


@pytest.mark.parametrize("scenario", [pytest.param("base", marks=pytest.mark.slow), "relang"])
def test_both_workers_get_what_one_alone_gets(scenario: str) -> None:
    workers = Workers()
    for number in range(len(SCENARIOS[scenario])):
        alone = recorded(scenario)[number].answer
        for answer in workers.ask(scenario, number, want_video=True):
            for given, expected in ((answer.actions, alone.actions), (answer.video, alone.video)):
                assert (given - expected).norm() <= 1e-6 * expected.norm(), number
            assert distance(answer.actions, f"{scenario}/{number}/action") <= 1e-5


def test_the_last_pass_needs_the_prompts_worker_only() -> None:
    workers, alone = Workers(), recorded("base")[0].answer
    passes = count_passes(workers)
    for answer in workers.ask("base", 0):
        assert (answer.actions - alone.actions).norm() <= 1e-6 * alone.actions.norm()
    assert passes == [8, 7]


def count_passes(workers: Workers) -> list[int]:
    """How often each worker denoises from now on."""
    passes = [0, 0]
    for place, network in enumerate(workers.networks):
        whole = network._flows

        def counted(*given: object, place: int = place, whole: object = whole) -> object:
            passes[place] += 1
            return whole(*given)  # type: ignore[operator]

        network._flows = counted  # type: ignore[method-assign, assignment]
    return passes


def test_each_keeps_the_keys_and_values_of_its_own_branch() -> None:
    workers, single = Workers(), SessionMemory()
    workers.ask("base", 0)
    model().infer(single, seen("base", 0), noise(), FixedSteps(8))
    assert single.keys is not None
    for memory in workers.memories:
        assert memory.keys is not None
        assert 2 * memory.keys.nbytes == single.keys.nbytes


def test_they_rest_at_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.models.dreamzero.schedule.ALIKE", ((-2.0, 4),))
    workers = Workers()
    passes = count_passes(workers)
    first, second = workers.ask("base", 0, DynamicSteps)
    assert torch.equal(first.actions, second.actions)
    assert passes == [4, 4]


def test_a_worker_that_fails_does_not_leave_the_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, threads = Workers(), threading.active_count()
    whole = workers.networks[1]._flows

    def fails(*given: object) -> object:
        raise RuntimeError("the second device is gone")

    monkeypatch.setattr(workers.networks[1], "_flows", fails)
    with pytest.raises(RuntimeError, match="the second device is gone"):
        workers.ask("base", 0)
    monkeypatch.setattr(workers.networks[1], "_flows", whole)
    alone = recorded("base")[0].answer
    (answer, _) = workers.ask("base", 0)
    assert (answer.actions - alone.actions).norm() <= 1e-6 * alone.actions.norm()
    assert threading.active_count() <= threads
