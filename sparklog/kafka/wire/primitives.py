"""The parts of Kafka's encoding that compiled readers and writers call: variable-length numbers, tags and arrays.

Positions are indexes into the whole frame. The code compares every length with the end of the enclosing value before
it allocates anything of this length.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from sparklog.kafka.wire.malformed import MalformedMessage

#: Bytes that a writer returns: ``bytes``, ``bytearray``, ``memoryview`` or an Arrow buffer.
Buffer = Any
#: The value of a field of records. A received value is a view of its frame.
Records = Buffer | Sequence[Buffer] | None

#: The maximum number of bytes of an unsigned number of 32 bits.
_MOST_VARINT_BYTES = 5
#: Records of at most this length are copied next to the other fields. A separate buffer costs more.
_COPIED = 512


def malformed(what: str) -> NoReturn:
    """Raise :class:`MalformedMessage`."""
    raise MalformedMessage(what)


def uvarint(frame: memoryview, position: int) -> tuple[int, int]:
    """Return the unsigned number at ``position``, of at most 32 bits, and the position after it."""
    number = shift = 0
    for at in range(position, position + _MOST_VARINT_BYTES):
        byte = frame[at]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            if number > 0xFFFFFFFF:
                break
            return number, at + 1
        shift += 7
    malformed(f"the number at byte {position} has more than 32 bits")


def skip_tagged_fields(frame: memoryview, position: int, count: int, end: int) -> int:
    """Skip ``count`` unknown tagged fields, and return the position after them. Each has at least two bytes."""
    for _ in range(count):
        _, position = uvarint(frame, position)
        size, position = uvarint(frame, position)
        position += size
        if position > end:
            malformed(f"a tagged field ends {position - end} bytes after its struct")
    return position


def uvarint_bytes(number: int) -> bytes:
    """Return the encoding of an unsigned number of at most 32 bits."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def write_tags(out: bytearray, tags: list[tuple[int, bytes | bytearray]]) -> None:
    """Append the tagged fields of one struct, in the order of their tags."""
    out += uvarint_bytes(len(tags))
    for tag, value in tags:
        out += uvarint_bytes(tag)
        out += uvarint_bytes(len(value))
        out += value


def write_records(parts: list[Buffer], value: Records, *, compact: bool) -> bytearray:
    """Append records with their length to ``parts``, whose last element is a ``bytearray``. Return the last element.

    ``value`` is an Arrow buffer, ``bytes``, a ``memoryview`` of bytes, or a list or tuple of these. Records of more
    than a few hundred bytes are not copied.
    """
    out: bytearray = parts[-1]
    if value is None:
        out += b"\0" if compact else b"\xff\xff\xff\xff"
        return out
    given = value if isinstance(value, list | tuple) else (value,)
    views = [memoryview(part) for part in given]
    size = sum(view.nbytes for view in views)
    out += uvarint_bytes(size + 1) if compact else struct.pack(">i", size)
    if size <= _COPIED:
        for view in views:
            out += view
        return out
    parts.extend(view for view in views if view.nbytes)
    out = bytearray()
    parts.append(out)
    return out


def array_packer(code: str, length_code: str) -> Callable[[Sequence[Any]], bytes]:
    """Return a function that encodes a short array of fixed-size numbers with its length.

    ``code`` is the elements' code in ``struct``, and ``length_code`` that of the length: "i", or "B" for the compact
    length of arrays with fewer than 127 elements.
    """
    extra = 1 if length_code == "B" else 0
    packers = [struct.Struct(f">{length_code}{count}{code}").pack for count in range(8)]

    def pack(values: Sequence[Any]) -> bytes:
        count = len(values)
        if count < 8:
            return packers[count](count + extra, *values)
        if extra and count > 126:
            return uvarint_bytes(count + 1) + struct.pack(f">{count}{code}", *values)
        return struct.pack(f">{length_code}{count}{code}", count + extra, *values)

    return pack
