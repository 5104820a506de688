"""The full validation of a small batch of the default schema, without Arrow.

For a batch of one record, creating and validating Arrow's objects takes a leader longer than everything else. This
module accepts only batches whose metadata is the same, byte for byte, as that of ``small_batch_encoder``. In such a
batch the positions of all offsets, bits and times are known, and only a few numbers must be checked. Arrow validates
all other batches. A test compares both validations, with batches that are damaged at each position.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

import msgspec

from sparklog.record.message import PREFIX_BYTES
from sparklog.record.small_batch_encoder import (
    buffer_positions,
    small_batch_buffer_sizes,
    small_batch_metadata,
    small_batch_metadata_bytes,
)

#: The maximum number of records. With more records, Arrow is faster.
MOST_RECORDS = 256
METADATA_BYTES = small_batch_metadata_bytes()
#: The number of nodes and of buffers of the default schema, and the position of the nodes in the metadata that
#: ``batch_metadata`` encodes.
_NODES, _BUFFERS = 7, 17
_NODES_AT = PREFIX_BYTES + 112
_PAIRS = struct.Struct(f"<{2 * _NODES}q8x{2 * _BUFFERS}q")
assert _NODES_AT + _PAIRS.size == METADATA_BYTES
_OFFSETS = [struct.Struct(f"<{count + 1}i") for count in range(MOST_RECORDS + 1)]
_TIMES = [struct.Struct(f"<{count}q") for count in range(MOST_RECORDS + 1)]


class _Binary(NamedTuple):
    """A binary column in a batch of several records. Positions are relative to the beginning of the message."""

    nulls: int
    validity_at: int
    offsets_at: int
    #: The total length of all values, in bytes.
    length: int


class _Shape(msgspec.Struct, frozen=True):
    """What must be checked in messages with the same metadata, and where."""

    rows: int
    message_bytes: int
    #: The struct that extracts the parts of a message that can have only one valid content.
    fixed: struct.Struct
    #: The only valid content of these parts.
    expected: tuple[bytes, ...]
    #: The columns that need further checks. A batch of one record needs none.
    columns: tuple[_Binary, ...]
    times_at: int


def small_batch_times(message: bytes, record_count: int) -> tuple[int, int] | None:
    """Return the smallest and the greatest timestamp of a valid batch, or None if Arrow must validate the batch."""
    if len(message) < METADATA_BYTES:
        return None
    shape = _shape(message[:METADATA_BYTES])
    if shape is None or shape.rows != record_count or shape.message_bytes != len(message):
        return None
    if shape.fixed.unpack_from(message) != shape.expected:
        return None
    for column in shape.columns:
        if not _sound(message, column, record_count):
            return None
    times = _TIMES[record_count].unpack_from(message, shape.times_at)
    return (times[0], times[0]) if record_count == 1 else (min(times), max(times))


def _sound(message: bytes, column: _Binary, rows: int) -> bool:
    """Return whether the offsets and the nulls of a column are valid.

    The offsets must begin at 0, never decrease, and end at the total length of the values. The number of nulls must be
    the declared one.
    """
    offsets = _OFFSETS[rows].unpack_from(message, column.offsets_at)
    if offsets[0] != 0 or offsets[-1] != column.length or list(offsets) != sorted(offsets):
        return False
    if not column.nulls:
        return True
    at = column.validity_at
    bits = int.from_bytes(message[at : at + -(-rows // 8)], "little") & ((1 << rows) - 1)
    return bits.bit_count() == rows - column.nulls


@lru_cache(maxsize=256)
def _shape(metadata: bytes) -> _Shape | None:
    """Return what to check in messages with these metadata.

    Return None if ``small_batch_encoder`` would write other metadata for the same rows, nulls and lengths.
    """
    numbers = _PAIRS.unpack_from(metadata, _NODES_AT)
    rows, nulls = numbers[0], (numbers[1], numbers[3])
    lengths = numbers[2 * _NODES + 5], numbers[2 * _NODES + 11]
    if not 0 < rows <= MOST_RECORDS or not all(0 <= found <= rows for found in nulls):
        return None
    if not all(0 <= length < 2**31 for length in lengths):
        return None
    sizes = small_batch_buffer_sizes(rows, nulls, lengths)
    if metadata != small_batch_metadata(rows, nulls, sizes):
        return None
    at = [METADATA_BYTES + place for place, _ in buffer_positions(sizes)]
    no_headers = [(at[number], bytes(sizes[number])) for number in (6, 7, 10, 13)]
    columns = _Binary(nulls[0], at[0], at[1], lengths[0]), _Binary(nulls[1], at[3], at[4], lengths[1])
    fixed = (
        no_headers if rows > 1 else [*no_headers, *(part for column in columns for part in _single_value_parts(column))]
    )
    fixed.sort()
    return _Shape(
        rows,
        at[16] + sizes[16],
        _extractor(fixed),
        tuple(expected for _, expected in fixed),
        columns if rows > 1 else (),
        at[16],
    )


def _extractor(parts: list[tuple[int, bytes]]) -> struct.Struct:
    """Return a struct that extracts the parts at these positions of a message. The positions ascend."""
    form, end = "<", 0
    for at, expected in parts:
        form += f"{at - end}x{len(expected)}s"
        end = at + len(expected)
    return struct.Struct(form)


def _single_value_parts(column: _Binary) -> list[tuple[int, bytes]]:
    """Return the parts of a column with one value that can have only one valid content."""
    offsets = column.offsets_at, _OFFSETS[1].pack(0, column.length)
    return [offsets, (column.validity_at, b"\0")] if column.nulls else [offsets]
