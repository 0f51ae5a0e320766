"""Which adapters a server may use: names, and the folders they stand for. Imports no torch.

A name is looked up in what the operator gave; it is never made into a path, and nothing is fetched from anywhere.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relay.protocol.wording import quoted

BASE = "base"
"""The name under which a request asks for no adapter, where the server has a default one."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """What the operator chose about adapters.

    Attributes:
        named: folders by name.
        root: a folder whose sub-folders are adapters, under their own names; looked through again at a reload.
        default: the adapter of requests that name none.
        merged: add the only one to the weights when the policy is loaded, so that it costs nothing and nothing else can
            be asked for.
        memory_bytes: most device memory for adapters; those used longest ago make room.
    """

    named: Mapping[str, Path] = field(default_factory=dict)
    root: Path | None = None
    default: str | None = None
    merged: bool = False
    memory_bytes: int = 4 * 2**30

    @property
    def any(self) -> bool:
        """Whether requests may ask for adapters at all."""
        return bool(self.named) or self.root is not None

    def __post_init__(self) -> None:
        for name in self.named:
            if not is_name(name):
                raise ValueError(
                    f"an adapter cannot be called {quoted(name)}: expected letters, digits, '.', '_' and '-', "
                    f"at most 64, and not {BASE!r}"
                )
        if self.root is not None and not self.root.is_dir():
            raise ValueError(f"--adapter-root {self.root} is not a folder")
        if self.default is not None and not self.any:
            raise ValueError(f"--default-adapter {self.default} needs --adapter or --adapter-root")
        if self.merged and (len(self.named) != 1 or self.root is not None):
            raise ValueError(f"--merge-adapter takes one --adapter and no --adapter-root, got {len(self.named)}")


def is_name(name: str) -> bool:
    """Whether an adapter may have this name."""
    return _NAME.fullmatch(name) is not None and name not in (".", "..", BASE)


def parse_named(texts: Sequence[str]) -> dict[str, Path]:
    """`name=path` texts of the command line.

    Raises:
        ValueError: a text without `=`, or a name given twice.
    """
    named: dict[str, Path] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise ValueError(f"--adapter {text}: expected name=path")
        if name in named:
            raise ValueError(f"--adapter {name} is given twice")
        named[name] = Path(path).expanduser()
    return named


def find_folders(choice: AdapterChoice) -> dict[str, Path]:
    """Every adapter's folder by name, symbolic links resolved; what is given by name wins over the root.

    What lies in the root but leads out of it, or cannot be asked for by its name, is logged and left out.
    """
    folders: dict[str, Path] = {}
    if choice.root is not None:
        root = choice.root.resolve()
        for entry in sorted(entry for entry in root.iterdir() if not entry.name.startswith(".")):
            if _leads_out(entry, root):
                logger.warning("adapter root: %s leads out of %s and is left out", quoted(entry.name), root)
            elif entry.is_dir() and not is_name(entry.name):
                logger.warning("adapter root: %s cannot be an adapter's name and is left out", quoted(entry.name))
            elif entry.is_dir():
                folders[entry.name] = entry.resolve()
    return {**folders, **{name: path.resolve() for name, path in choice.named.items()}}


def _leads_out(entry: Path, root: Path) -> bool:
    """Whether it or a link in it leads out of the root, to the root itself or in a circle; opens nothing outside."""
    try:
        folder = entry.resolve()
        if folder == root or not folder.is_relative_to(root):
            return True
        return not all(path.resolve().is_relative_to(root) for path in folder.rglob("*"))
    except (OSError, RuntimeError):  # a circle: RuntimeError up to Python 3.12
        return True


def fingerprint(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """What changes when an adapter's files do: their names, sizes and times."""
    files = ((path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file())
    return tuple((str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns) for path, stat in files)
