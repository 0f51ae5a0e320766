"""Sessions of one connection: fresh, continued, reset, dropped, and what becomes of their state."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from relay.protocol.errors import ObservationError
from relay.server.sessions import Session, SessionTable


def table_of(limit: int = 1_024) -> tuple[SessionTable, list[Any]]:
    """A table and the states that it has freed so far."""
    freed: list[Any] = []
    return SessionTable(freed.append, limit), freed


def succeed(table: SessionTable, name: str, state: Any = None) -> bool:
    """One good request, whose policy keeps `state`; whether it found its session fresh."""
    with table.request(name) as session:
        fresh = session.fresh
        session.state = session.state or state
    return fresh


def fail(table: SessionTable, name: str) -> bool:
    """One refused request; whether it found its session fresh."""
    found: list[bool] = []
    with suppress(ObservationError), table.request(name) as session:
        found.append(session.fresh)
        raise ObservationError("refused")
    return found[0]


def test_an_unseen_id_is_fresh_and_continues_after_success():
    table, _ = table_of()
    assert [succeed(table, "arm"), succeed(table, "arm")] == [True, False]


def test_a_failed_first_request_does_not_use_up_the_fresh_start():
    table, _ = table_of()
    assert [fail(table, "arm"), succeed(table, "arm")] == [True, True]


def test_a_failed_later_request_changes_nothing():
    table, freed = table_of()
    succeed(table, "arm", "memory")
    assert [fail(table, "arm"), succeed(table, "arm")] == [False, False]
    assert freed == []


def test_alternating_ids_continue_side_by_side():
    table, _ = table_of()
    assert [succeed(table, name) for name in ("left", "right", "left", "right")] == [True, True, False, False]


def test_requests_in_flight_share_their_session():
    table, _ = table_of()
    with table.request("arm") as first, table.request("arm") as second:
        assert first is second
        with table.request("other") as other:
            assert other is not first


def test_clear_makes_every_id_fresh_and_frees_every_state():
    table, freed = table_of()
    for name in ("left", "right"):
        succeed(table, name, name)
    table.clear()
    assert freed == ["left", "right"]
    assert [succeed(table, "left"), succeed(table, "right")] == [True, True]


def test_a_success_from_before_a_reset_marks_nothing():
    table, _ = table_of()
    with table.request("arm"):
        table.clear()
    assert succeed(table, "arm")


def test_a_reset_separates_a_request_in_flight_from_later_ones():
    table, _ = table_of()
    with table.request("arm") as before:
        table.clear()
        with table.request("arm") as after:
            assert after is not before
    assert not succeed(table, "arm")


def test_a_state_in_use_is_freed_when_its_last_request_is_done():
    table, freed = table_of()
    succeed(table, "arm", "memory")
    with table.request("arm"):
        with table.request("arm"):
            table.clear()
        assert freed == []
    assert freed == ["memory"]


def test_the_least_recently_used_id_is_dropped_beyond_the_limit():
    table, freed = table_of(limit=2)
    for name in ("a", "b", "a", "c"):
        succeed(table, name, name)
    assert len(table) == 2
    assert freed == ["b"]
    assert not succeed(table, "a")
    assert succeed(table, "b")


def test_an_id_that_never_succeeds_drops_no_other():
    table, freed = table_of(limit=1)
    succeed(table, "a", "a")
    for _ in range(3):
        fail(table, "b")
    assert not succeed(table, "a")
    assert freed == []


def test_the_default_limit_is_1024():
    table = SessionTable(lambda state: None)
    for number in range(1_100):
        with table.request(str(number)):
            pass
    assert len(table) == 1_024


def test_a_session_is_itself_only():
    assert Session("arm") != Session("arm")
