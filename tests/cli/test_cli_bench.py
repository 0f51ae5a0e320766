"""`relay bench`'s command line: every option of a measurement arrives, under the name that it has there."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from relay.bench import command
from relay.bench.parameters import BenchOptions, Parameters
from relay.cli.main import main
from relay.protocol.images import Codec

URL = "ws://gpu-box:8000"

CHOSEN: dict[str, Any] = {
    "calls": 7,
    "warm_up": 3,
    "codec_rounds": 2,
    "interval": 0.5,
    "robot": "droid",
    "observation": Path("seen.msgpack"),
    "prompt": "fold",
    "frame_size": 96,
    "direct": False,
    "ca_file": Path("ca.pem"),
    "connect_timeout": 4.0,
    "timeout": 2.0,
    "seed": 9,
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Parameters, dict[str, Any]]]:
    """What would have been measured, and what would have been done with it."""
    measured: list[tuple[Parameters, dict[str, Any]]] = []
    monkeypatch.setattr(command, "run", lambda parameters, **where: measured.append((parameters, where)) or 0)
    return measured


def flag(name: str, value: Any) -> list[str]:
    dashed = name.replace("_", "-")
    return [f"--no-{dashed}"] if value is False else [f"--{dashed}", str(value)]


def test_every_option_of_a_measurement_arrives(measured: list[Any]) -> None:
    assert set(CHOSEN) == {option.name for option in fields(BenchOptions)}
    flags = [word for name, value in CHOSEN.items() for word in flag(name, value)]
    assert main(["bench", URL, *flags, "--codec", "jpeg_q50"]) == 0
    assert measured[0][0] == Parameters(url=URL, codec=Codec.JPEG_Q50, **CHOSEN)


def test_without_options_the_defaults_hold(measured: list[Any]) -> None:
    assert main(["bench", URL]) == 0
    assert measured == [(Parameters(url=URL), {"headers_file": None, "output": None, "plot": None})]


def test_files_of_the_report_and_of_headers_are_no_part_of_the_measurement(measured: list[Any]) -> None:
    assert main(["bench", URL, "--headers-file", "h", "--output", "o", "--plot", "p"]) == 0
    where = {"headers_file": Path("h"), "output": Path("o"), "plot": Path("p")}
    assert measured == [(Parameters(url=URL), where)]


def test_a_codec_that_is_none_is_refused_with_the_names(
    measured: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", URL, "--codec", "JPEG_Q91"]) == 2
    assert "relay bench: --codec 'JPEG_Q91' is not known; known are RAW, LOSSLESS" in capsys.readouterr().err
    assert measured == []
