"""Calls split into stages: what each end tells is taken, the rest is the link's, and nothing gets lost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from relay.bench.calls import Call, completed
from relay.bench.codecs import CodecFigures, recommended
from relay.bench.stages import Link, fitted_link, outside_model_ms, stages, stages_at
from relay.protocol.images import Codec

TOLD = {"parse_ms": 1.0, "prepare_ms": 2.0, "queue_ms": 3.0, "model_ms": 4.0, "encode_ms": 0.5, "infer_ms": 10.0}


def call(**fields: Any) -> Call:
    facts: dict[str, Any] = {
        "whole_ms": 50.0,
        "encode_ms": 5.0,
        "round_trip_ms": 42.0,
        "bytes_sent": 1000,
        "bytes_received": 100,
        "server": TOLD,
        "server_ms": 14.0,
    }
    return Call(**(facts | fields))


def test_a_relay_servers_timings_leave_the_rest_of_the_round_trip_to_the_link() -> None:
    assert stages(call()) == {
        "encode": 5.0,
        "link": 28.0,
        "parse": 1.0,
        "prepare": 2.0,
        "queue": 3.0,
        "model": 4.0,
        "reply": 4.0,
        "decode": 3.0,
    }


def test_a_known_link_divides_into_both_directions() -> None:
    split = stages(call(), Link(fixed_ms=20.0, ms_per_byte=0.01))
    assert split["upload"] == 20.0  # half of 20 ms, and 1000 bytes
    assert split["download"] == 8.0
    assert "link" not in split


def test_an_upload_never_takes_more_than_the_link_did() -> None:
    split = stages(call(), Link(fixed_ms=20.0, ms_per_byte=1.0))
    assert (split["upload"], split["download"]) == (28.0, 0.0)


def test_openpis_server_tells_one_stage_and_its_link_is_not_divided() -> None:
    split = stages(call(server={"infer_ms": 30.0}, server_ms=None), Link(20.0, 0.01))
    assert split == {"encode": 5.0, "link": 12.0, "policy": 30.0, "decode": 3.0}


def test_without_server_timings_link_and_server_are_one() -> None:
    split = stages(call(server={}, server_ms=None))
    assert split == {"encode": 5.0, "link and server": 42.0, "decode": 3.0}


@pytest.mark.parametrize("percentile", [50, 90, 99])
def test_the_stages_at_a_percentile_add_up_to_it_within_five_percent_even_with_outliers(percentile: int) -> None:
    random = np.random.default_rng(0)
    calls = [call(whole_ms=47.0 + trip, round_trip_ms=42.0 + trip) for trip in 10 * random.pareto(1.0, 60)]
    whole = float(np.percentile([each.whole_ms for each in calls], percentile))
    for link in (None, Link(20.0, 0.01)):
        assert sum(stages_at(percentile, calls, link).values()) == pytest.approx(whole, rel=0.05)


def test_a_single_call_is_every_percentile() -> None:
    assert stages_at(99, [call()]) == stages(call())


def test_the_link_is_a_line_through_requests_of_different_sizes() -> None:
    groups = [
        [call(bytes_sent=size, round_trip_ms=14.0 + 20.0 + 0.001 * size)] * 3 for size in (1_000, 30_000, 450_000)
    ]
    link = fitted_link(groups)
    assert link is not None
    assert (link.fixed_ms, link.ms_per_byte) == pytest.approx((20.0, 0.001))


def test_a_link_whose_larger_requests_were_faster_has_no_negative_bandwidth() -> None:
    groups = [[call(bytes_sent=size, round_trip_ms=trip)] for size, trip in ((1_000, 40.0), (450_000, 30.0))]
    link = fitted_link(groups)
    assert link is not None
    assert link.ms_per_byte == 0.0
    assert link.fixed_ms == pytest.approx(21.0)


def test_no_link_is_made_up_for_a_server_that_does_not_tell_its_own_time() -> None:
    stock = [[call(bytes_sent=size, server={"infer_ms": 30.0}, server_ms=None)] for size in (1, 2)]
    assert fitted_link(stock) is None


def test_the_next_reply_tells_what_the_server_spent_on_a_call() -> None:
    following = call(server=TOLD | {"prev_total_ms": 17.0})
    assert completed(call(server_ms=None), following).server_ms == 17.0


def test_openpis_previous_total_is_not_used_since_it_holds_the_wait_for_the_request() -> None:
    stock = call(server={"infer_ms": 30.0}, server_ms=None)
    following = call(server={"infer_ms": 30.0, "prev_total_ms": 400.0})
    assert completed(stock, following).server_ms is None


def test_the_policys_own_time_is_no_argument_for_a_codec() -> None:
    assert outside_model_ms(call()) == 43.0
    assert outside_model_ms(call(server={"infer_ms": 30.0})) == 20.0


def figures(codec: Codec, outside: float) -> CodecFigures:
    return CodecFigures(codec, 1.0, 1.0, math.nan, outside)


def test_the_fastest_codec_is_recommended() -> None:
    compared = [figures(Codec.RAW, 200.0), figures(Codec.JPEG_Q90, 40.0), figures(Codec.JPEG_Q50, 30.0)]
    assert recommended(compared).codec is Codec.JPEG_Q50


def test_of_codecs_that_are_nearly_as_fast_the_most_faithful_is_recommended() -> None:
    compared = [figures(Codec.RAW, 200.0), figures(Codec.JPEG_Q90, 31.0), figures(Codec.JPEG_Q50, 30.0)]
    assert recommended(compared).codec is Codec.JPEG_Q90
