"""``sparklog.read_history``, which returns a topic's archive and log as one DataFrame with each record once.

Spark's own Delta reader reads the archive, so that filters of the DataFrame skip files and row groups. The source reads
the log. The call fixes a version of the table, its archive end (for each partition the first offset that is not
archived), and the ends of the log. The archive job, OPTIMIZE and producers may continue. ``locate_moment`` finds the
offsets of a time in archive and log.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from sparklog.errors import ConfigError
from sparklog.model import Span, TopicPartition
from sparklog.net.client_security import Security
from sparklog.spark.columns import ColumnPlan
from sparklog.spark.configure import BOOTSTRAP_SETTING
from sparklog.spark.history import History, as_new_as_log, records_of_both
from sparklog.spark.offsets import EARLIEST, LATEST, ByOffset, ByTime, PartitionRange, StartPlace
from sparklog.spark.read import chosen_columns, option_texts
from sparklog.spark.read_filter import read_time
from sparklog.spark.read_options import ReadOptions, Subscribe, parse_read_options
from sparklog.spark.reader import HistoryRanges, project, ranges_of_both
from sparklog.spark.topics import Selected, SourceTopic

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructField, StructType

#: The session setting with the path of archives.
HISTORY_SETTING = "spark.sparklog.history"

#: A start or end: a time, as datetime or ISO 8601 text with a time zone, or offsets by partition.
Border = dt.datetime | str | Mapping[int, int]
_ALL = Span()
#: The protocol's value of read_committed.
_COMMITTED = 1
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_BORDER_OPTIONS = ("starting", "ending")


def read_history(
    spark: SparkSession,
    topic: str,
    *,
    history: str | None = None,
    start: Border | None = None,
    end: Border | None = None,
    columns: Iterable[str] | None = None,
    where: str | None = None,
    **options: str | int | bool,
) -> DataFrame:
    """Return all records of ``topic`` that are archived or still in its log, with the columns of ``sparklog.read``.

    Args:
        history: path of the topic's Delta table, or of the directory of all archives; default: the session setting
            ``spark.sparklog.history``.
        start, end: the first record to read, and the end, which is not read. A time means the first record at or after
            it in each partition. A mapping has offsets by partition; partitions that it does not name are read from
            their start, or to their end.
        columns: the columns to read, in this order; other columns are not read.
        where: conditions on partition, offset and timestamp, as in ``sparklog.read``.
        options: further options of ``format("sparklog")`` for reading the log.

    Raises:
        ConfigError: ``history`` has no archive of the topic, the archive has only the topic's current state, an
            argument is not valid, or the session does not support Delta.
        DataLoss: there is a gap between the archive and the log.
        BrokerError: the topic does not exist, or neither the archive nor the log has the offsets.
    """
    asked = _asked(spark, topic, history, where, options)
    asked = replace(asked, starting=_border("start", topic, start), ending=_border("end", topic, end))
    with SourceTopic(asked.bootstrap, asked.security) as view:
        selected = view.select(asked.selection)
        asked = _completed(asked, selected)
        assert asked.history is not None
        found = ranges_of_both(view, asked.history, asked, selected)
    schema = selected.columns(include_headers=asked.include_headers)
    if columns is not None:
        schema = chosen_columns(selected.columns(include_headers=True), columns)
    plan = project(topic, selected.topics[topic].shape, schema)
    sides = []
    if found.archived:
        sides.append(_archived(spark, found, plan, schema, asked))
    if found.logged:
        sides.append(
            _logged(spark, found.logged, schema, table=found.both.snapshot.table, where=where, options=options)
        )
    if not sides:
        return spark.createDataFrame([], schema)
    return sides[0] if len(sides) == 1 else sides[0].unionAll(sides[1])


class Located(NamedTuple):
    """The position of a time in one partition.

    ``offset`` is the offset of the first record at or after the time, and ``store`` is where this record is. If there
    is no such record yet, ``store`` is "ahead" and ``offset`` is the end of the log. ``version`` is the version of the
    table.
    """

    store: Literal["archive", "log", "ahead"]
    offset: int
    version: int


def locate_moment(
    spark: SparkSession,
    topic: str,
    moment: dt.datetime | str,
    *,
    history: str | None = None,
    **options: str | int | bool,
) -> dict[int, Located]:
    """Return the position of the time ``moment`` in each partition of ``topic``.

    The other arguments have the same meaning as in ``read_history``.

    Raises:
        ConfigError: ``history`` has no archive of the topic, or an argument is not valid.
        BrokerError: the topic does not exist.
    """
    asked = _asked(spark, topic, history, None, options)
    assert asked.history is not None
    return find_moment(asked.bootstrap, topic, moment, history=asked.history, security=asked.security)


def find_moment(
    bootstrap: str, topic: str, moment: dt.datetime | str, *, history: str, security: Security = None
) -> dict[int, Located]:
    """Return the position of the time ``moment`` in each partition of ``topic``, without a Spark session.

    Raises the same errors as ``locate_moment``.
    """
    time_us = _time_us("moment", moment)
    with SourceTopic(bootstrap, security) as view:
        selected = view.select(Subscribe((topic,)))
        both = History(history, topic).ends(
            selected.topics[topic], lambda known: view.ends(selected.partitions, _COMMITTED, known=known)
        )
        times = dict.fromkeys(selected.partitions, time_us)
        in_log = view.records_at(times, selected, ends=both.log, isolation=_COMMITTED)
        topic_then = selected.topics[topic]
        both = replace(both, snapshot=as_new_as_log(both.snapshot, topic_then, view.starts(times)))
        found = records_of_both(both.snapshot, times, in_log)
    located = {}
    for tp, offset in sorted(found.items()):
        end = both.ends[tp].end
        store: Literal["archive", "log"] = "log" if offset is None or offset >= both.archive_end(tp) else "archive"
        is_ahead = offset is None or offset >= end
        located[tp.partition] = Located(
            "ahead" if is_ahead else store, end if offset is None else min(offset, end), both.snapshot.version
        )
    return located


# --- arguments ---


def _asked(
    spark: SparkSession, topic: str, history: str | None, where: str | None, options: Mapping[str, str | int | bool]
) -> ReadOptions:
    for name in options:
        if name.lower().startswith(_BORDER_OPTIONS):
            raise ConfigError(f"option {name} is not supported for history: pass start= and end=")
    path = history or spark.conf.get(HISTORY_SETTING, None)
    if not path:
        raise ConfigError(f"no archive given: pass history=, the path of its tables, or set {HISTORY_SETTING}")
    texts = {**option_texts(options), "subscribe": topic, "history": path}
    if where is not None:
        texts["where"] = where
    known = spark.conf.get(BOOTSTRAP_SETTING, None)
    return parse_read_options(texts, {"bootstrap.servers": known} if known else {})


def _border(name: str, topic: str, given: Border | None) -> StartPlace:
    if given is None:
        return ByOffset(name, EARLIEST if name == "start" else LATEST)
    if isinstance(given, Mapping):
        return ByOffset(name, {TopicPartition(topic, number): offset for number, offset in given.items()})
    return ByTime(name, _time_us(name, given), or_latest=True)


def _time_us(name: str, given: dt.datetime | str) -> int:
    try:
        when = read_time(given) if isinstance(given, str) else given
    except ValueError:
        when = None
    if not isinstance(when, dt.datetime) or when.tzinfo is None:
        raise ConfigError(f"{name}={given!r}: expected a datetime or an ISO 8601 text, with a time zone")
    time_us = (when - _EPOCH) // dt.timedelta(microseconds=1)
    if time_us < 0:
        raise ConfigError(f"{name}={given}: expected a time since 1970")
    return time_us


def _completed(asked: ReadOptions, selected: Selected) -> ReadOptions:
    """Return ``asked`` with offsets for the partitions that ``start`` and ``end`` do not name."""
    return replace(
        asked,
        starting=_for_all(asked.starting, selected, EARLIEST),
        ending=_for_all(asked.ending, selected, LATEST),
    )


def _for_all(place: StartPlace, selected: Selected, otherwise: int) -> StartPlace:
    if isinstance(place, ByTime) or isinstance(place.offsets, int):
        return place
    return ByOffset(place.option, {**dict.fromkeys(selected.partitions, otherwise), **place.offsets})


# --- archive and log ---


def _archived(
    spark: SparkSession, found: HistoryRanges, plan: ColumnPlan, schema: StructType, asked: ReadOptions
) -> DataFrame:
    snapshot = found.both.snapshot
    try:
        frame = spark.read.format("delta").option("versionAsOf", snapshot.version).load(snapshot.table)
    except Exception as error:  # pyspark 4.2.0 raises the JVM's error without converting it.
        if "DATA_SOURCE_NOT_FOUND" not in str(error):
            raise
        raise ConfigError(
            "this session does not support Delta: start it with the package io.delta:delta-spark and its extensions,"
            ' or read with format("sparklog") and the option history, which needs no jar'
        ) from None
    condition = _condition(found, asked.where.timestamp)
    if condition is not None:
        frame = frame.where(condition)
    return frame.select(*_selected_columns(frame, plan, schema, topic=found.archived[0].partition.topic))


def _selected_columns(frame: DataFrame, plan: ColumnPlan, schema: StructType, *, topic: str) -> list[Column]:
    """Return the columns of the read, computed from those of the table."""
    from pyspark.sql import functions as sf

    there = {field.name: field.dataType for field in frame.schema.fields}
    columns = []
    for field, source in zip(schema.fields, plan.sources, strict=True):
        if source not in plan.archived_columns:
            column = sf.lit(topic if source == "_topic" else plan.timestamp_type).cast(field.dataType)
        elif source not in there:
            column = sf.lit(None).cast(field.dataType)
        else:
            column = frame[f"`{source.replace('`', '``')}`"]
            if there[source].simpleString() != field.dataType.simpleString():
                column = _cast_back(column, field)
        columns.append(column.alias(field.name))
    return columns


def _cast_back(column: Column, field: StructField) -> Column:
    """Return ``column`` cast to the topic's type.

    A table that was created manually may have another type, to which the archive job cast the values without loss.
    """
    from pyspark.sql import functions as sf

    cast = column.try_cast(field.dataType)
    words = sf.lit(
        f"column {field.name} of the archive has a value that is not a valid {field.dataType.simpleString()}"
    )
    return sf.when(column.isNull() | cast.isNotNull(), cast).otherwise(sf.raise_error(words).cast(field.dataType))


def _condition(found: HistoryRanges, times: Span) -> Column | None:
    """Return the filter for rows of the archive, or None if no filter is needed.

    All rows of a table version are below the end offsets of the archive in this version.
    """
    from pyspark.sql import functions as sf

    partitions: dict[str, list[int]] = {}
    for part in found.archived:
        partitions.setdefault(_bounds(part, found), []).append(part.partition.partition)
    every = sorted(number for number, end in found.both.snapshot.progress.ends.items() if end)
    conditions = []
    if partitions != {"": every}:
        # Build a text, because Spark balances a long chain of ORs only if it parses the chain.
        either = " or ".join(
            f"_partition in ({', '.join(map(str, numbers))}){bounds}" for bounds, numbers in partitions.items()
        )
        conditions.append(f"({either})")
    conditions += [f"_timestamp >= timestamp_micros({times.low})"] if times.low != _ALL.low else []
    conditions += [f"_timestamp < timestamp_micros({times.high})"] if times.high != _ALL.high else []
    return sf.expr(" and ".join(conditions)) if conditions else None


def _bounds(part: PartitionRange, found: HistoryRanges) -> str:
    low, high = "", ""
    if part.start > found.both.first.get(part.partition.partition, 0):
        low = f" and _offset >= {part.start}"
    if part.end < found.both.archive_end(part.partition):
        high = f" and _offset < {part.end}"
    return low + high


def _logged(
    spark: SparkSession,
    ranges: Sequence[PartitionRange],
    schema: StructType,
    *,
    table: str,
    where: str | None,
    options: Mapping[str, str | int | bool],
) -> DataFrame:
    """Return a DataFrame of exactly these ranges of the log, even if partitions are added before they are read.

    If records are archived and deleted from the log before they are read, they are read from the archive.
    """
    (topic,) = {part.partition.topic for part in ranges}
    given = {**option_texts(options), "history": table}
    given["assign"] = _json({topic: [part.partition.partition for part in ranges]})
    given["startingOffsets"] = _json({topic: {str(part.partition.partition): part.start for part in ranges}})
    given["endingOffsets"] = _json({topic: {str(part.partition.partition): part.end for part in ranges}})
    if where is not None:
        given["where"] = where
    return spark.read.format("sparklog").options(**given).schema(schema).load()


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
