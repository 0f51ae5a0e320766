"""What `unpack` accepts, what it refuses and how it says so, and that nothing but `InvalidPayload` leaves it."""

import re
import struct
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relay.protocol.errors import InvalidPayload
from relay.protocol.limits import MAX_MESSAGE_BYTES
from relay.protocol.msgpack_numpy import pack, unpack
from relay.protocol.msgpack_structure import check_structure

FLOATS = np.array([1.5, -2.0], "<f4")


def openpi_array(**changes: Any) -> dict[Any, Any]:
    fields = {b"__ndarray__": True, b"data": FLOATS.tobytes(), b"dtype": "<f4", b"shape": [2]}
    return fields | {key.encode(): value for key, value in changes.items()}


def legacy_array(**changes: Any) -> dict[Any, Any]:
    return {"nd": True, "type": "<f4", "kind": "f", "shape": [2], "data": FLOATS.tobytes()} | changes


def with_bytes_keys(fields: dict[Any, Any]) -> dict[Any, Any]:
    return {key.encode() if isinstance(key, str) else key: value for key, value in fields.items()}


def with_text_keys(fields: dict[Any, Any]) -> dict[Any, Any]:
    return {key.decode() if isinstance(key, bytes) else key: value for key, value in fields.items()}


def read(value: Any) -> Any:
    return unpack(msgpack.packb(value))


# ---- accepted forms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        openpi_array(),
        openpi_array(__ndarray__=1),
        openpi_array(dtype=b"<f4"),
        openpi_array(dtype="f4"),
        openpi_array(dtype="float32"),
        with_text_keys(openpi_array()),
        {b"__ndarray__": True, "data": FLOATS.tobytes(), b"dtype": "<f4", "shape": [2]},
        legacy_array(),
        legacy_array(kind=""),
        legacy_array(kind=b"f", type=b"<f4"),
        legacy_array(nd=1),
        with_bytes_keys(legacy_array()),
    ],
    ids=str,
)
def test_array_markers_of_both_dialects_are_read(fields: dict[Any, Any]):
    array = read({"state": fields})["state"]
    np.testing.assert_array_equal(array, FLOATS)
    assert array.dtype == np.float32


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({b"__npgeneric__": True, b"data": 1.5, b"dtype": "<f4"}, np.float32(1.5)),
        ({"__npgeneric__": True, "data": 1.5, "dtype": "<f4"}, np.float32(1.5)),
        ({b"__npgeneric__": 1, b"data": 3, b"dtype": "<i8"}, np.int64(3)),
        ({b"__npgeneric__": True, b"data": 3, b"dtype": "<f8"}, np.float64(3)),
        ({b"__npgeneric__": True, b"data": True, b"dtype": "|b1"}, np.bool_(True)),
        ({b"__npgeneric__": True, b"data": float("inf"), b"dtype": "<f2"}, np.float16("inf")),
        ({"nd": False, "type": "<f4", "kind": "f", "data": FLOATS[:1].tobytes()}, np.float32(1.5)),
        ({"nd": False, "type": "<f4", "data": FLOATS[:1].tobytes()}, np.float32(1.5)),
        ({"nd": False, "type": ">i2", "kind": "i", "data": b"\x01\x00"}, np.int16(256)),
    ],
)
def test_scalar_markers_of_both_dialects_are_read(fields: dict[Any, Any], expected: np.generic):
    scalar = read(fields)
    assert scalar == expected
    assert type(scalar) is type(expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"__ndarray__": False, "data": b"", "dtype": "<f4", "shape": [0]},
        {b"__ndarray__": 0},
        {b"__npgeneric__": False, b"data": 1, b"dtype": "<f4"},
        {"nd": True, "note": "hello"},
        {"nd": True, "type": "<f4", "kind": "f", "data": b""},
        {"nd": False, "type": "<f4", "kind": "f", "shape": [0], "data": b""},
        legacy_array(nd="yes"),
        {"nd": True, b"nd": True, "type": "<f4", "kind": "f", "shape": [0], "data": b""},
        {b"data": b"x", b"dtype": "<f4", b"shape": [1]},
        {},
    ],
    ids=str,
)
def test_other_maps_stay_maps(fields: dict[Any, Any]):
    assert read(fields) == fields


@pytest.mark.parametrize(
    "text",
    ["|b1", "|i1", "|u1"]
    + [order + code for order in "<>" for code in ("i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8")],
)
def test_every_dtype_of_the_table_is_read_as_a_native_array(text: str):
    sent = np.array([0, 1, 1], text)
    array = read(openpi_array(data=sent.tobytes(), dtype=text, shape=[3]))
    np.testing.assert_array_equal(array, sent)
    assert array.dtype.isnative
    assert array.dtype == np.dtype(text[1:])


@pytest.mark.parametrize("shape", [[], [0, 3], [3, 0], [1, 2], [2, 1, 1, 1, 1, 1, 1, 1]])
def test_shapes_are_kept(shape: list[int]):
    data = bytes(4 * int(np.prod(shape)))
    assert read(openpi_array(data=data, shape=shape)).shape == tuple(shape)


@pytest.mark.parametrize("dtype", ["<f4", ">f4"])
def test_arrays_are_read_only(dtype: str):
    array = read(openpi_array(dtype=dtype))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0


def test_arrays_are_views_of_bytes():
    assert isinstance(read(openpi_array()).base, bytes)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_bytes_like_message_is_read(kind: type):
    assert unpack(kind(pack({"a": [1]}))) == {"a": [1]}


# ---- refused markers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (openpi_array(dtype="|O"), "array marker has dtype '|O'; accepted are bool, int8 to int64"),
        (openpi_array(dtype="O"), "array marker has dtype 'O'"),
        (openpi_array(dtype="f4,O"), "array marker has dtype 'f4,O'"),
        (openpi_array(dtype="f8,f8"), "array marker has dtype 'f8,f8'"),
        (openpi_array(dtype="(2,)f4"), "array marker has dtype '(2,)f4'"),
        (openpi_array(dtype="|V8"), "array marker has dtype '|V8'"),
        (openpi_array(dtype="<c8"), "array marker has dtype '<c8'"),
        (openpi_array(dtype="<f16"), "array marker has dtype '<f16'"),
        (openpi_array(dtype="<M8[s]"), "array marker has dtype '<M8[s]'"),
        (openpi_array(dtype="<U2"), "array marker has dtype '<U2'"),
        (openpi_array(dtype="|S0"), "array marker has dtype '|S0'"),
        (openpi_array(dtype=""), "array marker has dtype ''"),
        (openpi_array(dtype="x" * 500), "array marker has dtype 'xxxx"),
        (openpi_array(dtype=["<f4"]), "array marker has dtype a list of 1 items"),
        (openpi_array(dtype={"a": 1}), "array marker has dtype a map of 1 items"),
        (openpi_array(dtype=None), "array marker has dtype nil"),
        (openpi_array(shape=[-1]), "array marker has -1 in its shape"),
        (openpi_array(shape=[2.0]), "array marker has 2.0 in its shape"),
        (openpi_array(shape=[True, 2]), "array marker has True in its shape"),
        (openpi_array(shape=[[2]]), "array marker has a list of 1 items in its shape"),
        (openpi_array(shape=2), "array marker has 2 as shape"),
        (openpi_array(shape=[1] * 8 + [2]), "array marker has 9 dimensions; at most 8"),
        (openpi_array(shape=[3]), "array marker has 8 bytes; shape [3] of float32 takes 12"),
        (openpi_array(shape=[1]), "array marker has 8 bytes; shape [1] of float32 takes 4"),
        (openpi_array(shape=[2**62, 4]), "array marker has 8 bytes; shape [4611686018427387904, 4]"),
        (openpi_array(data=b"", shape=[0, 2**62, 2**62]), "array marker has shape [0, 4611"),
        (openpi_array(data="12345678"), "array marker has '12345678' as data; expected bytes"),
        (openpi_array(data=[1, 2]), "array marker has a list of 2 items as data"),
        (openpi_array(dtype="|b1", data=b"\x02"), "array marker has 1 bytes; shape [2] of bool takes 2"),
        (openpi_array(dtype="|b1", data=b"\x00\x02"), "array marker of dtype bool has bytes other than 0 and 1"),
        ({b"__ndarray__": True}, "array marker without data and dtype and shape"),
        ({b"__ndarray__": True, b"data": b"", b"dtype": "<f4"}, "array marker without shape"),
        (openpi_array(note="x"), "array marker with 5 fields"),
        (openpi_array() | {"data": b""}, "array marker with 5 fields"),
        ({b"__npgeneric__": True, b"data": 1}, "scalar marker without dtype"),
        ({b"__npgeneric__": True, b"data": 1, b"dtype": "|O"}, "array marker has dtype '|O'"),
        ({b"__npgeneric__": True, b"data": 256, b"dtype": "|u1"}, "scalar marker has the value 256, which is no uint8"),
        ({b"__npgeneric__": True, b"data": -1, b"dtype": "<u8"}, "scalar marker has the value -1, which is no uint64"),
        ({b"__npgeneric__": True, b"data": 1.5, b"dtype": "<i4"}, "scalar marker has the value 1.5"),
        ({b"__npgeneric__": True, b"data": True, b"dtype": "<i4"}, "scalar marker has the value True"),
        ({b"__npgeneric__": True, b"data": 1, b"dtype": "|b1"}, "scalar marker has the value 1, which is no bool"),
        ({b"__npgeneric__": True, b"data": 1e39, b"dtype": "<f4"}, "scalar marker has the value 1e+39"),
        ({b"__npgeneric__": True, b"data": "1", b"dtype": "<f4"}, "scalar marker has the value '1'"),
        ({b"__npgeneric__": True, b"data": [1.0], b"dtype": "<f4"}, "scalar marker has the value a list of 1 items"),
        (legacy_array(kind="V"), "array marker has kind 'V'; its dtype float32 has kind 'f'"),
        (legacy_array(kind="u"), "array marker has kind 'u'"),
        (legacy_array(kind=openpi_array()), "array marker has kind an array of shape (2,) and dtype float32"),
        (legacy_array(type="|O"), "array marker has dtype '|O'"),
        (legacy_array(type="|V4", kind="V"), "array marker has dtype '|V4'"),
        (legacy_array(shape=[-1]), "array marker has -1 in its shape"),
        ({"nd": False, "type": "<f4", "kind": "f", "data": FLOATS.tobytes()}, "array marker has 8 bytes; shape []"),
    ],
    ids=str,
)
def test_markers_that_lie_are_refused_with_their_key(fields: dict[Any, Any], complaint: str):
    with pytest.raises(InvalidPayload, match=re.escape(complaint)) as caught:
        read({"image": {"front": fields}})
    assert str(caught.value).startswith("image['front']: ")
    assert len(str(caught.value)) < 250


def test_markers_in_lists_are_named_by_position():
    with pytest.raises(InvalidPayload, match=re.escape("images[1]: array marker has dtype")):
        read({"images": [openpi_array(), openpi_array(dtype="|O")]})


def test_of_several_lying_markers_the_first_is_named():
    with pytest.raises(InvalidPayload, match=re.escape("b['c'][1]: array marker has dtype '|O'")):
        read({"a": openpi_array(), "b": {"c": [1, openpi_array(dtype="|O")]}, "d": openpi_array(shape=[-1])})


def test_a_lying_marker_is_named_even_if_it_is_the_whole_message():
    with pytest.raises(InvalidPayload, match=re.escape("array marker has dtype '|O'")) as caught:
        read(openpi_array(dtype="|O"))
    assert str(caught.value).startswith("array marker")


@pytest.mark.parametrize("count", [2_048, 2_049])
@pytest.mark.parametrize("marker", [openpi_array(), {b"__npgeneric__": True, b"data": 1, b"dtype": "<i4"}, {"nd": 1}])
def test_a_message_holds_at_most_2048_markers(marker: Any, count: int):
    message = {"first": [marker] * 1_000, "then": [marker] * (count - 1_000)}
    if count == 2_048:
        assert len(read(message)["then"]) == 1_048
    else:
        with pytest.raises(InvalidPayload, match=re.escape("then[1048]: more than 2048 arrays and scalars")):
            read(message)


def test_a_marker_inside_a_marker_is_refused():
    with pytest.raises(InvalidPayload, match="state: array marker has an array of shape"):
        read({"state": openpi_array(data=openpi_array())})


# ---- refused structure --------------------------------------------------------------------------------------------


def list_of(count: int, item: bytes) -> bytes:
    return b"\xdd" + struct.pack(">I", count) + item * count


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "byte 0: the message ends in the middle of a value"),
        (b"\x93\x01\x02", "byte 3: the message ends in the middle of a value"),
        (b"\xa5abc", "byte 4: the message ends in the middle of a value"),
        (b"\xc4", "byte 1: the message ends in the middle of a value"),
        (b"\xc6\x00\x00", "byte 3: the message ends in the middle of a value"),
        (b"\xcb\x00", "byte 2: the message ends in the middle of a value"),
        (b"\x01\x02", "byte 1: 1 bytes after the end of the message"),
        (b"\xc1", "byte 0: the reserved code 0xc1 is not accepted"),
        (b"\x81\xa1a\xd4\x01\x00", "byte 3: an extension type is not accepted"),
        (b"\x81\xa1a\xc7\x00\x05", "byte 3: an extension type is not accepted"),
        (b"\xd6\xff\x00\x00\x00\x00", "byte 0: an extension type is not accepted"),
        (b"\x81\x01\x02", "byte 1: map keys must be text or bytes, got an integer"),
        (b"\x81\xc0\x02", "byte 1: map keys must be text or bytes, got nil"),
        (b"\x81\xc3\x02", "byte 1: map keys must be text or bytes, got a boolean"),
        (b"\x81\xcb\x00\x00\x00\x00\x00\x00\x00\x00\x02", "byte 1: map keys must be text or bytes, got a float"),
        (b"\x81\x91\x01\x02", "byte 1: map keys must be text or bytes, got a list"),
        (b"\x81\x80\x02", "byte 1: map keys must be text or bytes, got a map"),
        (b"\x82\xa1a\x01\x80\x01", "byte 4: map keys must be text or bytes, got a map"),
        (b"\x91\xa3a\xff\xff", "byte 3: text that is not UTF-8"),
        (b"\x91" * 17 + b"\xc0", "byte 16: nested deeper than 16 levels"),
        (b"\x91" * 100 + b"\xc0", "byte 16: nested deeper than 16 levels"),
        (b"\x91" * 5_000_000, "byte 16: nested deeper than 16 levels"),
        (b"\x81\xa1a" * 17 + b"\xc0", "byte 48: nested deeper than 16 levels"),
        (list_of(4097, b"\xc0"), "byte 0: list of 4097 items; at most 4096"),
        (b"\xdf" + struct.pack(">I", 4097), "byte 0: map of 4097 items; at most 4096"),
        (b"\xdf\xff\xff\xff\xff", "byte 0: map of 4294967295 items"),
        (list_of(20_000_000, b"\x80"), "byte 0: list of 20000000 items"),
        (list_of(17, list_of(4096, b"\xc0")), "more than 65536 items in one message"),
        (list_of(4096, list_of(4096, b"\xc0")), "more than 65536 items in one message"),
        (list_of(4096, list_of(4096, b"\x80")), "more than 16384 maps and lists in one message"),
        (list_of(250, list_of(250, b"\x91\xc0")), "more than 16384 maps and lists in one message"),
        (b"\xdb" + struct.pack(">I", 2**20 + 1) + b"a" * (2**20 + 1), "byte 0: text of 1048577 bytes"),
    ],
    ids=range(32),
)
def test_structure_beyond_the_limits_is_refused_with_its_place(data: bytes, complaint: str):
    with pytest.raises(InvalidPayload, match=re.escape(complaint)):
        unpack(data)
    with pytest.raises(InvalidPayload, match=r"^byte \d+: "):
        check_structure(data)


@pytest.mark.parametrize(
    "data",
    [
        list_of(20_000_000, b"\x80"),
        list_of(4096, list_of(4096, b"\xc0")),
        list_of(4096, list_of(4096, b"\x80")),
        list_of(250, list_of(4090, b"\x80")),  # just short enough to be decoded without reading it through first
        (b"\xdc\x10\x00" + b"\xc0" * 4095) * 250 + b"\xc0",
        b"\x91" * 60_000_000,
    ],
    ids=["one list", "lists of nil", "lists of maps", "short", "nested lists", "nesting"],
)
def test_bombs_are_refused_before_memory_is_spent(data: bytes):
    tracemalloc.start()
    try:
        with pytest.raises(InvalidPayload):
            unpack(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 1024 * 1024


def test_messages_over_64_mib_are_refused_unread():
    with pytest.raises(InvalidPayload, match="message of 67108865 bytes; at most 67108864 are accepted"):
        unpack(bytes(MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize("padding", [0, 2_000_000], ids=["short", "long"])
@pytest.mark.parametrize("part", [{}, []])
@pytest.mark.parametrize("count", [16_379, 16_380])
def test_a_message_holds_at_most_16384_maps_and_lists(part: Any, count: int, padding: int):
    rows = [[part] * 4_096, [part] * 4_096, [part] * 4_096, [part] * (count - 3 * 4_096 - 1)]
    message = msgpack.packb({"padding": bytes(padding), "rows": rows})
    if count == 16_379:  # and the four rows, the list of them, the message
        assert len(unpack(message)["rows"]) == 4
    else:
        with pytest.raises(InvalidPayload, match="more than 16384 maps and lists in one message"):
            unpack(message)


def test_a_fault_after_very_many_values_is_placed_roughly():
    rows = list_of(15, list_of(4000, b"\xc0"))
    with pytest.raises(InvalidPayload, match=r"^after byte 16\d{3}: the message cannot be decoded: \w+"):
        unpack(rows[:-1] + b"\xc1")


@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 16 + b"\xc0",
        list_of(4096, b"\xc0"),
        list_of(15, list_of(4096, b"\xc0")),
        b"\xdb" + struct.pack(">I", 2**20) + b"a" * 2**20,
        msgpack.packb({str(index): index for index in range(4096)}),
        msgpack.packb({"blob": bytes(2_000_000)}),
    ],
    ids=["depth", "list", "items", "text", "map", "blob"],
)
def test_structure_at_the_limits_is_accepted(data: bytes):
    check_structure(data)
    assert unpack(data) == msgpack.unpackb(data)


@pytest.mark.parametrize("leaf", [openpi_array(), {b"__npgeneric__": True, b"data": 1, b"dtype": "<i4"}, [], {}, 1])
@pytest.mark.parametrize("padding", [0, 2_000_000], ids=["short", "long"])
@pytest.mark.parametrize("depth", range(12, 18))
def test_short_and_long_messages_have_the_same_depth_limit(leaf: Any, padding: int, depth: int):
    value = leaf
    for _ in range(depth):
        value = [value]
    levels = depth + {dict: 2 if isinstance(leaf, dict) and b"shape" in leaf else 1, list: 1}.get(type(leaf), 0)
    message = msgpack.packb({"padding": bytes(padding), "more": [[]] * 20, "deep": value})
    if levels + 1 <= 16:
        unpack(message)
    else:
        with pytest.raises(InvalidPayload, match="nested deeper than 16 levels"):
            unpack(message)


# ---- fuzz ---------------------------------------------------------------------------------------------------------

NAMES = [b"__ndarray__", b"data", b"dtype", b"shape", b"__npgeneric__", "__ndarray__", "data", "nd", "type", "kind"]
ODD = ["|O", "<f4", "|u1", "i4,i4", "|S0", b"|b1", [1], [-1], [0, 2**40], [], b"", b"\0" * 8, True, False, "f"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=16) | st.text(),
    lambda parts: (
        st.lists(parts, max_size=5) | st.dictionaries(st.sampled_from(NAMES), parts | st.sampled_from(ODD), max_size=5)
    ),
    max_leaves=12,
)
QUICK = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def read_or_refuse(data: bytes) -> None:
    try:
        value = unpack(data)
    except InvalidPayload:
        return
    check_structure(data)
    pack(value)


@QUICK
@given(VALUES)
def test_any_structure_is_read_or_refused(value: Any):
    read_or_refuse(msgpack.packb(value))


@QUICK
@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(data: bytes):
    read_or_refuse(data)


@QUICK
@given(st.data())
def test_any_damaged_observation_is_read_or_refused(data: st.DataObject):
    message = bytearray(
        pack({"image": {"front": FLOATS, "old": legacy_array()}, "seed": np.int64(3), "prompt": "pick"})
    )
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    read_or_refuse(bytes(message[: data.draw(st.integers(0, len(message)))]))
    read_or_refuse(bytes(message))
