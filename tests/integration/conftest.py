"""A real server with the shipped demo policy, in a process of its own; a JPEG file for clients that read one."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from stock_environment import FRAME

from relay.cli.local_server import LocalServer


@pytest.fixture(scope="session")
def demo_url() -> Iterator[str]:
    """`relay serve demo`, one row per batch, so that seeded replies are equal to the byte."""
    with LocalServer(["demo", "--max-batch", "1"]) as server:
        server.wait_until_ready(lambda phase: None)
        yield server.url


@pytest.fixture(scope="session")
def jpeg(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NDArray[np.uint8]]:
    """A JPEG file and the pixels it decodes to."""
    file = io.BytesIO()
    Image.fromarray(FRAME).save(file, "JPEG", quality=95)
    path = tmp_path_factory.mktemp("frames") / "frame.jpg"
    path.write_bytes(file.getvalue())
    return path, np.asarray(Image.open(file))
