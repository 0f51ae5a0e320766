"""docs/parity.md: its tolerances are the ones that hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from folders import write_relay

from relay.models import registry

PAGE = (Path(__file__).parents[2] / "docs" / "parity.md").read_text("utf-8")


@pytest.mark.parametrize(("family", "column"), [("pi05", 2), ("pi0", 3)])
def test_the_table_has_every_tolerance(family: str, column: int, tmp_path: Path) -> None:
    rows = re.findall(r"^\| (float32|bfloat16) \| (\w+) \| (\S+) \| (\S+) \|$", PAGE, re.MULTILINE)
    told = {
        (row[0], ours): float(row[column])
        for row in rows
        for ours in (("float32", "bfloat16") if row[1] == "either" else (row[1],))
    }
    assert told == registry.inspect(None, checkpoint=write_relay(tmp_path, family)).tolerances
