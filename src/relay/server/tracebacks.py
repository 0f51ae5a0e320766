"""What a client may read about a failure: one sentence, an error id, and a traceback without paths or values.

The whole traceback stays in the log, found by the id.
"""

from __future__ import annotations

import logging
import re
import secrets
import traceback
from collections.abc import Iterator
from pathlib import PurePath
from types import FrameType, TracebackType

from relay.engine.worker import NonFiniteActions
from relay.protocol.errors import InvalidPayload, ProtocolError
from relay.server.log_limit import LimitedLog
from relay.server.scheduler import ServerFull

HEADER = "Traceback (most recent call last):"
"""The words by which OpenPI clients tell a failure (openpi: src/openpi/serving/websocket_policy_server.py)."""

MAX_TRACEBACK_BYTES = 8 * 1024
MAX_SENTENCE_CHARACTERS = 2_000
MAX_REASON_CHARACTERS = 256

logger = logging.getLogger(__name__)


class FailureLog:
    """The log of one connection's failed requests: a line for one that was refused, a traceback for the unexpected."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._lines = LimitedLog(logger, f"failed requests from {peer}")

    def add(self, error: Exception) -> str:
        """Log one and return its error id, eight hexadecimal digits."""
        error_id = secrets.token_hex(4)
        refused = isinstance(error, (ProtocolError, ServerFull))
        self._lines.log(
            logging.WARNING if refused else logging.ERROR,
            "request from %s failed [error %s]: %s",
            self._peer,
            error_id,
            sentence(error),
            exc_info=None if refused else error,
        )
        return error_id

    def close(self) -> None:
        """Say how many were not logged, if there were too many."""
        self._lines.close()


def sentence(error: Exception) -> str:
    """The failure in words that are safe for any reader."""
    if isinstance(error, (ProtocolError, ServerFull, NonFiniteActions)):
        return str(error)[:MAX_SENTENCE_CHARACTERS]
    return "Internal inference error"


def sanitized(error: Exception, error_id: str) -> str:
    """The traceback as an OpenPI client gets it, at most 8 KB: module-relative frames, then the sentence and the id."""
    last = f"{sentence(error)} [error {error_id}]"
    if isinstance(error, (ProtocolError, ServerFull, NonFiniteActions)):
        end = [f"{type(error).__name__}: {last}"]
    else:
        end = [f"{type(error).__name__}: {_without_paths(str(error))}", last]
    frames = [] if isinstance(error, InvalidPayload) else list(_frames(error.__traceback__))
    room = MAX_TRACEBACK_BYTES - sum(len(line.encode()) + 1 for line in [HEADER, "  ...", *end])
    kept: list[str] = []
    for frame in reversed(frames):  # the innermost frames say most
        room -= len(frame.encode()) + 1
        if room < 0:
            kept.append("  ...")
            break
        kept.append(frame)
    return "\n".join([HEADER, *reversed(kept), *end])


def _frames(trace: TracebackType | None) -> Iterator[str]:
    for frame, line in traceback.walk_tb(trace):
        yield f"  {_module_path(frame)}:{line} {frame.f_code.co_name}"[:200]


def _module_path(frame: FrameType) -> str:
    """`relay/engine/worker.py` wherever it is installed: the package from the module's name, the file's last part."""
    file = PurePath(frame.f_code.co_filename).name
    module = str(frame.f_globals.get("__name__", ""))
    package = module if file == "__init__.py" else module.rpartition(".")[0]
    return "/".join([*filter(None, package.split(".")), file])


_FOLDERS = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?[\\/]+(?=\w|\.)(?:[^\s'\"<>|:;,()\[\]]*[\\/])?")


def _without_paths(reason: str) -> str:
    """The first line of a foreign exception's text, with `/home/me/model.bin` cut to `model.bin`."""
    return _FOLDERS.sub("", reason.strip().partition("\n")[0])[:MAX_REASON_CHARACTERS]
