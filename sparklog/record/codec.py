"""Conversion of record batches to bytes and back.

The body of a batch is exactly one encapsulated Arrow RecordBatch message. Its length is a multiple of 8 bytes. If it is
compressed, Arrow compresses each buffer inside the message. The body that ``encode_batch`` returns is sent, stored,
replicated and read unchanged. If the body is not compressed, ``decode_batch`` returns columns that are views of the
received memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_PRODUCER
from sparklog.record.arrays import array_of
from sparklog.record.batch_metadata import record_batch_metadata
from sparklog.record.checksum import Buffer, crc32c
from sparklog.record.header import BatchHeader, Flag
from sparklog.record.message import ALIGNMENT, read_metadata_length

#: The ``min_timestamp`` and ``max_timestamp`` of a batch without event times. The leader replaces them by its own time.
NO_TIMESTAMP = -1

COMPRESSIONS: dict[str, Flag] = {"lz4": Flag.LZ4, "zstd": Flag.ZSTD}
_WRITE_OPTIONS = {name: pa.ipc.IpcWriteOptions(compression=name, use_threads=False) for name in COMPRESSIONS}
_END_OF_STREAM_BYTES = 8
#: The bytes that a message may have in addition to its values, for metadata and padding.
_LARGE_BYTES = 4096
_MAX_COUNT = 2**31 - 1
_I64_MIN, _I64_MAX = -(2**63), 2**63 - 1
_UNIT_TO_US = {"s": (1_000_000, 1), "ms": (1_000, 1), "us": (1, 1), "ns": (1, 1_000)}


class EncodedBatch(NamedTuple):
    """A batch that is ready to be sent.

    The fields of ``header`` that the leader sets are 0, and the leader epoch is -1. ``body`` is any buffer that
    ``crc32c`` accepts. The body is ``bytes`` if a producer sends a single record.
    """

    header: BatchHeader
    body: pa.Buffer


def encode_batch(
    batch: pa.RecordBatch,
    *,
    schema_id: int,
    compression: str | None,
    event_time: str | None,
    producer_id: int = NO_PRODUCER,
    producer_epoch: int = -1,
    first_sequence: int = -1,
    transactional: bool = False,
) -> EncodedBatch:
    """Encode ``batch``. Its schema must be exactly the topic's schema with ``schema_id``; ``fit_table`` ensures this.

    ``compression`` is None, ``"none"``, ``"lz4"`` or ``"zstd"``. ``event_time`` names the column whose smallest and
    greatest values become the header's timestamps. The header has ``NO_TIMESTAMP`` if ``event_time`` is None, or if the
    column has only nulls.

    Raises:
        BrokerError: INVALID_CONFIG for another compression; INVALID_RECORD if there are no records or too many, or if
            an event time does not fit into microseconds.
    """
    if not 0 < batch.num_rows <= _MAX_COUNT:
        raise BrokerError(ErrorCode.INVALID_RECORD, f"a batch of {batch.num_rows} records, 1 to {_MAX_COUNT} expected")
    if compression in {None, "none"}:
        body, flags = batch.serialize(), Flag(0)
        if body.size > _LARGE_BYTES and _holds_more(body.size, batch):
            body = _copied(batch).serialize()
    elif compression in COMPRESSIONS:
        if _holds_more(pa.ipc.get_record_batch_size(batch), batch):
            batch = _copied(batch)
        body, flags = _serialize_compressed(batch, compression), COMPRESSIONS[compression]
    else:
        raise BrokerError(
            ErrorCode.INVALID_CONFIG, f"compression {compression!r}, expected none, {', '.join(COMPRESSIONS)}"
        )
    if body.size > _MAX_COUNT:
        raise BrokerError(ErrorCode.MESSAGE_TOO_LARGE, f"a batch of {body.size} bytes, at most {_MAX_COUNT} expected")
    earliest, latest = event_time_range(batch, event_time)
    header = BatchHeader(
        base_offset=0,
        position=0,
        max_timestamp=latest,
        running_max=0,
        append_time=0,
        producer_id=producer_id,
        min_timestamp=earliest,
        offset_span=batch.num_rows,
        record_count=batch.num_rows,
        length=body.size,
        body_crc=crc32c(body),
        leader_epoch=-1,
        schema_id=schema_id,
        first_sequence=first_sequence,
        offset_array_length=0,
        producer_epoch=producer_epoch,
        flags=int(flags | (Flag.TRANSACTIONAL if transactional else Flag(0))),
    )
    return EncodedBatch(header, body)


def batch_without_records(body: pa.Buffer, *, schema_id: int, offset_span: int, flags: int) -> EncodedBatch:
    """Return a batch that has no records but covers ``offset_span`` offsets. ``body`` is a message with zero rows."""
    header = BatchHeader(
        base_offset=0,
        position=0,
        max_timestamp=NO_TIMESTAMP,
        running_max=0,
        append_time=0,
        producer_id=NO_PRODUCER,
        min_timestamp=NO_TIMESTAMP,
        offset_span=offset_span,
        record_count=0,
        length=body.size,
        body_crc=crc32c(body),
        leader_epoch=-1,
        schema_id=schema_id,
        first_sequence=-1,
        offset_array_length=0,
        producer_epoch=-1,
        flags=flags,
    )
    return EncodedBatch(header, body)


def decode_batch(header: BatchHeader, body: Buffer, schema: pa.Schema, *, verify_crc: bool = True) -> pa.RecordBatch:
    """Return the records of a stored batch.

    ``schema`` is the schema with the id ``header.schema_id``. For a projected batch ``schema`` has only the batch's
    columns. ``body`` has ``header.length`` bytes, and then the offset array if there is one. For a projected batch
    without columns ``header.length`` is 0.

    The columns of an uncompressed batch are views of ``body`` and keep it alive. A body whose address is not a multiple
    of 8 is copied first, because code that uses Arrow relies on this alignment.

    Raises:
        BrokerError: CORRUPT_MESSAGE if length, CRC, row count or structure differ from the header.
    """
    buffer = pa.py_buffer(body)
    expected = header.length + header.offset_array_length
    if buffer.size != expected:
        raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"{_name(header)}: {buffer.size} bytes found, {expected} expected")
    if verify_crc:
        verify_body_crc(header, buffer)
    if header.length == 0 and header.flags & Flag.PROJECTED:
        records = read_record_batch(pa.py_buffer(record_batch_metadata(header.record_count)), schema)
    else:
        records = read_record_batch(buffer.slice(0, header.length), schema)
    if records.num_rows != header.record_count:
        raise BrokerError(
            ErrorCode.CORRUPT_MESSAGE,
            f"{_name(header)}: {records.num_rows} records found, {header.record_count} expected",
        )
    return records


def verify_body_crc(header: BatchHeader, body: Buffer) -> None:
    """Check the CRC of the body and the offset array against the header.

    Raises:
        BrokerError: CORRUPT_MESSAGE with both values if they differ.
    """
    compare_body_crc(header, crc32c(body))


def compare_body_crc(header: BatchHeader, computed: int) -> None:
    """Check a computed CRC against the header. Raises BrokerError CORRUPT_MESSAGE if they differ."""
    if computed != header.body_crc:
        raise BrokerError(
            ErrorCode.CORRUPT_MESSAGE,
            f"{_name(header)}: body CRC32C is {header.body_crc:#010x}, computed {computed:#010x}",
        )


def out_of_memory(what: str) -> BrokerError:
    """Return the error for a lack of memory while working on ``what``.

    The error is retriable, because the batch may be valid.
    """
    return BrokerError(ErrorCode.THROTTLING_QUOTA_EXCEEDED, f"{what}: not enough memory is free; try again later")


def read_record_batch(buffer: pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    """Decode one RecordBatch message as a batch of ``schema``.

    Only Arrow's reader checks the structure of the message.

    Raises:
        BrokerError: CORRUPT_MESSAGE if Arrow cannot read the message; a retriable error if there is too little memory.
    """
    if buffer.address % ALIGNMENT:
        buffer = pa.py_buffer(buffer.to_pybytes())
    try:
        return pa.ipc.read_record_batch(buffer, schema)
    except MemoryError:  # Arrow's own error for a lack of memory is a subclass of this one.
        raise out_of_memory("a batch cannot be read") from None
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"Arrow cannot read the batch: {reason}") from None


def event_time_range(batch: pa.RecordBatch, event_time: str | None) -> tuple[int, int]:
    """Return the smallest and greatest event time in microseconds since the epoch, as a header stores them.

    Return NO_TIMESTAMP twice if ``event_time`` is None, or if the column has only nulls.

    Raises:
        BrokerError: INVALID_RECORD if the column does not exist or has no times, or if a time is out of range.
    """
    if event_time is None:
        return NO_TIMESTAMP, NO_TIMESTAMP
    index = batch.schema.get_field_index(event_time)
    kind = None if index < 0 else batch.schema.field(index).type
    if kind is None or not (types.is_timestamp(kind) or types.is_date(kind)):
        raise BrokerError(
            ErrorCode.INVALID_RECORD, f"event-time column {event_time!r}: expected a timestamp or a date, found {kind}"
        )
    extremes = _extremes(batch.column(index))
    if extremes is None:
        return NO_TIMESTAMP, NO_TIMESTAMP
    factor, divisor = _to_us(kind)
    earliest, latest = extremes[0] * factor // divisor, extremes[1] * factor // divisor
    if earliest < _I64_MIN or latest > _I64_MAX:
        raise BrokerError(
            ErrorCode.INVALID_RECORD, f"event times {earliest} to {latest} us in column {event_time!r} exceed 64 bits"
        )
    return header_times(earliest, latest)


def header_times(earliest: int, latest: int) -> tuple[int, int]:
    """Return the smallest and greatest event time of a batch in the form that a header stores.

    The value of NO_TIMESTAMP is also a valid time: the last microsecond of 1969. If a batch has only this time, its
    header stores a smallest time that is one microsecond lower, so that the header differs from the header of a batch
    without event times. A search by time still finds the batch.
    """
    return (NO_TIMESTAMP - 1 if earliest == latest == NO_TIMESTAMP else earliest), latest


def _holds_more(size: int, batch: pa.RecordBatch) -> bool:
    """Return whether an encoded batch of ``size`` bytes is much larger than its records need.

    If all lists of a slice are empty or null, pyarrow 26 writes the offsets of all lists of the original column.
    """
    if not any(types.is_nested(column.type) and not _has_no_values(column) for column in batch.columns):
        return False  # This is the usual case. The check is faster than ``nbytes``.
    return size > 2 * int(batch.nbytes) + _LARGE_BYTES


def _has_no_values(column: pa.Array) -> bool:
    """Return whether this is a column of lists that are all empty or null, as the headers column usually is."""
    return types.is_list(column.type) and not len(column.values)


def _copied(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.take(array_of(np.arange(batch.num_rows, dtype=np.int64), pa.int64()))


def _serialize_compressed(batch: pa.RecordBatch, compression: str) -> pa.Buffer:
    # Only the stream writer supports compression.
    return stream_message(batch, None, options=_WRITE_OPTIONS[compression])


def stream_message(
    batch: pa.RecordBatch, custom_metadata: dict[str, str] | None, *, options: pa.ipc.IpcWriteOptions | None = None
) -> pa.Buffer:
    """Return the RecordBatch message that Arrow's stream writer writes for ``batch``, without the rest of a stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch, custom_metadata=custom_metadata)
    stream = sink.getvalue()
    start = read_metadata_length(memoryview(stream))
    return stream.slice(start, stream.size - start - _END_OF_STREAM_BYTES)


def _extremes(column: pa.Array) -> tuple[int, int] | None:
    """Return smallest and greatest value of a column of times, in the column's unit, or None if it has no times."""
    whole = pa.int32() if types.is_date32(column.type) else pa.int64()
    if column.null_count or len(column) == 0:
        smallest, greatest = pc.min_max(column.view(whole)).values()
        return (smallest.as_py(), greatest.as_py()) if smallest.is_valid else None
    # For a small batch without nulls, which is the usual case, this is faster than Arrow's kernels.
    if len(column) == 1:
        only = int(column[0].value)
        return only, only
    dtype = whole.to_pandas_dtype()
    values = np.frombuffer(column.buffers()[1], dtype, column.offset + len(column))[column.offset :]
    return int(values.min()), int(values.max())


def _to_us(kind: pa.DataType) -> tuple[int, int]:
    if types.is_date32(kind):
        return 86_400_000_000, 1
    return _UNIT_TO_US["ms" if types.is_date64(kind) else kind.unit]


def _name(header: BatchHeader) -> str:
    return f"batch of {header.record_count} records at offset {header.base_offset}"
