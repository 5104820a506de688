"""Decoding of a produced batch to rows of the default schema, and to a batch of the log.

``decode_batch`` checks the header first, then the checksum, then the declared sizes. After these checks, it
decompresses and decodes the records. For up to ``FEW_RECORDS`` records it makes no Arrow arrays unless the caller asks
for rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog.errors import ErrorCode
from sparklog.kafka.records.batch_view import BatchView, verify_crc
from sparklog.kafka.records.compression import decompressed, refuse_large
from sparklog.kafka.records.decode_few import Headers, ManyHeaders, decode_few
from sparklog.kafka.records.decode_many import Columns, decode_many
from sparklog.kafka.records.invalid import MOST_RECORD_ERRORS, InvalidRecords, RecordError
from sparklog.record.arrays import binary_of
from sparklog.record.checksum import crc32c
from sparklog.record.codec import NO_TIMESTAMP, EncodedBatch, encode_batch, header_times, read_record_batch
from sparklog.record.header import BatchHeader, Flag
from sparklog.record.schema import DEFAULT_EVENT_TIME, DEFAULT_SCHEMA
from sparklog.record.small_batch_encoder import body_of_columns, several_records_body, single_record_body

#: With more records than this, numpy and Arrow are faster than a loop. The first number is for the plain Python loop,
#: and the second for the compiled one. ``bench/kafka_records.py`` measures both.
FEW_RECORDS = 400 if hasattr(decode_few, "__code__") else 1500
#: A batch with more bytes of records than this is not decoded by a loop, because its values may be large; see
#: ``_LARGE_VALUE``.
_FEW_BYTES = 1024 * 1024
#: The average size of values in bytes from which a loop that copies each value once is faster than Arrow.
_LARGE_VALUE = 400
#: The timestamp of a record that has no time.
NO_TIME_MS = -1
#: The least and the greatest milliseconds that fit into 64 bits of microseconds.
LEAST_MS, GREATEST_MS = -(2**63 // 1000), (2**63 - 1) // 1000

#: The minimum size of a record, in bytes: a record without key, value and headers.
_LEAST_RECORD_BYTES = 7
_HEADERS_TYPE = DEFAULT_SCHEMA.field("headers").type
_TIME_TYPE = DEFAULT_SCHEMA.field("timestamp").type


class _SmallBatch:
    """The records of a small batch. ``times_us`` is None if a record has no timestamp."""

    __slots__ = ("headers", "keys", "times_ms", "times_us", "values")

    def __init__(
        self,
        keys: Sequence[bytes | None],
        values: Sequence[bytes | None],
        headers: Sequence[Headers | None] | None,
        times_ms: list[int],
    ) -> None:
        self.keys = keys
        self.values = values
        self.headers = headers
        self.times_ms = times_ms
        self.times_us = None if NO_TIME_MS in times_ms else [1000 * time for time in times_ms]

    def body(self) -> bytes | None:
        """Return the records as the body of a batch of the log, or None if only Arrow can make the body."""
        if self.times_us is None or self.headers is not None:
            return None
        if len(self.times_us) == 1:
            return single_record_body(self.keys[0], self.values[0], self.times_us[0])
        return several_records_body(self.keys, self.values, self.times_us)

    def time_range_us(self) -> tuple[int, int]:
        assert self.times_us is not None
        return min(self.times_us), max(self.times_us)

    def rows(self) -> pa.RecordBatch:
        body = self.body()
        if body is not None:  # encoding and reading a body is faster than making the arrays one by one
            return read_record_batch(pa.py_buffer(body), DEFAULT_SCHEMA)
        headers = None if self.headers is None else _header_array(self.headers)
        times = np.array(self.times_ms, np.int64)
        return _rows_of_columns(binary_of(self.keys), binary_of(self.values), headers, times)


class _LargeBatch:
    """The records of a large batch."""

    __slots__ = ("_columns", "_times_ms")

    def __init__(self, columns: Columns, times_ms: npt.NDArray[np.int64]) -> None:
        self._columns = columns
        self._times_ms = times_ms

    def body(self) -> bytes | None:
        """Return the records as the body of a batch of the log, or None if Arrow makes the body in less time.

        Arrow copies each value twice. This method copies it once, but its fixed cost for each value equals a copy of
        some hundreds of bytes.
        """
        columns, count = self._columns, len(self._times_ms)
        size = int(np.maximum(columns.values.lengths, 0).sum())
        if columns.headers is not None or size < _LARGE_VALUE * count or np.any(self._times_ms == NO_TIME_MS):
            return None
        return body_of_columns(count, columns.keys.parts(), columns.values.parts(), (self._times_ms * 1000).tobytes())

    def time_range_us(self) -> tuple[int, int]:
        return 1000 * int(self._times_ms.min()), 1000 * int(self._times_ms.max())

    def rows(self) -> pa.RecordBatch:
        columns = self._columns
        return _rows_of_columns(columns.keys.array(), columns.values.array(), columns.headers, self._times_ms)


class DecodedBatch:
    """The records of a produced batch, checked and decompressed."""

    __slots__ = (
        "_records",
        "_rows",
        "base_sequence",
        "count",
        "max_timestamp_ms",
        "producer_epoch",
        "producer_id",
        "transactional",
    )

    def __init__(self, view: BatchView, max_timestamp_ms: int, records: _SmallBatch | _LargeBatch) -> None:
        self.count = view.record_count
        self.producer_id = view.producer_id  #: -1: not idempotent
        self.producer_epoch = view.producer_epoch
        self.base_sequence = view.base_sequence
        self.transactional = view.transactional
        self.max_timestamp_ms = max_timestamp_ms  #: the greatest timestamp of the records; -1: they have none
        self._records = records
        self._rows: pa.RecordBatch | None = None

    @property
    def rows(self) -> pa.RecordBatch:
        """Return the records as a batch of ``DEFAULT_SCHEMA``. A record with timestamp -1 has a null timestamp."""
        if self._rows is None:
            self._rows = self._records.rows()
        return self._rows

    def stored(self, *, schema_id: int, timed: bool, compression: str | None = None) -> EncodedBatch:
        """Return the records as a batch of the log, with the producer's id, epoch, sequence and transactional flag.

        The topic has the default schema, with the number ``schema_id``. ``timed`` means that the timestamp column is
        the topic's event-time column. The batch needs no further validation: ``validate_batch`` accepts it, unless it
        is larger than the topic allows.
        """
        body = None if compression not in {None, "none"} else self._records.body()
        if body is None:
            event_time = DEFAULT_EVENT_TIME if timed else None
            return self.stored_rows(self.rows, schema_id=schema_id, event_time=event_time, compression=compression)
        earliest = latest = NO_TIMESTAMP
        if timed:
            earliest, latest = header_times(*self._records.time_range_us())
        header = BatchHeader(
            base_offset=0,
            position=0,
            max_timestamp=latest,
            running_max=0,
            append_time=0,
            producer_id=self.producer_id,
            min_timestamp=earliest,
            offset_span=self.count,
            record_count=self.count,
            length=len(body),
            body_crc=crc32c(body),
            leader_epoch=-1,
            schema_id=schema_id,
            first_sequence=self.base_sequence,
            offset_array_length=0,
            producer_epoch=self.producer_epoch,
            flags=int(Flag.TRANSACTIONAL) if self.transactional else 0,
        )
        return EncodedBatch(header, pa.py_buffer(body))

    def stored_rows(
        self, rows: pa.RecordBatch, *, schema_id: int, event_time: str | None, compression: str | None = None
    ) -> EncodedBatch:
        """Return ``rows`` as a batch of the log, with the producer's id, epoch, sequence and transactional flag.

        ``rows`` are the records as rows of a typed topic, as ``JsonTopic.rows`` returns them.
        """
        return encode_batch(
            rows,
            schema_id=schema_id,
            compression=compression,
            event_time=event_time,
            producer_id=self.producer_id,
            producer_epoch=self.producer_epoch,
            first_sequence=self.base_sequence,
            transactional=self.transactional,
        )


def decode_batch(view: BatchView, *, max_bytes: int, keyed: bool = False) -> DecodedBatch:
    """Check, decompress and decode a batch that a client has produced.

    ``max_bytes`` is the maximum size of the records after decompression. The function allocates at most a small
    multiple of it. ``keyed`` means that every record needs a key, as in a compacted topic.

    Raises:
        InvalidRecords: CORRUPT_MESSAGE for a wrong CRC; UNSUPPORTED_COMPRESSION_TYPE for an unknown codec;
            MESSAGE_TOO_LARGE for more than ``max_bytes``; INVALID_TIMESTAMP for a time that does not fit into
            microseconds, and for a batch that claims log append time; INVALID_RECORD for other faults, such as
            too many headers.
    """
    _check_header(view)
    refuse_large(view.records, view.codec, max_bytes=max_bytes)
    verify_crc(view)
    data = decompressed(view.records, view.codec, max_bytes=max_bytes)
    count = view.record_count
    if count * _LEAST_RECORD_BYTES > len(data):
        raise InvalidRecords(ErrorCode.INVALID_RECORD, f"{count} records declared in {len(data)} bytes of records")
    if count <= FEW_RECORDS and len(data) <= _FEW_BYTES:
        try:
            return _decoded_small(view, bytes(data), keyed)
        except ManyHeaders:
            pass
    return _decoded_many(view, memoryview(data), keyed)


def _check_header(view: BatchView) -> None:
    if view.log_append_time:
        raise InvalidRecords(ErrorCode.INVALID_TIMESTAMP, "a producer's batch cannot have log append time")
    if view.control:
        raise InvalidRecords(ErrorCode.INVALID_RECORD, "a producer's batch cannot be a control batch")
    count = view.record_count
    if count <= 0 or view.last_offset_delta != count - 1:
        raise InvalidRecords(
            ErrorCode.INVALID_RECORD,
            f"{count} records over {view.last_offset_delta + 1} offsets, expected one offset for each record and at "
            "least one record",
        )
    if view.producer_id >= 0:
        if view.producer_epoch < 0 or view.base_sequence < 0:
            raise InvalidRecords(
                ErrorCode.INVALID_RECORD,
                f"producer {view.producer_id} with epoch {view.producer_epoch} and sequence {view.base_sequence}",
            )
    elif view.transactional:
        raise InvalidRecords(ErrorCode.INVALID_RECORD, "a transactional batch has no producer id")


def _decoded_small(view: BatchView, data: bytes, keyed: bool) -> DecodedBatch:
    small = _SmallBatch(*decode_few(data, view.record_count, view.base_timestamp_ms))
    times = small.times_ms
    latest = max(times)
    if latest > GREATEST_MS or min(times) < LEAST_MS:
        raise _bad_times([index for index, time in enumerate(times) if not LEAST_MS <= time <= GREATEST_MS])
    if keyed and None in small.keys:
        raise _no_keys([index for index, key in enumerate(small.keys) if key is None])
    return DecodedBatch(view, latest, small)


def _decoded_many(view: BatchView, data: memoryview, keyed: bool) -> DecodedBatch:
    columns = decode_many(data, view.record_count, _HEADERS_TYPE)
    deltas, base = columns.deltas_ms, view.base_timestamp_ms
    # The bounds are compared with the deltas, because a sum may have more than 64 bits.
    least, greatest = max(LEAST_MS - base, -(2**63)), min(GREATEST_MS - base, 2**63 - 1)
    if int(deltas.min()) < least or int(deltas.max()) > greatest:
        raise _bad_times(np.flatnonzero((deltas < least) | (deltas > greatest)).tolist())
    times = deltas + base
    if keyed and columns.keys.null_count:
        raise _no_keys(np.flatnonzero(columns.keys.lengths < 0).tolist())
    return DecodedBatch(view, int(times.max()), _LargeBatch(columns, times))


def _bad_times(numbers: Sequence[int]) -> InvalidRecords:
    detail = "its timestamp does not fit into 64 bits of microseconds"
    return _of_records(ErrorCode.INVALID_TIMESTAMP, numbers, detail)


def _no_keys(numbers: Sequence[int]) -> InvalidRecords:
    return _of_records(ErrorCode.INVALID_RECORD, numbers, "it has no key, and the topic is compacted")


def _of_records(code: ErrorCode, numbers: Sequence[int], detail: str) -> InvalidRecords:
    errors = [RecordError(number, detail) for number in numbers[:MOST_RECORD_ERRORS]]
    return InvalidRecords(code, f"{len(numbers)} records: record {numbers[0]}: {detail}", errors)


# --- rows ---


def _rows_of_columns(
    keys: pa.Array, values: pa.Array, headers: pa.Array | None, times_ms: npt.NDArray[np.int64]
) -> pa.RecordBatch:
    count = len(times_ms)
    given = times_ms != NO_TIME_MS
    validity = None if given.all() else pa.py_buffer(np.packbits(given, bitorder="little"))
    times_us = pa.Array.from_buffers(_TIME_TYPE, count, [validity, pa.py_buffer(times_ms * 1000)])
    if headers is None:
        headers = _no_headers(count)
    return pa.RecordBatch.from_arrays([keys, values, headers, times_us], schema=DEFAULT_SCHEMA)


def _no_headers(count: int) -> pa.Array:
    pairs = _header_pairs([])
    buffers = [pa.py_buffer(bytes(-(-count // 8))), pa.py_buffer(bytes(4 * (count + 1)))]
    return pa.Array.from_buffers(_HEADERS_TYPE, count, buffers, children=[pairs])


def _header_array(headers: Sequence[Headers | None]) -> pa.Array:
    borders = np.zeros(len(headers) + 1, np.int32)
    np.cumsum([len(found or ()) for found in headers], out=borders[1:])
    validity = np.packbits([found is not None for found in headers], bitorder="little")
    pairs = _header_pairs([pair for found in headers if found for pair in found])
    buffers = [pa.py_buffer(validity), pa.py_buffer(borders)]
    return pa.Array.from_buffers(_HEADERS_TYPE, len(headers), buffers, children=[pairs])


def _header_pairs(pairs: Headers) -> pa.Array:
    keys = binary_of([key.encode() for key, _ in pairs], pa.string())
    values = binary_of([value for _, value in pairs])
    return pa.Array.from_buffers(_HEADERS_TYPE.value_type, len(pairs), [None], children=[keys, values])
