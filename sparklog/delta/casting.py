"""From records as the source shows them to rows of their table, and to the reason why a record is none.

A table that is there decides what its columns are: those the topic has in another type are cast, where no value may
change by that. Values of a topic without a schema may be JSON that is taken apart. A record that cannot be cast as a
whole is a bad row: it has a reason. Pure: makes Spark's column expressions, runs nothing.
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

#: Of the key and the headers beside columns that were taken out of the value.
JSON_KEY, JSON_HEADERS = "_key", "_headers"
#: Whether a row deletes its key; in no table.
TOMBSTONE = "_sparklog_tombstone"
#: The source's: values that no type of Spark's can hold.
_CAST_ERROR = "_cast_error"
#: In the message of a failure: a record is none.
BAD_ROW = "SPARKLOG_BAD_ROW"
_PLACE = (PARTITION, OFFSET, TIMESTAMP)
_CORRUPT = "_sparklog_corrupt"
_PARSED = "_sparklog_parsed"
_DAY_US = 86_400_000_000
#: Years 1 to 9999, which every reader of a table can show, in us since 1970; half-open.
_TIMES = (-62_135_596_800_000_000, 253_402_300_800_000_000)
#: Of a value that a reason shows.
_SHOWN = 100
#: What Spark writes as three characters in the names of directories, and `{` to be on the safe side.
_ESCAPED = r"[\x01-\x1f\x7f\"#%'*/:=?\\\[\]^{]"
#: Of a name in a directory, on file systems.
_NAME_BYTES = 255
#: Values of a column that a table is partitioned by which Delta takes for null.
_NULLS = ("", "__HIVE_DEFAULT_PARTITION__")


@dataclass(frozen=True, slots=True)
class Casting:
    """How the records of one topic become rows. ``own``: its columns as they are read; ``json``: those in its values;
    ``table``: the columns that rows get; ``keys``: of the table of a topic's current state, those of ``own`` that are
    the key, else none. ``partition_by``: the table's columns that it is partitioned by; ``named``: whether directories
    are called by their values."""

    own: StructType
    is_default: bool
    json: StructType | None
    table: StructType
    keys: tuple[str, ...] = ()
    partition_by: tuple[str, ...] = ()
    named: bool = True

    def rows(self, read: DataFrame) -> tuple[DataFrame, DataFrame]:
        """The records of ``read``, which has the source's columns, as rows of the table, and the others as rows of the
        quarantine. Where there are keys, rows have a column ``TOMBSTONE`` as well."""
        placed = self._placed(read)
        reasons = self._reasons(placed)
        is_good = _is_none(reasons)
        record = sf.struct(*(_column(name) for name in self.own.names)).alias(RECORD)
        bad = placed.where(~is_good).select(*_PLACE, _joined(reasons).alias(REASON), record)
        return self._good(placed.where(is_good)), bad

    def rows_or_failure(self, read: DataFrame) -> DataFrame:
        """All records as rows of the table; what is made of them fails, with ``BAD_ROW`` in its message, where there
        is another."""
        placed = self._placed(read)
        reasons = self._reasons(placed)
        failure = sf.raise_error(sf.concat(sf.lit(f"{BAD_ROW}: "), _joined(reasons))).cast("boolean")
        return self._good(placed.where(sf.when(_is_none(reasons), True).otherwise(failure)))

    def read_columns(self, offered: StructType) -> StructType:
        """Those of the source's columns that rows are made of: each of the others would cost the JVM time."""
        wanted = {*self.own.names, *self._place_names, _CAST_ERROR}
        return StructType([field for field in offered.fields if field.name in wanted])

    @property
    def _place_names(self) -> tuple[str, ...]:
        """What the source calls a record's place and time."""
        return ("partition", "offset", "timestamp") if self.is_default else _PLACE

    def _good(self, placed: DataFrame) -> DataFrame:
        more = [self._is_tombstone().alias(TOMBSTONE)] if self.keys else []
        return placed.select(*self._values(), *_PLACE, _utc_date().alias(DATE), *more)

    @property
    def table_keys(self) -> tuple[str, ...]:
        """The names of the keys in the table."""
        return (JSON_KEY,) if self.keys and self.json is not None else self.keys

    def _is_tombstone(self) -> Column:
        """Whether a record deletes its key. The same as ``record.keys.tombstones`` finds."""
        others = ["value"] if self.is_default else [name for name in self.own.names if name not in self.keys]
        return _all_null(others) if others else sf.lit(False)

    def _placed(self, read: DataFrame) -> DataFrame:
        """The topic's own columns under their names, and where and when each record is."""
        place = [sf.col(name).alias(alias) for name, alias in zip(self._place_names, _PLACE, strict=True)]
        told = [name for name in (_CAST_ERROR,) if name in read.columns and name not in self.own.names]
        placed = read.select(*(_column(name) for name in self.own.names), *place, *told)
        if self.json is None:
            return placed
        wanted = StructType([*self.json.fields, StructField(_CORRUPT, StringType())])
        options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
        return placed.withColumn(_PARSED, sf.from_json(sf.col("value").cast("string"), wanted, options))

    def _sources(self) -> list[tuple[StructField, Column]]:
        """The table's columns but for those of place and time, and where each comes from."""
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

    def _reasons(self, placed: DataFrame) -> list[Column]:
        """Why a record may be no row: all are null of one that is."""
        wanted = _by_name(self.table)
        found = [sf.col(_CAST_ERROR)] if _CAST_ERROR in placed.columns and _CAST_ERROR not in self.own.names else []
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
    """How records become rows of a table with the columns ``table`` (None: it is not there yet), and the columns that
    the table has to get. ``keys`` and ``partition_by``: as in ``Casting``; ``properties``: the table's, as it is.

    Raises:
        ConfigError: naming the columns that Delta has no type for, that are in the table in a type nothing is cast to,
            that would stand beside the archive's own under the same name, or that no new table can be partitioned by.
    """
    if json is not None and not is_default:
        raise ConfigError("the topic has a schema: its values are not JSON to be taken apart")
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
            raise ConfigError(f"column {name} would be in the table twice: Delta ignores case")
        seen.add(name)
    if refused := [f"{field.name} ({field.dataType.simpleString()})" for field in columns.fields if _lacks(field)]:
        raise ConfigError(f"Delta has no type for column {', '.join(refused)}")


def _lacks(field: StructField) -> bool:
    refused = DayTimeIntervalType | YearMonthIntervalType | TimeType | NullType
    return any(isinstance(part, refused) for part in parts(field.dataType))


def _check_kinds(needed: StructType, there: Mapping[str, StructField]) -> None:
    """Nested values are not cast: it could not be told which of them was lost."""
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
                f"{field.name} is {found.dataType.simpleString()} there and {field.dataType.simpleString()} here"
            )
    if complaints:
        raise ConfigError(f"the table's columns do not fit: {'; '.join(complaints)}")


def _check_partitions(columns: StructType, partition_by: tuple[str, ...]) -> None:
    """Of a new table. Partitions are told apart by text, which not all bytes are: different keys would become one."""
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
    """Equal but for nullability and what is noted beside columns."""
    return left.simpleString() == right.simpleString()


def _by_name(columns: StructType) -> dict[str, StructField]:
    return {field.name.lower(): field for field in columns.fields}


def _column(name: str) -> Column:
    quoted = name.replace("`", "``")
    return sf.col(f"`{quoted}`")


def _all_null(names: Iterable[str]) -> Column:
    return reduce(and_, (_column(name).isNull() for name in names))


def _utc_date() -> Column:
    """Whatever the session's zone."""
    since = sf.unix_micros(sf.col(TIMESTAMP))
    return sf.date_from_unix_date(sf.round((since - sf.pmod(since, sf.lit(_DAY_US))) / sf.lit(_DAY_US)).cast("int"))


def _is_none(reasons: list[Column]) -> Column:
    """Asked of every record: nothing is put together for it, as ``_joined`` would."""
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
        # Spark cuts 1.5 to 1 without a word.
        is_bad = is_bad | (source.isNotNull() & ~made.try_cast(field.dataType).eqNullSafe(source))
    return sf.when(is_bad, _told(f"{field.name}: ", source, f" is no {wanted.simpleString()}"))


def _time_reason(name: str, source: Column, kind: DataType) -> Column:
    """Null for times within the years that everybody can show."""
    if isinstance(kind, TimestampType):
        since = sf.unix_micros(source)
        is_bad, shown = (since < sf.lit(_TIMES[0])) | (since >= sf.lit(_TIMES[1])), since
        words = " us since 1970 are not in the years 1 to 9999"
    else:
        shown = sf.year(source)
        is_bad, words = ~shown.between(1, 9999), " is not one of the years 1 to 9999"
    return sf.when(is_bad, _told(f"{name}: ", shown, words))


def _partition_reason(field: StructField, source: Column, *, named: bool) -> Column:
    """Delta keeps a value of such a column as text, and rows of one value share a directory. ``named``: which is called
    by the value."""
    text = source.try_cast(field.dataType).cast("string")
    before = f"{field.name}: the table is partitioned by it, and "
    reason = sf.when(text.isin(*_NULLS), _told(f"{before}Delta takes this text there for null: ", text, ""))
    if isinstance(field.dataType, BinaryType):
        # A cast to text keeps all bytes as they are.
        changed = sf.concat(sf.lit(f"{before}Delta would change these bytes, which are no UTF-8: "), _hex(source))
        reason = reason.when(~sf.is_valid_utf8(text), changed)
    if named:
        room = _NAME_BYTES - len(re.sub(_ESCAPED, "%00", field.name).encode()) - 1
        is_long = sf.octet_length(sf.regexp_replace(text, _ESCAPED, "%00")) > room
        words = f"{before}no directory can be called by this text: "
        reason = reason.when(sf.contains(text, sf.lit("\0")) | is_long, _told(words, text, ""))
    return reason


def _hex(value: Column) -> Column:
    return sf.left(sf.hex(value), sf.lit(_SHOWN))


def _json_reason() -> Column:
    corrupt = sf.col(_PARSED).getField(_CORRUPT)
    # An empty text is parsed to null without being called corrupt.
    is_bad = sf.col("value").isNotNull() & (corrupt.isNotNull() | sf.col(_PARSED).isNull())
    return sf.when(is_bad, _told("value is no JSON object of these columns: ", sf.col("value"), ""))


def _told(before: str, value: Column, after: str) -> Column:
    return sf.concat(sf.lit(before), sf.left(value.cast("string"), sf.lit(_SHOWN)), sf.lit(after))
