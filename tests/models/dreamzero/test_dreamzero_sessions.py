"""Sessions on the device: they never mix, make room for each other without a trace, and leave nothing behind."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from golden_engine import actions, answer, golden_engine, observation, observed, undisturbed
from tiny_dreamzero import SCENARIOS, frames

from relay.engine.base import Failure
from relay.models.dreamzero.engine import DreamZeroEngine
from relay.models.dreamzero.sessions import DreamZeroSession

pytestmark = pytest.mark.dreamzero

PAIR = ("base", "relang")


def take_turns(engine: DreamZeroEngine) -> None:
    """Two sessions in turns, each of which must answer, to the bit, as if it were alone."""
    sessions = {scenario: engine.open_session() for scenario in PAIR}
    for number in range(6):
        for scenario, session in sessions.items():
            if number < len(SCENARIOS[scenario]):
                check(engine, session, scenario, number)


def check(engine: DreamZeroEngine, session: DreamZeroSession, scenario: str, number: int) -> None:
    given = actions(engine, session, observation(scenario, number)).tobytes()
    assert given == undisturbed(scenario)[number], f"{scenario}/{number}"


def test_two_sessions_in_turns_answer_as_if_each_were_alone() -> None:
    take_turns(golden_engine())


def test_they_do_so_where_the_device_holds_one_only() -> None:
    engine = golden_engine(sessions=1)
    evicted = count_evictions(engine)
    take_turns(engine)
    assert len(evicted) >= 7
    assert len(engine.residents) == 1
    assert engine.residents.nbytes == engine.residents.session_bytes


def count_evictions(engine: DreamZeroEngine) -> list[DreamZeroSession]:
    """The sessions that are set aside from now on."""
    evicted: list[DreamZeroSession] = []
    whole = engine.residents._evict_oldest

    def evict() -> None:
        evicted.append(next(iter(engine.residents._held)))
        whole()

    engine.residents._evict_oldest = evict  # type: ignore[method-assign]
    return evicted


def test_the_session_used_longest_ago_makes_room() -> None:
    engine = golden_engine(sessions=2)
    first, second, third = (engine.open_session() for _ in range(3))
    for session in (first, second, first, third):
        actions(engine, session, observation("base", 0))
    assert [session.resident_bytes > 0 for session in (first, second, third)] == [True, False, True]


def test_a_session_that_comes_back_keeps_its_place() -> None:
    engine = golden_engine(sessions=2)
    first, second = engine.open_session(), engine.open_session()
    evicted = count_evictions(engine)
    for number in range(3):
        for session in (first, second):
            check(engine, session, "base", number)
    assert not evicted


@pytest.mark.parametrize("before", [1, 3, 4, 5])
def test_a_session_set_aside_before_a_call_goes_on_in_another_place(before: int) -> None:
    engine = golden_engine()
    session = engine.open_session()
    for number in range(before):
        check(engine, session, "base", number)
    snapshot = session.evict()
    engine.close_session(session)
    again = engine.open_session()
    again.restore(snapshot)
    for number in range(before, 6):
        check(engine, again, "base", number)


def test_a_session_set_aside_keeps_the_frames_that_lead_single_ones() -> None:
    engine = golden_engine()
    pictures = frames("one by one", 4).numpy()
    sessions = [engine.open_session() for _ in range(2)]
    given: list[list[bytes]] = [[], []]
    for number, picture in enumerate(pictures):
        snapshot = sessions[0].evict()
        sessions[0] = engine.open_session()
        sessions[0].restore(snapshot)
        for session, replies in zip(sessions, given, strict=True):
            replies.append(actions(engine, session, observed(str(number), picture)).tobytes())
    assert given[0] == given[1]


def test_a_session_set_aside_keeps_nothing_on_the_device_and_little_beside_it() -> None:
    engine = golden_engine()
    session = engine.open_session()
    actions(engine, session, observation("base", 0))
    whole = session.nbytes
    session.evict()
    assert session.resident_bytes == 0
    assert 0 < session.nbytes < whole / 3  # image features of full width are most of it here


# ---- a device that runs out of memory all the same


def runs_out(engine: DreamZeroEngine, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next passes find no memory, once the new frames are observed."""
    whole, left = engine.model._denoise, [times]

    def denoise(*given: Any, **named: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return whole(*given, **named)

    monkeypatch.setattr(engine.model, "_denoise", denoise)


def test_the_others_are_set_aside_and_the_request_runs_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = golden_engine()
    sessions = [engine.open_session() for _ in range(3)]
    for session in sessions:
        check(engine, session, "base", 0)
    runs_out(engine, 1, monkeypatch)
    check(engine, sessions[2], "base", 1)
    assert [session.resident_bytes > 0 for session in sessions] == [False, False, True]
    for number, session in ((1, sessions[0]), (2, sessions[2]), (1, sessions[1])):
        check(engine, session, "base", number)


def test_a_request_that_finds_no_memory_twice_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = golden_engine()
    session, other = engine.open_session(), engine.open_session()
    for one in (session, other):
        check(engine, one, "base", 0)
    runs_out(engine, 2, monkeypatch)
    row = answer(engine, session, observation("relang", 1))
    assert isinstance(row, Failure)
    assert "out of memory" in str(row.error)
    for one in (session, other):
        for number in (1, 2):
            check(engine, one, "base", number)


def test_a_failure_keeps_no_tensors_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = golden_engine()
    session = engine.open_session()
    check(engine, session, "base", 0)
    before = tensor_bytes()
    runs_out(engine, 2, monkeypatch)
    row = answer(engine, session, observation("base", 0))
    assert isinstance(row, Failure)
    engine.close_session(session)
    del session
    assert tensor_bytes() < before


# ---- what is over is gone


def test_a_closed_session_holds_nothing() -> None:
    engine = golden_engine()
    session = engine.open_session()
    check(engine, session, "base", 0)
    engine.close_session(session)
    assert session.nbytes == 0
    assert len(engine.residents) == engine.residents.nbytes == 0


def test_a_session_that_never_answered_is_closed_as_well() -> None:
    engine = golden_engine()
    engine.close_session(engine.open_session())
    assert len(engine.residents) == 0


def test_sessions_one_after_the_other_leave_the_memory_flat() -> None:
    engine = golden_engine()
    sizes: list[int] = []
    for _ in range(10):
        session = engine.open_session()
        for number in range(2):
            actions(engine, session, observation("base", number), num_steps=5)
        sizes.append(tensor_bytes())
        engine.close_session(session)
    assert max(sizes[1:]) <= 1.05 * sizes[1]


def test_sessions_that_are_never_closed_take_what_the_limit_says() -> None:
    engine = golden_engine(sessions=2)
    sessions = [engine.open_session() for _ in range(8)]
    for session in sessions:
        actions(engine, session, observation("base", 0), num_steps=5)
        assert engine.residents.nbytes <= 2 * engine.residents.session_bytes
    aside = [session.nbytes for session in sessions if not session.resident_bytes]
    assert len(aside) == 6
    assert max(aside) == min(aside)
    assert engine.residents.most == 2


def tensor_bytes() -> int:
    """What all dense tensors of this process hold, each storage once; other families' tests leave sparse ones."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    held = [tensor for tensor in tensors if tensor.layout == torch.strided]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}.values())


def test_pictures_of_a_long_clip_are_not_kept_with_it() -> None:
    engine = golden_engine()
    session = engine.open_session()
    for number in range(2):
        actions(engine, session, observation("eight", number))
    kept = session.recent.pictures
    assert len(kept) == 4
    assert all(picture.base is None for picture in kept)
    assert np.array_equal(kept[-1], observation("eight", 1)["observation/view"][-1])
