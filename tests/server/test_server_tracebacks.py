"""What a client reads about a failure."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from relay.engine.worker import NonFiniteActions
from relay.protocol.errors import InvalidPayload, ObservationError
from relay.server import log_limit
from relay.server.log_limit import LINES_PER_MINUTE
from relay.server.tracebacks import HEADER, MAX_TRACEBACK_BYTES, FailureLog, sanitized, sentence


def raised(error: Exception, depth: int = 0) -> Exception:
    """The same error after it travelled through `depth` frames."""

    def travel(left: int) -> None:
        local_secret = "hunter2"
        assert local_secret
        if left:
            travel(left - 1)
        raise error

    try:
        travel(depth)
    except Exception as caught:
        return caught
    raise AssertionError


def test_it_begins_with_the_words_and_ends_with_sentence_and_id():
    text = sanitized(raised(ObservationError("state has 7 values; fake expects 3")), "0123abcd")
    assert text.startswith(HEADER)
    assert text.endswith("state has 7 values; fake expects 3 [error 0123abcd]")


def test_frames_name_module_line_and_function():
    assert re.search(r"^  test_server_tracebacks\.py:\d+ travel$", sanitized(raised(ValueError("x")), "0"), re.M)


def test_a_frame_of_a_package_is_relative_to_it():
    try:
        from relay.protocol.messages import decode_request

        decode_request(b"\x80\x80")
    except InvalidPayload as error:
        text = sanitized(RuntimeError("x").with_traceback(error.__traceback__), "0")
    assert re.search(r"^  relay/protocol/messages\.py:\d+ decode_request$", text, re.M)


def test_it_holds_no_absolute_path_and_no_local_value():
    text = sanitized(raised(RuntimeError("no /home/robot/w/model.bin in C:\\data\\m")), "0")
    assert str(Path(__file__).parent) not in text
    assert "/home" not in text
    assert "C:" not in text
    assert "hunter2" not in text
    assert "RuntimeError: no model.bin in m" in text


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("open('/srv/a b')", "open('a b')"),
        ("file:///etc/passwd", "file:passwd"),
        ("3/4 of a / b", "3/4 of a / b"),
        ("relative/path.py", "relative/path.py"),
        ("first\nsecond", "first"),
        ("", ""),
    ],
)
def test_paths_in_a_foreign_reason_are_cut(reason: str, expected: str):
    assert f"\nRuntimeError: {expected}\n" in sanitized(RuntimeError(reason), "0")


def test_causes_are_left_out():
    error = ValueError("outer")
    error.__cause__ = OSError("inner")
    assert "inner" not in sanitized(raised(error), "0")


def test_a_deep_stack_keeps_its_innermost_frames_within_the_limit():
    text = sanitized(raised(RecursionError("too deep " * 1_000), depth=400), "0123abcd")
    assert len(text.encode()) <= MAX_TRACEBACK_BYTES
    assert text.startswith(f"{HEADER}\n  ...\n")
    assert text.endswith("[error 0123abcd]")


def test_undecodable_bytes_have_no_stack():
    text = sanitized(raised(InvalidPayload("byte 3 is no MessagePack")), "0")
    assert text == f"{HEADER}\nInvalidPayload: byte 3 is no MessagePack [error 0]"


def test_the_sentence_of_a_foreign_error_says_nothing_of_it():
    assert sentence(KeyError("secret")) == "Internal inference error"


def test_our_own_errors_speak_for_themselves():
    assert sentence(NonFiniteActions("actions[0, 1] is not finite")) == "actions[0, 1] is not finite"


def test_the_log_has_the_whole_traceback_under_the_id(caplog: pytest.LogCaptureFixture):
    error_id = FailureLog("127.0.0.1:1").add(raised(RuntimeError("boom")))
    assert re.fullmatch("[0-9a-f]{8}", error_id)
    assert error_id in caplog.text
    assert __file__ in caplog.text
    assert "boom" in caplog.text


def test_a_refused_request_is_a_warning_and_a_fault_is_an_error(caplog: pytest.LogCaptureFixture):
    failures = FailureLog("peer")
    failures.add(ObservationError("no"))
    failures.add(RuntimeError("no"))
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]


def test_a_refused_request_takes_one_line_of_the_log(caplog: pytest.LogCaptureFixture):
    FailureLog("peer").add(raised(ObservationError("state is missing")))
    assert len(caplog.text.splitlines()) == 1


def test_a_flood_of_failures_is_cut_and_counted(caplog: pytest.LogCaptureFixture):
    failures = FailureLog("10.0.0.7:5")
    for _ in range(1_000):
        failures.add(ObservationError("no"))
    assert len(caplog.records) == LINES_PER_MINUTE
    failures.close()
    assert caplog.records[-1].getMessage() == "980 more lines about failed requests from 10.0.0.7:5 were left out"


def test_after_a_minute_failures_are_logged_again(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(log_limit, "monotonic", lambda: now)
    failures = FailureLog("peer")
    for _ in range(LINES_PER_MINUTE + 3):
        failures.add(ObservationError("no"))
    now = 60.0
    failures.add(ObservationError("news"))
    assert "3 more lines" in caplog.records[-2].getMessage()
    assert "news" in caplog.records[-1].getMessage()
