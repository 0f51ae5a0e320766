"""`relay bench`: how long calls to a server take from here, and where their time goes."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tyro.conf import OmitArgPrefixes, Positional

from relay.bench.parameters import BenchOptions, Parameters
from relay.cli.demo import codec_named
from relay.protocol.images import Codec


@dataclass(frozen=True)
class Bench:
    """Measure the round trips to a policy server, one call at a time, and where their time goes."""

    url: Positional[str]
    """The server's address, such as ws://gpu-box:8000."""

    codec: str = Codec.JPEG_Q90.name
    """How frames are sent: RAW, LOSSLESS, or JPEG_Q100, Q98, Q95, Q92, Q90, Q85 or Q50."""

    measurement: OmitArgPrefixes[BenchOptions] = field(default_factory=BenchOptions)

    headers_file: Path | None = None
    """Headers for the connection, one a line, such as Authorization: Api-Key ..."""

    output: Path | None = None
    """JSON file for all numbers."""

    plot: Path | None = None
    """Picture file, such as bench.png."""

    def run(self) -> int:
        from relay.bench.command import run

        try:
            parameters = Parameters(url=self.url, codec=codec_named(self.codec), **asdict(self.measurement))
        except ValueError as error:
            print(f"relay bench: {error}", file=sys.stderr)
            return 2
        return run(parameters, headers_file=self.headers_file, output=self.output, plot=self.plot)
