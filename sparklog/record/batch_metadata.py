"""The metadata of a RecordBatch message, encoded without Arrow.

So the bytes do not depend on the version of Arrow. The bytes have this layout:

::

    0    u32 24            position of the Message table, counted from the end of the message's prefix
    4    vtable            u16 12, u16 24, positions of version, type, header, body length; 8 zeros
    24   Message           back to the vtable, -> RecordBatch, body length, version V5, type 3; 5 zeros
    48   vtable            u16 12, u16 24, positions of rows, nodes, buffers, compression (0: none); 4 zeros
    64   RecordBatch       back to the vtable, -> nodes, rows, -> buffers, -> compression
    88   vtable            u16 8, u16 8, positions of codec and method
    96   BodyCompression   back to the vtable, codec, method; 6 zeros
    108  u32 count         the vector of nodes: two i64 each, from 112 on; then 4 zeros
    ..   u32 count         the vector of buffers: two i64 each

This module is pure. Source: format/Message.fbs of Arrow.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain

from sparklog.record.message import CONTINUATION, METADATA_V5, NOT_COMPRESSED, PREFIX_BYTES, RECORD_BATCH

_HEAD = struct.Struct("<Ii I6H8x iIqhB5x 6H4x iIqII 4HiBB6x I")
_HEAD_BYTES = 112
assert _HEAD.size == PREFIX_BYTES + _HEAD_BYTES
_BETWEEN = struct.Struct("<4xI")


def record_batch_metadata(
    rows: int,
    *,
    nodes: Sequence[tuple[int, int]] = (),
    buffers: Sequence[tuple[int, int]] = (),
    codec: int = NOT_COMPRESSED,
    body_length: int = 0,
) -> bytes:
    """Return the metadata of a RecordBatch message with ``rows`` rows: the message's prefix and its flatbuffer.

    The other arguments have the same meaning as the fields of ``BatchMessage``. Without nodes the batch has no columns
    and no body, so the result is a whole message.
    """
    buffers_at = _HEAD_BYTES + 16 * len(nodes) + 4
    head = _HEAD.pack(
        CONTINUATION,
        buffers_at + 4 + 16 * len(buffers),
        24,
        *(12, 24, 16, 18, 4, 8),
        # Message
        24 - 4,
        64 - 28,
        body_length,
        METADATA_V5,
        RECORD_BATCH,
        *(12, 24, 8, 4, 16, 0 if codec == NOT_COMPRESSED else 20),
        # RecordBatch
        64 - 48,
        108 - 68,
        rows,
        buffers_at - 80,
        96 - 84,
        *(8, 8, 4, 5),
        # BodyCompression
        96 - 88,
        max(codec, 0),
        0,
        len(nodes),
    )
    return head + _pairs(nodes) + _BETWEEN.pack(len(buffers)) + _pairs(buffers)


def _pairs(pairs: Sequence[tuple[int, int]]) -> bytes:
    return struct.pack(f"<{2 * len(pairs)}q", *chain.from_iterable(pairs))
