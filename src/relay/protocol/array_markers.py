"""The maps that stand for NumPy arrays and scalars in a message: building them, and reading them with suspicion."""

from __future__ import annotations

import math
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from relay.protocol.errors import InvalidPayload
from relay.protocol.limits import MAX_ARRAY_DIMS
from relay.protocol.wording import as_text, shown


def to_marker(value: Any) -> dict[bytes, Any]:
    """openpi's marker map for an array or a NumPy scalar.

    Raises:
        ValueError: for what has no portable form.
        TypeError: for foreign types.
    """
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):
            raise ValueError("a masked array cannot be sent, its mask would be lost; use .filled() first")
        array = cast(Any, value)
        if array.dtype.str not in _DTYPES:
            raise ValueError(f"dtype {array.dtype.name} cannot be sent{_remedy(array.dtype)}")
        return {b"__ndarray__": True, b"data": _elements(array), b"dtype": array.dtype.str, b"shape": array.shape}
    if isinstance(value, np.generic):
        scalar = cast(Any, value)
        if scalar.dtype.str not in _DTYPES:
            raise ValueError(f"a {scalar.dtype.name} scalar cannot be sent; use a plain number or text")
        return {b"__npgeneric__": True, b"data": scalar.item(), b"dtype": scalar.dtype.str}
    if isinstance(value, int):
        raise ValueError("an integer beyond 64 bits cannot be sent")
    raise TypeError(f"{type(value).__name__} cannot be sent; use arrays, numbers, text, bytes, lists and dicts")


def _remedy(dtype: Any) -> str:
    if "float" in dtype.name:
        return "; convert it with .astype(np.float32)"
    return "; send text as str, several in a list" if dtype.kind in "US" else ""


def _elements(array: Any) -> bytes | memoryview:
    """The elements in C order; of large contiguous arrays without a copy."""
    if array.nbytes < _VIEW_FROM_BYTES or not array.flags.c_contiguous:
        return array.tobytes()
    return array.reshape(-1).view(np.uint8).data


_VIEW_FROM_BYTES: Final = 4_096


def from_marker(fields: dict[Any, Any]) -> Any:
    """The read-only array or the scalar that a marker map stands for, or the map itself if it is none.

    Raises:
        InvalidPayload: for a marker with missing or contradictory fields, or of a dtype outside the fixed table.
    """
    if len(fields) == 4 and fields.keys() == _OPENPI_ARRAY and fields[b"__ndarray__"] is True:
        return _array(fields[b"dtype"], fields[b"shape"], fields[b"data"])
    named = {as_text(key): value for key, value in fields.items()}
    if _is_true(named.get("__ndarray__")):
        _check_names("array", fields, named, ("__ndarray__", "data", "dtype", "shape"))
        return _array(named["dtype"], named["shape"], named["data"])
    if _is_true(named.get("__npgeneric__")):
        _check_names("scalar", fields, named, ("__npgeneric__", "data", "dtype"))
        return _scalar(named["dtype"], named["data"])
    if len(named) == len(fields) and named.keys() in _LEGACY_FORMS:
        return _legacy(fields, named)
    return fields


_OPENPI_ARRAY: Final = {b"__ndarray__", b"data", b"dtype", b"shape"}
_MARKERS: Final = frozenset((b"__ndarray__", b"__npgeneric__", b"nd", "__ndarray__", "__npgeneric__", "nd"))
is_plain_map: Final = _MARKERS.isdisjoint
"""Whether a map has no key that tells a marker, so that `from_marker` need not be asked."""

_LEGACY_ARRAY: Final = {"nd", "type", "kind", "shape", "data"}
# vLLM-Omni sends `kind` with a scalar, msgpack-numpy does not.
_LEGACY_FORMS: Final = (_LEGACY_ARRAY, {"nd", "type", "kind", "data"}, {"nd", "type", "data"})


def _is_true(marker: Any) -> bool:
    return marker is True or (type(marker) is int and marker == 1)


def _check_names(what: str, fields: dict[Any, Any], named: dict[str, Any], expected: tuple[str, ...]) -> None:
    missing = [name for name in expected if name not in named]
    if missing:
        raise InvalidPayload(f"{what} marker without {' and '.join(missing)}")
    if len(fields) > len(expected):
        raise InvalidPayload(f"{what} marker with {len(fields)} fields; expected {', '.join(expected)}, each once")


def _legacy(fields: dict[Any, Any], named: dict[str, Any]) -> Any:
    """`nd` true is an array, false a scalar; every other combination is an ordinary map."""
    is_array = named.keys() == _LEGACY_ARRAY
    if not (_is_true(named["nd"]) if is_array else named["nd"] is False):
        return fields
    dtype, kind = _dtype(named["type"]), as_text(named.get("kind", ""))
    if not isinstance(kind, str) or kind not in ("", dtype.kind):
        raise InvalidPayload(f"array marker has kind {shown(kind)}; its dtype {dtype.name} has kind '{dtype.kind}'")
    if is_array:
        return _array(named["type"], named["shape"], named["data"])
    return cast(Any, _array(named["type"], [], named["data"]))[()]


def _array(dtype_text: Any, shape: Any, data: Any) -> NDArray[Any]:
    dtype = _dtype(dtype_text)
    if type(data) is not bytes:
        raise InvalidPayload(f"array marker has {shown(data)} as data; expected bytes")
    if type(shape) is not list:
        raise InvalidPayload(f"array marker has {shown(shape)} as shape; expected a list of integers")
    sides = cast("list[Any]", shape)
    if len(sides) > MAX_ARRAY_DIMS:
        raise InvalidPayload(f"array marker has {len(sides)} dimensions; at most {MAX_ARRAY_DIMS} are accepted")
    size = dtype.itemsize
    for side in sides:
        if type(side) is not int or side < 0:
            raise InvalidPayload(f"array marker has {shown(side)} in its shape; expected integers of 0 or more")
        size *= side
    if size != len(data):
        raise InvalidPayload(f"array marker has {len(data)} bytes; shape {sides} of {dtype.name} takes {size}")
    if dtype.kind == "b" and data.translate(None, b"\x00\x01"):
        raise InvalidPayload("array marker of dtype bool has bytes other than 0 and 1")
    try:
        array = np.ndarray(sides, dtype, data)
    except (ValueError, OverflowError):  # no elements, but sides whose product overflows
        raise InvalidPayload(f"array marker has shape {sides}, which is too large") from None
    if not dtype.isnative:
        array = array.astype(dtype.newbyteorder("="))
        array.flags.writeable = False
    return array


def _scalar(dtype_text: Any, value: Any) -> Any:
    dtype = _dtype(dtype_text)
    low, high = _RANGES[dtype.str[1:]]
    if dtype.kind == "b":
        fits = type(value) is bool
    elif dtype.kind == "f":
        fits = type(value) in (int, float) and (low <= value <= high or not math.isfinite(value))
    else:
        fits = type(value) is int and low <= value <= high
    if not fits:
        raise InvalidPayload(f"scalar marker has the value {shown(value)}, which is no {dtype.name}")
    return dtype.type(value)


def _dtype(text: Any) -> Any:
    dtype = _DTYPES.get(text) if type(text) in (str, bytes) else None
    if dtype is None:
        raise InvalidPayload(
            f"array marker has dtype {shown(as_text(text))}; accepted are bool, int8 to int64, uint8 to uint64 "
            "and float16 to float64"
        )
    return dtype


def _dtype_table() -> dict[str | bytes, Any]:
    """Every accepted spelling: `<f4`, `>f4`, `f4`, `float32`, and the same as bytes."""
    table: dict[str | bytes, Any] = {}
    for code in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"):
        native: Any = np.dtype(code)
        spellings = {f"<{code}": np.dtype(f"<{code}"), f">{code}": np.dtype(f">{code}")}
        spellings |= {native.str: native, native.name: native, code: native}
        for spelling, dtype in spellings.items():
            table[spelling] = table[spelling.encode()] = dtype
    return table


_DTYPES: Final = _dtype_table()


def _range_of(dtype: Any) -> tuple[int | float, int | float]:
    if dtype.kind == "f":
        return float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    return (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)


_RANGES: Final = {dtype.str[1:]: _range_of(dtype) for dtype in _DTYPES.values()}
