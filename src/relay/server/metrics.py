"""What a server counts about itself, per policy: stages, outcomes, bytes. docs/metrics.md explains each.

Counting is a few additions per request, on the event loop's thread only; `exposition.py` makes text of it when asked.
Labels come from closed sets, never from what a client sent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from relay.engine.worker import DeviceFault, LoadFailed
from relay.protocol.errors import InvalidPayload, ObservationError
from relay.server.histogram import Histogram
from relay.server.preparation import Expired
from relay.server.scheduler import ServerFull
from relay.server.sessions import SessionTable

Stage = Literal["parse", "prepare", "queue", "model", "send", "total"]
"""`send` is encoding and handing the reply to the socket; `total` is from the request's arrival until then."""

Outcome = Literal["answered", "reset", "invalid", "refused", "expired", "full", "failed", "lost", "dropped"]
"""Undecodable; refused observation; too late; queue full; engine error; device lost; client left before the answer."""

OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)
STAGES: Final[tuple[Stage, ...]] = get_args(Stage)

SECONDS: Final = (0.000_1, 0.000_25, 0.000_5, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


@dataclass(slots=True)
class PolicyMetrics:
    """The numbers of one served policy."""

    stages: dict[Stage, Histogram] = field(default_factory=lambda: {stage: Histogram(SECONDS) for stage in STAGES})
    requests: Counter[tuple[str, Outcome]] = field(default_factory=lambda: Counter[tuple[str, Outcome]]())
    """By dialect and outcome."""
    received_bytes: int = 0
    sent_bytes: int = 0
    open_sessions: set[SessionTable] = field(default_factory=lambda: set[SessionTable]())
    """The tables of the open connections."""

    def observe_ms(self, **milliseconds: float) -> None:
        """Count what one request spent in each stage that is named."""
        for stage, value in milliseconds.items():
            self.stages[stage].observe(value / 1e3)  # pyright: ignore[reportArgumentType]


def outcome_of(error: Exception) -> Outcome:
    """How a request that ended with this error is counted."""
    match error:
        case ServerFull():
            return "full"
        case Expired():
            return "expired"
        case InvalidPayload():
            return "invalid"
        case ObservationError():
            return "refused"
        case DeviceFault() | LoadFailed():
            return "lost"
        case _:
            return "failed"
