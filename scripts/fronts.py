"""Debian's nginx and HAProxy, unpacked into a folder and not installed, for tests of what stands in front of a server.

    python scripts/fronts.py      makes .fronts, or finds it, and prints where the programs are

Where both are installed already, or the system has no apt, nothing is made. Used by `tests/deploy/` and
`benchmarks/fronts.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / ".fronts"

PACKAGES = ("nginx", "haproxy")
LIBRARIES = ("liblua5.3-0", "libopentracing-c-wrapper0", "libopentracing1")
"""What Debian 12's haproxy is linked with and no other program; later releases need fewer."""


def program(name: str) -> Path | None:
    """The program of a front, installed or in our folder; None where it is in neither place."""
    installed = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    unpacked = FOLDER / "usr/sbin" / name
    return Path(installed) if installed else unpacked if unpacked.exists() else None


def environment() -> dict[str, str]:
    """Ours, with the libraries that were unpacked too."""
    libraries = [str(folder) for folder in FOLDER.glob("usr/lib/*-linux-gnu*")]
    path = ":".join([*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    return os.environ | ({"LD_LIBRARY_PATH": path} if path else {})


def ensure() -> None:
    """Fetch and unpack the programs that are missing, with apt."""
    missing = [name for name in PACKAGES if program(name) is None]
    if not missing:
        return
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        print(f"{' and '.join(missing)} must be installed by hand: this system has no apt", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as folder:
        if not _download(folder, missing):
            subprocess.run(["apt-get", "--quiet=2", "update"], check=True)
            if not _download(folder, missing):
                sys.exit(f"apt has no {' or no '.join(missing)}")
        for library in LIBRARIES:
            _download(folder, [library])
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg-deb", "--extract", str(package), str(FOLDER)], check=True)


def _download(folder: str, packages: list[str]) -> bool:
    command = ["apt-get", "--quiet=2", "download", *packages]
    return subprocess.run(command, cwd=folder, stderr=subprocess.DEVNULL).returncode == 0


if __name__ == "__main__":
    ensure()
    for name in PACKAGES:
        print(f"{name}: {program(name) or 'missing'}")
