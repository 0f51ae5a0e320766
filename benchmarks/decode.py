"""What distrust costs: `decode_request` against openpi-client's decoder, which checks nothing.

    python benchmarks/decode.py

One observation with three cameras of 224x224, as JPEG files (31 KB together) and as arrays, decoded by both in turns
in one process; "with headers" adds the frames' headers, which a policy reads before it decodes a pixel. The fastest of
many short batches is taken, since other processes can only slow a batch down. The stock package comes from
.venv-stock, which `make stock` makes; its decoder runs on this environment's NumPy and MessagePack.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import stock
from relay.protocol.images import Codec, decoded_bytes, encode_images
from relay.protocol.messages import Infer, decode_request
from relay.protocol.msgpack_numpy import pack

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
JPEG_BYTES = 31_000
GOAL_US = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=2_000, help="of 20 calls, for each decoder")
    batches = parser.parse_args().batches
    unpackb = stock_decoder()
    print(f"{'':14}{'stock':>10}{'relay':>10}{'more':>10}{'ratio':>8}{'with headers':>14}{'more':>10}")
    for name, message in (("JPEG", pack(jpeg_observation())), ("raw arrays", pack(raw_observation()))):
        plain, relay, headers = fastest((unpackb, decode_request, decode_and_read_headers), message, batches)
        print(
            f"{name:10}{len(message) / 1e3:4.0f} KB"[:18].ljust(14)
            + f"{plain:7.2f} us{relay:7.2f} us{relay - plain:+7.2f} us{relay / plain:8.2f}"
            + f"{headers:11.2f} us{headers - plain:+7.2f} us"
        )
    print(f"goal: at most {GOAL_US:g} us more for a JPEG observation")


def stock_decoder() -> Callable[[bytes], Any]:
    """openpi-client's `unpackb`, without the package around it, which wants an older NumPy."""
    stock.ensure()
    (file,) = stock.ENVIRONMENT.glob("[Ll]ib/**/site-packages/openpi_client/msgpack_numpy.py")
    spec = importlib.util.spec_from_file_location("stock_msgpack_numpy", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.unpackb


def jpeg_observation() -> dict[str, Any]:
    """JPEG files of a photograph, at the highest quality that keeps the three below 31 KB together."""
    for codec in (Codec.JPEG_Q95, Codec.JPEG_Q92, Codec.JPEG_Q90, Codec.JPEG_Q85, Codec.JPEG_Q50):
        observation = encode_images(raw_observation(), codec)
        if sum(map(len, observation["image"].values())) <= JPEG_BYTES:
            return observation
    raise AssertionError("the photograph is too detailed")


def raw_observation() -> dict[str, Any]:
    photograph = Image.open(Path(__file__).parent / "data/frame.png").convert("RGB").resize((224, 224))
    frame = np.asarray(photograph)
    return {
        "image": dict.fromkeys(CAMERAS, frame),
        "state": np.linspace(-1, 1, 32, dtype=np.float32),
        "prompt": "pick up the fork and put it into the drawer",
    }


def decode_and_read_headers(message: bytes) -> None:
    request = decode_request(message)
    assert isinstance(request, Infer)
    for camera, frame in request.observation["image"].items():
        decoded_bytes(frame, camera)


def fastest(decoders: tuple[Callable[[bytes], Any], ...], message: bytes, batches: int) -> list[float]:
    """Microseconds a call, the least of all batches of each decoder."""
    least = [float("inf")] * len(decoders)
    for _ in range(batches):
        for index, decode in enumerate(decoders):
            started = time.perf_counter()
            for _ in range(20):
                decode(message)
            least[index] = min(least[index], (time.perf_counter() - started) / 20 * 1e6)
    return least


if __name__ == "__main__":
    main()
