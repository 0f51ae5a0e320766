"""Sessions of one connection: fresh, continued, reset, dropped."""

from __future__ import annotations

from relay.server.sessions import SessionTable


def test_an_unseen_id_is_fresh_and_continues_after_success():
    table = SessionTable()
    session = table.resume("arm")
    assert session.fresh
    table.mark_seen(session)
    assert not table.resume("arm").fresh


def test_a_failed_first_request_does_not_use_up_the_fresh_start():
    table = SessionTable()
    table.resume("arm")
    assert table.resume("arm").fresh


def test_alternating_ids_continue_side_by_side():
    table = SessionTable()
    for name in ("left", "right"):
        table.mark_seen(table.resume(name))
    assert [table.resume(name).fresh for name in ("left", "right", "left")] == [False, False, False]


def test_clear_makes_every_id_fresh():
    table = SessionTable()
    for name in ("left", "right"):
        table.mark_seen(table.resume(name))
    table.clear()
    assert table.resume("left").fresh
    assert table.resume("right").fresh


def test_a_reply_from_before_a_reset_marks_nothing():
    table = SessionTable()
    session = table.resume("arm")
    table.clear()
    table.mark_seen(session)
    assert table.resume("arm").fresh


def test_the_least_recently_used_id_is_dropped_beyond_the_limit():
    table = SessionTable(limit=2)
    for name in ("a", "b"):
        table.mark_seen(table.resume(name))
    table.resume("a")
    table.mark_seen(table.resume("c"))
    assert len(table) == 2
    assert not table.resume("a").fresh
    assert table.resume("b").fresh


def test_an_id_that_never_succeeds_drops_no_other():
    table = SessionTable(limit=1)
    table.mark_seen(table.resume("a"))
    table.resume("b")
    assert not table.resume("a").fresh


def test_the_default_limit_is_1024():
    table = SessionTable()
    for number in range(1_100):
        table.mark_seen(table.resume(str(number)))
    assert len(table) == 1_024
