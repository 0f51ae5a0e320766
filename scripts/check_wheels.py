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
from pathlib import Path

PYTHONS = ("3.10", "3.14")
PROCESSORS = ("x86_64", "aarch64")
PLATFORMS = ("manylinux2014", "manylinux_2_28")
"""NumPy's wheels for the newest Pythons need the later one: glibc 2.28, as of Debian 10."""

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    results = [resolve(python, processor) for python in PYTHONS for processor in PROCESSORS]
    return max(report(result) for result in results)


def dependencies() -> list[str]:
    """What the base installation asks for, as `pyproject.toml` states it."""
    listed = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert listed is not None
    return re.findall(r'"(.+?)"', listed.group(1))


def resolve(python: str, processor: str) -> tuple[str, str | None]:
    """What would be installed there, and what went wrong: None, `"no network"` or pip's words."""
    platforms = [f"--platform={platform}_{processor}" for platform in PLATFORMS]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "report.json"
        # A dry run resolves like `pip download`, from the wheels' metadata.
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries=1", "--timeout=15"]
        command += ["install", "--dry-run", "--quiet", "--ignore-installed", f"--target={folder}/wheels"]
        command += ["--only-binary=:all:", f"--python-version={python}", *platforms, f"--report={found}"]
        done = subprocess.run([*command, *dependencies()], capture_output=True, text=True)
        where = f"Python {python} on {processor}"
        if done.returncode == 0:
            packages = [item["metadata"] for item in json.loads(found.read_text())["install"]]
            return f"{where}: " + ", ".join(f"{item['name']} {item['version']}" for item in packages), None
        if re.search(r"Retrying \(|NewConnectionError|ConnectTimeout|ProxyError|Network is unreachable", done.stderr):
            return where, "no network"
        return where, "\n".join(line for line in done.stderr.splitlines() if line.startswith("ERROR"))


def report(result: tuple[str, str | None]) -> int:
    where, trouble = result
    if trouble is None:
        print(f"wheels for {where}")
    elif trouble == "no network":
        print(f"wheels for {where}: not checked, the package index cannot be reached")
    else:
        print(f"wheels for {where}: MISSING\n{trouble}")
    return int(trouble not in (None, "no network"))


if __name__ == "__main__":
    sys.exit(main())
