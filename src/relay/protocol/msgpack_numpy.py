"""MessagePack with NumPy arrays: what openpi-client emits, byte for byte, and a decoder that trusts nothing.

The marker maps are those of `openpi: packages/openpi-client/src/openpi_client/msgpack_numpy.py`; on input also the
older form of `vllm-omni: vllm_omni/entrypoints/openpi/connection.py` and msgpack-numpy. The sender's dtype text never
reaches NumPy: openpi's decoder hands it over, and a message with dtype `|O` ends the process that reads it.
"""

from __future__ import annotations

from typing import Any, Final, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

from relay.protocol.errors import InvalidPayload
from relay.protocol.limits import (
    MAX_ARRAY_DIMS,
    MAX_CONTAINER_ITEMS,
    MAX_DEPTH,
    MAX_ITEMS,
    MAX_MESSAGE_BYTES,
    MAX_STRING_BYTES,
)
from relay.protocol.msgpack_structure import check_structure
from relay.protocol.wording import child_path, quoted


def pack(value: Any) -> bytes:
    """Encode `value`; arrays and NumPy scalars become openpi's marker maps.

    Arrays are written in C order with their own dtype and endianness. Tuples become lists.

    Raises:
        ValueError: naming the key, for values that the receiver could not read: bfloat16 and float8, object,
            structured and complex arrays, masked arrays, integers beyond 64 bits, foreign types.
    """
    try:
        return cast(bytes, msgpack.packb(value, default=_marker))
    except (TypeError, ValueError, OverflowError) as error:
        reason = _refusal(value, "", 0) or str(error)
        raise ValueError(reason) from None


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """Decode one message; marker maps become arrays and NumPy scalars, all other maps stay dicts.

    Arrays are read-only and native-endian; they share the memory of the byte strings that the message holds.

    Raises:
        InvalidPayload: naming the key, or the byte offset where the message cannot be decoded. Nothing else.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidPayload(f"message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are accepted")
    data = bytes(data)
    # An item takes at least one byte, so a shorter message cannot hold too many.
    long = len(data) > MAX_ITEMS
    if long:
        check_structure(data)
    try:
        value = _decode(data, _from_marker)
        if not long:
            _check_depth(value)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise _explained(data, error) from None
    return value


# ---- emitting ----------------------------------------------------------------------------------------------------


def _marker(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        _check_emitted(array)
        return {
            b"__ndarray__": True,
            b"data": _array_bytes(array),
            b"dtype": array.dtype.str,
            b"shape": array.shape,
        }
    if isinstance(value, np.generic):
        _check_emitted(value)
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"a {type(value).__name__} cannot be sent; use arrays, numbers, text, bytes, lists and dicts")


def _check_emitted(value: NDArray[Any] | np.generic) -> None:
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError("a masked array cannot be sent, its mask would be lost; use .filled() first")
    if value.dtype.kind in "VOc":
        hint = "; convert it with .astype(np.float32)" if "float" in value.dtype.name else ""
        raise ValueError(f"dtype {value.dtype.name} cannot be sent{hint}")


def _array_bytes(array: NDArray[Any]) -> bytes | memoryview:
    """The elements in C order; large contiguous arrays without a copy."""
    if array.nbytes >= _VIEW_FROM_BYTES and array.flags.c_contiguous:
        return array.reshape(-1).view(np.uint8).data
    return array.tobytes()


_VIEW_FROM_BYTES: Final = 4_096


def _refusal(value: Any, path: str, depth: int) -> str | None:
    """Why `value` cannot be packed, with the path of the first part that is at fault."""
    if depth > MAX_DEPTH:
        return f"{path}: nested deeper than {MAX_DEPTH} levels"
    if isinstance(value, dict):
        parts: Any = cast("dict[Any, Any]", value).items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(cast("list[Any]", value))
    else:
        try:
            msgpack.packb(value, default=_marker)
        except (TypeError, ValueError, OverflowError) as error:
            return f"{path}: {error}" if path else str(error)
        return None
    for key, part in parts:
        reason = _refusal(part, child_path(path, key), depth + 1)
        if reason:
            return reason
    return None


# ---- reading -----------------------------------------------------------------------------------------------------


def _decode(data: bytes, object_hook: Any) -> Any:
    return msgpack.unpackb(
        data,
        object_hook=object_hook,
        ext_hook=_refuse_extension,
        strict_map_key=True,
        max_str_len=MAX_STRING_BYTES,
        max_array_len=MAX_CONTAINER_ITEMS,
        max_map_len=MAX_CONTAINER_ITEMS,
        max_ext_len=0,
    )


def _refuse_extension(code: int, data: bytes) -> Any:
    raise InvalidPayload(f"extension type {code} is not accepted")


def _from_marker(fields: dict[Any, Any]) -> Any:
    """The array or scalar that a marker map stands for, or the map itself."""
    if b"__ndarray__" in fields or "__ndarray__" in fields:
        if _is_true(_field(fields, "__ndarray__")):
            _check_fields(fields, "array", _ARRAY_FIELDS)
            return _array(_field(fields, "dtype"), _field(fields, "shape"), _field(fields, "data"))
    elif b"__npgeneric__" in fields or "__npgeneric__" in fields:
        if _is_true(_field(fields, "__npgeneric__")):
            _check_fields(fields, "scalar", _SCALAR_FIELDS)
            return _scalar(_field(fields, "dtype"), _field(fields, "data"))
    elif b"nd" in fields or "nd" in fields:
        return _from_legacy_marker(fields)
    return fields


def _from_legacy_marker(fields: dict[Any, Any]) -> Any:
    names = {_text(name) for name in fields}
    if len(names) != len(fields):
        return fields
    many = _field(fields, "nd")
    if _is_true(many) and names == _LEGACY_ARRAY_FIELDS:
        dtype = _field(fields, "type")
        _check_kind(dtype, _field(fields, "kind"))
        return _array(dtype, _field(fields, "shape"), _field(fields, "data"))
    if many is False and names in _LEGACY_SCALAR_FIELDS:
        dtype = _field(fields, "type")
        _check_kind(dtype, _field(fields, "kind"))
        return _array(dtype, [], _field(fields, "data"))[()]
    return fields


def _field(fields: dict[Any, Any], name: str) -> Any:
    value = fields.get(_BYTES_NAMES[name], _MISSING)
    return fields.get(name) if value is _MISSING else value


def _is_true(marker: Any) -> bool:
    return marker is True or (type(marker) is int and marker == 1)


def _check_fields(fields: dict[Any, Any], what: str, expected: frozenset[str]) -> None:
    if len(fields) != len(expected) or {_text(name) for name in fields} != expected:
        names = ", ".join(sorted(expected))
        came = ", ".join(sorted(quoted(_text(name)) for name in fields))
        raise InvalidPayload(f"{what} marker must have exactly the fields {names}; got {came}")


def _check_kind(dtype: Any, kind: Any) -> None:
    if kind is not None and _text(kind) not in ("", _dtype(dtype).kind):
        raise InvalidPayload(
            f"array marker has kind {quoted(_text(kind))}, which is not that of {quoted(_text(dtype))}"
        )


def _array(dtype_text: Any, shape: Any, data: Any) -> NDArray[Any]:
    dtype = _dtype(dtype_text)
    if type(shape) is not list or len(cast("list[Any]", shape)) > MAX_ARRAY_DIMS:
        raise InvalidPayload(f"array marker has shape {quoted(shape)}; expected a list of at most {MAX_ARRAY_DIMS}")
    if type(data) is not bytes:
        raise InvalidPayload(f"array marker has data of type {type(data).__name__}; expected bytes")
    expected = dtype.itemsize
    for side in cast("list[Any]", shape):
        if type(side) is not int or side < 0:
            raise InvalidPayload(f"array marker has shape {quoted(shape)}; expected non-negative integers")
        expected *= side
    if expected != len(data):
        raise InvalidPayload(
            f"array marker has {len(data)} bytes of data; shape {quoted(shape)} of {dtype.name} takes {expected}"
        )
    if dtype.kind == "b" and data.translate(None, b"\x00\x01"):
        raise InvalidPayload("array marker of dtype bool has bytes other than 0 and 1")
    try:
        array: NDArray[Any] = np.ndarray(cast("list[int]", shape), dtype, data)
    except (ValueError, OverflowError):  # empty, but with sides whose product overflows
        raise InvalidPayload(f"array marker has shape {quoted(shape)}, which is too large") from None
    if not dtype.isnative:
        array = array.astype(dtype.newbyteorder("="))
        array.flags.writeable = False
    return array


def _scalar(dtype_text: Any, value: Any) -> np.generic:
    dtype = _dtype(dtype_text)
    kind = dtype.kind
    if kind == "b":
        fits = type(value) is bool
    elif kind == "f":
        fits = type(value) in (int, float) and _fits_float(float(value), dtype)
    else:
        limits = np.iinfo(dtype)
        fits = type(value) is int and limits.min <= value <= limits.max
    if not fits:
        raise InvalidPayload(f"scalar marker has the value {quoted(value)}, which does not fit {dtype.name}")
    return dtype.type(value)


def _fits_float(value: float, dtype: np.dtype[Any]) -> bool:
    return value != value or abs(value) == np.inf or abs(value) <= np.finfo(dtype).max


def _dtype(text: Any) -> np.dtype[Any]:
    dtype = _DTYPES.get(text) if type(text) in (str, bytes) else None
    if dtype is None:
        raise InvalidPayload(
            f"array marker has dtype {quoted(_text(text))}; accepted are bool, int8 to int64, uint8 to uint64 "
            "and float16 to float64"
        )
    return dtype


def _text(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _dtype_table() -> dict[str | bytes, np.dtype[Any]]:
    table: dict[str | bytes, np.dtype[Any]] = {}
    for code in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"):
        native = np.dtype(code)
        forms = {native.str: native, code: native, native.name: native}
        for order in "<>":
            forms[order + code] = np.dtype(order + code)
        for form, dtype in forms.items():
            table[form] = dtype
            table[form.encode()] = dtype
    return table


_DTYPES: Final = _dtype_table()
_MISSING: Final = object()
_ARRAY_FIELDS: Final = frozenset(("__ndarray__", "data", "dtype", "shape"))
_SCALAR_FIELDS: Final = frozenset(("__npgeneric__", "data", "dtype"))
_LEGACY_ARRAY_FIELDS: Final = frozenset(("nd", "type", "kind", "shape", "data"))
_LEGACY_SCALAR_FIELDS: Final = (frozenset(("nd", "type", "kind", "data")), frozenset(("nd", "type", "data")))
_BYTES_NAMES: Final = {name: name.encode() for name in (*_ARRAY_FIELDS, *_SCALAR_FIELDS, *_LEGACY_ARRAY_FIELDS)}


def _check_depth(value: Any) -> None:
    """Count levels as `check_structure` does on the wire, where an array is a map that holds a list."""
    level: list[Any] = [value]
    depth = 0
    while level:
        deeper: list[Any] = []
        for part in level:
            kind = type(part)
            if kind is dict:
                deeper.extend(part.values())
            elif kind is list:
                deeper.extend(part)
            elif kind is np.ndarray and depth + 2 > MAX_DEPTH:
                raise InvalidPayload(f"nested deeper than {MAX_DEPTH} levels")
        depth += 1
        level = deeper
        if deeper and depth > MAX_DEPTH:
            raise InvalidPayload(f"nested deeper than {MAX_DEPTH} levels")


# ---- explaining a refusal ----------------------------------------------------------------------------------------


def _explained(data: bytes, error: Exception) -> InvalidPayload:
    """The error to raise for a message that failed to decode: with the byte offset, or else with the key."""
    try:
        check_structure(data)
        _walk(_decode(data, None), "")
    except InvalidPayload as precise:
        return precise
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        pass  # the first error says as much
    return InvalidPayload(f"the message cannot be decoded: {error}")


def _walk(value: Any, path: str) -> None:
    """Read the markers again, outermost first, this time knowing where they stand."""
    if isinstance(value, dict):
        fields = cast("dict[Any, Any]", value)
        for key, part in fields.items():
            _walk(part, child_path(path, key))
        try:
            _from_marker(fields)
        except InvalidPayload as error:
            raise InvalidPayload(f"{path}: {error}" if path else str(error)) from None
    elif isinstance(value, list):
        for index, part in enumerate(cast("list[Any]", value)):
            _walk(part, child_path(path, index))
