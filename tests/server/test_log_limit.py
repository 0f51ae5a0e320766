"""What others' bad requests may not write into the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from websockets.exceptions import InvalidUpgrade

from relay.server.api_keys import read_api_keys
from relay.server.log_limit import leave_out_bad_requests

LISTENER = logging.getLogger("websockets.server")


@pytest.fixture(autouse=True)
def filtered() -> Iterator[None]:
    before = list(LISTENER.filters)
    leave_out_bad_requests()
    yield
    LISTENER.filters[:] = before


def test_a_request_that_is_no_upgrade_leaves_no_line(caplog: pytest.LogCaptureFixture):
    LISTENER.error("opening handshake failed", exc_info=InvalidUpgrade("Connection"))
    try:
        raise ValueError("unsupported protocol; expected HTTP/1.1: PRI * HTTP/2.0")
    except ValueError:
        LISTENER.error("opening handshake failed", exc_info=True)
    assert caplog.records == []


def test_a_handshake_that_fails_in_this_programs_code_is_logged(caplog: pytest.LogCaptureFixture):
    try:
        read_api_keys(environment={"RELAY_API_KEYS": "short"})
    except ValueError:
        LISTENER.error("opening handshake failed", exc_info=True)
    assert len(caplog.records) == 1


def test_other_errors_of_the_listener_are_logged(caplog: pytest.LogCaptureFixture):
    try:
        raise ValueError("nobody foresaw this")
    except ValueError:
        LISTENER.error("connection handler failed", exc_info=True)
    assert len(caplog.records) == 1
