"""Ask the package index whether the light client installs from wheels alone, on machines that are not this one.

    python scripts/check_wheels.py      one line for each Python and processor; nothing is installed

Robots seldom have a compiler, so every dependency must come as a wheel for the oldest and the newest Python.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

PYTHONS = ("3.10", "3.14")
PROCESSORS = ("x86_64", "aarch64")
PLATFORMS = ("manylinux2014", "manylinux_2_28")
"""NumPy's wheels for the newest Pythons need the later one: glibc 2.28, as of Debian 10."""

ROOT = Path(__file__).resolve().parent.parent


class NoNetwork(Exception):
    """The package index cannot be reached."""


def main() -> int:
    status = 0
    for python, processor in product(PYTHONS, PROCESSORS):
        where = f"wheels for Python {python} on {processor}"
        try:
            print(f"{where}: {resolve(python, processor)}")
        except LookupError as missing:
            print(f"{where}: MISSING\n{missing}")
            status = 1
        except NoNetwork as error:
            print(f"wheels: not checked. {error}")
            return status
    return status


def dependencies() -> list[str]:
    """What the base installation asks for, as `pyproject.toml` states it."""
    listed = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert listed is not None
    return re.findall(r'"(.+?)"', listed.group(1))


def resolve(python: str, processor: str) -> str:
    """The releases that would be installed there.

    Raises:
        LookupError: in pip's words, if a package has no wheel for it.
        NoNetwork: if that cannot be known.
    """
    platforms = [f"--platform={platform}_{processor}" for platform in PLATFORMS]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "report.json"
        # A dry run resolves like `pip download`, from the wheels' metadata.
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries=1", "--timeout=15"]
        command += ["install", "--dry-run", "--quiet", "--ignore-installed", f"--target={folder}/wheels"]
        command += ["--only-binary=:all:", f"--python-version={python}", *platforms, f"--report={found}"]
        done = subprocess.run([*command, *dependencies()], capture_output=True, text=True)
        if done.returncode == 0:
            packages = [item["metadata"] for item in json.loads(found.read_text())["install"]]
            return ", ".join(f"{package['name']} {package['version']}" for package in packages)
    if "Retrying (" in done.stderr:
        raise NoNetwork("The package index cannot be reached.")
    raise LookupError("\n".join(line for line in done.stderr.splitlines() if line.startswith("ERROR")) or done.stderr)


if __name__ == "__main__":
    sys.exit(main())
