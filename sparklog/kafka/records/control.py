"""The encoding of control batches: transaction markers and fillers.

A filler covers offsets without records at the end of a fetch response, so that the consumer advances past them.
"""

from __future__ import annotations

import struct

from sparklog.kafka.records.batch_view import CONTROL, CRC_FROM, HEADER, HEADER_BYTES, LENGTH_END, MAGIC, TRANSACTIONAL
from sparklog.record.checksum import crc32c

_ABORT, _COMMIT = 0, 1
_KEY = struct.Struct(">hh")
_VALUE = struct.Struct(">hi")
_FROM_ATTRIBUTES = struct.Struct(">hiqqqhii")
assert CRC_FROM + _FROM_ATTRIBUTES.size == HEADER_BYTES


def encode_control_batch(
    *,
    offset: int,
    leader_epoch: int,
    committed: bool,
    timestamp_ms: int,
    producer_id: int = -1,
    producer_epoch: int = -1,
    coordinator_epoch: int = 0,
) -> bytes:
    """Return the marker of a committed or aborted transaction, at ``offset``.

    Without a producer id the batch is a filler. A consumer skips it, and continues at the offset after it. A batch
    without records cannot be the filler, because some clients do not advance past it and fetch it again.
    """
    key = _KEY.pack(0, _COMMIT if committed else _ABORT)
    value = _VALUE.pack(0, coordinator_epoch)
    # Lengths are varints in zigzag: 2 n. Attributes, timestamp delta and offset delta are 0, and there are no headers.
    record = b"".join((b"\0\0\0", bytes([2 * len(key)]), key, bytes([2 * len(value)]), value, b"\0"))
    attributes = CONTROL | (TRANSACTIONAL if producer_id >= 0 else 0)
    body = (
        _FROM_ATTRIBUTES.pack(attributes, 0, timestamp_ms, timestamp_ms, producer_id, producer_epoch, -1, 1)
        + bytes([2 * len(record)])
        + record
    )
    length = CRC_FROM - LENGTH_END + len(body)
    head = HEADER.pack(offset, length, leader_epoch, MAGIC, crc32c(body), *(0,) * 8)[:CRC_FROM]
    return head + body
