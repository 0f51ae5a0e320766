"""Reads the skeleton of a MessagePack message, building no values: limits, key types, text, truncation.

It knows no array markers. `unpack` calls it before decoding a long message, and after a failed decoding, to find the
byte at which the message is wrong.
"""

from __future__ import annotations

import sys
from typing import Final

from relay.protocol.errors import InvalidPayload
from relay.protocol.limits import MAX_CONTAINER_ITEMS, MAX_CONTAINERS, MAX_DEPTH, MAX_ITEMS, MAX_STRING_BYTES


def check_structure(data: bytes, most_values: int = sys.maxsize) -> int:
    """Check that `data` is one complete MessagePack value within the limits; a map pair counts as one item.

    Returns:
        How many bytes were read; not all of them if there are more than `most_values` values, keys included.

    Raises:
        InvalidPayload: naming the byte offset of the first fault.
    """
    end = len(data)
    position = 0
    items = containers = 0
    depth = 0
    pending = 1  # values, or keys and values, still to read in the innermost container
    in_map = False
    outer: list[tuple[int, bool]] = []
    for _ in range(most_values):
        if pending == 0:
            if not outer:
                break
            pending, in_map = outer.pop()
            depth -= 1
            continue
        if position >= end:
            raise _truncated(end)
        code = data[position]
        if in_map and pending % 2 == 0 and code not in _KEY_CODES:
            raise InvalidPayload(f"byte {position}: map keys must be text or bytes, got {_name(code)}")
        pending -= 1
        size = _SCALAR_SIZES[code]
        if size:
            position += size
            continue
        kind, width, count = _SIZED[code]
        start = position + 1 + width
        if width:
            if start > end:
                raise _truncated(end)
            count = int.from_bytes(data[position + 1 : start], "big")
        if kind is _TEXT:
            if count > MAX_STRING_BYTES or not data[start : start + count].isascii():
                _check_text(data, position, start, count)
            position = start + count
            continue
        if kind is _BYTES:
            position = start + count
            continue
        if kind is _REFUSED:
            raise InvalidPayload(f"byte {position}: {_name(code)} is not accepted")
        if count > MAX_CONTAINER_ITEMS:
            raise InvalidPayload(
                f"byte {position}: {kind} of {count} items; at most {MAX_CONTAINER_ITEMS} are accepted"
            )
        items += count
        containers += 1
        if items > MAX_ITEMS or containers > MAX_CONTAINERS:
            raise InvalidPayload(f"byte {position}: {too_many(items)}")
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidPayload(f"byte {position}: nested deeper than {MAX_DEPTH} levels")
        position = start
        if count == 0:
            depth -= 1
            continue
        outer.append((pending, in_map))
        in_map = kind is _MAP
        pending = 2 * count if in_map else count
    else:
        return position
    if position > end:
        raise _truncated(end)
    if position < end:
        raise InvalidPayload(f"byte {position}: {end - position} bytes after the end of the message")
    return end


def too_many(items: int) -> InvalidPayload:
    """Which of the two limits on a whole message is exceeded."""
    what = f"{MAX_ITEMS} items" if items > MAX_ITEMS else f"{MAX_CONTAINERS} maps and lists"
    return InvalidPayload(f"more than {what} in one message")


def _truncated(end: int) -> InvalidPayload:
    return InvalidPayload(f"byte {end}: the message ends in the middle of a value")


def _check_text(data: bytes, position: int, start: int, count: int) -> None:
    if count > MAX_STRING_BYTES:
        raise InvalidPayload(f"byte {position}: text of {count} bytes; at most {MAX_STRING_BYTES} are accepted")
    try:
        str(data[start : start + count], "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidPayload(f"byte {start + error.start}: text that is not UTF-8") from None


def _name(code: int) -> str:
    if code < 0x80 or code >= 0xE0 or 0xCC <= code <= 0xD3:
        return "an integer"
    if code in (0xCA, 0xCB):
        return "a float"
    if code in (0xC2, 0xC3):
        return "a boolean"
    if code == 0xC0:
        return "nil"
    if code == 0xC1:
        return "the reserved code 0xc1"
    kind = _SIZED[code][0]
    return "an extension type" if kind == _REFUSED else f"a {kind}"


_TEXT: Final = "text"
_BYTES: Final = "byte string"
_LIST: Final = "list"
_MAP: Final = "map"
_REFUSED: Final = "refused"


def _scalar_sizes() -> bytes:
    """Whole length of each scalar by its first byte; 0 where the length must be read."""
    sizes = bytearray(256)
    sizes[0x00:0x80] = b"\x01" * 0x80
    sizes[0xE0:0x100] = b"\x01" * 0x20
    for code in (0xC0, 0xC2, 0xC3):
        sizes[code] = 1
    for code, size in ((0xCA, 5), (0xCB, 9), (0xCC, 2), (0xCD, 3), (0xCE, 5), (0xCF, 9)):
        sizes[code] = size
    for code, size in ((0xD0, 2), (0xD1, 3), (0xD2, 5), (0xD3, 9)):
        sizes[code] = size
    return bytes(sizes)


def _sized_kinds() -> list[tuple[str, int, int]]:
    """Kind of value, width of its length field, and its length where it has none, by first byte."""
    kinds = [(_REFUSED, 0, 0)] * 256
    kinds[0x80:0x90] = [(_MAP, 0, count) for count in range(16)]
    kinds[0x90:0xA0] = [(_LIST, 0, count) for count in range(16)]
    kinds[0xA0:0xC0] = [(_TEXT, 0, count) for count in range(32)]
    kinds[0xC4:0xC7] = [(_BYTES, 1, 0), (_BYTES, 2, 0), (_BYTES, 4, 0)]
    kinds[0xD9:0xDC] = [(_TEXT, 1, 0), (_TEXT, 2, 0), (_TEXT, 4, 0)]
    kinds[0xDC:0xE0] = [(_LIST, 2, 0), (_LIST, 4, 0), (_MAP, 2, 0), (_MAP, 4, 0)]
    return kinds


_SCALAR_SIZES: Final = _scalar_sizes()
_SIZED: Final = _sized_kinds()
_KEY_CODES: Final = frozenset((*range(0xA0, 0xC0), 0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB))
