"""Tests of the store that a range is read from, and of the tasks that read it."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from sparklog.delta.archive_progress import ArchiveProgress
from sparklog.delta.data_file import DataFile
from sparklog.delta.snapshot import TableSnapshot, _spans
from sparklog.delta.table import META_COLUMNS, statistics, table_columns
from sparklog.errors import ConfigError
from sparklog.model import Span, TopicPartition
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.spark.history import _check_columns, as_new_as_log
from sparklog.spark.history_plan import BothEnds, pack_files, split_at_archive_end
from sparklog.spark.offsets import PartitionRange
from sparklog.spark.reader import narrow
from sparklog.spark.schema import TopicShape
from sparklog.spark.topics import SelectedTopic, TopicLogEnds

_A, _B = TopicPartition("t", 0), TopicPartition("t", 1)
_ALL = Span()
_MB = 1024 * 1024


def both(end: int, log: tuple[int, int], first: int | None = 0) -> BothEnds:
    snapshot = TableSnapshot(
        "lake/t", 7, ArchiveProgress(topic="t", topic_id="x", batch=3, ends={0: end}, mode="append"), frozenset(), ()
    )
    return BothEnds(snapshot, {_A: TopicLogEnds(*log, 5)}, {} if first is None else {0: first})


def test_a_range_is_cut_at_the_end_of_the_archive() -> None:
    pieces = [PartitionRange(_A, 0, 10), PartitionRange(_B, 3, 9)]
    assert split_at_archive_end(pieces, {0: 4}) == ([(_A, 0, 4)], [(_A, 4, 10), (_B, 3, 9)])
    assert split_at_archive_end(pieces, {0: 10, 1: 3}) == ([(_A, 0, 10)], [(_B, 3, 9)])
    assert split_at_archive_end(pieces, {0: 0, 1: 20}) == ([(_B, 3, 9)], [(_A, 0, 10)])


def test_history_begins_in_the_archive_and_ends_with_the_log() -> None:
    assert both(10, (5, 20), first=2).ends == {_A: TopicLogEnds(2, 20, 5)}
    assert both(10, (5, 20), first=None).ends == {_A: TopicLogEnds(5, 20, 5)}, "only markers were archived"
    assert both(10, (10, 10)).ends == {_A: TopicLogEnds(0, 10, 5)}


def test_records_in_neither_store_are_named_in_the_error() -> None:
    torn = both(10, (15, 20))
    assert torn.is_torn
    assert torn.losses([PartitionRange(_A, 0, 10)]) == []
    assert torn.losses([PartitionRange(_A, 15, 20)]) == []
    assert torn.losses([PartitionRange(_A, 3, 20)]) == [
        "t-0: offsets 10 to 15 were deleted from the log, but the archive lake/t (version 7) ends at 10"
    ]
    assert torn.losses([PartitionRange(_A, 12, 14)])[0].startswith("t-0: offsets 12 to 14 were deleted")
    cut = both(10, (0, 8))
    assert cut.is_torn
    assert (
        "the log was truncated to 8, but the archive lake/t (version 7) ends at 10"
        in cut.losses([PartitionRange(_A, 0, 10)])[0]
    )
    assert not both(10, (10, 10)).is_torn


def test_the_archive_is_needed_below_its_end_and_the_log_start() -> None:
    assert both(10, (5, 20)).is_archive_needed({_A: 9})
    assert not both(10, (5, 20)).is_archive_needed({_A: 10})
    assert both(10, (15, 20)).is_archive_needed({_A: 12}), "the archive may have continued since"
    assert both(10, (5, 20)).is_archive_needed({})
    assert not both(0, (0, 20)).is_archive_needed({})


def test_a_log_range_stays_whole_after_fast_retention() -> None:
    pieces = [PartitionRange(_A, 10, 30), PartitionRange(_B, 10, 30)]
    assert narrow(pieces, {_A: 20, _B: None}, {}) == [(_A, 20, 30)]
    assert narrow(pieces, {_A: 20, _B: None}, {_A: 10, _B: 10}) == [(_A, 20, 30)]
    assert narrow(pieces, {_A: 20, _B: None}, {_A: 11, _B: 30}) == pieces


def test_a_time_is_searched_in_an_archive_that_reaches_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = both(10, (5, 20)).snapshot, both(15, (15, 20)).snapshot
    topic = SelectedTopic("x", TopicShape(pa.schema([])))
    monkeypatch.setattr("sparklog.spark.history.take_snapshot", lambda table, name, ids: newer)
    assert as_new_as_log(older, topic, {_A: 10}) is older
    assert as_new_as_log(older, topic, {_A: 11}) is newer


def test_statistics_for_file_selection_exist_with_any_column_count() -> None:
    narrow = StructType([StructField(f"c{number}", LongType()) for number in range(28)])
    assert statistics(table_columns(narrow)) == {}
    wide = StructType([*narrow.fields, StructField("inner", StructType([StructField("x", LongType())] * 2))])
    assert statistics(table_columns(wide)) == {"delta.dataSkippingNumIndexedCols": "34"}


def test_times_of_statistics_are_as_inexact_as_stored() -> None:
    old, new = -(10**15), 10**15
    actions = pa.table({"min._timestamp": [new, old, None], "max._timestamp": [new, old, None]})
    minute = 60_000_000
    assert _spans(actions, "_timestamp") == [(new, new + 1000), (old - minute, old + 1000 + minute), _ALL]


def test_files_are_packed_by_size_and_skipped_by_statistics() -> None:
    def file(name: str, partitions: Span, offsets: Span, size: int = 40 * _MB, times: Span = _ALL) -> DataFile:
        return DataFile(name, size, partitions, offsets, times)

    files = [
        file("a", Span(0, 1), Span(0, 10)),
        file("b", Span(0, 2), Span(0, 50), size=10 * _MB),
        file("c", Span(0, 1), Span(10, 20)),
        file("d", Span(1, 2), Span(0, 10), size=1, times=Span(100, 200)),
        file("unknown", Span(), Span(), size=1),
    ]

    def packed(*ranges: PartitionRange, times: Span = _ALL) -> list[str]:
        return ["".join(found.path for found in pack) for pack in pack_files(files, ranges, times)]

    assert packed(PartitionRange(_A, 0, 20)) == ["ab", "cunknown"]
    assert packed(PartitionRange(_A, 12, 15)) == ["bcunknown"]
    assert packed(PartitionRange(_B, 0, 1)) == ["bdunknown"]
    assert packed(PartitionRange(_B, 0, 1), times=Span(low=200)) == ["bunknown"]
    assert packed(PartitionRange(_B, 0, 1), times=Span(high=100)) == ["bunknown"]
    assert packed() == []


def test_renamed_columns_of_a_table_are_matched_with_the_topic() -> None:
    """The timestamp of the records is `_timestamp` in the table, where `Timestamp` is a user's own column."""
    topic = SelectedTopic("x", TopicShape(DEFAULT_SCHEMA, "timestamp"))
    progress = ArchiveProgress(topic="t", topic_id="x", batch=3, ends={}, mode="append")

    def check(*own: str) -> None:
        _check_columns(TableSnapshot("lake/t", 7, progress, frozenset({*own, *META_COLUMNS.names}), ()), topic)

    check("key", "value", "headers", "Timestamp")
    with pytest.raises(
        ConfigError, match="column Value, which the topic calls value: archive the topic to another path"
    ):
        check("key", "Value", "headers")
    for own in (("_key", "_headers", "Timestamp"), ("_key", "_headers", "Key")):
        with pytest.raises(ConfigError, match="parsed from the topic's values"):
            check(*own)
