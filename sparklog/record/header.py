"""The batch header of fixed size: the fields that the log can read without the batch's Arrow message.

A header has 96 bytes, little-endian. An ``.index`` file is an array of headers. A request or reply has the headers
before the batches.

::

    0   base_offset          i64   offset of the first record
    8   position             i64   file position of the body in the segment's .arrow file
    16  max_timestamp        i64   us, of the records in this batch
    24  running_max          i64   us, greatest max_timestamp in the segment up to and with this batch
    32  append_time          i64   us, leader's clock at append
    40  producer_id          i64   -1: not idempotent
    48  min_timestamp        i64   us, of the records in this batch
    56  offset_span          u32   offsets covered: next batch starts at base_offset + offset_span
    60  record_count         u32   records present (equal to offset_span until cleaned)
    64  length               u32   bytes of the body: one encapsulated Arrow RecordBatch message
    68  body_crc             u32   CRC32C of the body and the offset array
    72  leader_epoch         i32
    76  schema_id            i32
    80  first_sequence       i32   -1: not idempotent
    84  offset_array_length  u32   bytes of u32 offset deltas after the body (cleaned batches), a multiple of 8; else 0
    88  producer_epoch       i16
    90  flags                u16   see Flag; bits 12 to 15 are the format version
    92  header_crc           u32   CRC32C of bytes 0 to 92

The producer sets the fields that it knows. At the append the leader sets base_offset, position, running_max,
append_time, leader_epoch and the first-of-segment flag, and then the CRC. After that the header does not change:
followers store it unchanged, so replicas are byte-identical. But each replica compacts its own log. Compacted batches
(``Flag.CLEANED``) may differ between replicas; records that both replicas have are the same, at the same offsets.
"""

from __future__ import annotations

import struct
from enum import IntFlag
from typing import NamedTuple

import google_crc32c
import numpy as np

from sparklog.errors import BrokerError, ErrorCode

HEADER_BYTES = 96
FORMAT_VERSION = 1
_VERSION_SHIFT = 12
_FLAG_MASK = (1 << _VERSION_SHIFT) - 1
_VERSION_BITS = FORMAT_VERSION << _VERSION_SHIFT
_STRUCT = struct.Struct("<7q4I3iIhHI")
#: All fields except the CRC, which covers these bytes.
_FIELDS = struct.Struct("<7q4I3iIhH")
_CRC = struct.Struct("<I")
_CRC_AT = HEADER_BYTES - _CRC.size
assert _STRUCT.size == HEADER_BYTES and _FIELDS.size == _CRC_AT

#: numpy dtype of an array of headers. The field names equal ``BatchHeader``'s.
HEADER_DTYPE = np.dtype(
    [
        ("base_offset", "<i8"),
        ("position", "<i8"),
        ("max_timestamp", "<i8"),
        ("running_max", "<i8"),
        ("append_time", "<i8"),
        ("producer_id", "<i8"),
        ("min_timestamp", "<i8"),
        ("offset_span", "<u4"),
        ("record_count", "<u4"),
        ("length", "<u4"),
        ("body_crc", "<u4"),
        ("leader_epoch", "<i4"),
        ("schema_id", "<i4"),
        ("first_sequence", "<i4"),
        ("offset_array_length", "<u4"),
        ("producer_epoch", "<i2"),
        ("flags", "<u2"),
        ("header_crc", "<u4"),
    ]
)
assert HEADER_DTYPE.itemsize == HEADER_BYTES


class Flag(IntFlag):
    """The bits of ``BatchHeader.flags``."""

    LZ4 = 1
    ZSTD = 2
    CONTROL = 4
    TRANSACTIONAL = 8
    FIRST_OF_SEGMENT = 16
    OFFSET_ARRAY = 32
    #: The body has only some of the columns, see ``projection``. Only batches in replies to consumers have this flag.
    PROJECTED = 64
    #: The cleaner wrote the batch, or a follower appended the batch after a batch with this flag. The batch's position
    #: may differ from its position in the leader's segment.
    CLEANED = 128


class BatchHeader(NamedTuple):
    """One decoded header. The module's docstring describes the fields. ``flags`` does not have the version bits."""

    base_offset: int
    position: int
    max_timestamp: int
    running_max: int
    append_time: int
    producer_id: int
    min_timestamp: int
    offset_span: int
    record_count: int
    length: int
    body_crc: int
    leader_epoch: int
    schema_id: int
    first_sequence: int
    offset_array_length: int
    producer_epoch: int
    flags: int

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.offset_span

    @property
    def stored_bytes(self) -> int:
        """Return the size of the batch in the ``.arrow`` file: body and offset array, padded to a multiple of 8."""
        array_bytes = self.offset_array_length
        return self.length + -(-array_bytes // 8) * 8 if array_bytes else self.length

    def pack(self) -> bytes:
        """Return the encoded header of 96 bytes, with format version and CRC."""
        head = _FIELDS.pack(*self[:-1], self.flags | _VERSION_BITS)
        return head + _CRC.pack(google_crc32c.value(head))


def pack_placed(
    header: BatchHeader, *, base_offset: int, position: int, running_max: int, append_time: int, leader_epoch: int
) -> bytes:
    """Return the encoded header of a producer's batch with the fields that the leader sets at the append.

    The timestamps and flags stay as the producer set them, so do not use this function if the leader must change them.
    The result is the same as from ``pack`` on a header with these fields, but this function is faster because it does
    not create that header.
    """
    head = _FIELDS.pack(
        base_offset,
        position,
        header.max_timestamp,
        running_max,
        append_time,
        *header[5:11],
        leader_epoch,
        *header[12:16],
        header.flags | _VERSION_BITS,
    )
    return head + _CRC.pack(google_crc32c.value(head))


def unpack_header(source: bytes | bytearray | memoryview, at: int = 0) -> BatchHeader:
    """Decode and verify the header at ``at``.

    Raises:
        BrokerError: CORRUPT_MESSAGE if bytes are missing, the CRC differs, or the format version is newer.
    """
    if len(source) - at < HEADER_BYTES:
        raise BrokerError(
            ErrorCode.CORRUPT_MESSAGE, f"batch header: {len(source) - at} bytes found, {HEADER_BYTES} expected"
        )
    *fields, version_and_flags, crc = _STRUCT.unpack_from(source, at)
    expected = google_crc32c.value(bytes(source[at : at + _CRC_AT]))
    if crc != expected:
        raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"batch header CRC32C is {crc:#010x}, computed {expected:#010x}")
    version = version_and_flags >> _VERSION_SHIFT
    if version != FORMAT_VERSION:
        raise BrokerError(
            ErrorCode.CORRUPT_MESSAGE, f"batch header format version {version} found, {FORMAT_VERSION} expected"
        )
    fields.append(version_and_flags & _FLAG_MASK)
    return tuple.__new__(BatchHeader, fields)  # as the class does it, but without a Python call


def unpack_headers(source: bytes | bytearray | memoryview) -> list[BatchHeader]:
    """Decode and verify all headers in ``source``.

    Raises:
        BrokerError: CORRUPT_MESSAGE if the length is not a multiple of 96, or if ``unpack_header`` refuses a header.
    """
    if len(source) % HEADER_BYTES:
        raise BrokerError(
            ErrorCode.CORRUPT_MESSAGE, f"batch headers: {len(source)} bytes, not a multiple of {HEADER_BYTES}"
        )
    return [unpack_header(source, at) for at in range(0, len(source), HEADER_BYTES)]


def header_array(source: bytes | bytearray | memoryview) -> np.ndarray:
    """Return the bytes as a numpy array of headers, without copying or verifying them."""
    return np.frombuffer(source, dtype=HEADER_DTYPE)
