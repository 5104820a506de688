"""Tests of the job's arguments, and of what a checkpoint says about a batch, without Spark."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.errors import ParseException, StreamingQueryException
from pyspark.sql.types import DataType, IntegerType, LongType, StructField, StructType

from sparklog.delta import job
from sparklog.delta.archive import explained
from sparklog.delta.archive_progress import ArchiveProgress
from sparklog.delta.archive_table import ArchiveFenced, ArchiveRefused
from sparklog.delta.casting import Casting
from sparklog.delta.file_sizes import FileSizes
from sparklog.delta.job import is_lasting, maintain
from sparklog.delta.maintenance import Maintenance
from sparklog.delta.micro_batch_archiver import BatchArchiver
from sparklog.delta.options import (
    ArchiveOptions,
    interval_s,
    parse_every,
    parse_retention,
    parse_schemas,
    parse_size,
    parse_trigger,
)
from sparklog.delta.quarantine import QuarantineMoved
from sparklog.delta.session import PACKAGE, submit_arguments
from sparklog.delta.stream_ends import BatchEnds, read_batch_ends
from sparklog.delta.table import own_columns, quarantine_path, table_columns, table_path
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import OffsetRange, TopicPartition
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.spark.offsets import parse_by_offset, settle
from sparklog.spark.schema import TopicShape, topic_columns
from sparklog.spark.stream_offset import Position, StreamOffset

INT = StructType([StructField("a", IntegerType())])


def parse(text: str) -> DataType:
    match text:
        case "a int":
            return INT
        case "bigint":
            return LongType()
        case _:
            raise ParseException("no columns")


@pytest.mark.parametrize(
    ("text", "interval", "seconds"),
    [
        ("available-now", None, 0),
        ("30s", "30 seconds", 30),
        ("500ms", "500 milliseconds", 0.5),
        ("5 m", "5 minutes", 300),
        ("1h", "1 hours", 3600),
    ],
)
def test_supported_triggers_become_intervals(text: str, interval: str | None, seconds: float) -> None:
    assert parse_trigger(text) == interval
    assert interval_s(interval) == seconds
    assert interval_s("1 second") == 1


@pytest.mark.parametrize("text", ["once", "30", "-1s", ""])
def test_other_triggers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="available-now"):
        parse_trigger(text)


def test_schemas_of_values_are_parsed_by_topic() -> None:
    assert parse_schemas([], ["t"], parse=parse) == {}
    assert parse_schemas(["a int"], ["t", "u"], parse=parse) == {"t": INT, "u": INT}
    assert parse_schemas(["u=a int"], ["t", "u"], parse=parse) == {"u": INT}
    for text in ("v=a int", "bigint", "u=nonsense"):
        with pytest.raises(ConfigError, match="--schema"):
            parse_schemas([text], ["t", "u"], parse=parse)


def test_additional_packages_are_submitted_too() -> None:
    assert submit_arguments()[:2] == ["--packages", PACKAGE]
    assert submit_arguments("a:b:1")[:2] == ["--packages", f"{PACKAGE},a:b:1"]


def test_batch_ends_are_read_from_a_checkpoint(tmp_path: Path) -> None:
    """The file is as Spark writes it, with the source's offset in its last line."""
    ends = {TopicPartition("t", 0): Position("id", 7, 3), TopicPartition("t", 10): Position("id", 2)}
    begun = {TopicPartition("t", 10): Position("id", 1)}
    (tmp_path / "offsets").mkdir()
    text = json.dumps(StreamOffset(ends, begun).to_json())
    (tmp_path / "offsets" / "4").write_text(f'v1\n{{"batchWatermarkMs":0}}\n{text}')
    earlier = {TopicPartition("t", 0): Position("id", 5), TopicPartition("t", 10): Position("id", 0)}
    (tmp_path / "offsets" / "3").write_text(f"v1\n{{}}\n{json.dumps(StreamOffset(earlier).to_json())}")
    assert read_batch_ends(tmp_path, 4, topic="t") == BatchEnds("id", {0: 7, 10: 2}, {0: 5, 10: 1})
    with pytest.raises(ConfigError, match="no offset of topic u"):
        read_batch_ends(tmp_path, 4, topic="u")


def test_columns_of_tables_avoid_conflicts() -> None:
    shape = TopicShape(DEFAULT_SCHEMA, "timestamp")
    read = topic_columns(shape, include_headers=True, include_cast_errors=True)
    own = own_columns(read, shape.schema.names, is_default=True)
    assert own.names == ["key", "value", "headers"]
    casting = Casting(own, is_default=True, json=None, table=table_columns(own))
    wanted = ["key", "value", "partition", "offset", "timestamp", "headers", "_cast_error"]
    assert casting.read_columns(read).names == wanted
    for names in (["a", "A"], ["_Offset"]):
        columns = StructType([StructField(name, IntegerType()) for name in names])
        with pytest.raises(ConfigError, match="Delta ignores case"):
            own_columns(columns, names, is_default=False)
    assert table_path("/lake/", "t") == "/lake/t" and quarantine_path("/lake", "t") == "/lake/_quarantine/t"
    with pytest.raises(ConfigError):
        table_path("/lake", "_quarantine")


def test_lasting_errors_are_not_retried() -> None:
    assert is_lasting(ArchiveFenced("x")) and is_lasting(ConfigError("x")) and is_lasting(KeyError("a fault of ours"))
    assert is_lasting(BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "x"))
    assert not is_lasting(BrokerError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "x"))
    assert is_lasting(ParseException("[...] ConfigError: option"))
    assert not is_lasting(ParseException("[...] ClientTimeout: no response"))
    assert is_lasting(ParseException("Cannot call methods on a stopped SparkContext."))
    assert not is_lasting(QuarantineMoved("x"))
    assert is_lasting(ConnectionRefusedError("the JVM is gone")) and not is_lasting(OSError(errno.ENOSPC, "no space"))


def test_a_partition_unknown_to_one_broker_is_no_lasting_error() -> None:
    """Spark's planning may ask another broker than the one that resolved the start, and that broker may not know the
    partition yet."""
    known = {TopicPartition("t", number): OffsetRange(0, 5) for number in range(2)}
    place = parse_by_offset("startingOffsets", '{"t": {"0": 3}}', default=0)
    with pytest.raises(ConfigError) as raised:
        settle(place, known, {})
    assert not is_lasting(explained(StreamingQueryException(f"[...] ConfigError: {raised.value}")))
    assert is_lasting(explained(StreamingQueryException("DataLoss: offsets 0 to 3 were deleted\n")))


class _NoTable:
    """A table for batches that are only planned."""

    path, progress = "/lake/t", None


def test_a_batch_that_does_not_follow_is_refused() -> None:
    """There are two cases: the previous batch was not archived, or new partitions have lost their first records."""
    progress = ArchiveProgress(topic="t", topic_id="id", batch=3, ends={0: 5}, mode="append")
    table: Any = _NoTable()
    nothing: Any = None

    def archiver(progress: ArchiveProgress) -> BatchArchiver:
        return BatchArchiver(
            table, nothing, nothing, progress=progress, fail_on_data_loss=True, store=lambda _: None, sizes=FileSizes(1)
        )

    assert archiver(progress)._next(BatchEnds("id", {0: 9, 1: 2}, {0: 5, 1: 0})).ends == {0: 9, 1: 2}
    for begun in ({0: 7, 1: 0}, {0: 5, 1: 1}):
        with pytest.raises(ArchiveRefused, match="were deleted from the log"):
            archiver(progress)._next(BatchEnds("id", {0: 9, 1: 2}, begun))
    new = ArchiveProgress(topic="t", topic_id="id", batch=-1, ends={}, mode="append")
    first = archiver(new)._next(BatchEnds("id", {0: 9}, {0: 7}))
    assert (first.lost, first.begins) == ({}, {0: 7})
    assert archiver(first)._next(BatchEnds("id", {0: 12, 1: 2}, {0: 9, 1: 0})).begins == {0: 7, 1: 0}
    assert archiver(progress)._next(BatchEnds("id", {0: 9}, {0: 5})).begins == {}, (
        "a table without a known begin keeps none"
    )


def test_intervals_sizes_and_retentions_are_parsed() -> None:
    assert [parse_every("--x", text) for text in ("never", "0s", "30m", "1h", "2d")] == [None, 0, 1800, 3600, 172_800]
    assert [parse_size("--x", text) for text in ("1m", "128MB", "1 g", "2097152")] == [
        1 << 20,
        1 << 27,
        1 << 30,
        2 << 20,
    ]
    assert [parse_retention(text) for text in ("7d", "168h", "14d")] == [168, 168, 336]
    for call in (
        lambda: parse_every("--x", "1 fortnight"),
        lambda: parse_size("--x", "100k"),
        lambda: parse_size("--x", "large"),
        lambda: parse_retention("167h"),
        lambda: parse_retention("never"),
    ):
        with pytest.raises(ConfigError, match="expected"):
            call()


def test_small_batches_take_one_task_and_large_ones_many() -> None:
    sizes = FileSizes(100_000_000)
    assert sizes.tasks(0) == sizes.tasks(1000) == 1
    assert sizes.tasks(10_000_000) == 40
    sizes.wrote(1_000_000, 10_000_000)
    sizes.wrote(0, 0)
    assert [sizes.tasks(offsets) for offsets in (2_500_000, 2_600_000, 10_000_000)] == [1, 2, 4]


def test_a_stop_prevents_the_start_of_maintenance(tmp_path: Path) -> None:
    archives = [ArchiveOptions(bootstrap="", topic=name, to=str(tmp_path), group="g") for name in ("first", "second")]
    stopping, said = threading.Event(), list[str]()
    stopping.set()
    assert maintain(cast(Any, None), archives, stopping=stopping, tell=said.append) == {}
    assert said == ["stopped before first"]


def test_a_stop_during_maintenance_starts_no_other_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The maintenance continues neither with another topic nor with the quarantine of the same one."""
    archives = [ArchiveOptions(bootstrap="", topic=name, to=str(tmp_path), group="g") for name in ("first", "second")]
    stopping, begun, said = threading.Event(), list[str](), list[str]()

    class Looking(Maintenance):
        def __init__(self, tables: list[str]) -> None:
            self._tables, self._every_s = tables, None

        def _maintain(self, path: str) -> Exception | None:
            begun.append(path)
            if len(begun) == 3:
                stopping.set()
            return None

    class There:
        def versions(self) -> list[int]:
            return [0]

    monkeypatch.setattr(job, "open_log_with_spark", lambda *_: There())
    monkeypatch.setattr(
        job, "maintenance_of", lambda _spark, options, tell: Looking([f"{options.topic}/{n}" for n in range(2)])
    )
    assert maintain(cast(Any, None), archives, stopping=stopping, tell=said.append) == {}
    assert begun == ["first/0", "first/1", "second/0"]
    begun.clear()
    stopping.clear()
    begun.extend(["", ""])
    assert maintain(cast(Any, None), archives, stopping=stopping, tell=said.append) == {}
    assert begun == ["", "", "first/0"]
    assert said[-1] == "stopped before second"
