"""The paths and columns of a topic's tables.

    <to>/<topic>               its columns, then _partition, _offset, _timestamp, _date
    <to>/_quarantine/<topic>   _partition, _offset, _timestamp, reason, record: rows that could not be cast, as read

The columns of a topic without a schema are ``key, value, headers``, with the source's names and types. ``_date`` is the
UTC date of ``_timestamp``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from sparklog.errors import ConfigError

PARTITION, OFFSET, TIMESTAMP, DATE = "_partition", "_offset", "_timestamp", "_date"
#: The columns that every table has after the topic's own columns.
META_COLUMNS = StructType(
    [
        StructField(PARTITION, IntegerType()),
        StructField(OFFSET, LongType()),
        StructField(TIMESTAMP, TimestampType()),
        StructField(DATE, DateType()),
    ]
)
#: The number of columns for which Delta keeps statistics. Source: its table property dataSkippingNumIndexedCols.
_INDEXED = 32
REASON, RECORD = "reason", "record"
#: The mode of a table: all records, or the current state by key.
MODE_PROPERTY = "sparklog.mode"
#: The default partition column of tables.
DEFAULT_PARTITION_BY = (DATE,)
_QUARANTINE = "_quarantine"
#: The characters that Delta does not allow in column names without column mapping.
_ODD = re.compile(r"[ ,;{}()\n\t=]")
_MAPPING = "delta.columnMapping.mode"
_LOCAL_TIMES = "timestampNtz"
#: The columns of a topic without a schema that are archived, in addition to position and time.
_DEFAULT_OWN = ("key", "value", "headers")


def table_path(to: str, topic: str) -> str:
    """Return the path of a topic's table.

    Raises ConfigError if the topic has the name of the quarantines' directory.
    """
    if topic == _QUARANTINE:
        raise ConfigError(f"topic {topic} cannot be archived: its path is reserved for quarantines")
    return f"{to.rstrip('/')}/{topic}"


def quarantine_path(to: str, topic: str) -> str:
    """Return the path of a topic's quarantine."""
    return f"{to.rstrip('/')}/{_QUARANTINE}/{topic}"


def own_columns(read: StructType, names: Collection[str], *, is_default: bool) -> StructType:
    """Return the topic's own columns: all columns of a record except for topic, partition, offset and timestamp.

    ``read`` has the columns of the source, including headers. ``names`` has the column names of the topic's schema.

    Raises:
        ConfigError: a name conflicts with one of the table's additional columns, or differs from another name only in
            case.
    """
    wanted = _DEFAULT_OWN if is_default else names
    columns = StructType([field for field in read.fields if field.name in wanted])
    _check_names(columns)
    return columns


def _check_names(columns: StructType) -> None:
    taken = {field.name.lower(): "the archive's" for field in META_COLUMNS.fields}
    for name in columns.names:
        if other := taken.get(name.lower()):
            raise ConfigError(f"column {name} cannot be archived beside {other} {name.lower()}: Delta ignores case")
        taken[name.lower()] = "the topic's"


def table_columns(own: StructType) -> StructType:
    """Return the columns of a topic's table. All are nullable, because old rows lack columns that were added later."""
    return StructType([*(StructField(field.name, field.dataType) for field in own.fields), *META_COLUMNS.fields])


def statistics(columns: StructType) -> dict[str, str]:
    """Return the properties that make Delta keep statistics of all these columns in a new table.

    By default Delta keeps statistics of the first 32 columns. But readers find files by position and time, which are
    the last columns.
    """
    count = _leaves(columns)
    return {"delta.dataSkippingNumIndexedCols": str(count)} if count > _INDEXED else {}


def needed_properties(columns: StructType, features: Collection[str] = ()) -> dict[str, str]:
    """Return the table properties that Delta requires for these columns and the columns nested in them.

    ``features`` are the table features that the table already has.
    """
    needed = {}
    for part in parts(columns):
        if isinstance(part, StructType) and any(_ODD.search(name) for name in part.names):
            needed[_MAPPING] = "name"
        if isinstance(part, TimestampNTZType) and _LOCAL_TIMES not in features:
            needed[f"delta.feature.{_LOCAL_TIMES}"] = "supported"
    return needed


def names_directories(properties: Mapping[str, str]) -> bool:
    """Return whether Delta names the table's directories by the values of the partition columns, and not at random."""
    is_mapped = properties.get(_MAPPING, "none").lower() != "none"
    return not is_mapped and properties.get("delta.randomizeFilePrefixes", "false").lower() != "true"


def parts(kind: DataType) -> Iterator[DataType]:
    """Yield a type and all its nested types."""
    yield kind
    match kind:
        case ArrayType():
            yield from parts(kind.elementType)
        case MapType():
            yield from parts(kind.keyType)
            yield from parts(kind.valueType)
        case StructType():
            for field in kind.fields:
                yield from parts(field.dataType)


def _leaves(kind: DataType) -> int:
    return sum(_leaves(field.dataType) for field in kind.fields) if isinstance(kind, StructType) else 1


def quarantine_columns(own: StructType) -> StructType:
    """Return the columns of a topic's quarantine. Its column ``record`` is a struct of the topic's columns as read."""
    record = StructField(RECORD, StructType([StructField(field.name, field.dataType) for field in own.fields]))
    place = [field for field in META_COLUMNS.fields if field.name != DATE]
    return StructType([*place, StructField(REASON, StringType()), record])
