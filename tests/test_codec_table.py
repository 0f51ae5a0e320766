"""The table in docs/codecs.md is what the code makes of the frame in the repository."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from relay import Codec


def benchmark() -> ModuleType:
    """benchmarks/codecs.py, under another name than the standard library's module."""
    path = Path(__file__).parents[1] / "benchmarks" / "codecs.py"
    spec = importlib.util.spec_from_file_location("codec_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["codec_benchmark"] = module
    spec.loader.exec_module(module)
    return module


CODECS = benchmark()
ROWS = {row.codec: row for row in CODECS.read_table(CODECS.PAGE.read_text("utf-8"))}


def test_the_table_has_a_row_for_every_codec():
    assert list(ROWS) == [codec.name for codec in Codec]


@pytest.mark.parametrize("codec", Codec)
def test_bytes_and_psnr_are_what_this_codec_gives_up_to_the_encoders_version(codec: Codec):
    told, measured = ROWS[codec.name], CODECS.measured(codec, CODECS.frame())
    assert told.size == pytest.approx(measured.size, rel=0.03)
    assert told.psnr == pytest.approx(measured.psnr, abs=0.3)


def test_the_page_is_written_by_the_table_alone():
    text = CODECS.table(list(ROWS.values()))
    assert f"{CODECS.BEGIN}\n{text}{CODECS.END}" in CODECS.PAGE.read_text("utf-8")


def test_the_frame_is_the_synthetic_one():
    assert CODECS.FRAME.stat().st_size < 150_000
    difference = CODECS.frame().astype(int) - CODECS.synthetic_frame()
    assert np.abs(difference).max() <= 1  # sines differ in the last digit between machines
