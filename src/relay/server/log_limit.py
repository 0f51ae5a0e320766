"""Bounds on what clients can write into the log."""

from __future__ import annotations

import logging
import traceback
from time import monotonic
from typing import Any

LINES_PER_MINUTE = 20


class LimitedLog:
    """At most 20 lines a minute about one subject; then one line that says how many were left out.

    Args:
        logger: where they go.
        subject: whom or what they are about.
    """

    def __init__(self, logger: logging.Logger, subject: str) -> None:
        self._logger = logger
        self._subject = subject
        self._since = monotonic()
        self._lines = 0
        self._left_out = 0

    def log(self, level: int, message: str, *values: Any, exc_info: BaseException | None = None) -> None:
        """Write one line, as `logging.Logger.log` does, if there is room for it."""
        if monotonic() - self._since >= 60:
            self.close()
            self._since, self._lines = monotonic(), 0
        if self._lines < LINES_PER_MINUTE:
            self._lines += 1
            self._logger.log(level, message, *values, exc_info=exc_info)
        else:
            self._left_out += 1

    def close(self) -> None:
        """Say how many lines were left out, if any."""
        if self._left_out:
            self._logger.warning("%d more lines about %s were left out", self._left_out, self._subject)
            self._left_out = 0


def leave_out_bad_requests() -> None:
    """Keep from the log what `websockets` before version 17 writes, as errors with tracebacks, of others' bad requests.

    Some of its releases write that even of health checks and of upgrades that were turned away.
    """
    logging.getLogger("websockets.server").addFilter(_is_our_affair)


def _is_our_affair(record: logging.LogRecord) -> bool:
    """Whether a record is no failed handshake, or one that failed in this program's own code."""
    if record.msg != "opening handshake failed" or record.exc_info is None:
        return True
    frames = traceback.walk_tb(record.exc_info[2])
    return any(frame.f_globals.get("__name__", "").startswith("relay.") for frame, _ in frames)
