"""Tests of batch reads of a topic's archive and log together, without Spark, on real brokers and tables."""

from __future__ import annotations

import datetime as dt
import json
import logging
import pickle
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.delta.rows import ArchiveFileGone
from sparklog.delta.topic_description import to_json
from sparklog.errors import BrokerError, ConfigError
from sparklog.model import TopicPartition
from sparklog.spark.history_read_task import FilesRead
from sparklog.spark.range_read import DataLoss, RangeRead
from sparklog.spark.read_history import find_moment
from sparklog.spark.read_options import parse_read_options, parse_schema_options
from sparklog.spark.reader import BatchReader, plan_read
from sparklog.spark.topics import SourceTopic
from sparklog.testing.process_cluster import ProcessCluster
from tests.cli.in_process import in_process
from tests.delta.history_tables import Archive, instant

pytestmark = pytest.mark.integration

_NOON = 1_700_049_600_000_000
_HOUR = 3_600_000_000
_TYPED = "n bigint, t timestamp, word string"

#: Plan and read, with options.
Read = Callable[..., list[dict[str, Any]]]


def options_of(brokers: ProcessCluster, archive: Archive, **options: str) -> dict[str, str]:
    topic = Path(archive.path).name
    return {"bootstrap.servers": brokers.bootstrap, "subscribe": topic, "history": archive.path, **options}


def reader_of(given: dict[str, str], columns: list[str] | None = None) -> BatchReader:
    options = parse_read_options(given, {})
    with SourceTopic(options.bootstrap) as view:
        selected = view.select(parse_schema_options(given, {}).selection)
        schema = selected.columns(include_headers=options.include_headers)
        if columns is not None:
            schema = type(schema)([schema[name] for name in columns])
        return BatchReader(plan_read(view, options, schema=schema))


def read(given: dict[str, str], columns: list[str] | None = None) -> list[dict[str, Any]]:
    """Return all rows by partition and offset. A copy of the reader reads each task, as in Spark."""
    reader = reader_of(given, columns)
    copy = pickle.loads(pickle.dumps(reader))
    batches = [batch for task in reader.partitions() for batch in copy.read(pickle.loads(pickle.dumps(task)))]
    rows = [row for batch in batches for row in batch.to_pylist()]
    place = [name for name in ("_partition", "partition", "_offset", "offset") if rows and name in rows[0]]
    return sorted(rows, key=lambda row: [row[name] for name in place])


def places(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(row["_partition"], row["_offset"]) for row in rows]


def write(brokers: ProcessCluster, topic: str, numbers: range, partition: int, *, hour: float = 0) -> None:
    """Return rows ``n`` one minute apart, from ``hour`` hours after noon on."""
    times = [_NOON + int(hour * _HOUR) + place * 60_000_000 for place in range(len(numbers))]
    data = pa.table(
        {
            "n": pa.array(numbers, pa.int64()),
            "t": pa.array(times, pa.timestamp("us", "UTC")),
            "word": [f"word {number}" for number in numbers],
        }
    )
    with Producer(brokers.bootstrap) as producer:
        producer.write(topic, data, partition=partition).result()


@pytest.fixture
def typed(brokers: ProcessCluster, admin: Admin, topic: str, lake: str) -> Archive:
    """Create a topic with two partitions and its archive.

    Partition 0 has offsets 0 to 30, of which 20 are archived. Partition 1 has 0 to 10, of which 4 are archived, and is
    a day older. The archive has files of two commits.
    """
    admin.create_topic(
        topic, partitions=2, replication_factor=1, schema=_TYPED, event_time="t", config={"retention.ms": -1}
    )
    archive = Archive(brokers.bootstrap, topic, lake, row_group=4)
    write(brokers, topic, range(12), 0)
    write(brokers, topic, range(100, 110), 1, hour=-24)
    archive.archive({0: 12, 1: 4})
    write(brokers, topic, range(12, 30), 0, hour=1)
    archive.archive({0: 20})
    return archive


def test_each_offset_is_read_once_from_either_store(
    typed: Archive, brokers: ProcessCluster, admin: Admin, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = options_of(brokers, typed)
    everything = read({name: text for name, text in given.items() if name != "history"})
    assert len(everything) == 40
    assert read(given) == everything
    # Below the end of the archive the log may be shorter or empty.
    admin.delete_records({TopicPartition(topic, 0): 13, TopicPartition(topic, 1): 4})
    assert read(given) == everything
    typed.compact()
    assert read(given) == everything
    typed.archive()
    admin.delete_records({TopicPartition(topic, 0): None, TopicPartition(topic, 1): None})
    assert read(given) == everything
    assert read({**given, "history": str(Path(typed.path).parent)}) == everything
    # Above it records are missing: the read reports that, or skips them on request.
    write(brokers, topic, range(30, 40), 0)
    admin.delete_records({TopicPartition(topic, 0): 35})
    with pytest.raises(
        DataLoss, match=f"{topic}-0: offsets 30 to 35 were deleted from the log, but the archive .* ends at 30"
    ):
        read(given)
    assert len(read({**given, "where": "partition = 1"})) == 10, "partition 1 has no hole"
    with caplog.at_level(logging.WARNING):
        assert [row["n"] for row in read({**given, "failOnDataLoss": "false"})][30:35] == [35, 36, 37, 38, 39]
    assert "offsets 30 to 35 were deleted" in caplog.text


def test_ranges_conditions_and_columns_hold_on_both_sides(typed: Archive, brokers: ProcessCluster, topic: str) -> None:
    given = options_of(brokers, typed)
    everything = read({name: text for name, text in given.items() if name != "history"})
    for options in (
        {"startingOffsets": f'{{"{topic}": {{"0": 18, "1": -2}}}}'},
        {
            "startingOffsets": f'{{"{topic}": {{"0": 21, "1": 3}}}}',
            "endingOffsets": f'{{"{topic}": {{"0": 25, "1": 4}}}}',
        },
        {"endingOffsets": f'{{"{topic}": {{"0": 5, "1": 0}}}}'},
        {"where": "partition = 1 and offset between 2 and 6"},
        {"where": "partition in (0) and offset >= 15"},
        {"where": f"timestamp >= {_NOON // 1000 + 300_000} and timestamp < {(_NOON + _HOUR) // 1000 + 600_000}"},
        {"startingTimestamp": str(_NOON // 1000 + 3 * 60_000), "startingOffsetsByTimestampStrategy": "latest"},
        {"startingTimestamp": str((_NOON - 24 * _HOUR) // 1000 + 8 * 60_000)},
        {"startingTimestamp": "0", "endingTimestamp": str((_NOON + _HOUR) // 1000 + 9 * 60_000)},
        {"minPartitions": "9"},
        {"maxRecordsPerPartition": "3"},
    ):
        expected = read({**{name: text for name, text in given.items() if name != "history"}, **options})
        assert expected
        assert read({**given, **options}) == expected, options
    assert read(given, ["word", "_offset", "_partition"]) == [
        {name: row[name] for name in ("word", "_offset", "_partition")} for row in everything
    ]
    assert len(read(given, ["_topic"])) == 40


def test_only_ranges_that_may_match_are_planned(typed: Archive, brokers: ProcessCluster, topic: str) -> None:
    def tasks(**options: str) -> tuple[int, list[str]]:
        """Return the files of the archive and the ranges of the log in the plan."""
        planned = reader_of(options_of(brokers, typed, **options)).partitions()
        logged = [task for task in planned if isinstance(task, RangeRead)]
        files = {file.path for task in planned if isinstance(task, FilesRead) for file in task.files}
        return len(files), [f"{task.partition.partition}:{task.start}-{task.end}" for task in logged]

    assert tasks() == (3, ["0:20-30", "1:4-10"])
    assert tasks(where="partition = 1") == (1, ["1:4-10"])
    assert tasks(where="offset >= 12") == (1, ["0:20-30"])
    assert tasks(where=f"timestamp >= {(_NOON + _HOUR) // 1000}")[0] == 1
    assert tasks(where=f"timestamp < {_NOON // 1000}")[0] == 1
    assert tasks(endingOffsets=f'{{"{topic}": {{"0": 20, "1": 4}}}}') == (3, [])
    assert tasks(startingOffsets=f'{{"{topic}": {{"0": 20, "1": 4}}}}') == (0, ["0:20-30", "1:4-10"])


def test_a_time_is_found_in_archive_or_log_or_neither(
    typed: Archive, brokers: ProcessCluster, admin: Admin, topic: str
) -> None:
    admin.delete_records({TopicPartition(topic, 0): 20, TopicPartition(topic, 1): 4})
    typed.compact()

    def moment(us: int) -> dict[int, tuple[str, int]]:
        located = find_moment(brokers.bootstrap, topic, instant(us), history=typed.path)
        return {number: found[:2] for number, found in located.items()}

    assert moment(0) == {0: ("archive", 0), 1: ("archive", 0)}
    assert moment(_NOON - 24 * _HOUR + 1) == {0: ("archive", 0), 1: ("archive", 1)}
    assert moment(_NOON - 24 * _HOUR + 4 * 60_000_000) == {0: ("archive", 0), 1: ("log", 4)}
    assert moment(_NOON + 11 * 60_000_000 + 1) == {0: ("archive", 12), 1: ("ahead", 10)}
    assert moment(_NOON + _HOUR + 8 * 60_000_000) == {0: ("log", 20), 1: ("ahead", 10)}
    assert moment(_NOON + 2 * _HOUR) == {0: ("ahead", 30), 1: ("ahead", 10)}
    command = ("topics", "locate", topic, "2023-11-14T12:04:00Z", "--history", typed.path, "-b", brokers.bootstrap)
    told = in_process(*command, "--json")
    assert json.loads(told.text) == [
        {"partition": 0, "store": "archive", "offset": 0, "version": 2},
        {"partition": 1, "store": "log", "offset": 4, "version": 2},
    ]
    assert in_process(*command).text.splitlines()[1].split() == ["0", "archive", "0", "2"]


def test_deleted_rows_stay_deleted_and_vacuumed_files_are_reported(typed: Archive, brokers: ProcessCluster) -> None:
    given = options_of(brokers, typed)
    reader = reader_of(given)
    planned = reader.partitions()
    typed.delete("_partition = 0 and _offset in (3, 13)")
    assert [place for place in places(read(given)) if place[0] == 0] == [(0, n) for n in range(30) if n not in (3, 13)]
    assert sum(batch.num_rows for task in planned for batch in reader.read(task)) == 40, "planned before the vacuum"
    typed.vacuum()
    with pytest.raises(ArchiveFileGone, match="no longer exists: the table was vacuumed after the read was"):
        for task in planned:
            list(reader.read(task))
    assert len(read(given)) == 38


def test_a_table_without_archive_commits_ends_with_its_rows(
    typed: Archive, brokers: ProcessCluster, admin: Admin, topic: str, tmp_path: Path
) -> None:
    """Delta has cleaned its log, so the table has no commits of the archive."""
    rows = DeltaTable(typed.path).to_pyarrow_table()
    kept = {"sparklog.topic": to_json(admin.describe_topic(topic))}
    state = {**kept, "sparklog.mode": "upsert"}
    named = rows.rename_columns({"word": "Word"})  # as in a table made by hand: Delta ignores case
    for name, properties in (("kept", kept), ("state", state), ("named", kept)):
        write_deltalake(str(tmp_path / name), named if name == "named" else rows, partition_by=["_date"])
        DeltaTable(str(tmp_path / name)).alter.set_table_properties(properties, raise_if_not_exists=False)
    given = options_of(brokers, typed)
    everything = read(given)
    admin.delete_records({TopicPartition(topic, 0): 20, TopicPartition(topic, 1): 4})
    assert read({**given, "history": str(tmp_path / "kept")}) == everything
    for name, message in (
        ("state", "was archived in mode upsert"),
        ("named", "has a column Word, which the topic calls word"),
    ):
        with pytest.raises(ConfigError, match=message):
            read({**given, "history": str(tmp_path / name)})


def test_every_type_and_column_survives_the_archive(
    brokers: ProcessCluster, admin: Admin, topic: str, lake: str
) -> None:
    schema = pa.schema(
        [
            pa.field("flag", pa.bool_(), nullable=False),
            *(pa.field(f"i{bits}", getattr(pa, f"int{bits}")()) for bits in (8, 16, 32, 64)),
            ("u", pa.uint32()),
            ("f", pa.float32()),
            ("d", pa.float64()),
            ("price", pa.decimal128(10, 2)),
            ("text", pa.string()),
            ("raw", pa.binary()),
            ("day", pa.date32()),
            ("at", pa.timestamp("us", "UTC")),
            ("local", pa.timestamp("us")),
            ("numbers", pa.list_(pa.int64())),
            ("inner", pa.struct([("x", pa.int64()), ("when", pa.list_(pa.timestamp("us", "UTC")))])),
            ("named", pa.map_(pa.string(), pa.int32())),
        ]
    )
    admin.create_topic(topic, partitions=1, replication_factor=1, schema=schema, key="text")
    when = dt.datetime(2024, 5, 1, 12, 30, 0, 123456, dt.timezone.utc)
    row = {
        "flag": True,
        "i8": -8,
        "i16": 16,
        "i32": -32,
        "i64": 2**62,
        "u": 2**31,
        "f": 0.5,
        "d": 1e300,
        "price": Decimal("-3.14"),
        "text": "ä",
        "raw": b"\0\1",
        "day": dt.date(1500, 1, 1),
        "at": when,
        "local": when.replace(tzinfo=None),
        "numbers": [1, None, 3],
        "named": [("a", 1), ("b", None)],
        "inner": {"x": 1, "when": [when, None]},
    }
    rows = [row, {**dict.fromkeys(row), "flag": False}]
    with Producer(brokers.bootstrap) as producer:
        producer.write(topic, pa.Table.from_pylist(rows, schema)).result()
    archive = Archive(brokers.bootstrap, topic, lake)
    archive.archive()
    given = options_of(brokers, archive)
    logged = read({name: text for name, text in given.items() if name != "history"})
    admin.delete_records({TopicPartition(topic, 0): None})
    assert read(given) == logged
    assert [row["text"] for row in logged] == ["ä", None]
    # The topic got this column after the rows were archived.
    admin.add_columns(topic, pa.schema([("note", pa.string())]))
    with Producer(brokers.bootstrap) as producer:
        producer.write(
            topic, pa.Table.from_pylist([{**row, "note": "new"}], schema.append(pa.field("note", pa.string())))
        ).result()
    assert [row["note"] for row in read(given)] == [None, None, "new"]


def test_a_topic_without_a_schema_shows_the_same_columns(
    brokers: ProcessCluster, admin: Admin, topic: str, lake: str
) -> None:
    admin.create_topic(topic, partitions=1, replication_factor=1)
    archive = Archive(brokers.bootstrap, topic, lake)
    with Producer(brokers.bootstrap) as producer:
        for number in range(6):
            headers = [("h", b"1"), ("h", None)] if number % 2 else None
            producer.send(topic, b"v%d" % number, key=b"k", headers=headers)
            producer.flush()
    archive.archive({0: 4})
    given = options_of(brokers, archive, includeHeaders="true")
    logged = read({name: text for name, text in given.items() if name != "history"})
    admin.delete_records({TopicPartition(topic, 0): 4})
    assert read(given) == logged
    assert [row["value"] for row in logged] == [b"v%d" % number for number in range(6)]
    assert logged[0]["headers"] is None
    assert logged[1]["headers"]


def test_an_archive_of_another_topic_is_refused(
    typed: Archive, brokers: ProcessCluster, admin: Admin, topic: str, tmp_path: Path
) -> None:
    given = options_of(brokers, typed)
    with pytest.raises(ConfigError, match=f"there is no Delta table at {tmp_path}/x or {tmp_path}/x/{topic}"):
        read({**given, "history": f"{tmp_path}/x"})
    other = Archive(brokers.bootstrap, topic, str(tmp_path / "upsert"))
    other.archive(mode="upsert")
    with pytest.raises(ConfigError, match="was archived in mode upsert: it has the topic's current state, not its"):
        read({**given, "history": other.path})
    write_deltalake(str(tmp_path / "plain"), pa.table({"_offset": [1]}))
    with pytest.raises(ConfigError, match="was not written by an archive"):
        read({**given, "history": str(tmp_path / "plain")})
    for options, message in (
        ({"subscribe": f"{topic},other"}, "requires a single topic"),
        ({"isolation.level": "read_uncommitted"}, "committed records only"),
        ({"history": " "}, "expected a path"),
    ):
        with pytest.raises(ConfigError, match=message):
            read({**given, **options})
    with pytest.raises(BrokerError, match=r"endingOffsets: offset 99 of .* is outside the log, which has 0 to 30"):
        read({**given, "endingOffsets": f'{{"{topic}": {{"0": 99, "1": 0}}}}'})
    admin.delete_topic(topic)
    admin.create_topic(topic, partitions=2, replication_factor=1, schema=_TYPED, event_time="t")
    with pytest.raises(ConfigError, match=f"is the archive of an earlier topic {topic} "):
        read(given)
