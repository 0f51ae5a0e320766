"""What all tests share: few threads, no slow test unless asked for, and none that needs what this machine lacks."""

from __future__ import annotations

import os
from pathlib import Path

# Before anything imports torch or numpy: the tests must pass on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

VOCAB = Path(__file__).parents[1] / "vocab"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests, and tests that need fetched tokenizer files or a GPU, saying how many and why.

    With `-m EXPRESSION`, the expression decides about slow ones.
    """
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    notes: dict[str, None] = {}
    has_vocab = (VOCAB / "gemma.json").is_file()
    for item in items:
        if item.get_closest_marker("slow") and not config.option.markexpr:
            notes["slow tests are left out: `make test-slow` runs them"] = None
        elif item.get_closest_marker("vocab") and not has_vocab:
            notes["tests of the Gemma vocabulary are left out: `make vocab` fetches it"] = None
        elif not (item.get_closest_marker("gpu") and not _has_gpu()):
            kept.append(item)
            continue
        left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
        config.stash[_NOTES] = list(notes)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for note in config.stash.get(_NOTES, []):
        terminalreporter.write_line(note)


_NOTES = pytest.StashKey[list[str]]()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
