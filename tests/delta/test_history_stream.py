"""Tests of streams that begin in the archive and continue in the log, without Spark, on real brokers and tables."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.errors import ConfigError
from sparklog.model import TopicPartition
from sparklog.spark.history_read_task import FilesRead
from sparklog.spark.range_read import DataLoss, RangeRead
from sparklog.spark.read_options import parse_read_options
from sparklog.spark.schema import DEFAULT_COLUMNS
from sparklog.spark.stream import StreamReader
from sparklog.spark.stream_offset import parse_stream_offset
from sparklog.testing.process_cluster import ProcessCluster
from tests.delta.history_tables import Archive

pytestmark = pytest.mark.integration

Place = tuple[int, int]


class Query:
    """A query's checkpoint and its runs. Offsets pass through JSON, readers and tasks through pickle, as in Spark."""

    def __init__(self, bootstrap: str, archive: Archive, **options: str) -> None:
        self._given = {
            "bootstrap.servers": bootstrap,
            "subscribe": Path(archive.path).name,
            "history": archive.path,
            "startingoffsets": "earliest",
            **{name.lower(): text for name, text in options.items()},
        }
        self.offset: dict[str, Any] = {}
        self.reader = self._fresh()
        #: Files of the archive and ranges of the log that the last batch reads.
        self.files = 0
        self.ranges: list[str] = []

    def restart(self, **options: str) -> None:
        self._given.update({name.lower(): text for name, text in options.items()})
        self.reader.stop()
        self.reader = self._fresh()

    def plan(self, limit: int | None = None) -> dict[str, Any]:
        start = self.offset or self.reader.initialOffset()
        bound = ReadMaxRows(limit) if limit else ReadAllAvailable()
        found: dict[str, Any] = json.loads(json.dumps(self.reader.latestOffset(start, bound)))
        return found

    def rows(self, end: dict[str, Any]) -> list[Place]:
        """Return the rows of the batch up to ``end``, from a separate reader as in Spark."""
        tasks = self.reader.partitions(self.offset or self.reader.initialOffset(), end)
        self.files = sum(len(task.files) for task in tasks if isinstance(task, FilesRead))
        self.ranges = [
            f"{task.partition.partition}:{task.start}-{task.end}" for task in tasks if isinstance(task, RangeRead)
        ]
        other = pickle.loads(pickle.dumps(self._fresh()))
        rows = [
            (row["partition"], row["offset"])
            for task in tasks
            for batch in other.read(pickle.loads(pickle.dumps(task)))
            for row in batch.to_pylist()
        ]
        return sorted(rows)

    def batch(self, limit: int | None = None) -> list[Place]:
        """Plan a batch, read it, and advance the offset to its end."""
        end = self.plan(limit)
        rows = self.rows(end)
        self.offset = end
        return rows

    def without_history(self) -> None:
        """Restart the query with the log alone."""
        del self._given["history"]
        self.restart()

    def rest(self, limit: int) -> Iterator[list[Place]]:
        """Yield batches until no records are left."""
        while (before := self.offset) != (end := self.plan(limit)):
            yield self.batch(limit)
            assert self.offset == end != before

    def _fresh(self) -> StreamReader:
        return StreamReader(parse_read_options(self._given, {}, streaming=True), DEFAULT_COLUMNS)


def produce(brokers: ProcessCluster, topic: str, count: int, partition: int = 0) -> None:
    with Producer(brokers.bootstrap) as producer:
        for number in range(count):
            producer.send(topic, b"%d" % number, partition=partition)


@pytest.fixture
def archive(brokers: ProcessCluster, admin: Admin, topic: str, lake: str) -> Archive:
    """Create a topic and its archive.

    Partition 0 has offsets 0 to 30, of which 20 are archived. Partition 1 has 0 to 10, of which 8 are archived. The log
    starts at the end of the archive. The archive has two commits, and was compacted into one file.
    """
    admin.create_topic(topic, partitions=2, replication_factor=1)
    archive = Archive(brokers.bootstrap, topic, lake, row_group=4)
    produce(brokers, topic, 30)
    produce(brokers, topic, 10, partition=1)
    archive.archive({0: 12, 1: 4})
    archive.archive({0: 20, 1: 8})
    archive.compact()
    admin.delete_records({TopicPartition(topic, 0): 20, TopicPartition(topic, 1): 8})
    return archive


@pytest.fixture
def query_of(brokers: ProcessCluster, archive: Archive) -> Iterator[Callable[..., Query]]:
    made: list[Query] = []

    def make(**options: str) -> Query:
        made.append(Query(brokers.bootstrap, archive, **options))
        return made[-1]

    yield make
    for query in made:
        query.reader.stop()


def everything(zero: int = 30, one: int = 10) -> list[Place]:
    return [*((0, offset) for offset in range(zero)), *((1, offset) for offset in range(one))]


def test_a_stream_starts_in_the_archive_and_continues_in_the_log(
    query_of: Callable[..., Query], brokers: ProcessCluster, topic: str
) -> None:
    query = query_of()
    assert query.batch(8) == [*((0, n) for n in range(6)), (1, 0), (1, 1)]
    assert (query.files, query.ranges) == (1, [])
    sizes = []
    seen = [*((0, n) for n in range(6)), (1, 0), (1, 1)]
    for rows in query.rest(8):
        sizes.append(len(rows))
        seen += rows
    assert sorted(seen) == everything()
    assert max(sizes) <= 8, "the archive must obey the limit as the log does"
    assert query.files == 0
    produce(brokers, topic, 3)
    assert query.batch() == [(0, 30), (0, 31), (0, 32)]
    assert query.ranges == ["0:30-33"]
    produce(brokers, topic, 2)
    query.without_history()
    assert query.batch() == [(0, 33), (0, 34)], "a query without history must accept the checkpoint"
    whole = query_of()
    assert whole.batch() == everything(35)
    assert (whole.files, whole.ranges) == (1, ["0:20-35", "1:8-10"])


@pytest.mark.extended
def test_a_batch_is_the_same_at_every_rerun(
    query_of: Callable[..., Query],
    brokers: ProcessCluster,
    admin: Admin,
    archive: Archive,
    topic: str,
) -> None:
    """The archive, retention, OPTIMIZE and VACUUM run between the attempts of a batch."""
    dice = random.Random(8)
    query = query_of()
    seen: Counter[Place] = Counter()
    for _ in range(40):
        end = query.plan(dice.choice([2, 5, 9]))
        if end == query.offset:
            if query.files == 0 and seen.total() >= 80:
                break
            produce(brokers, topic, dice.choice([0, 3, 7]), dice.choice([0, 1]))
            continue
        first = query.rows(end)
        for _ in range(dice.randrange(3)):
            _move(dice.randrange(5), brokers, admin, archive, topic)
            query.restart()
            assert query.rows(end) == first
        query.offset = end
        seen.update(first)
        if dice.random() < 0.3:
            query.restart()
    ends = parse_stream_offset(query.offset).positions
    assert sorted(seen) == everything(ends[TopicPartition(topic, 0)].offset, ends[TopicPartition(topic, 1)].offset)
    assert set(seen.values()) == {1}
    assert len(seen) > 60


def _move(step: int, brokers: ProcessCluster, admin: Admin, archive: Archive, topic: str) -> None:
    assert archive.progress is not None
    match step:
        case 0:
            produce(brokers, topic, 5)
        case 1:
            archive.archive({number: end + 2 for number, end in archive.progress.ends.items()})
            produce(brokers, topic, 2, 0)
            produce(brokers, topic, 2, 1)
        case 2:
            admin.delete_records({TopicPartition(topic, n): end for n, end in archive.progress.ends.items()})
        case 3:
            archive.compact()
        case _:
            archive.vacuum()


@pytest.mark.extended
def test_a_paused_query_continues_from_the_archive(
    query_of: Callable[..., Query], brokers: ProcessCluster, admin: Admin, archive: Archive, topic: str
) -> None:
    """Retention that waits for the archive and not for this query loses nothing, even while the query runs."""
    query = query_of()
    assert query.batch() == everything()
    produce(brokers, topic, 10)
    archive.archive()
    produce(brokers, topic, 4)
    admin.delete_records({TopicPartition(topic, 0): 40, TopicPartition(topic, 1): None})
    assert query.batch(6) == [(0, offset) for offset in range(30, 36)]
    assert query.files > 0
    query.restart()
    assert [rows for batch in query.rest(6) for rows in batch] == [(0, offset) for offset in range(36, 44)]


def test_a_hole_between_archive_and_log_is_data_loss(query_of: Callable[..., Query], admin: Admin, topic: str) -> None:
    query = query_of()
    seen = query.batch(8)
    admin.delete_records({TopicPartition(topic, 0): 25})
    with pytest.raises(
        DataLoss, match=f"{topic}-0: offsets 20 to 25 were deleted from the log, but the archive .* ends at 20"
    ):
        query.plan(8)
    query.restart(failOnDataLoss="false")
    seen += [place for rows in query.rest(8) for place in rows]
    assert sorted(seen) == [place for place in everything() if place not in [(0, n) for n in range(20, 25)]]
    fresh = query_of()
    with pytest.raises(DataLoss, match="offsets 20 to 25 were deleted"):
        fresh.plan()


def test_offsets_without_rows_before_an_archive_are_no_loss(
    brokers: ProcessCluster, admin: Admin, topic: str, lake: str
) -> None:
    """A query that has read only an aborted transaction continues in the archive after the log was deleted."""
    admin.create_topic(topic, partitions=1, replication_factor=1)
    with Producer(brokers.bootstrap, transactional_id=topic) as producer:
        producer.begin()
        producer.send(topic, b"aborted", partition=0)
        producer.flush()
        producer.abort()
    archive = Archive(brokers.bootstrap, topic, lake)
    query = Query(brokers.bootstrap, archive)
    query.without_history()
    assert query.batch() == []
    produce(brokers, topic, 4)
    archive.archive(begins={0: 0})
    admin.delete_records({TopicPartition(topic, 0): None})
    query.restart(history=archive.path)
    assert query.batch() == [(0, offset) for offset in range(2, 6)]
    for offset, expected in ((0, range(2, 6)), (1, range(2, 6)), (3, range(3, 6))):
        given = Query(brokers.bootstrap, archive, startingOffsets=json.dumps({topic: {"0": offset}}))
        assert given.batch() == [(0, number) for number in expected]
        given.reader.stop()
    query.reader.stop()


@pytest.mark.extended
def test_a_history_stream_starts_at_given_offsets(
    query_of: Callable[..., Query], brokers: ProcessCluster, topic: str
) -> None:
    latest = query_of(startingOffsets="latest")
    end = latest.plan()
    assert latest.rows(end) == []
    latest.offset = end
    produce(brokers, topic, 1, partition=1)
    assert latest.batch() == [(1, 10)]
    given = query_of(startingOffsets=json.dumps({topic: {"0": 18, "1": 9}}))
    assert given.batch() == [(0, offset) for offset in range(18, 30)] + [(1, 9), (1, 10)]
    assert (given.files, given.ranges) == (1, ["0:20-30", "1:9-11"])


@pytest.mark.extended
def test_a_finite_run_reads_what_existed_at_its_start(
    query_of: Callable[..., Query], brokers: ProcessCluster, archive: Archive, topic: str
) -> None:
    query = query_of()
    query.reader.prepareForTriggerAvailableNow()
    produce(brokers, topic, 5)
    archive.archive()
    assert sorted(place for rows in query.rest(9) for place in rows) == everything()


def test_an_archive_of_current_state_is_refused(
    query_of: Callable[..., Query], brokers: ProcessCluster, topic: str, tmp_path: Path
) -> None:
    state = Archive(brokers.bootstrap, topic, str(tmp_path / "upsert"))
    state.archive(mode="upsert")
    with pytest.raises(ConfigError, match="was archived in mode upsert"):
        query_of(history=state.path).plan()
