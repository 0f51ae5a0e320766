"""Damaged and hostile messages by the hundred thousand, read as the server and the client read them.

    make fuzz                                        200,000 messages, a few minutes
    make fuzz ARGS="--messages 1000000 --jobs 2"     more, in two processes
    python tests/protocol/fuzz_messages.py --replay tests/data/corpus/NAME.gz

Half of the messages are observations with flipped bytes, cut ends, swapped pieces and wrong lengths; the others are
structures that Hypothesis makes of markers, options and image slots, as they are and damaged too. Each must be read or
refused with an error of ours, within 50 ms of processor time if it is no longer than 1 MiB. One that is not goes to
tests/data/corpus/, where `make test` reads it from then on. The messages are made in a process of their own, so that
one that ends or hangs the interpreter is caught as well.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import io
import math
import mmap
import multiprocessing
import random
import re
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import hypothesis
import msgpack
import numpy as np
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from PIL import Image

from relay.protocol.errors import InvalidPayload, ObservationError
from relay.protocol.image_header import image_header, is_image_file
from relay.protocol.images import Codec, decode_images, decoded_bytes, encode_frame, encode_images, is_image_key
from relay.protocol.messages import Infer, decode_request
from relay.protocol.msgpack_numpy import pack, unpack

CORPUS: Final = Path(__file__).parents[1] / "data" / "corpus"
LONGEST_CALL_S: Final = 0.05
LONG_MESSAGE: Final = 1024 * 1024
STALL_S: Final = 60.0
DECODED_IN: Final = 4
"""One in so many readable observations has its pixels decoded, which is not timed: the server does it in threads."""


# ---- reading one message ------------------------------------------------------------------------------------------


class Failure(AssertionError):
    """A message that broke a promise."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a message: `read`, or the class of the error that refused it; and the slowest call in seconds."""

    outcome: str
    seconds: float


def check(message: bytes, *, decode_pixels: bool = True, longest_s: float = LONGEST_CALL_S) -> Verdict:
    """Read a message as the server and as the client would.

    Raises:
        Failure: for an error that is not ours, or a call of more than `longest_s` for a message of up to 1 MiB.
    """
    if len(message) > LONG_MESSAGE:
        longest_s = math.inf
    request, outcome, seconds = _timed(decode_request, message, longest_s)
    if isinstance(request, Infer):
        _, refusal, header_seconds = _timed(_read_headers, request.observation, longest_s)
        outcome = outcome if refusal == "read" else refusal
        seconds = max(seconds, header_seconds)
        if decode_pixels and refusal == "read":
            _allowed(decode_images, request.observation)
    _, _, client_seconds = _timed(unpack, message, longest_s)
    return Verdict(outcome, max(seconds, client_seconds))


def _timed(call: Any, argument: Any, longest_s: float) -> tuple[Any, str, float]:
    """The result, the outcome and the processor time of a call; a slow one counts only if it stays slow."""
    result, outcome, seconds = _once(call, argument)
    if seconds > longest_s:
        # The collector's walk over everything else in this process, or another process in the same core's cache.
        gc.collect()
        gc.freeze()
        seconds = min(seconds, *(_once(call, argument)[2] for _ in range(3)))
        if seconds > longest_s:
            raise Failure(f"{call.__name__} took {seconds * 1e3:.0f} ms")
    return result, outcome, seconds


def _once(call: Any, argument: Any) -> tuple[Any, str, float]:
    started = time.thread_time()
    result, outcome = _allowed(call, argument)
    return result, outcome, time.thread_time() - started


def _allowed(call: Any, argument: Any) -> tuple[Any, str]:
    try:
        return call(argument), "read"
    except (InvalidPayload, ObservationError) as error:
        if type(error) is ObservationError and call is unpack:
            raise Failure("unpack raised an ObservationError") from error
        return None, type(error).__name__
    except Exception as error:
        raise Failure(f"{call.__name__} raised {type(error).__name__}: {error}") from error


def _read_headers(observation: Any) -> None:
    """The frames' headers, as a policy's preparation reads them before it decodes any."""
    for key, value in observation.items():
        if is_image_key(key):
            slots = value.items() if isinstance(value, dict) else [(key, value)]
            for camera, slot in slots:
                decoded_bytes(slot, str(camera))
        elif isinstance(value, bytes) and is_image_file(value):
            image_header(value, key)


def kept(file: Path) -> bytes:
    """A message of the corpus."""
    return gzip.decompress(file.read_bytes())


# ---- making messages ----------------------------------------------------------------------------------------------


def messages(seed: int) -> Iterator[bytes]:
    """Endless messages, the same for the same seed and release of Hypothesis."""
    chance = random.Random(seed)
    observations = valid_observations(chance)
    while True:
        yield heavy(chance)
        for structure in _structures(chance.getrandbits(32), 50):
            whole = msgpack.packb(structure)
            yield whole
            for _ in range(9):
                yield damaged(whole, observations, chance)
            for _ in range(10):
                yield damaged(chance.choice(observations), observations, chance)


def valid_observations(chance: random.Random) -> list[bytes]:
    """Observations of several shapes in every container, with and without options."""
    found: list[bytes] = []
    for height, width in ((1, 1), (2, 3), (16, 16), (64, 48), (224, 224)):
        frame = _frame(height, width)
        state = np.linspace(-1, 1, 32, dtype=np.float32)
        for codec in Codec:
            images = {camera: frame for camera in ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")}
            plain = {"image": images, "state": state, "prompt": "pick up the fork"}
            found.append(pack(encode_images(plain, codec)))
        for data in _image_files(frame):
            found.append(pack({"image": {"base_0_rgb": data}, "state": state, "prompt": "pick", **_options(chance)}))
        clip = np.stack([frame, frame])
        found.append(pack({"observation/exterior_image_1_left": clip, "observation/joint_position": state[:7]}))
        found.append(pack({"video.front": [[encode_frame(frame, Codec.JPEG_Q90)] * 2], "endpoint": "infer"}))
        found.append(msgpack.packb({"observation.images.top": _legacy(frame), "state": _legacy(state), "prompt": b"x"}))
    found.append(pack({"endpoint": "reset"}))
    return found


def _frame(height: int, width: int) -> Any:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 3, columns * 5, rows + columns], axis=-1).astype(np.uint8)


def _image_files(frame: Any) -> list[bytes]:
    """What cameras and encoders other than ours write."""
    image = Image.fromarray(frame)
    variants: list[tuple[Any, dict[str, Any]]] = [
        (image, {"format": "PNG"}),
        (image.convert("L"), {"format": "PNG"}),
        (image.convert("P"), {"format": "PNG"}),
        (image.convert("RGBA"), {"format": "PNG"}),
        (image, {"format": "JPEG", "progressive": True}),
        (image.convert("L"), {"format": "JPEG"}),
        (image.convert("CMYK"), {"format": "JPEG"}),
        (image, {"format": "WEBP"}),
        (image, {"format": "WEBP", "lossless": True}),
        (image.convert("RGBA"), {"format": "WEBP", "lossless": True}),
        (image, {"format": "GIF"}),
    ]
    files: list[bytes] = []
    for variant, options in variants:
        buffer = io.BytesIO()
        variant.save(buffer, **options)
        files.append(buffer.getvalue())
    return files


def _options(chance: random.Random) -> dict[str, Any]:
    every: dict[str, Any] = {
        "session_id": "arm-1",
        "num_steps": 5,
        "sampling_params": {"num_inference_steps": 5},
        "adapter_dir": "fold-towel",
        "deadline_ms": 80.0,
        "noise": np.zeros((4, 8), np.float32),
        "prev_actions": np.zeros((3, 8), np.float32),
        "inference_delay": 1,
        "execution_horizon": np.int64(2),
        "executed_actions": np.ones((2, 8), np.float32),
    }
    return {name: every[name] for name in every if chance.random() < 0.7}


def _legacy(array: Any) -> dict[str, Any]:
    return {"nd": True, "type": array.dtype.str, "kind": "", "shape": list(array.shape), "data": array.tobytes()}


def heavy(chance: random.Random) -> bytes:
    """As much as fits into the limits of one kind of value, or a little more, with or without a fault at its end."""
    part = chance.choice(
        (
            {b"__npgeneric__": True, b"data": 1.5, b"dtype": "<f4"},
            {"__npgeneric__": True, "data": 1, "dtype": "<i8"},
            {b"__ndarray__": True, b"data": b"", b"dtype": ">f4", b"shape": [0]},
            {"nd": False, "type": "<f4", "kind": "f", "data": bytes(4)},
            {"nd": True, "note": 1},
            {"a": None},
            {},
            [],
            None,
            "prompt",
            "größe",
        )
    )
    most = min(65_536 // (1 + len(part)), 16_384) if isinstance(part, (dict, list)) else 65_536
    count = int(most * chance.choice((0.05, 0.9, 0.99, 1)))
    parts = [[part] * min(4_000, count - start) for start in range(0, count, 4_000)]
    names = [f"key {number}" if chance.random() < 0.5 else b"key %d" % number for number in range(len(parts))]
    rows = [dict(zip(map(str, range(len(row))), row, strict=True)) for row in parts] if chance.random() < 0.5 else parts
    message = msgpack.packb({"endpoint": "infer", **dict(zip(names, rows, strict=True)), "state": FAULTY})
    end = chance.choice((len(message), len(message) - 3, len(message) - len(msgpack.packb(FAULTY))))
    return message[:end] + chance.choice((b"", b"\xc1", b"\xc0"))


FAULTY: Final = {b"__ndarray__": True, b"data": b"", b"dtype": "|O", b"shape": [0]}

_NAMES: Final = ("__ndarray__", "__npgeneric__", "data", "dtype", "shape", "nd", "type", "kind")
_KEYS: Final = (
    "image", "images", "image_mask", "video", "observation/wrist_image_left", "observation.images.top", "video.front",
    "state", "prompt", "endpoint", "session_id", "seed", "num_steps", "num_inference_steps", "sampling_params",
    "adapter_dir", "deadline_ms", "noise", "prev_actions", "inference_delay", "execution_horizon", "executed_actions",
    "base_0_rgb", "note",
)  # fmt: skip
_DTYPES: Final = (
    "|b1", "|i1", "|u1", "<i2", ">i4", "<i8", "<u2", ">u8", "<f2", "<f4", ">f8", "float32", "f4", b"<f4", "|O", "O",
    "f8,O", "(2,)f4", "<f16", "<c8", "|V4", "|S0", "<U2", "<M8[s]", "", "f4" * 50,
)  # fmt: skip
_SIDES: Final = (-1, 0, 1, 2, 3, 4, 224, 2**31, 2**62, 2**63, True, 1.5, None, "3")


def _structures(seed: int, count: int) -> list[dict[Any, Any]]:
    found: list[dict[Any, Any]] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(structures())
    def collect(structure: dict[Any, Any]) -> None:
        found.append(structure)

    collect()
    return found


def structures() -> st.SearchStrategy[dict[Any, Any]]:
    """Requests that are nearly right: known keys with fitting and other values, markers of both dialects."""
    files = _small_files()
    number = st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 300) | st.floats()
    leaf = (
        st.none()
        | st.booleans()
        | number
        | st.text(max_size=12)
        | st.binary(max_size=24)
        | st.sampled_from(range(len(files))).map(lambda number: files[number])
        | st.sampled_from(["infer", "reset", "default", "../x"])
    )
    shape = st.lists(st.sampled_from(_SIDES), max_size=9)
    honest = st.builds(_honest_marker, st.sampled_from(_DTYPES[:11]), st.lists(st.integers(0, 4), max_size=4))
    scalar = st.builds(
        lambda dtype, value: {"__npgeneric__": True, "data": value, "dtype": dtype}, st.sampled_from(_DTYPES), leaf
    )
    lying = st.fixed_dictionaries(
        {},
        optional={
            "__ndarray__": st.sampled_from([True, False, 1, 0, 2, None]),
            "__npgeneric__": st.sampled_from([True, 1, None]),
            "nd": st.sampled_from([True, False, 1, "yes"]),
            "dtype": st.sampled_from(_DTYPES) | leaf,
            "type": st.sampled_from(_DTYPES) | leaf,
            "kind": st.sampled_from(["", "f", "V", b"u"]),
            "shape": shape | leaf,
            "data": st.binary(max_size=64) | leaf,
        },
    )
    marker = st.builds(_spelled, honest | scalar | lying, st.sampled_from(["bytes", "text", "mixed"]))
    value = leaf | marker
    for _ in range(2):
        value = (
            value | st.lists(value, max_size=4) | st.dictionaries(st.sampled_from(_KEYS + _NAMES), value, max_size=4)
        )
    nested = st.builds(_nested, value, st.integers(0, 20), st.booleans())
    return st.dictionaries(
        st.sampled_from(_KEYS) | st.sampled_from([key.encode() for key in _KEYS]) | st.text(max_size=3),
        value | nested,
        max_size=7,
    )


def _small_files() -> list[bytes]:
    return [*_image_files(_frame(2, 3)), b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP", b""]


def _honest_marker(dtype: str, shape: list[int]) -> dict[str, Any]:
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return {"__ndarray__": True, "data": bytes(size), "dtype": dtype, "shape": shape}


def _spelled(marker: dict[str, Any], keys: str) -> dict[Any, Any]:
    return {
        key.encode() if keys == "bytes" or (keys == "mixed" and number % 2) else key: value
        for number, (key, value) in enumerate(marker.items())
    }


def _nested(value: Any, levels: int, in_map: bool) -> Any:
    for _ in range(levels):
        value = {"image": value} if in_map else [value]
    return value


# ---- damaging messages --------------------------------------------------------------------------------------------

_HOT: Final = re.compile(
    rb"__ndarray__|__npgeneric__|data|dtype|shape|type|kind|nd|image|video|state|seed|noise|RIFF|IHDR|IDAT|VP8|\xff\xd8"
)
_LENGTH_CODES: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_ODD_LENGTHS: Final = (0, 1, 2, 15, 16, 127, 255, 4096, 4097, 65535, 65536, 2**20, 2**20 + 1, 2**31 - 1, 2**32 - 1)


def damaged(message: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """A message with one to four faults, most of them where the structure is."""
    data = bytearray(message)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        if not data:
            break
        chance.choice(_FAULTS)(data, others, chance)
    return bytes(data)


def _flip(data: bytearray, others: list[bytes], chance: random.Random) -> None:
    data[_place(data, chance)] ^= 1 << chance.randrange(8)


def _overwrite(data: bytearray, others: list[bytes], chance: random.Random) -> None:
    for _ in range(chance.randint(1, 8)):
        data[_place(data, chance)] = chance.choice((0, 1, 0x7F, 0x80, 0xC1, 0xC4, 0xDC, 0xFF, chance.randrange(256)))


def _truncate(data: bytearray, others: list[bytes], chance: random.Random) -> None:
    del data[_place(data, chance) :]


def _splice(data: bytearray, others: list[bytes], chance: random.Random) -> None:
    """A piece of another message, in place of a piece or in between."""
    other = chance.choice(others)
    start, size = chance.randrange(len(other)), chance.choice((1, 4, 16, 64, 1024))
    place = _place(data, chance)
    data[place : place + chance.choice((0, size))] = other[start : start + size]


def _remove(data: bytearray, others: list[bytes], chance: random.Random) -> None:
    place = _place(data, chance)
    del data[place : place + chance.choice((1, 2, 4, 16, 256))]


def _repeat(data: bytearray, others: list[bytes], chance: random.Random) -> None:
    place = _place(data, chance)
    piece = bytes(data[place : place + chance.choice((1, 2, 8, 64))])
    data[place:place] = piece * chance.choice((1, 2, 16, 300))


def _mislead(data: bytearray, others: list[bytes], chance: random.Random) -> None:
    """Another number in a length field near by."""
    place = _place(data, chance)
    for position in range(place, min(place + 64, len(data) - 5)):
        width = _LENGTH_CODES.get(data[position])
        if width:
            old = int.from_bytes(data[position + 1 : position + 1 + width], "big")
            length = chance.choice((old + 1, max(0, old - 1), 2 * old, *_ODD_LENGTHS)) % (1 << 8 * width)
            data[position + 1 : position + 1 + width] = length.to_bytes(width, "big")
            return
        if 0x80 <= data[position] < 0xC0 and chance.random() < 0.3:  # a short map, list or text
            data[position] ^= chance.randrange(1, 16)
            return


_FAULTS: Final = (_flip, _flip, _overwrite, _truncate, _splice, _remove, _repeat, _mislead, _mislead)


def _place(data: bytearray, chance: random.Random) -> int:
    """Anywhere, but more often near names and headers than amid pixels."""
    where = chance.random()
    if where < 0.3:
        return chance.randrange(len(data))
    if where < 0.45:
        return chance.randrange(min(len(data), 64))
    start = chance.randrange(len(data))
    near = _HOT.search(data, start) or _HOT.search(data)
    around = near.start() - 8 + chance.randrange(48) if near else start
    return min(max(0, around), len(data) - 1)


# ---- the program --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    """What one process found."""

    count: int
    outcomes: Counter[str]
    slowest_s: float
    slowest: bytes
    failure: str | None = None
    message: bytes = b""


_HEADER: Final = struct.Struct("<QQ")  # messages read, length of the one being read
_ROOM: Final = 16 * 1024 * 1024


def fuzz(seed: int, count: int, file: Path, reports: Any) -> None:
    """Check `count` messages; each lies in `file` while it is read."""
    with file.open("r+b") as handle:
        current = mmap.mmap(handle.fileno(), _ROOM)
    report = Report(0, Counter(), 0.0, b"")
    gc.freeze()
    parent = multiprocessing.parent_process()
    for message in messages(seed):
        if report.count % 1_000 == 0 and not (parent and parent.is_alive()):
            return
        current[_HEADER.size : _HEADER.size + len(message)] = message
        current[: _HEADER.size] = _HEADER.pack(report.count, len(message))
        try:
            verdict = check(message, decode_pixels=report.count % DECODED_IN == 0)
        except Failure as failure:
            report.failure, report.message = str(failure), message
            break
        report.count += 1
        report.outcomes[verdict.outcome] += 1
        if verdict.seconds > report.slowest_s:
            seconds = min(verdict.seconds, check(message, decode_pixels=False).seconds)  # once without a collection
            if seconds > report.slowest_s:
                report.slowest_s, report.slowest = seconds, message
        if report.count == count:
            break
    current[: _HEADER.size] = _HEADER.pack(report.count, 0)
    reports.put(report)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--seed", type=int, help="makes the same messages again; by default drawn and printed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--replay", type=Path, nargs="+", metavar="FILE", help="read these messages instead")
    arguments = parser.parse_args()
    if arguments.replay:
        for file in arguments.replay:
            print(f"{file}: {check(kept(file))}")
        return 0
    seed = random.SystemRandom().getrandbits(32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}, {arguments.messages:,} messages, {arguments.jobs} processes", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        reports = _run(seed, arguments.messages, arguments.jobs, Path(folder))
    return _tell(reports, time.monotonic() - started)


def _run(seed: int, count: int, jobs: int, folder: Path) -> list[Report]:
    context = multiprocessing.get_context("spawn")
    running: list[tuple[Any, Path, Any]] = []
    for job in range(jobs):
        file = folder / str(job)
        file.write_bytes(bytes(_ROOM))
        queue = context.SimpleQueue()
        share = count // jobs + (job < count % jobs)
        process = context.Process(target=fuzz, args=(seed + job, share, file, queue), daemon=True)
        process.start()
        running.append((process, file, queue))
    moved = {file: (0, time.monotonic()) for _, file, _ in running}
    told = time.monotonic()
    reports: list[Report] = []
    while running:
        time.sleep(0.2)
        for job in list(running):
            process, file, queue = job
            done, message = _being_read(file)
            if done != moved[file][0]:
                moved[file] = (done, time.monotonic())
            stalled = done > 0 and time.monotonic() - moved[file][1] > STALL_S
            if not queue.empty():
                reports.append(queue.get())
            elif not process.is_alive() or stalled:
                what = f"one call took more than {STALL_S:g} s" if stalled else f"it ended with {process.exitcode}"
                reports.append(Report(done, Counter(), 0.0, b"", what, message))
                process.kill()
            else:
                continue
            running.remove(job)
        if time.monotonic() - told > 10:
            told = time.monotonic()
            print(f"{sum(done for done, _ in moved.values()):,} messages", flush=True)
    return reports


def _being_read(file: Path) -> tuple[int, bytes]:
    with file.open("rb") as handle:
        done, length = _HEADER.unpack(handle.read(_HEADER.size))
        return done, handle.read(length)


def _tell(reports: list[Report], seconds: float) -> int:
    outcomes: Counter[str] = sum((report.outcomes for report in reports), Counter())
    slowest = max(reports, key=lambda report: report.slowest_s)
    total = sum(report.count for report in reports)
    print(f"{total:,} messages in {seconds:.0f} s: " + ", ".join(f"{n:,} {name}" for name, n in outcomes.most_common()))
    print(f"the slowest call took {slowest.slowest_s * 1e3:.1f} ms, for a message of {len(slowest.slowest):,} bytes")
    failed = [report for report in reports if report.failure is not None]
    for report in failed:
        CORPUS.mkdir(parents=True, exist_ok=True)
        file = CORPUS / f"{sha256(report.message).hexdigest()[:16]}.gz"
        file.write_bytes(gzip.compress(report.message, mtime=0))
        print(f"FAILED: {report.failure}\n  {file}\n  python {sys.argv[0]} --replay {file}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
