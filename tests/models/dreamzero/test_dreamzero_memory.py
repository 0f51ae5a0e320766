"""Sessions: two never mix, what is set aside comes back to the bit, and a failure leaves no trace."""

from __future__ import annotations

import pytest
import torch
from tiny_dreamzero import SCENARIOS
from tiny_dreamzero_model import ask, model, noise, recorded, seen, session_before

from relay.models.dreamzero.memory import SessionMemory
from relay.models.dreamzero.schedule import FixedSteps

pytestmark = pytest.mark.dreamzero

CALLS = len(SCENARIOS["base"])


def check(memory: SessionMemory, scenario: str, number: int) -> None:
    """The next call answers, to the bit, as it does in a session that nothing happened to."""
    answer = ask(memory, scenario, number, want_video=True)
    undisturbed = recorded(scenario)[number].answer
    assert torch.equal(answer.actions, undisturbed.actions), number
    assert torch.equal(answer.video, undisturbed.video), number


def test_two_interleaved_sessions_equal_two_separate_ones_to_the_bit() -> None:
    memories = {"base": SessionMemory(), "relang": SessionMemory()}
    for number in range(CALLS):
        for scenario, memory in memories.items():
            if number < len(SCENARIOS[scenario]):
                check(memory, scenario, number)


@pytest.mark.parametrize("before", [{1, 2, 3, 4, 5}, {2}, {4}])
def test_a_session_set_aside_before_any_call_answers_as_if_it_had_not_been(before: set[int]) -> None:
    memory = session_before("base", min(before))
    for number in range(min(before), CALLS):
        if number in before:
            snapshot = memory.evict()
            assert memory.keys is None
            assert snapshot is not None
            memory = SessionMemory()
            memory.restore(snapshot)
        check(memory, "base", number)


def test_what_is_kept_of_a_session_set_aside_is_small() -> None:
    memory = session_before("base", 3)
    whole = memory.nbytes
    memory.evict()
    assert memory.nbytes < whole / 3  # the image features, which are of full size here


class Fails:
    """Steps that break off in the middle of the denoising."""

    last = None

    def __init__(self, at: int) -> None:
        self._at = at

    def runs(self, number: int, flows: object) -> bool:
        if number == self._at:
            raise RuntimeError("the device is gone")
        return True


@pytest.mark.parametrize(("before", "at"), [(0, 0), (2, 3), (3, 0), (4, 3)])
def test_a_call_that_failed_leaves_the_session_as_it_was(before: int, at: int) -> None:
    memory = session_before("base", before)
    with pytest.raises(RuntimeError):
        model().infer(memory, seen("relang", min(before, 3)), noise(), Fails(at))
    for number in range(before, CALLS):
        check(memory, "base", number)


def test_observed_latents_differ_from_call_to_call_when_the_frames_do() -> None:
    episode = recorded("base")[3].answer.episode
    latents = episode.latents[1:]
    assert len(latents) == 3
    for later, earlier in zip(latents[1:], latents, strict=False):
        assert (later - earlier).norm() > 0.1 * earlier.norm()


def test_the_newest_frame_begins_a_window_that_begins_in_the_middle_of_a_clip() -> None:
    memory = SessionMemory()
    fresh = seen("base", 1)
    answer = model().infer(memory, fresh, noise(), FixedSteps(8))
    newest = model().infer(SessionMemory(), fresh._replace(frames=fresh.frames[-1:]), noise(), FixedSteps(8))
    assert torch.equal(answer.actions, newest.actions)
