"""Calls in their number and order: what warms up is left out, codecs take turns with the same observation."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

from relay.bench.calls import Call, make_calls
from relay.bench.codecs import compare_codecs
from relay.protocol.images import Codec


class Answering:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.timeouts: set[float | None] = set()
        self.last = Call(1.0, 0.1, 0.8, 10, 10, {})

    def infer(self, observation: dict[str, Any], /, *, timeout: float | None = None) -> Mapping[str, Any]:
        self.asked.append(observation)
        self.timeouts.add(timeout)
        return {}


def test_each_codec_gets_the_same_observations_and_its_first_turn_does_not_count() -> None:
    policies = {Codec.RAW: Answering(), Codec.JPEG_Q50: Answering()}
    calls = compare_codecs(policies, ({"number": number} for number in count()), 3)
    assert [len(group) for group in calls.values()] == [3, 3]
    for policy in policies.values():
        assert [observation["number"] for observation in policy.asked] == [0, 1, 2, 3]


def test_every_call_waits_no_longer_than_allowed() -> None:
    policy = Answering()
    assert len(make_calls(policy, iter([{}, {}, {}]), 3, timeout=2.5)) == 3
    assert policy.timeouts == {2.5}
