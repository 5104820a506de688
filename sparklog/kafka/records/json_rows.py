"""The conversion of records of Kafka's clients to rows of a typed topic, and back. A record's value is a JSON document.

The fields of the document are the row's columns. If the document has none of the key columns, they come from the
record's key, in the form that ``record/keys`` writes: text and bytes unchanged, numbers big-endian. So a record without
a value, Kafka's tombstone, becomes the tombstone of a typed topic, which has only key columns.

When a row becomes a record, the key has the key columns, and the value has all columns. The value of a tombstone is
null. The timestamp is the event time.

A typed topic has no column for headers, so a record with headers is refused.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparklog.errors import ErrorCode
from sparklog.kafka.records.column_memory import valid_of
from sparklog.kafka.records.invalid import MOST_RECORD_ERRORS, InvalidRecords, RecordError
from sparklog.kafka.records.json_columns import columns_from_json, documents_of
from sparklog.kafka.records.key_columns import UndecodableKey, columns_from_keys
from sparklog.record.arrays import array_of, binary_of
from sparklog.record.keys import encode_keys, tombstones
from sparklog.record.schema import DEFAULT_SCHEMA

_NO_FIELDS = binary_of([b"{}"])[0]
_TIME = DEFAULT_SCHEMA.field("timestamp").type


class JsonTopic(NamedTuple):
    """The columns of a typed topic whose values Kafka's clients see as JSON."""

    schema: pa.Schema
    key_columns: tuple[str, ...]
    event_time: str | None

    def rows(self, records: pa.RecordBatch, *, keyed: bool = False) -> pa.RecordBatch:
        """Return ``records``, a batch of ``DEFAULT_SCHEMA``, as rows of the topic.

        ``keyed`` means that every row needs a key, as in a compacted topic.

        Raises:
            InvalidRecords: INVALID_RECORD. It names the records that do not fit, and their fields.
        """
        keys, values, headers, _ = records.columns
        _refuse(_lengths_above_zero(headers), "it has headers, and a typed topic has no column for them")
        _refuse(~valid_of(values) & ~valid_of(keys), "it has neither a key nor a value")
        if values.null_count and not self.key_columns:
            _refuse(~valid_of(values), "it has no value, and the topic has no key columns")
        rows = columns_from_json(pc.fill_null(values, _NO_FIELDS), self._nullable_keys())
        rows = self._with_keys(rows, keys)
        if keyed:
            _refuse(self._without_key(rows), "it has no key, and the topic is compacted")
        for name in self.key_columns:
            if not self.schema.field(name).nullable:
                _refuse(~valid_of(rows.column(name)), f"field {name} cannot be null")
        return pa.RecordBatch.from_arrays(rows.columns, schema=self.schema)

    def records(self, rows: pa.RecordBatch, *, append_time_us: int | None = None) -> pa.RecordBatch:
        """Return ``rows`` as records, a batch of ``DEFAULT_SCHEMA``.

        A record of a row without an event time has the time ``append_time_us``, or no time if that is None.
        """
        count = rows.num_rows
        keys = (
            encode_keys(rows, self.key_columns).cast(pa.binary()) if self.key_columns else pa.nulls(count, pa.binary())
        )
        values = documents_of(rows)
        if self.key_columns and (gone := tombstones(rows, self.key_columns)) is not None:
            validity = pa.py_buffer(np.packbits(~(gone & valid_of(keys)), bitorder="little"))
            values = pa.Array.from_buffers(pa.binary(), count, [validity, *values.buffers()[1:]])
        headers = pa.nulls(count, DEFAULT_SCHEMA.field("headers").type)
        return pa.RecordBatch.from_arrays(
            [keys, values, headers, self.times(rows, append_time_us=append_time_us)], schema=DEFAULT_SCHEMA
        )

    def _nullable_keys(self) -> pa.Schema:
        """Return the schema with nullable key columns. A document may omit them if the record's key has them."""
        return pa.schema(
            [field.with_nullable(True) if field.name in self.key_columns else field for field in self.schema]
        )

    def _without_key(self, rows: pa.RecordBatch) -> np.ndarray:
        found = np.ones(rows.num_rows, np.bool_)
        for name in self.key_columns:
            found &= ~valid_of(rows.column(name))
        return found

    def _with_keys(self, rows: pa.RecordBatch, keys: pa.Array) -> pa.RecordBatch:
        """Return ``rows``, and decode the key columns from ``keys`` in rows that have none of them."""
        wanted = self._without_key(rows) & valid_of(keys)
        if not self.key_columns or not wanted.any():
            return rows
        places = np.flatnonzero(wanted)
        taken = keys.take(array_of(places, pa.int64()))
        try:
            found = columns_from_keys(taken, [self.schema.field(name) for name in self.key_columns])
        except UndecodableKey as error:
            _refuse_one(int(places[error.row]), str(error))
        # Row i is element i of the column, or one of the elements from the keys, which follow the column.
        order = np.arange(rows.num_rows)
        order[places] = rows.num_rows + np.arange(len(places))
        indices = array_of(order, pa.int64())
        columns = list(rows.columns)
        for name, column in zip(self.key_columns, found, strict=True):
            index = rows.schema.get_field_index(name)
            columns[index] = pa.concat_arrays([columns[index], column]).take(indices)
        return pa.RecordBatch.from_arrays(columns, schema=rows.schema)

    def times(self, rows: pa.RecordBatch, *, append_time_us: int | None) -> pa.Array:
        """Return the event times of rows. A row without one has ``append_time_us``, or null if that is None."""
        if self.event_time is None:
            times = pa.nulls(rows.num_rows, _TIME)
        else:
            column = rows.column(self.event_time)
            times = column.cast(pa.timestamp("us"), safe=False).cast(_TIME)
        if append_time_us is None or not times.null_count:
            return times
        return pc.fill_null(times, array_of(np.array([append_time_us], np.int64), _TIME)[0])


def _lengths_above_zero(headers: pa.Array) -> np.ndarray:
    borders = np.frombuffer(headers.buffers()[1], np.int32)[headers.offset : headers.offset + len(headers) + 1]
    return (np.diff(borders) > 0) & valid_of(headers)


def _refuse(records: np.ndarray, message: str) -> None:
    """Raise InvalidRecords with ``message`` for the records that are marked, if there are any."""
    places = np.flatnonzero(records).tolist()
    if places:
        errors = [RecordError(place, message) for place in places[:MOST_RECORD_ERRORS]]
        raise InvalidRecords(ErrorCode.INVALID_RECORD, f"record {places[0]}: {message}", errors)


def _refuse_one(place: int, message: str) -> None:
    raise InvalidRecords(ErrorCode.INVALID_RECORD, f"record {place}: {message}", (RecordError(place, message),))
