"""From a stored batch to the batch Spark expects: columns chosen, cast and completed, all as whole columns.

Spark compares the first batch's schema with its own, names, types and nullability, and hands batches to the JVM
unchecked after that, so every batch leaves here with exactly that schema. The driver plans, tasks assemble: what only
they need of Arrow, which takes long to load, is loaded by them.
Pure: takes Arrow in and gives Arrow out.
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

#: Values of timestampType. Source: Kafka, org.apache.kafka.common.record.TimestampType.
CREATE_TIME = 0
LOG_APPEND_TIME = 1

_UTC_US = pa.timestamp("us", tz="UTC")
#: Of one array of strings, whose places have 32 bits.
_MOST_TEXT_BYTES = 2**31 - 1
#: What made columns say that is the same in all records of a topic, and so not kept with them.
_TOLD_BY_TOPIC = ("_topic", "timestampType")
_MADE = {*LOG_COLUMNS.fieldNames(), CAST_ERROR_COLUMN.name}
_DEFAULT_NAMES = {"topic": "_topic", "partition": "_partition", "offset": "_offset", "timestamp": "_timestamp"}


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """Which output column comes from where. Made on the driver, crosses to tasks by pickle.

    ``sources`` and ``made`` run parallel to ``target``. Where ``made`` is true the source is one of ``_topic``,
    ``_partition``, ``_offset``, ``_timestamp``, ``timestampType`` and ``_cast_error``, else it is the name of a stored
    column.
    """

    shape: TopicShape
    target: pa.Schema
    sources: tuple[str, ...]
    made: tuple[bool, ...]

    @property
    def stored_columns(self) -> tuple[str, ...]:
        """The columns that have to be read from the log, each once. None at all: batch headers tell everything."""
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
        """The output batch for rows of ``batch``, whose offsets are ``offsets`` (int64, without nulls).

        Raises:
            BrokerError: SCHEMA_MISMATCH when a value does not fit the declared column, unless ``_cast_error`` is among
                the columns; then SCHEMA_OUTDATED when the batch may have columns that this plan does not know.
        """
        arrays: list[pa.Array | None] = []
        errors = self._cast_errors(header, rows=len(offsets), partition=partition)
        for field, name, made in zip(self.target, self.sources, self.made, strict=True):
            if made and name == CAST_ERROR_COLUMN.name:
                arrays.append(None)  # told by all the others, wherever it stands
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
        """The columns of the topic's Delta table that the output is made of, each once."""
        return tuple(dict.fromkeys(name for name in self.sources if name not in _TOLD_BY_TOPIC))

    def assemble_archived(self, batch: pa.RecordBatch, *, topic: str) -> pa.RecordBatch:
        """The output batch for rows of the topic's Delta table, which has the source's names for what it keeps; nulls
        for a column that the topic got later.

        Raises:
            BrokerError: SCHEMA_MISMATCH when a value does not fit the declared column.
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
        """What the column timestampType says of every record."""
        return LOG_APPEND_TIME if self.shape.stamped_by_log else CREATE_TIME

    def _cast_errors(self, header: BatchHeader, *, rows: int, partition: TopicPartition) -> _CastErrors | None:
        """None where they are to fail the read: nobody reads them, or what is read is the topic's own of that name."""
        if not any(made and name == CAST_ERROR_COLUMN.name for name, made in zip(self.sources, self.made, strict=True)):
            return None
        if header.schema_id > self.shape.schema_id >= 0:
            detail = f"{partition}: a batch has schema {header.schema_id}, known is {self.shape.schema_id}"
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
        """The event time; for a record without one the greatest of its batch, which is the time the leader appended
        it where no record has one. So every time shown is one by which the batch is found."""
        index = batch.schema.get_field_index(self.shape.event_time) if self._needs_event_time else -1
        if index < 0:
            return _repeated(header.max_timestamp, _UTC_US, rows)
        times = _to_utc(batch.column(index))
        return times.fill_null(scalar_of(header.max_timestamp, _UTC_US)) if times.null_count else times


def plan_timestamps(shape: TopicShape) -> ColumnPlan:
    """The timestamp alone, whatever the topic's columns are called."""
    return ColumnPlan(shape, pa.schema([pa.field("timestamp", _UTC_US)]), ("_timestamp",), made=(True,))


def plan_columns(declared: StructType, shape: TopicShape) -> ColumnPlan:
    """Where the columns of ``declared``, already checked against the topic's, come from."""
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
    """A stored column; nulls for one that the topic got after this batch was written."""
    index = batch.schema.get_field_index(name)
    return batch.column(index) if index >= 0 else pa.nulls(rows, field.type)


def _null_if_empty(headers: pa.Array) -> pa.Array:
    """A record without headers shows null, as in Spark's Kafka source; a writer may have stored an empty list."""
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
            ErrorCode.SCHEMA_MISMATCH, f"{partition}: column {field.name} is NOT NULL, {array.null_count} nulls found"
        )
    return array


class _CastErrors:
    """Of one batch: values that cannot be cast become null, and are told by row."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        #: By row: there are none of most batches, and no time is spent on records then.
        self._told: dict[int, list[str]] = {}

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
            self._told.setdefault(row, []).append(f"{field.name}: {str(error).splitlines()[0]}")
            return pa.nulls(1, field.type)

    def column(self) -> pa.Array:
        if not self._told:
            return pa.nulls(self._rows, pa.string())
        texts = {row: "; ".join(told) for row, told in self._told.items()}
        return pa.array([texts.get(row) for row in range(self._rows)], pa.string())


def _to_utc(times: pa.Array) -> pa.Array:
    """Timestamps and dates as us in UTC; those without a zone count as UTC, as in batch headers."""
    return times if times.type == _UTC_US else _truncated(times, _UTC_US)


def _truncated(array: pa.Array, target: pa.DataType) -> pa.Array:
    """A cast that may only cut times to a coarser unit. Raises pyarrow.ArrowException."""
    import pyarrow.compute as pc

    return pc.cast(array, options=pc.CastOptions(target, allow_time_truncate=True))


def offset_run(first: int, rows: int) -> pa.Array:
    """Offsets ``first, first + 1, ...`` of ``rows`` rows."""
    return array_of(np.arange(first, first + rows, dtype=np.int64), pa.int64())


def _repeated(value: int, kind: pa.DataType, rows: int) -> pa.Array:
    return array_of(np.full(rows, value, dtype=f"i{kind.byte_width}"), kind)


def _repeated_text(text: str, rows: int) -> pa.Array:
    encoded = text.encode()
    if rows * len(encoded) > _MOST_TEXT_BYTES:
        return pa.repeat(pa.scalar(text, pa.string()), rows)  # which knows what to say
    ends = np.arange(rows + 1, dtype=np.int32) * len(encoded)
    return pa.Array.from_buffers(pa.string(), rows, [None, pa.py_buffer(ends), pa.py_buffer(encoded * rows)])
