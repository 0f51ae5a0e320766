"""What all tests share: few threads, no slow test unless asked for, and none that needs what this machine lacks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Before anything imports torch or numpy: the tests must pass on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

HERE = Path(__file__).parent
HAS_TORCH = find_spec("torch") is not None
HAS_DREAMZERO = all(find_spec(package) for package in ("diffusers", "transformers", "ftfy"))
HAS_VOCAB = all((HERE.parent / "vocab" / name).is_file() for name in ("gemma.json", "qwen3.json"))

TORCH_FREE = ("protocol", "client", "server")
"""Folders whose tests run wherever the base installation does; one that cannot be imported there is an error."""


class _Module(pytest.Module):
    """A test module; left out as a whole where it cannot be imported for want of torch."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            wanting = isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name in _SERVER_PACKAGES
            if HAS_TORCH or not wanting or self.path.relative_to(HERE).parts[0] in TORCH_FREE:
                raise
            self.config.stash[_MODULES].append(self.path)
            return []


_SERVER_PACKAGES = ("torch", "safetensors", "tokenizers", "sentencepiece")
_TORCH_SERVERS = {"demo_url", "tiny_url"}
_MODULES = pytest.StashKey[list[Path]]()
_NOTES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as for jobs of a shell's background: Ctrl-C is tested
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[_MODULES] = []
    config.stash[_NOTES] = []


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    module: pytest.Module = _Module.from_parent(parent, path=module_path)
    return module


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests, and those that need torch, other packages, fetched files or a GPU, saying how many and why.

    With `-m EXPRESSION`, the expression decides about slow ones.
    """
    notes = config.stash[_NOTES]
    if not config.option.markexpr and (count := _leave_out(config, items, lambda item: _marked(item, "slow"))):
        notes.append(f"{count} slow tests are left out: `make test-slow` runs them")
    if not HAS_TORCH:
        count = _leave_out(config, items, _needs_torch)
        if count or config.stash[_MODULES]:
            modules = len(config.stash[_MODULES])
            notes.append(f"torch is not installed: {count} tests and {modules} test modules are left out")
    if not HAS_DREAMZERO and (count := _leave_out(config, items, lambda item: _marked(item, "dreamzero"))):
        notes.append(f"diffusers, transformers or ftfy is not installed: {count} tests of DreamZero are left out")
    if not HAS_VOCAB and _leave_out(config, items, lambda item: _marked(item, "vocab")):
        notes.append("tests of published vocabularies are left out: `make vocab` fetches them")
    if count := _leave_out(config, items, lambda item: _marked(item, "gpu") and not _has_gpu()):
        notes.append(f"{count} tests that need a GPU are left out")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of pytest-xdist's processes, which prints nothing itself
        session.config.workeroutput["notes"] = session.config.stash[_NOTES]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep what a process of pytest-xdist left out; each has collected all tests, so that one's notes are enough."""
    node.config.stash[_NOTES] = getattr(node, "workeroutput", {}).get("notes", node.config.stash[_NOTES])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for note in config.stash[_NOTES]:
        terminalreporter.write_line(note)


def _leave_out(config: pytest.Config, items: list[pytest.Item], lacks: Callable[[pytest.Item], bool]) -> int:
    left_out = [item for item in items if lacks(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    return len(left_out)


def _needs_torch(item: pytest.Item) -> bool:
    """Marked so, or served by a policy that runs on it."""
    return _marked(item, "torch") or not _TORCH_SERVERS.isdisjoint(getattr(item, "fixturenames", ()))


def _marked(item: pytest.Item, name: str) -> bool:
    return item.get_closest_marker(name) is not None


def _has_gpu() -> bool:
    if not HAS_TORCH:
        return False
    import torch

    return torch.cuda.is_available()
