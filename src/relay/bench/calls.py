"""Calls to a policy, one after the other, each with what both ends tell about its time. Knows no statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol


class Policy(Protocol):
    """What is measured; `relay.Policy` has it."""

    def infer(self, observation: dict[str, Any], /, *, timeout: float | None = None) -> Mapping[str, Any]:
        """Answer an observation."""
        ...

    @property
    def last(self) -> CallFacts | None:
        """About the last call."""
        ...


class CallFacts(Protocol):
    """The client's own account of a call."""

    @property
    def encode_ms(self) -> float: ...
    @property
    def round_trip_ms(self) -> float: ...
    @property
    def bytes_sent(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Call:
    """One observation and its answer; times in milliseconds.

    Attributes:
        whole_ms: from asking to having the actions.
        encode_ms: compressing the frames and packing the message.
        round_trip_ms: from the first byte sent to the reply received.
        bytes_sent, bytes_received: sizes of the two messages.
        server: the timings in the reply, by name; empty where it has none.
        server_ms: what a relay server spent on it, from the arrival of the message until the reply was sent; None from
            any other, and from ours for the last call, since only the next reply tells.
    """

    whole_ms: float
    encode_ms: float
    round_trip_ms: float
    bytes_sent: int
    bytes_received: int
    server: Mapping[str, float]
    server_ms: float | None = None


def make_calls(
    policy: Policy,
    observations: Iterator[dict[str, Any]],
    number: int,
    *,
    interval: float = 0.0,
    timeout: float | None = None,
    on_call: Callable[[int], None] = lambda done: None,
) -> list[Call]:
    """Ask so many times.

    Args:
        interval: seconds from the answer to the next question.
        timeout: seconds to wait for each answer; None waits as long as the connection lives.
        on_call: told after each how many are done.
    """
    calls: list[Call] = []
    for done in range(1, number + 1):
        calls.append(_ask(policy, next(observations), timeout))
        if len(calls) > 1:
            calls[-2] = completed(calls[-2], calls[-1])
        on_call(done)
        if interval and done < number:
            time.sleep(interval)
    return calls


def completed(call: Call, following: Call) -> Call:
    """A call with what the reply to the connection's next one says about it.

    Of a relay server only: openpi's counts the wait for the request in.
    """
    total = following.server.get("prev_total_ms")
    if "prepare_ms" not in call.server or total is None:
        return call
    return replace(call, server_ms=min(total, call.round_trip_ms))


def _ask(policy: Policy, observation: dict[str, Any], timeout: float | None) -> Call:
    started = time.perf_counter()
    reply = policy.infer(observation, timeout=timeout)
    whole_ms = (time.perf_counter() - started) * 1e3
    facts = policy.last
    assert facts is not None, "the call succeeded"
    return Call(whole_ms, facts.encode_ms, facts.round_trip_ms, facts.bytes_sent, facts.bytes_received, _timings(reply))


def _timings(reply: Mapping[str, Any]) -> dict[str, float]:
    told = reply.get("server_timing")
    if not isinstance(told, Mapping):
        return {}
    return {str(name): float(value) for name, value in told.items() if isinstance(value, (int, float))}
