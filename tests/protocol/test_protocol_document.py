"""docs/protocol.md: its hex blocks are decoded to the values beside them, its numbers are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from relay.engine.base import PolicySpec
from relay.protocol import limits
from relay.protocol.messages import Infer, Reset, decode_request, encode_bare, encode_reply
from relay.protocol.msgpack_numpy import pack, unpack
from relay.server.dialects import OpenPIDialect, VllmDialect, serves
from relay.server.settings import ServerSettings

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text("utf-8")


class Frame(NamedTuple):
    """One hex block and the Python literal that follows it."""

    section: str
    data: bytes
    value: Any


def _frames() -> list[Frame]:
    frames: list[Frame] = []
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        pairs = re.findall(r"^```hex\n(.*?)^```\n+```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        for lines, literal in pairs:
            data = bytes.fromhex(re.sub(r"#.*", "", lines))
            frames.append(Frame(section.partition("\n")[0], data, eval(literal, {"np": np})))
    return frames


FRAMES = _frames()
OTHER_SPELLINGS = "Other spellings that are read"


def in_section(section: str) -> list[Frame]:
    return [frame for frame in FRAMES if frame.section == section]


def assert_same(value: Any, expected: Any) -> None:
    """Equal in value, type, dtype and the order of keys."""
    assert type(value) is type(expected)
    if isinstance(expected, dict):
        assert list(value) == list(expected)
        for key, part in expected.items():
            assert_same(value[key], part)
    elif isinstance(expected, np.ndarray):
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)
    else:
        assert value == expected


def test_every_hex_block_has_its_value_beside_it() -> None:
    assert len(FRAMES) == PAGE.count("```hex") == PAGE.count("```python")


@pytest.mark.parametrize("frame", FRAMES, ids=[f"{i}-{frame.section}" for i, frame in enumerate(FRAMES)])
def test_the_block_decodes_to_the_value_beside_it(frame: Frame) -> None:
    assert_same(unpack(frame.data), frame.value)


@pytest.mark.parametrize(
    "frame", [frame for frame in FRAMES if frame.section != OTHER_SPELLINGS], ids=lambda frame: frame.section
)
def test_the_value_is_sent_as_the_block(frame: Frame) -> None:
    assert pack(frame.value) == frame.data


def test_the_first_frame_is_what_the_openpi_path_sends() -> None:
    [frame] = in_section("First frame")
    sizes = {key: value for key, value in frame.value.items() if key not in ("model", "cameras")}
    spec = PolicySpec(model=frame.value["model"], cameras=tuple(frame.value["cameras"]), **sizes)
    assert OpenPIDialect(ServerSettings(), relay_client=False).greeting(spec) == frame.data


def test_the_request_is_read_as_an_observation_without_options() -> None:
    request = decode_request(in_section("Arrays")[0].data)
    assert isinstance(request, Infer)
    assert_same(request.observation, in_section("Arrays")[0].value)
    assert request == Infer(request.observation)


def test_the_replies_are_what_both_paths_send() -> None:
    as_map, bare = in_section("Reply")
    timings = as_map.value["policy_timing"], as_map.value["server_timing"]
    assert encode_reply(encode_bare(as_map.value["actions"]), *timings) == as_map.data
    assert encode_bare(bare.value) == bare.data


def test_the_reset_and_its_two_replies_are_those_of_the_server() -> None:
    request, done = in_section("Reset")
    assert decode_request(request.data) == Reset()
    assert VllmDialect(ServerSettings(), "").reset_done() == done.data
    assert f"```text\n{OpenPIDialect(ServerSettings(), relay_client=False).reset_done()}\n```" in PAGE


@pytest.mark.parametrize(
    "number",
    [
        f"{limits.MAX_MESSAGE_BYTES >> 20} MiB",
        f"{limits.MAX_DEPTH} levels",
        f"{limits.MAX_ITEMS:,}",
        f"{limits.MAX_CONTAINER_ITEMS:,}",
        f"{limits.MAX_CONTAINERS:,}",
        f"{limits.MAX_MARKERS:,}",
        f"{limits.MAX_FRAMES}",
        f"{limits.MAX_STRING_BYTES >> 20} MiB",
        f"{limits.MAX_ARRAY_DIMS}",
        f"{limits.MAX_IMAGE_SIDE:,} pixels a side",
        f"{limits.MAX_DECODED_BYTES >> 20} MiB",
        f"{limits.MAX_PROMPT_BYTES:,} bytes of UTF-8",
        f"{limits.MAX_SESSION_ID_CHARS} characters",
        f"{limits.MAX_SESSIONS_PER_CONNECTION:,}",
        f"{limits.MAX_OUTSTANDING_REQUESTS}",
    ],
)
def test_the_limit_stands_in_the_table(number: str) -> None:
    assert f" | {number} |\n" in PAGE


def test_the_paths_are_told_apart_as_the_page_says() -> None:
    assert serves("/")
    assert serves("/pi05/v1/realtime/robot/openpi/?a=b")
    assert not serves("/v1/models")
