"""A reader of flatbuffer tables from untrusted bytes: it checks every access against the bounds first.

Arrow describes its messages in flatbuffers. A broker must know what a batch declares (row counts, buffers, sizes after
decompression) before a native library uses the batch. So the broker reads these few fields with this module. It copies
nothing and has no schemas: a caller names a field by its index in Arrow's ``.fbs`` files.

The layout, all little-endian:

::

    table    i32 distance back to its vtable, then the fields
    vtable   u16 own bytes, u16 bytes of the table, then one u16 per field: its position in the table, 0: absent
    offset   u32 distance forward to a table, vector or string
    vector   u32 count, then the items

Source: https://flatbuffers.dev/internals/
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeAlias

from sparklog.errors import BrokerError, ErrorCode

_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_I32 = struct.Struct("<i")
#: The maximum number of fields in the tables that this module is used for.
_MAX_FIELDS = 8
_VTABLES = [struct.Struct(f"<{1 + fields}H") for fields in range(_MAX_FIELDS + 1)]

#: The scalar types of fields.
UBYTE = struct.Struct("<B")
SHORT = struct.Struct("<h")
LONG = struct.Struct("<q")

ReadOnly: TypeAlias = "bytes | memoryview"


class Vector(NamedTuple):
    """The position and the number of a vector's items. The position was checked: all items are inside the bytes."""

    start: int
    items: int


class Table:
    """A reader of one table in the bytes ``source``.

    The reader reads a field only when the field is requested, and checks each access.

    Raises:
        BrokerError: CORRUPT_MESSAGE from the constructor and every method, if an offset is out of bounds.
    """

    __slots__ = ("_bytes", "_entries", "at", "source")

    def __init__(self, source: ReadOnly, at: int) -> None:
        self.source = source
        self.at = at
        vtable = at - _read(_I32, source, at)
        vtable_bytes = _read(_U16, source, vtable)
        if vtable_bytes < 4 or vtable_bytes % 2 or vtable + vtable_bytes > len(source):
            raise malformed(f"a vtable of {vtable_bytes} bytes at {vtable} in {len(source)} bytes")
        # A later version of Arrow may have more fields. They are ignored.
        fields = min(vtable_bytes // 2 - 2, _MAX_FIELDS)
        entries: tuple[int, ...] = _VTABLES[fields].unpack_from(source, vtable + 2)
        self._bytes = entries[0]
        #: The size of the table, and then the position of each field. Field 0 is at index 1.
        self._entries = entries
        if self._bytes < 4 or at + self._bytes > len(source):
            raise malformed(f"a table of {self._bytes} bytes at {at} in {len(source)} bytes")

    def scalar(self, index: int, kind: struct.Struct, *, default: int = 0) -> int:
        """Return the number in field ``index``, or ``default`` if the table does not have this field."""
        place = self._place(index, kind.size)
        if not place:
            return default
        value: int = kind.unpack_from(self.source, self.at + place)[0]
        return value

    def table(self, index: int) -> Table | None:
        """Return the table that field ``index`` points to, or None if this table does not have the field."""
        target = self._follow(index)
        return None if target is None else Table(self.source, target)

    def vector(self, index: int, item_bytes: int) -> Vector | None:
        """Return the vector of fixed-size items that field ``index`` points to.

        Return None if the table does not have the field.
        """
        target = self._follow(index)
        if target is None:
            return None
        count = _read(_U32, self.source, target)
        start = target + _U32.size
        if start + count * item_bytes > len(self.source):
            raise malformed(f"a vector of {count} items of {item_bytes} bytes at {start} in {len(self.source)} bytes")
        return Vector(start, count)

    def tables(self, index: int) -> list[Table]:
        """Return the tables in the vector that field ``index`` points to.

        The list is empty if this table does not have the field.
        """
        found = self.vector(index, _U32.size)
        if found is None:
            return []
        places = range(found.start, found.start + found.items * _U32.size, _U32.size)
        return [Table(self.source, place + _read(_U32, self.source, place)) for place in places]

    def text(self, index: int) -> bytes:
        """Return the bytes of the string in field ``index``, without the final zero.

        Return b"" if the table does not have the field.
        """
        found = self.vector(index, 1)
        return b"" if found is None else bytes(self.source[found.start : found.start + found.items])

    def _follow(self, index: int) -> int | None:
        place = self._place(index, _U32.size)
        if not place:
            return None
        at = self.at + place
        return at + _read(_U32, self.source, at)

    def _place(self, index: int, size: int) -> int:
        if index + 1 >= len(self._entries):
            return 0
        place = self._entries[index + 1]
        if place and not 4 <= place <= self._bytes - size:
            raise malformed(f"field {index} of {size} bytes at {place} in a table of {self._bytes} bytes")
        return place


def root_table(source: ReadOnly) -> Table:
    """Return the table to which the first four bytes of ``source`` point.

    Raises:
        BrokerError: CORRUPT_MESSAGE if an offset is out of bounds.
    """
    return Table(source, _read(_U32, source, 0))


def malformed(detail: str) -> BrokerError:
    """Return the error for invalid Arrow metadata."""
    return BrokerError(ErrorCode.CORRUPT_MESSAGE, f"Arrow metadata: {detail}")


def _read(kind: struct.Struct, source: ReadOnly, at: int) -> int:
    # A negative position must be refused: ``unpack_from`` would count it from the end.
    if not 0 <= at <= len(source) - kind.size:
        raise malformed(f"{kind.size} bytes at {at} in {len(source)} bytes")
    value: int = kind.unpack_from(source, at)[0]
    return value
