"""What a client is told once: notes per session, however often they come."""

from __future__ import annotations

from relay.engine.base import Note
from relay.server.remarks import MAX_REMARKS, Remarks
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
