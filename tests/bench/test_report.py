"""The report says how its numbers came about, and what it is silent on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from relay.bench.calls import Call
from relay.bench.codecs import CodecFigures
from relay.bench.parameters import Parameters
from relay.bench.report import as_json, as_text
from relay.bench.run import Measurement
from relay.bench.stages import Link
from relay.protocol.images import Codec

RELAYS = {"parse_ms": 1.0, "prepare_ms": 2.0, "queue_ms": 3.0, "model_ms": 4.0, "encode_ms": 0.5, "infer_ms": 10.0}


def measurement(server: dict[str, float], **fields: Any) -> Measurement:
    calls = [Call(50.0 + index, 5.0, 42.0 + index, 1000, 100, server) for index in range(20)]
    facts: dict[str, Any] = {
        "parameters": Parameters(url="ws://user:secret@gpu-box:8000/?key=secret", calls=20),
        "sent": Codec.JPEG_Q90,
        "route": "proxied",
        "metadata": {"model": "pi05", "odd": b"\x00"},
        "calls": tuple(calls),
        "compared": (),
        "bare_replies": False,
        "link": None,
        "busy": None,
        "started": "2026-01-01T00:00:00+00:00",
        "environment": {"versions": {}, "machine": {}},
    }
    return Measurement(**(facts | fields))


def unwrapped(seen: Measurement) -> str:
    """The report's text as one line."""
    return " ".join(as_text(seen).split())


def test_how_the_link_was_divided_is_stated() -> None:
    text = unwrapped(measurement(RELAYS, link=Link(20.0, 0.004)))
    assert "Upload: half of what a request without bytes would take (20.00 ms), and 4.0000 ms for each KB" in text


def test_a_link_that_cannot_be_divided_is_one_row_and_that_is_said() -> None:
    seen = measurement({"infer_ms": 30.0})
    assert "  link  " in as_text(seen)
    assert "how it divides into the two directions cannot be told" in unwrapped(seen)


def test_vllm_omnis_path_is_named_as_the_reason_for_the_missing_timings() -> None:
    assert "vLLM-Omni's replies are bare actions" in unwrapped(measurement({}, bare_replies=True))


def test_a_server_whose_replies_hold_no_timings_is_not_taken_for_vllm_omnis() -> None:
    text = unwrapped(measurement({}))
    assert "this server's replies hold none" in text
    assert "vLLM" not in text


def test_every_call_is_in_the_histogram() -> None:
    bars = [line for line in as_text(measurement(RELAYS)).splitlines() if " ms  #" in line or line.endswith("  0")]
    assert sum(int(line.split()[-1]) for line in bars) == 20


def test_a_busy_machine_is_noted() -> None:
    assert "note        the load was 9.0" in as_text(measurement(RELAYS, busy="the load was 9.0 on 2 cores"))


def test_the_advice_names_what_the_recommended_codec_loses() -> None:
    compared = (
        CodecFigures(Codec.RAW, 450_000, 0.1, 250.0, 220.0),
        CodecFigures(Codec.JPEG_Q50, 10_000, 0.5, 60.0, 30.0),
    )
    text = as_text(measurement(RELAYS, compared=compared))
    assert "take JPEG_Q50: the fastest over this link (visible losses" in text
    assert text.endswith("; RAW takes 190.0 ms more")


@pytest.mark.parametrize("form", [as_text, lambda seen: json.dumps(as_json(seen))], ids=["text", "JSON"])
def test_no_secret_of_the_address_is_in_the_report(form: Any) -> None:
    report = form(measurement(RELAYS))
    assert "gpu-box:8000" in report
    assert "secret" not in report
