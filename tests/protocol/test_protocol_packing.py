"""What `pack` emits: the bytes of openpi-client 0.1.2 (written with NumPy 1.26 and msgpack 1.2), and its refusals."""

import hashlib
import re
from typing import Any

import msgpack
import numpy as np
import pytest

from relay.protocol.msgpack_numpy import pack, unpack

MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3)
MARKER = "84c40b5f5f6e6461727261795f5fc3c40464617461"
"""A map of four fields: the `__ndarray__` flag and the name of the data field, both as byte strings."""

GOLDEN: dict[str, tuple[Any, str]] = {
    "float32": (
        np.array([1.5, -2.0], np.float32),
        MARKER + "c4080000c03f000000c0c4056474797065a33c6634c40573686170659102",
    ),
    "uint8 frame": (
        np.arange(6, dtype=np.uint8).reshape(1, 2, 3),
        MARKER + "c406000102030405c4056474797065a37c7531c405736861706593010203",
    ),
    "bool": (np.array([True, False]), MARKER + "c4020100c4056474797065a37c6231c40573686170659102"),
    "float16": (np.array([1.0], np.float16), MARKER + "c402003cc4056474797065a33c6632c40573686170659101"),
    "big-endian stays big-endian": (
        np.array([1.5], ">f4"),
        MARKER + "c4043fc00000c4056474797065a33e6634c40573686170659101",
    ),
    "Fortran order becomes C order": (
        np.asfortranarray(MATRIX),
        MARKER + "c418000000000000803f0000004000004040000080400000a040c4056474797065a33c6634c4057368617065920203",
    ),
    "negative stride": (
        np.array([1, 2, 3], np.int16)[::-1],
        MARKER + "c406030002000100c4056474797065a33c6932c40573686170659103",
    ),
    "slice": (
        MATRIX[:, ::2],
        MARKER + "c4100000000000000040000040400000a040c4056474797065a33c6634c4057368617065920202",
    ),
    "0-d": (
        np.array(7, np.int64),
        MARKER + "c4080700000000000000c4056474797065a33c6938c405736861706590",
    ),
    "empty": (np.zeros((0, 3), np.float32), MARKER + "c400c4056474797065a33c6634c4057368617065920003"),
    "float32 scalar": (
        np.float32(1.5),
        "83c40d5f5f6e7067656e657269635f5fc3c40464617461cb3ff8000000000000c4056474797065a33c6634",
    ),
    "int64 scalar": (
        np.int64(-3),
        "83c40d5f5f6e7067656e657269635f5fc3c40464617461fdc4056474797065a33c6938",
    ),
    "bool scalar": (
        np.bool_(True),
        "83c40d5f5f6e7067656e657269635f5fc3c40464617461c3c4056474797065a37c6231",
    ),
    "float64 scalar is a plain float": (np.float64(1.5), "cb3ff8000000000000"),
    "text scalar is plain text": (np.str_("ab"), "a26162"),
    "bytes scalar is plain bytes": (np.bytes_(b"ab"), "c4026162"),
    "tuple is a list": ((1, 2), "920102"),
    "bytearray": (bytearray(b"ab"), "c4026162"),
    "memoryview": (memoryview(b"ab"), "c4026162"),
    "nested": (
        {"state": np.array([0.5]), "prompt": "pick", "list": [None, True, 1.25]},
        "83a5737461746584c40b5f5f6e6461727261795f5fc3c40464617461c408000000000000e03fc4056474797065a33c6638"
        "c40573686170659101a670726f6d7074a47069636ba46c69737493c0c3cb3ff4000000000000",
    ),
}


@pytest.mark.parametrize(("value", "golden"), GOLDEN.values(), ids=GOLDEN.keys())
def test_pack_emits_the_bytes_of_openpi_client(value: Any, golden: str):
    assert pack(value).hex() == golden


def test_pack_emits_the_bytes_of_openpi_client_for_a_large_frame():
    frame = np.arange(60_000, dtype=np.uint8).reshape(100, 200, 3)
    golden = "a893a22a74d8260ac576e2e052b15f1cd40916b60aa245bcde8eabc2c71b0a5b"
    assert hashlib.sha256(pack({"image": frame})).hexdigest() == golden


@pytest.mark.parametrize("shape", [(300, 40), (40, 100, 3)])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "|u1", "<i8"])
def test_large_arrays_are_packed_as_their_elements_in_c_order(shape: tuple[int, ...], dtype: str):
    array = np.arange(int(np.prod(shape))).reshape(shape).astype("<i8").astype(dtype)
    for view in (array, array[::-1], array.T, np.asfortranarray(array)):
        fields = msgpack.unpackb(pack(view))
        assert fields[b"data"] == view.tobytes()
        assert (fields[b"dtype"], fields[b"shape"]) == (dtype, list(view.shape))


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"state": np.array([1 + 2j])}, "state: dtype complex128 cannot be sent"),
        ({"state": np.array([{}], object)}, "state: dtype object cannot be sent"),
        ({"state": np.zeros(2, "f4,i4")}, "state: dtype void64 cannot be sent"),
        ({"state": np.complex64(1)}, "state: a complex64 scalar cannot be sent"),
        ({"a": [0, {"b": np.zeros(2000, "c16")}]}, "a[1]['b']: dtype complex128 cannot be sent"),
        ({"state": np.ma.masked_array([1.0], [True])}, "state: a masked array cannot be sent"),
        ({"state": 2**64}, "state: an integer beyond 64 bits cannot be sent"),
        ({"image": {"front": {1, 2}}}, "image['front']: set cannot be sent"),
        ({"when": np.datetime64("2020-01-01")}, "when: a datetime64[D] scalar cannot be sent"),
        ({"text": "\ud800"}, "text: 'utf-8' codec can't encode"),
        (object(), "object cannot be sent"),
        ({"prompt": np.array(["pick"])}, "prompt: dtype str128 cannot be sent; send text as str, several in a list"),
        ({"prompt": np.array([b"pick"])}, "prompt: dtype bytes32 cannot be sent; send text as str, several in a list"),
        ({"when": np.array(["2020-01-01"], "M8[s]")}, "when: dtype datetime64[s] cannot be sent"),
        ({0: 1}, "a map key is 0; keys must be text or bytes"),
        ({"image": {"front": [{"a": 1}, {2: "b"}]}}, "image['front'][1]: a map key is 2; keys must be text or bytes"),
        ({"image": {None: 1}}, "image: a map key is nil; keys must be text or bytes"),
        ({"state": {(0, 1): 1}}, "state: a map key is a list of 2 items; keys must be text or bytes"),
    ],
)
def test_pack_names_the_key_it_refuses(value: Any, complaint: str):
    with pytest.raises(ValueError, match=f"^{re.escape(complaint)}"):
        pack(value)


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="long doubles are doubles here")
def test_pack_refuses_long_doubles():
    with pytest.raises(ValueError, match=r"state: a (longdouble|float128|float96) scalar cannot be sent"):
        pack({"state": np.longdouble(1)})
    with pytest.raises(ValueError, match=r"state: dtype \w+ cannot be sent; convert it with .astype\(np.float32\)"):
        pack({"state": np.zeros(1, np.longdouble)})


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_pack_tells_how_to_send_bfloat16_and_float8(dtype: str):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(
        ValueError, match=rf"state: dtype {dtype} cannot be sent; convert it with .astype\(np.float32\)"
    ):
        pack({"state": np.zeros(2, getattr(ml_dtypes, dtype))})


def test_pack_refuses_a_value_that_contains_itself():
    loop: dict[str, Any] = {}
    loop["again"] = loop
    with pytest.raises(ValueError, match=r"^state\['again'\].*: nested deeper than 16 levels"):
        pack({"state": loop})


@pytest.mark.parametrize("levels", [16, 17])
def test_pack_nests_as_deep_as_unpack_reads(levels: int):
    value: Any = 1
    for _ in range(levels):
        value = [value]
    if levels <= 16:
        assert unpack(pack(value)) == value
    else:
        with pytest.raises(ValueError, match="nested deeper than 16 levels"):
            pack(value)


def test_what_pack_emits_unpack_restores():
    value = {
        "image": {"front": np.arange(12, dtype=np.uint8).reshape(2, 2, 3)},
        "state": np.array([[0.5, np.inf]], np.float64),
        "seed": np.int64(-1),
        "prompt": "pick ü",
        "frames": [b"\xff\xd8\xff", None, True, 1.5, 2**63],
    }
    restored = unpack(pack(value))
    np.testing.assert_array_equal(restored["image"]["front"], value["image"]["front"])
    np.testing.assert_array_equal(restored["state"], value["state"])
    assert restored["seed"] == -1
    assert type(restored["seed"]) is np.int64
    assert restored["prompt"] == value["prompt"]
    assert restored["frames"] == value["frames"]
