"""Where the tables of a topic lie and which columns they have. Asks nobody.

    <to>/<topic>               its columns, then _partition, _offset, _timestamp, _date
    <to>/_quarantine/<topic>   _partition, _offset, _timestamp, reason, record: what could not be cast, as it was read

The columns of a topic without a schema are ``key, value, headers``, named and typed as by the source. ``_date`` is the
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
#: What every table has behind the topic's own columns.
META_COLUMNS = StructType(
    [
        StructField(PARTITION, IntegerType()),
        StructField(OFFSET, LongType()),
        StructField(TIMESTAMP, TimestampType()),
        StructField(DATE, DateType()),
    ]
)
#: Columns that Delta keeps statistics of. Source: its table property dataSkippingNumIndexedCols.
_INDEXED = 32
REASON, RECORD = "reason", "record"
#: Of a table: whether it holds records or the state that they come to.
MODE_PROPERTY = "sparklog.mode"
#: How tables are partitioned unless the archive is told otherwise.
DEFAULT_PARTITION_BY = (DATE,)
_QUARANTINE = "_quarantine"
#: Characters that Delta takes in no column name, unless it maps names to others.
_ODD = re.compile(r"[ ,;{}()\n\t=]")
_MAPPING = "delta.columnMapping.mode"
_LOCAL_TIMES = "timestampNtz"
#: What is kept of the columns of a topic without a schema, beside its place and time.
_DEFAULT_OWN = ("key", "value", "headers")


def table_path(to: str, topic: str) -> str:
    """The table of a topic under the archive's path. Raises ConfigError for a topic of the quarantines' name."""
    if topic == _QUARANTINE:
        raise ConfigError(f"topic {topic} cannot be archived: its table would lie where quarantines are")
    return f"{to.rstrip('/')}/{topic}"


def quarantine_path(to: str, topic: str) -> str:
    """The quarantine of a topic under the archive's path."""
    return f"{to.rstrip('/')}/{_QUARANTINE}/{topic}"


def own_columns(read: StructType, names: Collection[str], *, is_default: bool) -> StructType:
    """The columns of a topic that are its own: what a record holds but for topic, partition, offset and time.

    ``read``: the columns that the source shows, headers included; ``names``: those of the topic's schema.

    Raises:
        ConfigError: columns that a table cannot have beside its others, or beside each other: names that a table's own
            columns have, and names that differ in case only.
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
    """The columns of a topic's table, all nullable: a table holds rows that are older than some of its columns."""
    return StructType([*(StructField(field.name, field.dataType) for field in own.fields), *META_COLUMNS.fields])


def statistics(columns: StructType) -> dict[str, str]:
    """Properties of a new table with these columns. Delta keeps statistics of the first 32 unless told otherwise, and
    those of place and time, by which files are found, stand behind all others."""
    count = _leaves(columns)
    return {"delta.dataSkippingNumIndexedCols": str(count)} if count > _INDEXED else {}


def needed_properties(columns: StructType, features: Collection[str] = ()) -> dict[str, str]:
    """Properties without which Delta takes no such columns, whatever they are nested in. ``features``: what the table
    has already."""
    needed = {}
    for part in parts(columns):
        if isinstance(part, StructType) and any(_ODD.search(name) for name in part.names):
            needed[_MAPPING] = "name"
        if isinstance(part, TimestampNTZType) and _LOCAL_TIMES not in features:
            needed[f"delta.feature.{_LOCAL_TIMES}"] = "supported"
    return needed


def names_directories(properties: Mapping[str, str]) -> bool:
    """Whether Delta calls a partition's directory by its values, in a table with these properties: else by chance."""
    is_mapped = properties.get(_MAPPING, "none").lower() != "none"
    return not is_mapped and properties.get("delta.randomizeFilePrefixes", "false").lower() != "true"


def parts(kind: DataType) -> Iterator[DataType]:
    """A type, and all that it is made of."""
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
    """The columns of a topic's quarantine; ``record`` holds the topic's own columns as they were read."""
    record = StructField(RECORD, StructType([StructField(field.name, field.dataType) for field in own.fields]))
    place = [field for field in META_COLUMNS.fields if field.name != DATE]
    return StructType([*place, StructField(REASON, StringType()), record])
