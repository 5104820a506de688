"""Control markers: the end of a transaction in a partition's log.

A marker is a batch with ``Flag.CONTROL``, one offset and no records. Its body is a RecordBatch message of the topic's
schema with zero rows, so a sealed segment is an ordinary Arrow file without extra rows. The content of the marker is
JSON in the message's custom metadata, under ``sparklog.marker``. The content has the producer ids and epochs of the
committed and of the aborted transactions. This module is pure.
"""

from __future__ import annotations

import msgspec
import pyarrow as pa

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.arrays import empty_batch
from sparklog.record.checksum import Buffer
from sparklog.record.codec import EncodedBatch, batch_without_records, stream_message, verify_body_crc
from sparklog.record.header import BatchHeader, Flag
from sparklog.record.message import read_custom_metadata

FORMAT_VERSION = 1
MARKER_KEY = "sparklog.marker"


class Marker(msgspec.Struct, frozen=True):
    """The content of a marker: the committed and the aborted transactions, each as (producer id, producer epoch)."""

    committed: tuple[tuple[int, int], ...] = ()
    aborted: tuple[tuple[int, int], ...] = ()
    version: int = FORMAT_VERSION


_decode = msgspec.json.Decoder(Marker).decode


def encode_marker(marker: Marker, schema: pa.Schema, *, schema_id: int) -> EncodedBatch:
    """Encode a marker as a batch for a log whose newest schema is ``schema``."""
    body = stream_message(empty_batch(schema), {MARKER_KEY: msgspec.json.encode(marker).decode()})
    return batch_without_records(body, schema_id=schema_id, offset_span=1, flags=int(Flag.CONTROL))


def decode_marker(header: BatchHeader, body: Buffer) -> Marker:
    """Return the content of a stored marker.

    Raises:
        BrokerError: CORRUPT_MESSAGE if the batch is not a marker, does not fit its header, or has a newer format.
    """
    buffer = pa.py_buffer(body)
    if not header.flags & Flag.CONTROL or buffer.size != header.length:
        detail = f"{buffer.size} bytes with flags {Flag(header.flags)!r} found, a marker of {header.length} expected"
        raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"offset {header.base_offset}: {detail}")
    verify_body_crc(header, buffer)
    text = read_custom_metadata(memoryview(buffer)).get(MARKER_KEY.encode(), b"")
    try:
        marker = _decode(text)
    except msgspec.MsgspecError as error:
        raise BrokerError(
            ErrorCode.CORRUPT_MESSAGE, f"offset {header.base_offset}: not a marker: {error}: {text[:80]!r}"
        ) from None
    if marker.version > FORMAT_VERSION:
        raise BrokerError(
            ErrorCode.CORRUPT_MESSAGE,
            f"offset {header.base_offset}: marker of format version {marker.version}, {FORMAT_VERSION} expected",
        )
    return marker
