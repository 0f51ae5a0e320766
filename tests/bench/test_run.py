"""A whole measurement over a clock of its own: which calls count, what happens between them, and under which codec."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from types import TracebackType
from typing import Any

import pytest

import relay
from relay.bench import calls
from relay.bench.calls import Call
from relay.bench.codecs import COMPARED
from relay.bench.parameters import Parameters
from relay.bench.report import as_json
from relay.bench.run import measure
from relay.protocol.images import Codec

URL = "ws://gpu-box:8000"
SLOW_CALLS = 4
SLOW_S, QUICK_S = 2.0, 0.001


class Clock:
    """Stands for `time`; goes on only when a policy answers or somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Server:
    """Takes long for the first answers; keeps under which codecs it was opened and asked, and when it answered."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.opened: list[Codec] = []
        self.asked: list[Codec] = []
        self.answered: list[float] = []

    def answer(self, codec: Codec) -> None:
        self.clock.now += SLOW_S if len(self.asked) < SLOW_CALLS else QUICK_S
        self.asked.append(codec)
        self.answered.append(self.clock.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(calls, "time", clock)
    return clock


@pytest.fixture
def server(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server(clock)

    class Policy:
        """What a measurement needs of `relay.Policy`."""

        route = "proxied"
        last = Call(1.0, 0.1, 0.8, 10, 10, {})

        def __init__(self, url: str, codec: Codec, headers: Any, **options: Any) -> None:
            self.codec = codec
            server.opened.append(codec)

        def get_server_metadata(self) -> dict[str, Any]:
            return {"state_dim": 3, "cameras": ["front"]}

        def infer(self, observation: dict[str, Any], *, timeout: float | None = None) -> Mapping[str, Any]:
            server.answer(self.codec)
            return {}

        def __enter__(self) -> Policy:
            return self

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            pass

    monkeypatch.setattr(relay, "Policy", Policy)
    return server


def test_the_calls_that_warm_up_are_in_no_percentile(server: Server) -> None:
    numbers = as_json(measure(Parameters(url=URL, calls=6, warm_up=SLOW_CALLS, codec_rounds=0, frame_size=8)))
    assert len(server.asked) == SLOW_CALLS + 6
    assert numbers["counted"] == len(numbers["calls"]) == 6
    assert numbers["whole_ms"] == pytest.approx({"p50": 1.0, "p90": 1.0, "p99": 1.0})


def test_without_warm_up_the_first_calls_count(server: Server) -> None:
    numbers = as_json(measure(Parameters(url=URL, calls=6, warm_up=0, codec_rounds=0, frame_size=8)))
    assert len(server.asked) == 6
    assert numbers["whole_ms"]["p50"] == pytest.approx(2000.0)


def test_the_interval_lies_between_an_answer_and_the_next_question(server: Server, clock: Clock) -> None:
    measurement = measure(Parameters(url=URL, calls=5, warm_up=SLOW_CALLS, codec_rounds=0, interval=0.25, frame_size=8))
    assert clock.slept == [0.25] * 4  # none before the first call that counts, none after the last
    counted = server.answered[SLOW_CALLS:]
    gaps = [later - earlier for earlier, later in pairwise(counted)]
    assert gaps == pytest.approx([0.25 + QUICK_S] * 4)
    assert [call.whole_ms for call in measurement.calls] == pytest.approx([1.0] * 5)  # a pause is nobody's work


def test_without_an_interval_nothing_pauses(server: Server, clock: Clock) -> None:
    measure(Parameters(url=URL, calls=5, warm_up=2, codec_rounds=3, frame_size=8))
    assert clock.slept == []


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.LOSSLESS, Codec.JPEG_Q98])
def test_every_call_goes_under_the_codec_that_was_chosen(server: Server, codec: Codec) -> None:
    measurement = measure(Parameters(url=URL, calls=3, warm_up=2, codec=codec, codec_rounds=0, frame_size=8))
    assert server.asked == [codec] * 5
    assert measurement.sent is codec


@pytest.mark.parametrize("codec", [Codec.JPEG_Q50, Codec.JPEG_Q98], ids=["one of those compared", "another"])
def test_after_codecs_were_compared_the_calls_that_count_go_under_the_chosen_one(server: Server, codec: Codec) -> None:
    measurement = measure(Parameters(url=URL, calls=3, warm_up=2, codec=codec, codec_rounds=2, frame_size=8))
    warming, compared, counted = server.asked[:2], server.asked[2:-3], server.asked[-3:]
    assert warming + counted == [codec] * 5
    assert compared == [*COMPARED] * 3  # a turn to warm up, and two that count
    assert [each.codec for each in measurement.compared] == list(COMPARED)
    assert server.opened == [codec, *(other for other in COMPARED if other is not codec)]
