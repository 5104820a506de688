"""The header of a Kafka record batch, its checksum, and the two fields that a broker changes.

A batch (format version 2) has a header of 61 bytes, big-endian, and then the records, which may be compressed.

::

    0   base_offset          i64
    8   batch_length         i32   bytes after this field
    12  leader_epoch         i32
    16  magic                i8    2
    17  crc                  u32   CRC32C of all bytes from 21 on
    21  attributes           i16   bits 0-2 codec, 3 log append time, 4 transactional, 5 control
    23  last_offset_delta    i32
    27  base_timestamp       i64   ms
    35  max_timestamp        i64   ms
    43  producer_id          i64
    51  producer_epoch       i16
    53  base_sequence        i32
    57  record_count         i32
    61  records

Source: Kafka's documentation, "Message Format".
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from sparklog.errors import ErrorCode
from sparklog.kafka.records.invalid import InvalidRecords
from sparklog.record.checksum import crc32c

HEADER_BYTES = 61
MAGIC = 2
#: The position of the magic byte, which is the same in all versions of the format.
_MAGIC_AT = 16
#: The position of the first byte that the CRC covers.
CRC_FROM = 21
#: The bytes before ``leader_epoch``. ``batch_length`` does not count them.
LENGTH_END = 12
_FRAME = struct.Struct(">qi")
HEADER = struct.Struct(">qiibIhiqqqhii")
#: ``base_offset``, ``batch_length`` and ``leader_epoch``.
_PLACE = struct.Struct(">qii")
assert HEADER.size == HEADER_BYTES

CODEC_MASK = 0x07
LOG_APPEND_TIME = 0x08
TRANSACTIONAL = 0x10
CONTROL = 0x20


class BatchView(NamedTuple):
    """The decoded header of a batch, and a view of all bytes of the batch. The module's docstring has the fields."""

    base_offset: int
    batch_length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int
    data: memoryview

    @property
    def transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL)

    @property
    def control(self) -> bool:
        return bool(self.attributes & CONTROL)

    @property
    def log_append_time(self) -> bool:
        return bool(self.attributes & LOG_APPEND_TIME)

    @property
    def codec(self) -> int:
        """Return the number of the compression codec: 0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd."""
        return self.attributes & CODEC_MASK

    @property
    def records(self) -> memoryview:
        """Return the bytes of the records as the producer sent them."""
        return self.data[HEADER_BYTES:]


def read_batches(records: memoryview) -> list[BatchView]:
    """Return the batches in ``records``, the field of a Produce request with this name.

    Only headers and lengths are checked. ``verify_crc`` and ``decode_batch`` check the rest.

    Raises:
        InvalidRecords: CORRUPT_MESSAGE if a batch is incomplete or its length is impossible; INVALID_RECORD for a batch
            in the format of version 0 or 1, or of an unknown version.
    """
    found = []
    at, size = 0, len(records)
    while at < size:
        if size - at <= _MAGIC_AT:
            raise InvalidRecords(ErrorCode.CORRUPT_MESSAGE, f"{size - at} bytes found, a batch header expected")
        _, length = _FRAME.unpack_from(records, at)
        magic = records[at + _MAGIC_AT]
        if magic != MAGIC:
            raise InvalidRecords(
                ErrorCode.INVALID_RECORD, f"records of message format version {magic} found, only {MAGIC} is accepted"
            )
        end = at + LENGTH_END + length
        if length < HEADER_BYTES - LENGTH_END or end > size:
            raise InvalidRecords(
                ErrorCode.CORRUPT_MESSAGE,
                f"a batch of {length} bytes found, {HEADER_BYTES - LENGTH_END} to {size - at - LENGTH_END} expected",
            )
        found.append(BatchView._make((*HEADER.unpack_from(records, at), records[at:end])))
        at = end
    return found


def verify_crc(view: BatchView) -> None:
    """Check the CRC of a batch.

    Raises:
        InvalidRecords: CORRUPT_MESSAGE with both values if they differ.
    """
    computed = crc32c(view.data[CRC_FROM:])
    if computed != view.crc:
        raise InvalidRecords(
            ErrorCode.CORRUPT_MESSAGE, f"the batch's CRC32C is {view.crc:#010x}, computed {computed:#010x}"
        )


def placed_batch(data: memoryview, *, base_offset: int, leader_epoch: int) -> list[bytes | memoryview]:
    """Return a producer's batch with another base offset and leader epoch, as consecutive buffers.

    The CRC covers neither field. The function does not copy the records, which stay compressed as the producer sent
    them.
    """
    return [_PLACE.pack(base_offset, len(data) - LENGTH_END, leader_epoch), data[_PLACE.size :]]
