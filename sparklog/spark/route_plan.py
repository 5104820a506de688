"""The planning of a write: which columns of a DataFrame are data, and which ones choose the topic and partition.

Columns are checked by name before any task starts. A column that the topic has is data. Among the other columns,
``topic`` (``_topic``) and ``partition`` (``_partition``) choose the destination of a row. The remaining columns of a
read (``offset``, ``timestampType``, ``_offset``, ``_timestamp``) are dropped, so that the rows of a read can be written
to another topic. Any other column is an error, because its values would silently be lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql.types import (
    IntegralType,
    NullType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.arrays import empty_batch
from sparklog.record.schema import fit_table
from sparklog.spark.route import TOPIC_COLUMNS, TopicRoute
from sparklog.spark.schema import TopicShape, arrow_columns, spark_type

_TIMESTAMPS = (TimestampType, TimestampNTZType)
_PARTITION_COLUMNS = ("partition", "_partition")
_LEFT_BEHIND = frozenset({"offset", "timestampType", "_offset", "_timestamp", *TOPIC_COLUMNS, *_PARTITION_COLUMNS})


def plan_route(topic: str, shape: TopicShape, columns: StructType) -> TopicRoute:
    """Return the route of a DataFrame with ``columns`` into ``topic``.

    Raises:
        BrokerError: SCHEMA_MISMATCH. The message names each column that the topic does not have, that is required but
            missing, or whose type does not match, and it shows the difference between the two schemas.
    """
    own = set(shape.schema.names)
    names = columns.fieldNames()
    partition_column = next((name for name in _PARTITION_COLUMNS if name in names and name not in own), None)
    if partition_column is not None and not isinstance(columns[partition_column].dataType, IntegralType | NullType):
        raise _mismatch(
            topic,
            [f"column {partition_column!r} has type {columns[partition_column].dataType.simpleString()}, expected int"],
        )
    sent = data_columns(shape, columns)
    payload = tuple(sent.fieldNames())
    complaints = []
    if not payload:
        complaints.append(f"none of the topic's columns {shape.schema.names} is among {names}")
    elif shape.is_default and "value" not in names:
        complaints.append("column 'value' is missing")
    complaints += _zone_complaints(shape, columns, payload)
    arriving = arrow_columns(sent)
    try:
        fit_table(empty_batch(arriving), shape.schema)
    except BrokerError as error:
        complaints.append(error.detail)
    if complaints:
        if not shape.is_default and set(payload) - own:
            complaints.append("mergeSchema=true adds columns that the topic does not have")
        raise _mismatch(topic, [*complaints, schema_diff(shape.schema, arriving)])
    return TopicRoute(topic, payload, partition_column)


def with_topic_names(own: Sequence[str], columns: StructType) -> StructType:
    """Return ``columns`` with the topic's spelling of each name that differs from one in ``own`` only in case.

    Spark resolves names like this unless ``spark.sql.caseSensitive`` is set. Exact matches take precedence. A name that
    matches several columns is not changed.
    """
    exact = set(own) & set(columns.fieldNames())
    free = Counter(name.lower() for name in own if name not in exact)
    by_lower = {name.lower(): name for name in own if name not in exact}
    given = Counter(name.lower() for name in columns.fieldNames() if name not in exact)

    def renamed(column: StructField) -> StructField:
        lower = column.name.lower()
        if column.name in exact or column.name in _LEFT_BEHIND or free[lower] != 1 or given[lower] != 1:
            return column
        return StructField(by_lower[lower], column.dataType, column.nullable)

    return StructType([renamed(column) for column in columns.fields])


def data_columns(shape: TopicShape, columns: StructType) -> StructType:
    """Return those columns of a DataFrame that are data for a topic with this shape."""
    own = set(shape.schema.names)
    return StructType([column for column in columns.fields if column.name in own or column.name not in _LEFT_BEHIND])


def schema_diff(topic: pa.Schema, written: pa.Schema) -> str:
    """Return the differences between a topic's schema and the written columns, one column per line.

    ``-`` marks the topic's column and ``+`` the written one. The following do not count as differences: a nullable
    column of the topic that is not written, and a written column that only has a narrower type or is not nullable.
    """
    lines = []
    for field in topic:
        index = written.get_field_index(field.name)
        if index < 0 and not field.nullable:
            lines.append(f"- {_line(field)}")
        elif index >= 0 and not _fits(written.field(index), field):
            lines += [f"- {_line(field)}", f"+ {_line(written.field(index))}"]
    lines += [f"+ {_line(field)}" for field in written if topic.get_field_index(field.name) < 0]
    return "\n".join(["- columns of the topic, + written columns:", *lines])


def _fits(written: pa.Field, field: pa.Field) -> bool:
    try:
        fit_table(empty_batch(pa.schema([written])), pa.schema([field]))
    except BrokerError:
        return False
    return True


def _line(field: pa.Field) -> str:
    return f"{field.name} {field.type}{'' if field.nullable else ' not null'}"


def _zone_complaints(shape: TopicShape, columns: StructType, payload: Sequence[str]) -> list[str]:
    """Return error messages for timestamps with a time zone in place of ones without, and the reverse.

    Spark converts one to the other by the session's time zone, but the log would use UTC.
    """
    complaints = []
    for name in payload:
        index = shape.schema.get_field_index(name)
        if index < 0:
            continue
        found, expected = columns[name].dataType, spark_type(shape.schema.field(index).type)
        if isinstance(found, _TIMESTAMPS) and isinstance(expected, _TIMESTAMPS) and found != expected:
            complaints.append(
                f"column {name!r} has type {found.simpleString()}, expected {expected.simpleString()}: add a cast"
            )
    return complaints


def _mismatch(topic: str, complaints: Sequence[str]) -> BrokerError:
    return BrokerError(ErrorCode.SCHEMA_MISMATCH, f"topic {topic}: {'; '.join(complaints)}")
