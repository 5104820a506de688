"""Casting of records from the source to rows of their table, and the reasons why a record cannot be cast.

The columns of an existing table are fixed: columns with another type in the topic are cast, but no value may change.
Values of a topic without a schema may be JSON that is parsed into columns. A record that cannot be cast completely is a
bad row with a reason. Pure: creates Spark's column expressions, runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DayTimeIntervalType,
    MapType,
    NullType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    TimeType,
    YearMonthIntervalType,
)

from sparklog.delta.table import (
    DATE,
    OFFSET,
    PARTITION,
    REASON,
    RECORD,
    TIMESTAMP,
    names_directories,
    needed_properties,
    parts,
    table_columns,
)
from sparklog.errors import ConfigError

#: Names of key and headers beside columns that were parsed from the value.
JSON_KEY, JSON_HEADERS = "_key", "_headers"
#: Temporary column: whether a row deletes its key.
TOMBSTONE = "_sparklog_tombstone"
#: Column of the source: values that no Spark type can hold.
_CAST_ERROR = "_cast_error"
#: Marker in the message of a failure that a bad row causes.
BAD_ROW = "SPARKLOG_BAD_ROW"
_PLACE = (PARTITION, OFFSET, TIMESTAMP)
_CORRUPT = "_sparklog_corrupt"
_PARSED = "_sparklog_parsed"
_DAY_US = 86_400_000_000
#: Years 1 to 9999, which every reader of a table supports, in us since 1970; half-open.
_TIMES = (-62_135_596_800_000_000, 253_402_300_800_000_000)
#: Maximum length of a value in a reason.
_SHOWN = 100
#: Characters that Spark writes as three characters in names of directories, and `{` for safety.
_ESCAPED = r"[\x01-\x1f\x7f\"#%'*/:=?\\\[\]^{]"
#: Maximum bytes of a file name on file systems.
_NAME_BYTES = 255
#: Values of a partition column that Delta reads as null.
_NULLS = ("", "__HIVE_DEFAULT_PARTITION__")


@dataclass(frozen=True, slots=True)
class Casting:
    """Plan for casting the records of one topic to rows. ``own``: its columns as read. ``json``: the columns parsed
    from its values. ``table``: the columns of rows. ``keys``: for a table of the topic's current state, the key columns
    in ``own``; otherwise empty. ``partition_by``: the table's partition columns; ``named``: whether values name
    directories."""

    own: StructType
    is_default: bool
    json: StructType | None
    table: StructType
    keys: tuple[str, ...] = ()
    partition_by: tuple[str, ...] = ()
    named: bool = True

    def rows(self, read: DataFrame) -> tuple[DataFrame, DataFrame]:
        """Return the records of ``read``, which has the source's columns, as rows of the table, and bad rows for the
        quarantine. If there are keys, rows have an additional column ``TOMBSTONE``."""
        positioned = self._positioned(read)
        reasons = self._reasons(positioned)
        is_good = _is_none(reasons)
        record = sf.struct(*(_column(name) for name in self.own.names)).alias(RECORD)
        bad = positioned.where(~is_good).select(*_PLACE, _joined(reasons).alias(REASON), record)
        return self._good(positioned.where(is_good)), bad

    def rows_or_failure(self, read: DataFrame) -> DataFrame:
        """Return all records as rows of the table. A query over them fails with ``BAD_ROW`` in its message if there is
        a bad row."""
        positioned = self._positioned(read)
        reasons = self._reasons(positioned)
        failure = sf.raise_error(sf.concat(sf.lit(f"{BAD_ROW}: "), _joined(reasons))).cast("boolean")
        return self._good(positioned.where(sf.when(_is_none(reasons), True).otherwise(failure)))

    def read_columns(self, offered: StructType) -> StructType:
        """Return the source's columns that rows need; each additional column would cost the JVM time."""
        wanted = {*self.own.names, *self._place_names, _CAST_ERROR}
        return StructType([field for field in offered.fields if field.name in wanted])

    @property
    def _place_names(self) -> tuple[str, ...]:
        """Return the source's names for a record's position and time."""
        return ("partition", "offset", "timestamp") if self.is_default else _PLACE

    def _good(self, positioned: DataFrame) -> DataFrame:
        more = [self._is_tombstone().alias(TOMBSTONE)] if self.keys else []
        return positioned.select(*self._values(), *_PLACE, _utc_date().alias(DATE), *more)

    @property
    def table_keys(self) -> tuple[str, ...]:
        """Return the names of the keys in the table."""
        return (JSON_KEY,) if self.keys and self.json is not None else self.keys

    def _is_tombstone(self) -> Column:
        """Return whether a record deletes its key, as ``record.keys.tombstones`` does."""
        others = ["value"] if self.is_default else [name for name in self.own.names if name not in self.keys]
        return _all_null(others) if others else sf.lit(False)

    def _positioned(self, read: DataFrame) -> DataFrame:
        """Return the topic's columns under their names, and each record's position and time."""
        place = [sf.col(name).alias(alias) for name, alias in zip(self._place_names, _PLACE, strict=True)]
        errors = [name for name in (_CAST_ERROR,) if name in read.columns and name not in self.own.names]
        positioned = read.select(*(_column(name) for name in self.own.names), *place, *errors)
        if self.json is None:
            return positioned
        wanted = StructType([*self.json.fields, StructField(_CORRUPT, StringType())])
        options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
        return positioned.withColumn(_PARSED, sf.from_json(sf.col("value").cast("string"), wanted, options))

    def _sources(self) -> list[tuple[StructField, Column]]:
        """Return the table's columns, except for position and time, and the source of each."""
        if self.json is None:
            return [(field, _column(field.name)) for field in self.own.fields]
        taken = [(field, sf.col(_PARSED).getField(field.name)) for field in self.json.fields]
        own = {field.name: field.dataType for field in self.own.fields}
        kept = {JSON_KEY: "key", JSON_HEADERS: "headers"}
        return [*taken, *((StructField(name, own[source]), _column(source)) for name, source in kept.items())]

    def _values(self) -> list[Column]:
        wanted = _by_name(self.table)
        return [
            (source if kind == field.dataType else source.try_cast(kind)).alias(field.name)
            for field, source in self._sources()
            for kind in [wanted[field.name.lower()].dataType]
        ]

    def _reasons(self, positioned: DataFrame) -> list[Column]:
        """Return the reasons why a record is a bad row; all are null for a good one."""
        wanted = _by_name(self.table)
        found = [sf.col(_CAST_ERROR)] if _CAST_ERROR in positioned.columns and _CAST_ERROR not in self.own.names else []
        found += [_time_reason(TIMESTAMP, sf.col(TIMESTAMP), TimestampType())]
        if self.json is not None:
            found.append(_json_reason())
        if self.keys:
            found.append(sf.when(_all_null(self.keys), sf.lit("the record has no key")))
        for field, source in self._sources():
            found += _reasons(field, source, wanted[field.name.lower()])
            if field.name.lower() in {name.lower() for name in self.partition_by}:
                found.append(_partition_reason(wanted[field.name.lower()], source, named=self.named))
        return found


def plan_casting(
    own: StructType,
    *,
    is_default: bool,
    json: StructType | None,
    table: StructType | None,
    keys: tuple[str, ...] = (),
    partition_by: tuple[str, ...] = (),
    properties: Mapping[str, str] | None = None,
) -> tuple[Casting, StructType]:
    """Return the plan for a table with the columns ``table`` (None: it does not exist yet), and the columns to add to
    the table. ``keys`` and ``partition_by``: as in ``Casting``; ``properties``: the table's current ones.

    Raises:
        ConfigError: columns have no Delta type, or no cast exists to their type in the table. Also if columns have the
            name of one of the archive's own columns, or cannot be partition columns of a new table.
    """
    if json is not None and not is_default:
        raise ConfigError("the topic has a schema: --schema is for JSON values of topics without one")
    draft = Casting(own, is_default, json, StructType())
    needed = table_columns(StructType([field for field, _ in draft._sources()]))
    _check(needed)
    there = _by_name(table) if table is not None else {}
    _check_kinds(needed, there)
    columns = StructType([there.get(field.name.lower(), field) for field in needed.fields])
    if table is None:
        _check_partitions(columns, partition_by)
    added = StructType([field for field in needed.fields if field.name.lower() not in there])
    named = names_directories({**(properties or {}), **needed_properties(added)})
    return Casting(own, is_default, json, columns, keys, partition_by, named), added


def _check(columns: StructType) -> None:
    seen: set[str] = set()
    for name in (field.name.lower() for field in columns.fields):
        if name in seen:
            raise ConfigError(f"column {name} would occur twice in the table: Delta ignores case")
        seen.add(name)
    if refused := [f"{field.name} ({field.dataType.simpleString()})" for field in columns.fields if _lacks(field)]:
        raise ConfigError(f"Delta has no type for column {', '.join(refused)}")


def _lacks(field: StructField) -> bool:
    refused = DayTimeIntervalType | YearMonthIntervalType | TimeType | NullType
    return any(isinstance(part, refused) for part in parts(field.dataType))


def _check_kinds(needed: StructType, there: Mapping[str, StructField]) -> None:
    """Check the types of the columns. Nested values are not cast, because a reason could not name the lost value."""
    place = {PARTITION, OFFSET, TIMESTAMP, DATE}
    complaints = []
    for field in needed.fields:
        found = there.get(field.name.lower())
        if found is None or _same(found.dataType, field.dataType):
            continue
        nested = isinstance(found.dataType, ArrayType | MapType | StructType) or isinstance(
            field.dataType, ArrayType | MapType | StructType
        )
        if nested or field.name in place:
            complaints.append(
                f"{field.name}: {found.dataType.simpleString()} in the table, {field.dataType.simpleString()} to write"
            )
    if complaints:
        raise ConfigError(f"the table's columns do not match the topic's: {'; '.join(complaints)}")


def _check_partitions(columns: StructType, partition_by: tuple[str, ...]) -> None:
    """Check the partition columns of a new table. Partition values are text, which cannot represent all bytes:
    different keys would become equal."""
    by_name = _by_name(columns)
    binary = [
        name
        for name in partition_by
        if (field := by_name.get(name.lower())) is not None and isinstance(field.dataType, BinaryType)
    ]
    if binary:
        raise ConfigError(
            f"the table cannot be partitioned by {', '.join(binary)}, which is binary: Delta would change some of its "
            "values"
        )


def _same(left: DataType, right: DataType) -> bool:
    """Return whether both types are equal except for nullability and column metadata."""
    return left.simpleString() == right.simpleString()


def _by_name(columns: StructType) -> dict[str, StructField]:
    return {field.name.lower(): field for field in columns.fields}


def _column(name: str) -> Column:
    quoted = name.replace("`", "``")
    return sf.col(f"`{quoted}`")


def _all_null(names: Iterable[str]) -> Column:
    return reduce(and_, (_column(name).isNull() for name in names))


def _utc_date() -> Column:
    """Return the UTC date, independent of the session's time zone."""
    since = sf.unix_micros(sf.col(TIMESTAMP))
    return sf.date_from_unix_date(sf.round((since - sf.pmod(since, sf.lit(_DAY_US))) / sf.lit(_DAY_US)).cast("int"))


def _is_none(reasons: list[Column]) -> Column:
    """Return whether all reasons are null. Spark evaluates this for every record, so it does not build texts as
    ``_joined`` does."""
    return reduce(and_, (reason.isNull() for reason in reasons))


def _joined(reasons: list[Column]) -> Column:
    return sf.concat_ws("; ", *reasons)


def _reasons(field: StructField, source: Column, wanted: StructField) -> list[Column]:
    found = []
    if not _same(field.dataType, wanted.dataType):
        found.append(_cast_reason(field, source, wanted.dataType))
    if isinstance(field.dataType, TimestampType | TimestampNTZType | DateType):
        found.append(_time_reason(field.name, source, field.dataType))
    if not wanted.nullable:
        found.append(sf.when(source.isNull(), sf.lit(f"{field.name}: null in a NOT NULL column")))
    return found


def _cast_reason(field: StructField, source: Column, wanted: DataType) -> Column:
    made = source.try_cast(wanted)
    is_bad = source.isNotNull() & made.isNull()
    if isinstance(field.dataType, NumericType | TimestampType | TimestampNTZType):
        # Spark silently truncates 1.5 to 1.
        is_bad = is_bad | (source.isNotNull() & ~made.try_cast(field.dataType).eqNullSafe(source))
    return sf.when(is_bad, _message(f"{field.name}: ", source, f" is not a valid {wanted.simpleString()}"))


def _time_reason(name: str, source: Column, kind: DataType) -> Column:
    """Return a reason for times outside the years that every reader supports; otherwise null."""
    if isinstance(kind, TimestampType):
        since = sf.unix_micros(source)
        is_bad, shown = (since < sf.lit(_TIMES[0])) | (since >= sf.lit(_TIMES[1])), since
        words = " us since 1970 is outside the years 1 to 9999"
    else:
        shown = sf.year(source)
        is_bad, words = ~shown.between(1, 9999), " is outside the years 1 to 9999"
    return sf.when(is_bad, _message(f"{name}: ", shown, words))


def _partition_reason(field: StructField, source: Column, *, named: bool) -> Column:
    """Return a reason for values that a partition column cannot hold. Delta stores such a value as text, and rows with
    the same value share a directory. ``named``: the value names the directory."""
    text = source.try_cast(field.dataType).cast("string")
    before = f"{field.name}: partition column, "
    reason = sf.when(text.isin(*_NULLS), _message(f"{before}in which Delta reads this text as null: ", text, ""))
    if isinstance(field.dataType, BinaryType):
        # A cast to text keeps all bytes unchanged.
        changed = sf.concat(
            sf.lit(f"{before}in which Delta would change these bytes, which are not valid UTF-8: "), _hex(source)
        )
        reason = reason.when(~sf.is_valid_utf8(text), changed)
    if named:
        room = _NAME_BYTES - len(re.sub(_ESCAPED, "%00", field.name).encode()) - 1
        is_long = sf.octet_length(sf.regexp_replace(text, _ESCAPED, "%00")) > room
        words = f"{before}but this text cannot name a directory: "
        reason = reason.when(sf.contains(text, sf.lit("\0")) | is_long, _message(words, text, ""))
    return reason


def _hex(value: Column) -> Column:
    return sf.left(sf.hex(value), sf.lit(_SHOWN))


def _json_reason() -> Column:
    corrupt = sf.col(_PARSED).getField(_CORRUPT)
    # Spark parses an empty text to null without reporting it as corrupt.
    is_bad = sf.col("value").isNotNull() & (corrupt.isNotNull() | sf.col(_PARSED).isNull())
    return sf.when(is_bad, _message("value is not a JSON object with these columns: ", sf.col("value"), ""))


def _message(before: str, value: Column, after: str) -> Column:
    return sf.concat(sf.lit(before), sf.left(value.cast("string"), sf.lit(_SHOWN)), sf.lit(after))
