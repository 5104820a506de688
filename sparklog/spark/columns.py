"""The conversion of stored batches to the batches that Spark expects: whole columns are selected, cast and added.

Spark compares the schema of the first batch (names, types, nullability) with its own, and passes all later batches to
the JVM unchecked, so every batch must have exactly that schema. The driver plans the columns, and tasks convert
batches. The parts of Arrow that only tasks need take long to load, so only tasks load them. The module does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.record.arrays import array_of, null_of, scalar_of
from sparklog.record.header import BatchHeader
from sparklog.spark.schema import CAST_ERROR_COLUMN, DEFAULT_COLUMNS, LOG_COLUMNS, TopicShape

#: The values of timestampType. Source: Kafka, org.apache.kafka.common.record.TimestampType.
CREATE_TIME = 0
LOG_APPEND_TIME = 1

_UTC_US = pa.timestamp("us", tz="UTC")
#: The maximum bytes of one array of strings, because its offsets have 32 bits.
_MOST_TEXT_BYTES = 2**31 - 1
#: Columns that have the same value in all records of a topic, so that an archive does not store them.
_TOLD_BY_TOPIC = ("_topic", "timestampType")
_MADE = {*LOG_COLUMNS.fieldNames(), CAST_ERROR_COLUMN.name}
_DEFAULT_NAMES = {"topic": "_topic", "partition": "_partition", "offset": "_offset", "timestamp": "_timestamp"}


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """A plan that says where the values of each output column come from. The driver pickles it to tasks.

    ``target`` is the schema of the output. ``sources`` and ``made`` have one item for each column of ``target``. If the
    item in ``made`` is true, the task computes the column, and its source is one of ``_topic``, ``_partition``,
    ``_offset``, ``_timestamp``, ``timestampType`` and ``_cast_error``. Otherwise its source is the name of a stored
    column.
    """

    shape: TopicShape
    target: pa.Schema
    sources: tuple[str, ...]
    made: tuple[bool, ...]

    @property
    def stored_columns(self) -> tuple[str, ...]:
        """Return the columns to read from the log, each once. The result is empty if batch headers are enough."""
        wanted = {name for name, made in zip(self.sources, self.made, strict=True) if not made}
        if self._needs_event_time:
            wanted.add(str(self.shape.event_time))
        return tuple(name for name in self.shape.schema.names if name in wanted)

    @property
    def _needs_event_time(self) -> bool:
        is_asked = any(made and name == "_timestamp" for name, made in zip(self.sources, self.made, strict=True))
        return is_asked and self.shape.event_time is not None and not self.shape.stamped_by_log

    def assemble(
        self, header: BatchHeader, batch: pa.RecordBatch, *, partition: TopicPartition, offsets: pa.Array
    ) -> pa.RecordBatch:
        """Return the output batch for the rows of ``batch``, a batch of the log.

        ``offsets`` are the offsets of the rows, as int64 without nulls.

        Raises:
            BrokerError: SCHEMA_MISMATCH if a value does not fit the declared column and ``_cast_error`` is not read.
                SCHEMA_OUTDATED if ``_cast_error`` is read and the batch has a newer schema than the plan.
        """
        arrays: list[pa.Array | None] = []
        errors = self._cast_errors(header, rows=len(offsets), partition=partition)
        for field, name, made in zip(self.target, self.sources, self.made, strict=True):
            if made and name == CAST_ERROR_COLUMN.name:
                arrays.append(None)  # Filled in below, from the errors of all other columns.
                continue
            if made:
                array = self._make(name, header, batch, partition=partition, offsets=offsets)
            else:
                array = _stored(batch, name, len(offsets), field=field)
                if name == "headers" and self.shape.is_default:
                    array = _null_if_empty(array)
            arrays.append(_cast(array, field, partition) if errors is None else errors.cast(array, field))
        if errors is not None:
            arrays = [errors.column() if array is None else array for array in arrays]
        return pa.RecordBatch.from_arrays(arrays, schema=self.target)

    @property
    def archived_columns(self) -> tuple[str, ...]:
        """Return the columns to read from the topic's Delta table, each once."""
        return tuple(dict.fromkeys(name for name in self.sources if name not in _TOLD_BY_TOPIC))

    def assemble_archived(self, batch: pa.RecordBatch, *, topic: str) -> pa.RecordBatch:
        """Return the output batch for ``batch``, which has rows and column names of the topic's Delta table.

        A column that was added to the topic after the rows were archived is null.

        Raises:
            BrokerError: SCHEMA_MISMATCH if a value does not fit the declared column.
        """
        arrays = []
        for field, name, made in zip(self.target, self.sources, self.made, strict=True):
            if made and name in _TOLD_BY_TOPIC:
                value = topic if name == "_topic" else self.timestamp_type
                array = pa.repeat(pa.scalar(value, field.type), batch.num_rows)
            else:
                array = _stored(batch, name, batch.num_rows, field=field)
            arrays.append(_cast(array, field, topic))
        return pa.RecordBatch.from_arrays(arrays, schema=self.target)

    @property
    def timestamp_type(self) -> int:
        """Return the value that the column timestampType has in every record."""
        return LOG_APPEND_TIME if self.shape.stamped_by_log else CREATE_TIME

    def _cast_errors(self, header: BatchHeader, *, rows: int, partition: TopicPartition) -> _CastErrors | None:
        """Return a collector of cast errors, or None if a cast error must fail the read.

        It must if ``_cast_error`` is not read, or is a column of the topic itself.
        """
        if not any(made and name == CAST_ERROR_COLUMN.name for name, made in zip(self.sources, self.made, strict=True)):
            return None
        if header.schema_id > self.shape.schema_id >= 0:
            detail = f"{partition}: a batch has schema {header.schema_id}, newer than the read's {self.shape.schema_id}"
            raise BrokerError(ErrorCode.SCHEMA_OUTDATED, detail)
        return _CastErrors(rows)

    def _make(
        self, name: str, header: BatchHeader, batch: pa.RecordBatch, *, partition: TopicPartition, offsets: pa.Array
    ) -> pa.Array:
        match name:
            case "_topic":
                return _repeated_text(partition.topic, len(offsets))
            case "_partition":
                return _repeated(partition.partition, pa.int32(), len(offsets))
            case "_offset":
                return offsets
            case "timestampType":
                return _repeated(self.timestamp_type, pa.int32(), len(offsets))
            case _:
                return self._timestamps(header, batch, rows=len(offsets))

    def _timestamps(self, header: BatchHeader, batch: pa.RecordBatch, *, rows: int) -> pa.Array:
        """Return the timestamps of the records.

        A record without an event time gets the maximum of its batch. If no record has an event time, this is the
        leader's append time. So a lookup by any returned time finds the batch.
        """
        index = batch.schema.get_field_index(self.shape.event_time) if self._needs_event_time else -1
        if index < 0:
            return _repeated(header.max_timestamp, _UTC_US, rows)
        times = _to_utc(batch.column(index))
        return times.fill_null(scalar_of(header.max_timestamp, _UTC_US)) if times.null_count else times


def plan_timestamps(shape: TopicShape) -> ColumnPlan:
    """Return a plan whose only output column is the timestamp. No other column of the topic affects it."""
    return ColumnPlan(shape, pa.schema([pa.field("timestamp", _UTC_US)]), ("_timestamp",), made=(True,))


def plan_columns(declared: StructType, shape: TopicShape) -> ColumnPlan:
    """Return the plan for the output columns ``declared``. The caller has checked them against the topic's columns."""
    own = set(shape.schema.names)
    sources, made = [], []
    for name in declared.fieldNames():
        if shape.is_default and name in DEFAULT_COLUMNS.fieldNames():
            sources.append(_DEFAULT_NAMES.get(name, name))
            made.append(name not in {"key", "value"})
        else:
            sources.append(name)
            made.append(name not in own and name in _MADE)
    target = to_arrow_schema(declared, timezone="UTC")
    return ColumnPlan(shape, target, tuple(sources), tuple(made))


def _stored(batch: pa.RecordBatch, name: str, rows: int, *, field: pa.Field) -> pa.Array:
    """Return a stored column, or nulls if the column was added after this batch was written."""
    index = batch.schema.get_field_index(name)
    return batch.column(index) if index >= 0 else pa.nulls(rows, field.type)


def _null_if_empty(headers: pa.Array) -> pa.Array:
    """Return ``headers`` with null instead of empty lists, as Spark's Kafka source does."""
    import pyarrow.compute as pc

    is_empty = pc.equal(pc.list_value_length(headers), 0)
    return pc.if_else(is_empty, null_of(headers.type), headers) if pc.any(is_empty).as_py() else headers


def _cast(array: pa.Array, field: pa.Field, partition: TopicPartition | str) -> pa.Array:
    if array.type != field.type:
        try:
            array = _truncated(array, field.type)
        except pa.ArrowException as error:
            raise BrokerError(ErrorCode.SCHEMA_MISMATCH, f"{partition}: column {field.name}: {error}") from None
    if not field.nullable and array.null_count:
        raise BrokerError(
            ErrorCode.SCHEMA_MISMATCH, f"{partition}: column {field.name} is NOT NULL, but has {array.null_count} nulls"
        )
    return array


class _CastErrors:
    """A collector of the cast errors of one batch, by row. Values that cannot be cast become null."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        #: The error messages by row. Most batches have no errors, and need no work per record.
        self._errors: dict[int, list[str]] = {}

    def cast(self, array: pa.Array, field: pa.Field) -> pa.Array:
        if array.type == field.type:
            return array
        try:
            return _truncated(array, field.type)
        except pa.ArrowException:
            return pa.concat_arrays([self._one(array.slice(row, 1), field, row) for row in range(len(array))])

    def _one(self, value: pa.Array, field: pa.Field, row: int) -> pa.Array:
        try:
            return _truncated(value, field.type)
        except pa.ArrowException as error:
            self._errors.setdefault(row, []).append(f"{field.name}: {str(error).splitlines()[0]}")
            return pa.nulls(1, field.type)

    def column(self) -> pa.Array:
        if not self._errors:
            return pa.nulls(self._rows, pa.string())
        texts = {row: "; ".join(messages) for row, messages in self._errors.items()}
        return pa.array([texts.get(row) for row in range(self._rows)], pa.string())


def _to_utc(times: pa.Array) -> pa.Array:
    """Return timestamps and dates as microseconds in UTC; values without a time zone are UTC, as in batch headers."""
    return times if times.type == _UTC_US else _truncated(times, _UTC_US)


def _truncated(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Return ``array`` cast to ``target``. Only times may lose precision. Raises pyarrow.ArrowException."""
    import pyarrow.compute as pc

    return pc.cast(array, options=pc.CastOptions(target, allow_time_truncate=True))


def offset_run(first: int, rows: int) -> pa.Array:
    """Return an array of ``rows`` consecutive offsets that begin with ``first``."""
    return array_of(np.arange(first, first + rows, dtype=np.int64), pa.int64())


def _repeated(value: int, kind: pa.DataType, rows: int) -> pa.Array:
    return array_of(np.full(rows, value, dtype=f"i{kind.byte_width}"), kind)


def _repeated_text(text: str, rows: int) -> pa.Array:
    encoded = text.encode()
    if rows * len(encoded) > _MOST_TEXT_BYTES:
        return pa.repeat(pa.scalar(text, pa.string()), rows)  # Raises an error with a clear message.
    ends = np.arange(rows + 1, dtype=np.int32) * len(encoded)
    return pa.Array.from_buffers(pa.string(), rows, [None, pa.py_buffer(ends), pa.py_buffer(encoded * rows)])
