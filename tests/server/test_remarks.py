"""What a client is told once: notes per session, however often they come."""

from __future__ import annotations

import pytest

from relay.engine.base import Note
from relay.protocol.options import OPTION_KEYS
from relay.server.remarks import MAX_REMARKS, Remarks, misspelt_options
from relay.server.sessions import Session


def test_a_note_is_told_once_per_session():
    remarks, arm, hand = Remarks(), Session("arm"), Session("hand")
    notes = [Note("camera masked")]
    assert remarks.fresh(arm, notes) == ("camera masked",)
    assert remarks.fresh(arm, notes) == ()
    assert remarks.fresh(hand, notes) == ("camera masked",)


def test_after_a_reset_it_is_told_again():
    remarks = Remarks()
    remarks.fresh(Session("arm", episode=0), [Note("camera masked")])
    assert remarks.fresh(Session("arm", episode=1), [Note("camera masked")]) == ("camera masked",)


def test_notes_about_the_same_thing_are_told_once_though_their_values_differ():
    remarks, session = Remarks(), Session("arm")
    first = [Note("state[2] is -91", about="state range"), Note("state[3] is 7", about="state range")]
    assert remarks.fresh(session, first) == ("state[2] is -91",)
    assert remarks.fresh(session, [Note("state[2] is -92", about="state range")]) == ()


def test_a_client_that_earns_endless_notes_is_told_a_bounded_number():
    remarks, session = Remarks(), Session("arm")
    told = sum(len(remarks.fresh(session, [Note(str(i))])) for i in range(2 * MAX_REMARKS))
    assert told == MAX_REMARKS


@pytest.mark.parametrize(
    ("key", "option"),
    [
        ("adapter", "adapter_dir"),
        ("Adaptor", "adapter_dir"),
        ("num_step", "num_steps"),
        ("steps", "num_steps"),
        ("deadline", "deadline_ms"),
        ("sample_params", "sampling_params"),
        ("previous_actions", "prev_actions"),
    ],
)
def test_a_key_that_is_nearly_an_option_is_told_with_it(key: str, option: str):
    assert misspelt_options(["wrist", key]) == (Note(f"{key!r} is not known; did you mean {option!r}?"),)


@pytest.mark.parametrize(
    "key", ["speed", "state", "action", "actions", "image", "task", "observation/state", "x" * 10**6]
)
def test_keys_of_robots_are_not_taken_for_options(key: str):
    assert misspelt_options([key]) == ()


def test_what_is_left_of_an_option_is_not_told_to_be_it():
    assert misspelt_options(OPTION_KEYS) == ()
