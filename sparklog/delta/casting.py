"""The casting of records to rows of their table, and the reasons why a record cannot be cast.

The types of an existing table's columns do not change. If a column has another type in the topic, it is cast, but no
value may change. Values of a topic without a schema may be JSON that is parsed into columns. A record that cannot be
cast completely becomes a bad row with a reason. The module creates column expressions of Spark and runs no query.
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

#: The names of the columns for key and headers if the value is parsed into columns.
JSON_KEY, JSON_HEADERS = "_key", "_headers"
#: A temporary column that says whether a row deletes its key.
TOMBSTONE = "_sparklog_tombstone"
#: The source's column that describes values that no Spark type can hold.
_CAST_ERROR = "_cast_error"
#: The marker in the message of a failure that a bad row causes.
BAD_ROW = "SPARKLOG_BAD_ROW"
_PLACE = (PARTITION, OFFSET, TIMESTAMP)
_CORRUPT = "_sparklog_corrupt"
_PARSED = "_sparklog_parsed"
_DAY_US = 86_400_000_000
#: The years 1 to 9999, which every reader of a table supports, as [first, end) in microseconds since 1970.
_TIMES = (-62_135_596_800_000_000, 253_402_300_800_000_000)
#: The maximum length of a value in a reason.
_SHOWN = 100
#: The characters that Spark writes as three characters in names of directories, and `{` for safety.
_ESCAPED = r"[\x01-\x1f\x7f\"#%'*/:=?\\\[\]^{]"
#: The maximum bytes of a file name in file systems.
_NAME_BYTES = 255
#: The values of a partition column that Delta reads as null.
_NULLS = ("", "__HIVE_DEFAULT_PARTITION__")


@dataclass(frozen=True, slots=True)
class Casting:
    """A plan that converts the records of one topic to rows of its table.

    ``own`` has the topic's columns as the source returns them. ``json`` has the columns that are parsed from the
    records' values, or is None. ``table`` has the columns of the table. ``keys`` has the key columns of ``own`` if the
    table keeps only the topic's current state (mode upsert); otherwise it is empty. ``partition_by`` has the table's
    partition columns. ``named`` is set if Delta names directories by the values of these columns.
    """

    own: StructType
    is_default: bool
    json: StructType | None
    table: StructType
    keys: tuple[str, ...] = ()
    partition_by: tuple[str, ...] = ()
    named: bool = True

    def rows(self, read: DataFrame) -> tuple[DataFrame, DataFrame]:
        """Return two DataFrames: the records of ``read`` as rows of the table, and the bad rows for the quarantine.

        A bad row is a record that cannot be cast. ``read`` has the source's columns. If the plan has keys, the rows
        have an additional column ``TOMBSTONE``.
        """
        positioned = self._positioned(read)
        reasons = self._reasons(positioned)
        is_good = _is_none(reasons)
        record = sf.struct(*(_column(name) for name in self.own.names)).alias(RECORD)
        bad = positioned.where(~is_good).select(*_PLACE, _joined(reasons).alias(REASON), record)
        return self._good(positioned.where(is_good)), bad

    def rows_or_failure(self, read: DataFrame) -> DataFrame:
        """Return all records of ``read`` as rows of the table, assuming that each record can be cast.

        If a record cannot be cast, a query over the result fails, with ``BAD_ROW`` in the error's message.
        """
        positioned = self._positioned(read)
        reasons = self._reasons(positioned)
        failure = sf.raise_error(sf.concat(sf.lit(f"{BAD_ROW}: "), _joined(reasons))).cast("boolean")
        return self._good(positioned.where(sf.when(_is_none(reasons), True).otherwise(failure)))

    def read_columns(self, offered: StructType) -> StructType:
        """Return the columns of the source (``offered``) that this plan reads.

        Each further column would cost time in the JVM.
        """
        wanted = {*self.own.names, *self._place_names, _CAST_ERROR}
        return StructType([field for field in offered.fields if field.name in wanted])

    @property
    def _place_names(self) -> tuple[str, ...]:
        """Return the names that the source has for a record's position and time."""
        return ("partition", "offset", "timestamp") if self.is_default else _PLACE

    def _good(self, positioned: DataFrame) -> DataFrame:
        more = [self._is_tombstone().alias(TOMBSTONE)] if self.keys else []
        return positioned.select(*self._values(), *_PLACE, _utc_date().alias(DATE), *more)

    @property
    def table_keys(self) -> tuple[str, ...]:
        """Return the names that the key columns have in the table."""
        return (JSON_KEY,) if self.keys and self.json is not None else self.keys

    def _is_tombstone(self) -> Column:
        """Return whether a record deletes its key, as ``record.keys.tombstones`` does."""
        others = ["value"] if self.is_default else [name for name in self.own.names if name not in self.keys]
        return _all_null(others) if others else sf.lit(False)

    def _positioned(self, read: DataFrame) -> DataFrame:
        """Return a DataFrame with the topic's columns, and the position and time of each record."""
        place = [sf.col(name).alias(alias) for name, alias in zip(self._place_names, _PLACE, strict=True)]
        errors = [name for name in (_CAST_ERROR,) if name in read.columns and name not in self.own.names]
        positioned = read.select(*(_column(name) for name in self.own.names), *place, *errors)
        if self.json is None:
            return positioned
        wanted = StructType([*self.json.fields, StructField(_CORRUPT, StringType())])
        options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
        return positioned.withColumn(_PARSED, sf.from_json(sf.col("value").cast("string"), wanted, options))

    def _sources(self) -> list[tuple[StructField, Column]]:
        """Return the table's columns except for position and time, each with its source column."""
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
        """Return the reasons why a record is a bad row. For a good record all are null."""
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
    """Return a plan for a table with the columns ``table``, and the columns that must be added to this table.

    ``table`` is None if the table does not exist yet. ``keys`` and ``partition_by`` have the same meaning as in
    ``Casting``. ``properties`` are the table's current properties.

    Raises:
        ConfigError: a column has no Delta type, or its type cannot be cast to the column's type in the table. A column
            has the name of one of the archive's own columns. A column cannot be a partition column of a new table.
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
    """Check that the topic's columns can be cast to those of the table.

    Nested values are not cast, because a reason could not name the lost value.
    """
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
    """Check the partition columns of a new table.

    Partition values are text, which cannot represent all bytes, so different keys would become equal.
    """
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
    """Return whether all reasons are null.

    Spark evaluates this for every record, so it does not build texts as ``_joined`` does.
    """
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
        # Otherwise Spark silently truncates 1.5 to 1.
        is_bad = is_bad | (source.isNotNull() & ~made.try_cast(field.dataType).eqNullSafe(source))
    return sf.when(is_bad, _message(f"{field.name}: ", source, f" is not a valid {wanted.simpleString()}"))


def _time_reason(name: str, source: Column, kind: DataType) -> Column:
    """Return a reason for times outside the years that every reader supports, or null for other times."""
    if isinstance(kind, TimestampType):
        since = sf.unix_micros(source)
        is_bad, shown = (since < sf.lit(_TIMES[0])) | (since >= sf.lit(_TIMES[1])), since
        words = " us since 1970 is outside the years 1 to 9999"
    else:
        shown = sf.year(source)
        is_bad, words = ~shown.between(1, 9999), " is outside the years 1 to 9999"
    return sf.when(is_bad, _message(f"{name}: ", shown, words))


def _partition_reason(field: StructField, source: Column, *, named: bool) -> Column:
    """Return a reason for values that a partition column cannot hold, or null for other values.

    Delta stores the value as text, and rows with the same value share a directory. ``named`` means that the value names
    the directory.
    """
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
    # Spark parses an empty text to null and does not report it as corrupt.
    is_bad = sf.col("value").isNotNull() & (corrupt.isNotNull() | sf.col(_PARSED).isNull())
    return sf.when(is_bad, _message("value is not a JSON object with these columns: ", sf.col("value"), ""))


def _message(before: str, value: Column, after: str) -> Column:
    return sf.concat(sf.lit(before), sf.left(value.cast("string"), sf.lit(_SHOWN)), sf.lit(after))
