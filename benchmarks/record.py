"""What every benchmark writes down beside its numbers: when, on which machine, with which versions and parameters."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import relay

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PACKAGES = ("numpy", "msgpack", "websockets")


def write(
    name: str,
    content: Mapping[str, Any],
    parameters: Mapping[str, Any],
    *,
    folder: Path = RESULTS,
    packages: Sequence[str] = PACKAGES,
) -> Path:
    """Write one run's JSON file and say where.

    Args:
        name: of the benchmark; the file's begins with it.
        parameters: what the command line chose.
        packages: whose versions matter.
    """
    report = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {"relay": relay.__version__} | {package: version(package) for package in packages},
        "parameters": {key: str(value) for key, value in parameters.items()},
        **content,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{datetime.now():%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nwritten to {path}")
    return path


def machine() -> dict[str, Any]:
    """What the numbers were taken on, as far as the system tells."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True)
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "commit": commit.stdout.strip() or None,
    }


def how_busy() -> str | None:
    """A warning if other programs are using the machine."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    cores = os.cpu_count() or 1
    return f"the load is {load:.1f} on {cores} cores before we begin" if load > 0.3 * cores else None
