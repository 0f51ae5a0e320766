"""What `relay bench` and `examples/demo.py` do alike: measure, print, write the numbers and the picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from websockets.exceptions import WebSocketException

from relay.bench.parameters import Parameters
from relay.bench.plot import NoMatplotlib, save_plot
from relay.bench.report import as_json, as_text
from relay.bench.run import Progress, measure


def run(
    parameters: Parameters, *, headers_file: Path | None = None, output: Path | None = None, plot: Path | None = None
) -> int:
    """Measure and report; returns the exit code.

    Args:
        headers_file: headers for the connection, one a line as in HTTP, such as `Authorization: Api-Key ...`.
        output: JSON file for everything, the single calls included.
        plot: picture file; without Matplotlib, a line says how to get it.
    """
    try:
        measurement = measure(
            parameters, headers=read_headers(headers_file) if headers_file else None, progress=_progress()
        )
        print(as_text(measurement))
        if output is not None:
            output.write_text(json.dumps(as_json(measurement), indent=2) + "\n", "utf-8")
            print(f"\nnumbers     {output}")
        if plot is not None:
            try:
                save_plot(measurement, plot)
                print(f"picture     {plot}")
            except NoMatplotlib as missing:
                print(f"no picture: {missing}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, ValueError, OSError, WebSocketException) as error:
        print(f"relay bench: {error}", file=sys.stderr)
        return 1
    return 0


def read_headers(file: Path) -> Mapping[str, str]:
    """Headers from a file, one `Name: value` a line; blank lines and those that begin with `#` don't count.

    Raises:
        ValueError: naming the line that is none, without its text, which may be a secret.
        OSError: the file cannot be read.
    """
    headers: dict[str, str] = {}
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or not value.strip():
            raise ValueError(f"{file}, line {number}: expected a header such as 'Authorization: Api-Key ...'")
        headers[name.strip()] = value.strip()
    return headers


def _progress() -> Progress:
    """Says what is being done on a terminal's last line, and nothing anywhere else."""
    if not sys.stderr.isatty():
        return lambda doing: None
    return lambda doing: print(f"\r\x1b[K{doing}\r", end="", file=sys.stderr, flush=True)
