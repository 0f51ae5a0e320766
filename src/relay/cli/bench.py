"""`relay bench`: how long calls to a server take from here, and where their time goes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from relay.bench.observations import PROMPT
from relay.cli.demo import codec_named
from relay.protocol.images import Codec


@dataclass(frozen=True)
class Bench:
    """Measure the round trips to a policy server, one call at a time, and where their time goes."""

    url: Positional[str]
    """The server's address, such as ws://gpu-box:8000."""

    calls: int = 100
    """Calls that count."""

    warm_up: int = 5
    """Calls before them, which are left out."""

    codec: str = Codec.JPEG_Q90.name
    """How frames are sent: RAW, LOSSLESS, or JPEG_Q100, Q98, Q95, Q92, Q90, Q85 or Q50."""

    codec_rounds: int = 10
    """Calls under each of four codecs, to see which suits the link; 0 leaves that out."""

    interval: float = 0.0
    """Seconds from an answer to the next question; a pause lets TCP start slowly again, as on a robot."""

    robot: str | None = None
    """Send a robot's keys, by the name of its profile or as a YAML file, where the server doesn't tell its own."""

    observation: Path | None = None
    """Send this observation, a file in MessagePack as clients send it."""

    prompt: str = PROMPT
    """Task in words."""

    frame_size: int = 224
    """Height and width of the synthetic frames."""

    direct: bool = True
    """Take a direct route past proxies if the server offers one."""

    ca_file: Path | None = None
    """PEM file of the certificates to trust instead of the system's."""

    connect_timeout: float = 300.0
    """Seconds to wait for the server, which may still be loading its policy."""

    timeout: float = 60.0
    """Seconds to wait for each answer."""

    headers_file: Path | None = None
    """Headers for the connection, one a line, such as Authorization: Api-Key ..."""

    seed: int = 0
    """Of frames and states."""

    output: Path | None = None
    """JSON file for all numbers."""

    plot: Path | None = None
    """Picture file, such as bench.png."""

    def run(self) -> int:
        from relay.bench.command import run
        from relay.bench.run import Parameters

        try:
            parameters = Parameters(
                url=self.url,
                calls=self.calls,
                warm_up=self.warm_up,
                codec=codec_named(self.codec),
                codec_rounds=self.codec_rounds,
                interval=self.interval,
                robot=self.robot,
                observation=self.observation,
                prompt=self.prompt,
                frame_size=self.frame_size,
                direct=self.direct,
                ca_file=self.ca_file,
                connect_timeout=self.connect_timeout,
                timeout=self.timeout,
                seed=self.seed,
            )
        except ValueError as error:
            print(f"relay bench: {error}", file=sys.stderr)
            return 2
        return run(parameters, headers_file=self.headers_file, output=self.output, plot=self.plot)
