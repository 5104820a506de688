"""A leader's checks of a producer's batch before the append.

A batch that passes the checks cannot harm a reader.

The checksum is checked first, because most bad batches are accidents. Then the metadata is checked, without Arrow and
with bounds checks: rows, buffers, sizes after decompression. Only then is the batch passed to Arrow. Arrow's full
validation checks every offset and every character. All checks work on batches and columns, without a loop over records.
Only for small batches is a check of each record faster than Arrow (``small_batch_validator``).
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_PRODUCER
from sparklog.record.checksum import Buffer, crc32c
from sparklog.record.codec import (
    NO_TIMESTAMP,
    compare_body_crc,
    event_time_range,
    header_times,
    out_of_memory,
    read_record_batch,
    verify_body_crc,
)
from sparklog.record.compacted_batch import MAX_SPAN, offsets_of
from sparklog.record.flatbuffer import malformed
from sparklog.record.header import BatchHeader, Flag
from sparklog.record.keys import absent_keys
from sparklog.record.layout import layout_of
from sparklog.record.message import (
    LZ4_FRAME,
    NOT_COMPRESSED,
    ZSTD,
    BatchMessage,
    counted_bytes,
    read_batch_message,
)
from sparklog.record.required_columns import misplaced_null
from sparklog.record.schema import DEFAULT_EVENT_TIME, DEFAULT_SCHEMA
from sparklog.record.small_batch_validator import small_batch_times

#: The flags that a producer may set. The leader and the cleaner set the other flags.
_PRODUCER_FLAGS = int(Flag.LZ4 | Flag.ZSTD | Flag.TRANSACTIONAL)
#: The flags that a batch of RestoreRecords may have.
_PLACED_FLAGS = int(Flag.LZ4 | Flag.ZSTD | Flag.OFFSET_ARRAY)
_COMPRESSION_FLAGS = int(Flag.LZ4 | Flag.ZSTD)
_CODEC_FLAGS = {NOT_COMPRESSED: 0, LZ4_FRAME: int(Flag.LZ4), ZSTD: int(Flag.ZSTD)}
#: A body of at most this size is copied to ``bytes``, because the checks are then faster.
_SMALL_BYTES = 64 * 1024
#: The event-time settings of a topic with the default schema.
_TIMES_OF_DEFAULT = frozenset({None, DEFAULT_EVENT_TIME})
_CODEC_NAMES = {NOT_COMPRESSED: "no compression", LZ4_FRAME: "lz4", ZSTD: "zstd"}


def validate_batch(
    header: BatchHeader,
    body: Buffer,
    *,
    schema: pa.Schema,
    schema_id: int,
    max_message_bytes: int,
    event_time: str | None,
    required_key: Sequence[str] = (),
) -> None:
    """Check a producer's batch against the topic's newest schema and its limits.

    Producer id, epoch and sequence are not checked here, because the caller has already looked for duplicates.

    Raises:
        BrokerError: CORRUPT_MESSAGE for bytes that are invalid or do not fit the header. MESSAGE_TOO_LARGE if the batch
            has more than ``max_message_bytes``, as sent or after decompression.
            SCHEMA_OUTDATED for a schema id other than ``schema_id``. SCHEMA_MISMATCH for columns that differ from the
            schema's. INVALID_RECORD for nulls in columns that are not nullable, and for a record with nulls in all
            columns of ``required_key``. INVALID_RECORD also for timestamps that differ from the header's, for a batch
            without records, and for flags that a producer may not set.
    """
    _check_header(header, len(body), max_message_bytes)
    if len(body) <= _SMALL_BYTES:
        body = bytes(body)
    compare_body_crc(header, crc32c(body))
    _check_schema_id(header, schema_id)
    may_be_small = schema is DEFAULT_SCHEMA and not required_key
    if not (may_be_small and isinstance(body, bytes) and _sound_without_arrow(header, body, event_time)):
        records = _validate_by_arrow(
            header, pa.py_buffer(body), schema, max_message_bytes=max_message_bytes, event_time=event_time
        )
        _check_keys(records, required_key)


def validate_placed_batch(
    header: BatchHeader,
    body: Buffer,
    *,
    schema: pa.Schema,
    schema_id: int,
    max_message_bytes: int,
    event_time: str | None,
    required_key: Sequence[str] = (),
) -> None:
    """Check a batch whose records already have offsets and times. ``validate_batch`` checks all other batches.

    ``body`` has the message, and then the offset array if there is one. The batch may have no records but cover
    offsets. The event times must be between the two times of the header. A record without an event time has the greater
    of these two times.

    Raises:
        BrokerError: the errors of ``validate_batch``; also CORRUPT_MESSAGE for a wrong offset array, and INVALID_RECORD
            for times that such a batch cannot have.
    """
    _check_placed_header(header, len(body), max_message_bytes)
    whole = memoryview(body)
    verify_body_crc(header, whole[: header.length + header.offset_array_length])
    offsets_of(header, whole)
    _check_schema_id(header, schema_id)
    records = _sound_records(header, pa.py_buffer(whole[: header.length]), schema, max_message_bytes)
    found = event_time_range(records, event_time)
    times = (header.min_timestamp, header.max_timestamp)
    has_times = times != (NO_TIMESTAMP, NO_TIMESTAMP)
    if has_times != bool(header.record_count) or times[0] > times[1]:
        raise BrokerError(ErrorCode.INVALID_RECORD, f"times {times} us for {header.record_count} records")
    if found != (NO_TIMESTAMP, NO_TIMESTAMP) and not times[0] <= found[0] <= found[1] <= times[1]:
        _check_times(found, header, event_time)
    _check_keys(records, required_key)


def _sound_without_arrow(header: BatchHeader, body: bytes, event_time: str | None) -> bool:
    """Check the batch without Arrow. Return False if Arrow must check it.

    Raises BrokerError INVALID_RECORD if the timestamps are not those of the header.
    """
    if header.flags & _COMPRESSION_FLAGS or event_time not in _TIMES_OF_DEFAULT:
        return False
    times = small_batch_times(body, header.record_count)
    if times is None:
        return False
    _check_times(header_times(*times) if event_time else (NO_TIMESTAMP, NO_TIMESTAMP), header, event_time)
    return True


def _validate_by_arrow(
    header: BatchHeader, buffer: pa.Buffer, schema: pa.Schema, *, max_message_bytes: int, event_time: str | None
) -> pa.RecordBatch:
    """Make the remaining checks with Arrow, except those of the keys, and return the records."""
    records = _sound_records(header, buffer, schema, max_message_bytes)
    _check_times(event_time_range(records, event_time), header, event_time)
    return records


def _sound_records(header: BatchHeader, buffer: pa.Buffer, schema: pa.Schema, max_message_bytes: int) -> pa.RecordBatch:
    """Check the bytes, the columns and the nulls of a batch, and return its records."""
    source = memoryview(buffer)
    message = read_batch_message(source)
    _check_columns(message, schema, header.record_count)
    _check_sizes(message, source, header, max_message_bytes)
    records = read_record_batch(buffer, schema)
    try:
        records.validate(full=True)
    except MemoryError:
        raise out_of_memory("cannot validate a batch") from None
    except (pa.ArrowException, ValueError) as error:
        raise _corrupt(str(error).partition("\n")[0][:200]) from None
    _check_nulls(records, schema)
    return records


def _check_keys(records: pa.RecordBatch, required_key: Sequence[str]) -> None:
    if required_key and (count := absent_keys(records, required_key)):
        raise BrokerError(
            ErrorCode.INVALID_RECORD,
            f"{count} of {records.num_rows} records without key ({', '.join(required_key)}) found in a compacted topic",
        )


def _check_header(header: BatchHeader, found_bytes: int, max_message_bytes: int) -> None:
    if header.length != found_bytes or header.offset_array_length:
        raise _corrupt(
            f"{found_bytes} bytes found, {header.length} and an offset array of {header.offset_array_length} declared"
        )
    if found_bytes > max_message_bytes:
        raise _too_large(found_bytes, max_message_bytes)
    if header.flags & ~_PRODUCER_FLAGS:
        raise BrokerError(
            ErrorCode.INVALID_RECORD, f"flags {header.flags:#06x}, expected only flags of {_PRODUCER_FLAGS:#06x}"
        )
    if header.record_count == 0 or header.offset_span != header.record_count:
        raise BrokerError(
            ErrorCode.INVALID_RECORD,
            f"{header.record_count} records over {header.offset_span} offsets, expected one offset for each record "
            "and at least one record",
        )


def _check_placed_header(header: BatchHeader, found_bytes: int, max_message_bytes: int) -> None:
    expected_array = -(-4 * header.record_count // 8) * 8 if header.flags & Flag.OFFSET_ARRAY else 0
    if header.stored_bytes != found_bytes or header.offset_array_length != expected_array:
        raise _corrupt(
            f"{found_bytes} bytes found, {header.length} and an offset array of {header.offset_array_length} declared,"
            f" of {expected_array} expected"
        )
    if header.length > max_message_bytes:
        raise _too_large(header.length, max_message_bytes)
    if header.flags & ~_PLACED_FLAGS:
        raise BrokerError(
            ErrorCode.INVALID_RECORD, f"flags {header.flags:#06x}, expected only flags of {_PLACED_FLAGS:#06x}"
        )
    if header.producer_id != NO_PRODUCER or not max(header.record_count, 1) <= header.offset_span <= MAX_SPAN:
        raise BrokerError(
            ErrorCode.INVALID_RECORD,
            f"{header.record_count} records of producer {header.producer_id} over {header.offset_span} offsets, "
            f"expected no producer, and at least as many offsets as records, at most {MAX_SPAN}",
        )


def _check_schema_id(header: BatchHeader, schema_id: int) -> None:
    if header.schema_id == schema_id:
        return
    # If the id is later than this broker's, the broker will soon receive the new schema. The error is retriable.
    raise BrokerError(ErrorCode.SCHEMA_OUTDATED, f"schema id {header.schema_id} found, {schema_id} expected")


def _check_columns(message: BatchMessage, schema: pa.Schema, record_count: int) -> None:
    """Check the number of rows, nodes and buffers against the header and the schema, without reading the body."""
    if message.rows != record_count:
        raise _corrupt(f"{message.rows} records found, {record_count} declared in the header")
    nodes, buffers, _ = layout_of(schema)
    if len(message.nodes) != len(nodes) or len(message.buffers) != buffers or message.variadic_counts:
        raise BrokerError(
            ErrorCode.SCHEMA_MISMATCH,
            f"{len(message.nodes)} columns with {len(message.buffers)} buffers and {message.variadic_counts} variadic "
            f"counts found, {len(nodes)} with {buffers} and none expected (nested columns included)",
        )
    for node, (length, null_count) in zip(nodes, message.nodes, strict=True):
        if length < 0 or not 0 <= null_count <= length or (node.top and length != record_count):
            raise malformed(
                f"column {node.path!r} has {length} values, {null_count} of them null, in {record_count} rows"
            )


def _check_sizes(message: BatchMessage, source: memoryview, header: BatchHeader, max_message_bytes: int) -> None:
    if header.flags & _COMPRESSION_FLAGS != _CODEC_FLAGS[message.codec]:
        found = _CODEC_NAMES[message.codec]
        raise _corrupt(f"the batch is written with {found}, the header's flags are {header.flags:#06x}")
    counted = counted_bytes(message, source)
    if counted > max_message_bytes:
        raise _too_large(counted, max_message_bytes)


def _check_nulls(records: pa.RecordBatch, schema: pa.Schema) -> None:
    for index in layout_of(schema).required:
        if path := misplaced_null(records.column(index), schema.field(index)):
            raise BrokerError(ErrorCode.INVALID_RECORD, f"column {path!r} holds nulls and is not nullable")


def _check_times(found: tuple[int, int], header: BatchHeader, event_time: str | None) -> None:
    if found != (header.min_timestamp, header.max_timestamp):
        raise BrokerError(
            ErrorCode.INVALID_RECORD,
            f"timestamps {header.min_timestamp} to {header.max_timestamp} us in the header, {found[0]} to {found[1]} "
            f"in column {event_time!r}",
        )


def _corrupt(detail: str) -> BrokerError:
    return BrokerError(ErrorCode.CORRUPT_MESSAGE, detail)


def _too_large(found: int, limit: int) -> BrokerError:
    return BrokerError(ErrorCode.MESSAGE_TOO_LARGE, f"{found} bytes uncompressed, max.message.bytes is {limit}")
