"""The conversion of schemas between a topic's Arrow types and Spark's types.

A topic without a schema has the columns of Spark's Kafka source. A typed topic has its own columns, then ``_topic,
_partition, _offset, _timestamp``; if the topic has a column with one of these names, that column is read instead. An
Arrow type that Spark lacks becomes the smallest Spark type that holds all its values. The only loss is that nanoseconds
are truncated to microseconds. Columns that cannot be converted cause an error with their names before a task starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import pyarrow as pa
import pyarrow.types as pat
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_type
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DayTimeIntervalType,
    IntegerType,
    LongType,
    MapType,
    SpatialType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.schema import DEFAULT_SCHEMA, check_schema, parse_schema

if TYPE_CHECKING:
    from sparklog.protocol.messages import TopicMetadata

HEADERS_TYPE = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))

#: The columns of Spark's Kafka source, with the same nullability. Source: KafkaRecordToRowConverter.
DEFAULT_COLUMNS = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("timestampType", IntegerType()),
    ]
)
HEADERS_COLUMN = StructField("headers", HEADERS_TYPE)
LOG_COLUMNS = StructType(
    [
        StructField("_topic", StringType(), nullable=False),
        StructField("_partition", IntegerType(), nullable=False),
        StructField("_offset", LongType(), nullable=False),
        StructField("_timestamp", TimestampType(), nullable=False),
    ]
)

#: If this column is read, a value that Spark's type cannot hold becomes null, and this column describes the error.
#: Otherwise such a value fails the read.
CAST_ERROR_COLUMN = StructField("_cast_error", StringType())

#: The maximum number of digits of Spark's decimals.
_MAX_PRECISION = 38

#: The Arrow types without a Spark type of their own, with the Arrow type that they are cast to.
_WIDER: dict[pa.DataType, pa.DataType] = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.date64(): pa.date32(),
    pa.time32("s"): pa.time64("ns"),
    pa.time32("ms"): pa.time64("ns"),
}


@dataclass(frozen=True, slots=True)
class TopicShape:
    """The properties of a topic that determine its columns in Spark. The object is pickled to tasks.

    ``schema`` is the topic's newest schema. ``schema_id`` is the schema's number, or -1 if it is unknown.
    ``stamped_by_log`` means that records have the leader's append time.
    """

    schema: pa.Schema
    event_time: str | None = None
    stamped_by_log: bool = False
    schema_id: int = -1

    @property
    def is_default(self) -> bool:
        return bool(self.schema.equals(DEFAULT_SCHEMA))


def topic_shape(topic: TopicMetadata) -> TopicShape:
    """Return the shape of a topic. Raises BrokerError if its schema cannot be decoded."""
    latest = topic.schemas[-1]
    stamped_by_log = topic.config.get("message.timestamp.type") == "LogAppendTime"
    return TopicShape(parse_schema(latest.message), topic.event_time, stamped_by_log, latest.schema_id)


def arrow_schema(columns: StructType) -> pa.Schema:
    """Return the Arrow schema of a typed topic for these Spark columns. Timestamps are in UTC.

    Raises:
        BrokerError: SCHEMA_MISMATCH with the columns whose type a topic does not support: the null type, year-month and
            calendar intervals, variants, geometries.
    """
    schema = arrow_columns(columns)
    check_schema(schema)
    return schema


def arrow_columns(columns: StructType) -> pa.Schema:
    """Return the Arrow schema with which Spark passes these columns to a sink.

    Only the time zone of timestamps differs: it is UTC in the result, but Spark passes the time zone of the session.

    Raises:
        BrokerError: SCHEMA_MISMATCH with the columns whose Arrow type cannot be stored: year-month and calendar
            intervals, variants, geometries.
    """
    kinds = [(column, _arrow_type(column.dataType)) for column in columns.fields]
    if refused := [f"{column.name} ({_ddl(column.dataType)})" for column, kind in kinds if kind is None]:
        _mismatch(f"a topic does not support the type of column {', '.join(refused)}")
    return pa.schema([pa.field(column.name, kind, nullable=column.nullable) for column, kind in kinds])


def _arrow_type(kind: DataType) -> pa.DataType | None:
    """Return the Arrow type of a Spark type, or None if topics do not support it.

    Variants and geometries are not supported: only metadata of an Arrow field identifies them, which a topic's schema
    does not keep, so they would be read back as plain structs.
    """
    if _holds_tagged_type(kind):
        return None
    try:
        return to_arrow_type(kind, timezone="UTC")
    except PySparkException:
        return None


def _holds_tagged_type(kind: DataType) -> bool:
    match kind:
        case ArrayType():
            return _holds_tagged_type(kind.elementType)
        case MapType():
            return _holds_tagged_type(kind.keyType) or _holds_tagged_type(kind.valueType)
        case StructType():
            return any(_holds_tagged_type(field.dataType) for field in kind.fields)
        case _:
            return isinstance(kind, VariantType | SpatialType)


def topic_columns(shape: TopicShape, *, include_headers: bool = False, include_cast_errors: bool = False) -> StructType:
    """Return the columns that a topic has in Spark.

    With ``include_cast_errors`` all columns of the topic are nullable, because each may have a value that cannot be
    converted.

    Raises:
        BrokerError: SCHEMA_MISMATCH with the columns that have no Spark type.
    """
    errors = [CAST_ERROR_COLUMN] if include_cast_errors else []
    if shape.is_default:
        headers = [HEADERS_COLUMN] if include_headers else []
        return StructType([*DEFAULT_COLUMNS.fields, *headers, *errors])
    kinds = [(field, spark_type(field.type)) for field in shape.schema]
    if refused := [f"{field.name} ({field.type})" for field, kind in kinds if kind is None]:
        _mismatch(f"Spark has no type for column {', '.join(refused)}")
    fields = [
        StructField(field.name, kind, field.nullable or include_cast_errors)
        for field, kind in kinds
        if kind is not None
    ]
    own = {field.name for field in fields}
    return StructType(fields + [column for column in [*LOG_COLUMNS.fields, *errors] if column.name not in own])


def spark_type(kind: pa.DataType) -> DataType | None:
    """Return the Spark type that holds every value of an Arrow type, or None if there is none."""
    try:
        return from_arrow_type(_crossing(kind))
    except PySparkException:
        return None


def _crossing(kind: pa.DataType) -> pa.DataType:
    """Return the Arrow type in which values of ``kind`` are passed to Spark. Child types are converted as well."""
    if kind in _WIDER:
        return _WIDER[kind]
    if pat.is_decimal(kind) and kind.precision <= _MAX_PRECISION:
        return pa.decimal128(kind.precision, kind.scale)
    if pat.is_decimal(kind):
        raise PySparkException(f"{kind} has more than {_MAX_PRECISION} digits")
    if pat.is_map(kind):
        return pa.map_(_crossing_field(kind.key_field), _crossing_field(kind.item_field))
    if pat.is_struct(kind):
        return pa.struct([_crossing_field(field) for field in kind])
    if pat.is_list(kind) or pat.is_large_list(kind) or pat.is_fixed_size_list(kind):
        return pa.list_(_crossing_field(kind.value_field))
    return kind


def _crossing_field(field: pa.Field) -> pa.Field:
    return field.with_type(_crossing(field.type))


def check_projection(declared: StructType, offered: StructType, *, with_errors: bool = False) -> None:
    """Check the schema ``declared`` that a user gave to ``.schema(...)``: it must select from the ``offered`` columns.

    The order of the columns is free. ``with_errors`` means that the column of cast errors is read, so that all other
    columns may be null.

    Raises:
        BrokerError: SCHEMA_MISMATCH with the columns that the topic does not have or has with another type, or that are
            declared NOT NULL although they may have nulls.
    """
    if not declared.fields:
        _mismatch("the schema has no columns; declare at least one, such as the offset")
    by_name = {column.name: column for column in offered.fields}
    complaints = []
    for column in declared.fields:
        found = by_name.get(column.name)
        if found is None:
            complaints.append(f"{column.name}: not a column of the topic")
        elif not _same_kind(column.dataType, found.dataType):
            complaints.append(
                f"{column.name}: declared as {_ddl(column.dataType)}, but {_ddl(found.dataType)} in the topic"
            )
        elif not _promises_less(column, found):
            why = "with includeCastErrors any column may be null" if with_errors else "the topic allows nulls"
            complaints.append(f"{column.name}: declared NOT NULL, but {why}")
    if complaints:
        _mismatch(f"{'; '.join(complaints)} (columns: {', '.join(by_name)})")


def _same_kind(left: DataType, right: DataType) -> bool:
    """Return whether both types are equal in what Arrow stores.

    Nullability, string collation and the fields of a day-time interval may differ.
    """
    match left, right:
        case (ArrayType(), ArrayType()):
            return _same_kind(left.elementType, right.elementType)
        case (MapType(), MapType()):
            return _same_kind(left.keyType, right.keyType) and _same_kind(left.valueType, right.valueType)
        case (StructType(), StructType()):
            return left.fieldNames() == right.fieldNames() and all(
                _same_kind(a.dataType, b.dataType) for a, b in zip(left.fields, right.fields, strict=True)
            )
        case (StringType(), StringType()) | (DayTimeIntervalType(), DayTimeIntervalType()):
            return True
        case _:
            return left == right


def _promises_less(declared: StructField, found: StructField) -> bool:
    return (declared.nullable or not found.nullable) and _children_promise_less(declared.dataType, found.dataType)


def _children_promise_less(left: DataType, right: DataType) -> bool:
    match left, right:
        case (ArrayType(), ArrayType()):
            return (left.containsNull or not right.containsNull) and _children_promise_less(
                left.elementType, right.elementType
            )
        case (MapType(), MapType()):
            return (
                (left.valueContainsNull or not right.valueContainsNull)
                and _children_promise_less(left.keyType, right.keyType)
                and _children_promise_less(left.valueType, right.valueType)
            )
        case (StructType(), StructType()):
            return all(_promises_less(a, b) for a, b in zip(left.fields, right.fields, strict=True))
        case _:
            return True


def one_shape(shapes: Mapping[str, TopicShape]) -> TopicShape:
    """Return the shape that all topics of a read share, because they must have the same columns.

    Raises:
        BrokerError: SCHEMA_MISMATCH with two topics whose columns differ.
    """
    (first, shape), *others = sorted(shapes.items())
    for name, other in others:
        if topic_columns(other) != topic_columns(shape):
            _mismatch(
                f"topics {first} and {name} have different columns and cannot be read as one table: "
                f"{', '.join(shape.schema.names)} and {', '.join(other.schema.names)}"
            )
    return shape


def _ddl(kind: DataType) -> str:
    return kind.simpleString()


def _mismatch(detail: str) -> NoReturn:
    raise BrokerError(ErrorCode.SCHEMA_MISMATCH, detail)
