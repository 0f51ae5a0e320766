"""Run the tests that need no torch on every Python found, with the newest, older and oldest packages.

    python scripts/every_python.py                          all of them, about a minute and a half each
    python scripts/every_python.py --only 3.10 tests/client     one interpreter, some tests; what follows is for pytest

Each interpreter gets an environment `.venv-3.X` with the base installation, the command line's packages and pytest.
Other releases than the newest lie in folders that are put in front of it, so that nothing is ever reinstalled.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import check_wheels

ROOT = check_wheels.ROOT
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TESTED_WITH = ("pytest>=8.2", "pytest-asyncio>=0.24", "hypothesis>=6.100", "trustme>=1.1")

NUMPY_1 = ("numpy==1.26.*", "simplejpeg")
OLDEST = tuple(re.sub(r"^([\w-]+)>=([\d.]+).*", r"\1==\2", wanted) for wanted in check_wheels.dependencies())
PINS: dict[str, tuple[tuple[str, ...], ...]] = {
    "3.10": ((), NUMPY_1, OLDEST),
    "3.11": ((), NUMPY_1),
    "3.12": ((), NUMPY_1, ("numpy==2.0.*",)),
    "3.13": ((),),
    "3.14": ((),),
}
"""For each Python, what takes the place of the newest releases in each of its runs."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests that need no torch on every Python found.")
    parser.add_argument("--only", action="append", choices=PYTHONS, help="this Python; may be given several times")
    options, pytest_arguments = parser.parse_known_args()
    rows: list[Row] = []
    for python in options.only or PYTHONS:
        interpreter = find_interpreter(python)
        if interpreter is None:
            rows.append(Row(python, "", "", "this interpreter was not found", 0))
            continue
        environment = make_environment(python, interpreter)
        for pins in PINS[python]:
            rows.append(run_tests(python, environment, pins, pytest_arguments))
    print(table(rows))
    wheels = 0 if options.only else check_wheels.main()
    return max(wheels, *(row.status for row in rows))


@dataclass(frozen=True)
class Row:
    """One line of the table; `status` is 0 unless something failed."""

    python: str
    numpy: str
    websockets: str
    outcome: str
    status: int


def find_interpreter(python: str) -> Path | None:
    """The first that runs and can make environments: on the PATH, then those of pyenv and uv."""
    for candidate in candidates(f"python{python}"):
        check = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
        answer = subprocess.run([str(candidate), "-c", check], capture_output=True, text=True)
        if answer.returncode == 0 and answer.stdout.strip() == python:
            return candidate
    return None


def candidates(name: str) -> Iterator[Path]:
    if found := shutil.which(name):
        yield Path(found)
    for folder in ("~/.pyenv/versions", "~/.local/share/uv/python"):
        yield from sorted(Path(folder).expanduser().glob(f"*/bin/{name}"))


def make_environment(python: str, interpreter: Path) -> Path:
    """`.venv-3.X`, made or brought up to date with `pyproject.toml`."""
    environment = ROOT / f".venv-{python}"
    stamp = environment / "installed"
    if not stamp.exists() or stamp.stat().st_mtime < (ROOT / "pyproject.toml").stat().st_mtime:
        say(f"Python {python}: making {environment.name} with {interpreter}")
        subprocess.run([str(interpreter), "-m", "venv", "--clear", str(environment)], check=True)
        install(environment, "--editable", f"{ROOT}[cli]", *TESTED_WITH)
        stamp.touch()
    return environment


def run_tests(python: str, environment: Path, pins: tuple[str, ...], arguments: list[str]) -> Row:
    path = pinned(environment, pins)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, path))}
    numpy, websockets = versions(environment, variables)
    say(f"Python {python}, numpy {numpy}, websockets {websockets}")
    started = time.monotonic()
    command = [str(environment / "bin/python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.splitlines() or ["no output"]
    if done.returncode != 0:
        print(done.stdout)
    print(*[line for line in lines if line.startswith("torch is not installed")], sep="\n")
    counts = re.sub(r" in [\d.]+s.*", "", lines[-1].strip("= "))
    return Row(python, numpy, websockets, f"{counts} in {time.monotonic() - started:.0f} s", done.returncode)


def pinned(environment: Path, pins: tuple[str, ...]) -> list[Path]:
    """The folder with these releases, filled if it is not there; none for no pins."""
    if not pins:
        return []
    folder = environment / "pins" / re.sub(r"[^\w.-]+", "_", "+".join(pins))
    if not folder.exists():
        unfinished = folder.with_name("unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        install(environment, "--no-deps", f"--target={unfinished}", *pins)
        unfinished.rename(folder)
    return [folder]


def install(environment: Path, *what: str) -> None:
    pip = [str(environment / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    done = subprocess.run([*pip, *what], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}\nscripts/every_python.py: could not install {', '.join(what)}")


def versions(environment: Path, variables: dict[str, str]) -> tuple[str, str]:
    ask = "import numpy, websockets.version; print(numpy.__version__, websockets.version.version)"
    command = [str(environment / "bin/python"), "-c", ask]
    numpy, websockets = subprocess.run(
        command, env=variables, capture_output=True, text=True, check=True
    ).stdout.split()
    return numpy, websockets


def table(rows: list[Row]) -> str:
    """The rows in columns as wide as they need to be."""
    lines = [("Python", "numpy", "websockets", "tests")]
    lines += [(row.python, row.numpy, row.websockets, row.outcome) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(3)] + [0]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
