"""What all tests share: few threads, and no test that needs what this machine lacks."""

from __future__ import annotations

import os
from pathlib import Path

# Before anything imports torch or numpy: the tests must pass on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

VOCAB = Path(__file__).parents[1] / "vocab"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that need fetched tokenizer files or a GPU, saying how many and why."""
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    has_vocab = (VOCAB / "gemma.json").is_file()
    for item in items:
        missing = (item.get_closest_marker("vocab") and not has_vocab) or (
            item.get_closest_marker("gpu") and not _has_gpu()
        )
        (left_out if missing else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
        if not has_vocab:
            config.stash[_NOTES] = ["tests of the Gemma vocabulary are left out: `make vocab` fetches it"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for note in config.stash.get(_NOTES, []):
        terminalreporter.write_line(note)


_NOTES = pytest.StashKey[list[str]]()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
