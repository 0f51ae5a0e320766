"""What `make test-all` runs is what the package says it supports."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import metadata
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "scripts")
    return importlib.import_module("every_python")


def test_every_python_of_the_classifiers_has_its_runs(matrix: ModuleType) -> None:
    classifiers = metadata("relay-robotics").get_all("Classifier", [])
    stated = re.findall(r"^Programming Language :: Python :: (3\.\d+)$", "\n".join(classifiers), re.MULTILINE)
    assert tuple(stated) == matrix.PYTHONS
    assert matrix.PINS.keys() == set(stated)


def test_the_oldest_packages_are_the_lower_bounds(matrix: ModuleType) -> None:
    required = metadata("relay-robotics").get_all("Requires-Dist", [])
    bounds = {re.split(r"[<>=!~; ]", line)[0].lower(): line for line in required if "extra ==" not in line}
    assert len(matrix.OLDEST) == len(bounds)
    for pin in matrix.OLDEST:
        name, release = pin.split("==")
        assert f">={release}" in bounds[name.lower()]


def test_the_oldest_packages_run_on_the_oldest_python(matrix: ModuleType) -> None:
    assert matrix.OLDEST in matrix.PINS[matrix.PYTHONS[0]]
