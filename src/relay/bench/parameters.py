"""What is measured and how: the one list of options, which the command line shows as it stands here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from relay.bench.observations import PROMPT
from relay.protocol.images import Codec
from relay.protocol.limits import MAX_IMAGE_SIDE

_LONGEST_INTERVAL_S = 3600


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is sent, how often, and how long anything may take."""

    calls: int = 100
    """Calls that count."""

    warm_up: int = 5
    """Calls before them, which are left out."""

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

    seed: int = 0
    """Of frames and states."""


@dataclass(frozen=True, slots=True)
class Parameters(BenchOptions):
    """The options with what they are about.

    Attributes:
        url: the server's address.
        codec: how frames are sent.

    Raises:
        ValueError: naming the one that cannot be.
    """

    url: str = field(kw_only=True)
    codec: Codec = field(default=Codec.JPEG_Q90, kw_only=True)

    def __post_init__(self) -> None:
        for name, least in (("calls", 1), ("warm_up", 0), ("codec_rounds", 0), ("frame_size", 8), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.frame_size > MAX_IMAGE_SIDE:
            raise ValueError(f"frame_size must be at most {MAX_IMAGE_SIDE}, got {self.frame_size}")
        if not 0 <= self.interval <= _LONGEST_INTERVAL_S:
            raise ValueError(f"interval must be between 0 and {_LONGEST_INTERVAL_S} s, got {self.interval:g}")
        for name in ("connect_timeout", "timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number of seconds above 0, got {getattr(self, name):g}")
