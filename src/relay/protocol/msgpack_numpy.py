"""MessagePack with NumPy arrays: what openpi-client emits, byte for byte, and a decoder that trusts nothing.

The marker maps are those of `openpi: packages/openpi-client/src/openpi_client/msgpack_numpy.py`; on input also the
older ones of `vllm-omni: vllm_omni/entrypoints/openpi/connection.py` and msgpack-numpy. The sender's dtype text never
reaches NumPy: openpi's decoder hands it over, and a message with dtype `|O` ends the process that reads it.
"""

from __future__ import annotations

from typing import Any, Final, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import numpy as np

from relay.protocol.array_markers import from_marker, is_plain_map, to_marker
from relay.protocol.errors import InvalidPayload
from relay.protocol.limits import (
    MAX_CONTAINER_ITEMS,
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_ITEMS,
    MAX_MARKERS,
    MAX_MESSAGE_BYTES,
    MAX_STRING_BYTES,
)
from relay.protocol.msgpack_structure import check_structure, too_many
from relay.protocol.wording import key_path, shown


def pack(value: Any) -> bytes:
    """Encode `value`; arrays and NumPy scalars become openpi's marker maps.

    Arrays are written in C order with their own dtype and endianness. Tuples become lists.

    Raises:
        ValueError: naming the key, for what the receiver would not read: arrays of another dtype than bool, int8 to
            int64, uint8 to uint64 and float16 to float64, masked arrays, integers beyond 64 bits, map keys other than
            text and bytes, foreign types, more than 16 levels.
    """
    _check_keys(value, (), 1)
    try:
        return _msgpack.packb(value, default=to_marker)
    except _PACKING_ERRORS as error:
        reason = _refusal(value, ()) or str(error)
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
    # `_decode` counts a container when it is complete. How much can be open until then is bounded by the length of
    # a short message; a long one is read through first, which takes longer than decoding it would.
    if len(data) > _READ_THROUGH_FROM:
        check_structure(data)
    try:
        value, fault = _decode(data)
    except _DECODING_ERRORS as error:
        raise _explained(data, error) from None
    if fault is not None:
        path = _path_to_fault(value)
        raise InvalidPayload(f"{key_path(path)}: {fault}" if path else str(fault))
    return value


_READ_THROUGH_FROM: Final = 1024 * 1024
_msgpack: Final = cast(Any, msgpack)
_PACKING_ERRORS: Final = (ValueError, TypeError, OverflowError)
_DECODING_ERRORS: Final = (ValueError, TypeError, RecursionError, msgpack.UnpackException)


def _check_keys(value: Any, path: tuple[Any, ...], depth: int) -> None:
    """What MessagePack would write and the receiver refuse: numbers as keys, endless or deep nesting."""
    if isinstance(value, dict):
        fields = cast("dict[Any, Any]", value)
        for key in fields:
            if not isinstance(key, (str, bytes)):
                where = f"{key_path(path)}: " if path else ""
                raise ValueError(f"{where}a map key is {shown(key)}; keys must be text or bytes")
        parts = fields.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(cast("list[Any]", value))
    else:
        return
    if depth > MAX_DEPTH:
        raise ValueError(f"{key_path(path)}: nested deeper than {MAX_DEPTH} levels")
    for key, part in parts:
        if isinstance(part, _SENT_CONTAINERS):
            _check_keys(part, (*path, key), depth + 1)


_SENT_CONTAINERS: Final = (dict, list, tuple)


def _refusal(value: Any, path: tuple[Any, ...]) -> str | None:
    """Why `value` cannot be packed, beginning with the path of the first part that is at fault."""
    if isinstance(value, dict):
        parts = list(cast("dict[Any, Any]", value).items())
    elif isinstance(value, (list, tuple)):
        parts = list(enumerate(cast("list[Any]", value)))
    else:
        try:
            _msgpack.packb(value, default=to_marker)
        except _PACKING_ERRORS as error:
            return f"{key_path(path)}: {error}" if path else str(error)
        return None
    for key, part in parts:
        reason = _refusal(part, (*path, key))
        if reason:
            return reason
    return None


def _decode(data: bytes) -> tuple[Any, InvalidPayload | None]:
    """The value, and what is wrong with the first marker that lies; `_FAULT` then stands in its place."""
    items = containers = markers = 0
    fault: InvalidPayload | None = None

    def read_map(fields: dict[Any, Any]) -> Any:
        nonlocal items, containers, markers, fault
        containers += 1
        items += len(fields)
        if items > MAX_ITEMS or containers > MAX_CONTAINERS:
            raise too_many(items)
        if is_plain_map(fields) or fault is not None:
            return fields
        markers += 1
        try:
            if markers > MAX_MARKERS:
                raise InvalidPayload(f"more than {MAX_MARKERS} arrays and scalars in one message")
            return from_marker(fields)
        except InvalidPayload as error:
            fault = error  # where it is can be told when the maps around it are read
            return _FAULT

    def read_list(values: list[Any]) -> list[Any]:
        nonlocal items, containers
        containers += 1
        items += len(values)
        if items > MAX_ITEMS or containers > MAX_CONTAINERS:
            raise too_many(items)
        return values

    value = _unpackb(data, object_hook=read_map, list_hook=read_list)
    if containers > MAX_DEPTH:  # fewer cannot nest too deep
        _check_depth(value)
    return value, fault


_FAULT: Final = object()


def _path_to_fault(value: Any) -> tuple[Any, ...] | None:
    if value is _FAULT:
        return ()
    parts = cast("dict[Any, Any]", value).items() if type(value) is dict else enumerate(value)
    for key, part in parts:
        if part is _FAULT:
            return (key,)
        if type(part) in _CONTAINERS:
            below = _path_to_fault(part)
            if below is not None:
                return (key, *below)
    return None


def _unpackb(data: bytes, **hooks: Any) -> Any:
    return _msgpack.unpackb(
        data,
        ext_hook=_refuse_extension,
        strict_map_key=True,
        max_str_len=MAX_STRING_BYTES,
        max_array_len=MAX_CONTAINER_ITEMS,
        max_map_len=MAX_CONTAINER_ITEMS,
        max_ext_len=0,
        **hooks,
    )


def _refuse_extension(code: int, data: bytes) -> Any:
    raise InvalidPayload(f"extension type {code} is not accepted")


def _check_depth(value: Any) -> None:
    """Count levels as `check_structure` does, on the wire: an array is a map that holds a list, a scalar is a map."""
    level = [value] if type(value) in _CONTAINERS else []
    depth = 0
    while level:
        depth += 1
        parts = [
            part
            for container in level
            if container
            for part in (cast("dict[Any, Any]", container).values() if type(container) is dict else container)
        ]
        level = [part for part in parts if type(part) in _CONTAINERS]
        deepest = depth + (1 if level else 0)
        if depth >= MAX_DEPTH - 1:
            deepest = max([deepest, *(depth + _wire_levels(part) for part in parts)])
        if deepest > MAX_DEPTH:
            raise InvalidPayload(f"nested deeper than {MAX_DEPTH} levels")


def _wire_levels(part: Any) -> int:
    return 2 if isinstance(part, np.ndarray) else 1 if isinstance(part, np.generic) else 0


_CONTAINERS: Final = frozenset((dict, list))


def _explained(data: bytes, error: Exception) -> InvalidPayload:
    """The error for a message that failed to decode, with the byte at which, or in a very long one after which."""
    reason = str(error)
    if not isinstance(error, InvalidPayload):
        reason = f"the message cannot be decoded: {reason or type(error).__name__}"
    try:
        position = check_structure(data, _EXPLAINED_VALUES)
    except InvalidPayload as precise:
        return precise
    return InvalidPayload(reason if position == len(data) else f"after byte {position}: {reason}")


_EXPLAINED_VALUES: Final = 16_384
"""Takes less than 5 ms; a robot's message has a few hundred."""
