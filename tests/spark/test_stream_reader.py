"""Tests of the streaming reader without Spark, on real brokers: logs that grow, lose records and are replaced."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows

from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError
from sparklog.model import TopicPartition
from sparklog.spark.range_read import DataLoss
from sparklog.spark.read_options import parse_read_options
from sparklog.spark.schema import DEFAULT_COLUMNS
from sparklog.spark.stream import StreamReader
from sparklog.testing.process_cluster import ProcessCluster, wait_until

pytestmark = pytest.mark.integration


class Query:
    """A query's checkpoint and its runs. Offsets pass through JSON and readers through pickle, as in Spark."""

    def __init__(self, bootstrap: str, **options: str) -> None:
        self._given = {"bootstrap.servers": bootstrap, **{name.lower(): text for name, text in options.items()}}
        self.offset: dict[str, Any] = {}
        self.reader = self._fresh()

    def run(self, **options: str) -> Query:
        """Begin a new run, with the given changes of the options."""
        self._given.update({name.lower(): text for name, text in options.items()})
        self.reader.stop()
        self.reader = self._fresh()
        return self

    def plan(self, limit: ReadAllAvailable | ReadMaxRows | ReadMinRows | None = None) -> dict[str, Any]:
        """Return the end of the next batch."""
        start = self.offset or self.reader.initialOffset()
        end = self.reader.latestOffset(start, limit or self.reader.getDefaultReadLimit())
        return json.loads(json.dumps(end))  # type: ignore[no-any-return]

    def rows(self, end: dict[str, Any], start: dict[str, Any] | None = None) -> list[tuple[str, int, int, bytes]]:
        """Return the rows of a batch, from a separate reader as in Spark."""
        start = start or self.offset or self.reader.initialOffset()
        tasks = self.reader.partitions(start, end)
        other = pickle.loads(pickle.dumps(self._fresh()))
        found = [
            (row["topic"], row["partition"], row["offset"], row["value"])
            for task in tasks
            for batch in other.read(pickle.loads(pickle.dumps(task)))
            for row in batch.to_pylist()
        ]
        return sorted(found)

    def _fresh(self) -> StreamReader:
        return StreamReader(parse_read_options(self._given, {}, streaming=True), DEFAULT_COLUMNS)

    def batch(self, limit: ReadAllAvailable | ReadMaxRows | ReadMinRows | None = None) -> list[bytes]:
        """Plan a batch, read it, and advance the offset to its end."""
        end = self.plan(limit)
        found = self.rows(end)
        self.offset = end
        return [value for *_, value in found]


@pytest.fixture
def query_of(brokers: ProcessCluster) -> Iterator[Callable[..., Query]]:
    """Return a function that creates a query with the given options. The fixture stops the query at the end."""
    made = []

    def make(**options: str) -> Query:
        made.append(Query(brokers.bootstrap, **options))
        return made[-1]

    yield make
    for query in made:
        query.reader.stop()


def produce(brokers: ProcessCluster, topic: str, *values: str, partition: int = 0) -> None:
    with Producer(brokers.bootstrap) as producer:
        for value in values:
            producer.send(topic, value.encode(), partition=partition)


def test_a_start_at_latest_is_fixed_once(
    query_of: Callable[..., Query], brokers: ProcessCluster, admin: Admin, topic: str
) -> None:
    admin.create_topic(topic, partitions=1)
    produce(brokers, topic, "before")
    query = query_of(subscribe=topic)
    assert query.reader.initialOffset() == query.reader.initialOffset()
    end = query.plan()
    produce(brokers, topic, "while it was down")
    # The batch was not finished: Spark replays it in another run, from the initial offset.
    query.run()
    assert query.rows(end, query.reader.initialOffset()) == []
    query.offset = end
    assert query.batch() == [b"while it was down"]


def test_a_query_obeys_limits_and_finds_new_partitions(
    query_of: Callable[..., Query], brokers: ProcessCluster, admin: Admin, topic: str
) -> None:
    admin.create_topic(topic, partitions=1)
    produce(brokers, topic, *"abcdefghij")
    query = query_of(
        subscribePattern=f"{topic}.*",
        startingOffsets="earliest",
        maxOffsetsPerTrigger="8",
        minOffsetsPerTrigger="5",
        maxTriggerDelay="1h",
    )
    assert query.reader.getDefaultReadLimit() == ReadMaxRows(8)
    assert b"".join(query.batch()) == b"abcdefgh"
    waits = query.plan()
    assert waits == query.offset
    # A one-time trigger reads all existing records, regardless of the limit.
    assert query.plan(ReadAllAvailable()) != query.offset
    admin.create_partitions(topic, 2)
    admin.create_topic(f"{topic}-b", partitions=1)
    produce(brokers, topic, *"kl", partition=1)
    produce(brokers, f"{topic}-b", *"m")
    end = query.plan()
    assert [(tp, partition, value) for tp, partition, _, value in query.rows(end)] == [
        (topic, 0, b"i"),
        (topic, 0, b"j"),
        (topic, 1, b"k"),
        (topic, 1, b"l"),
        (f"{topic}-b", 0, b"m"),
    ]
    # The batch contains the start offsets of the new partitions, so any run replays it equally.
    start, query.offset = query.offset, end
    assert query.run().rows(end, start)[2:] != []
    assert query.plan() == end
    lag = query.reader.reportLatestOffset()
    assert lag is not None
    assert lag["topics"][topic]["offsets"] == {"0": 10, "1": 2}


def test_available_now_reads_only_what_existed_at_its_start(
    query_of: Callable[..., Query], brokers: ProcessCluster, admin: Admin, topic: str
) -> None:
    admin.create_topic(topic, partitions=1)
    produce(brokers, topic, *"abcde")
    query = query_of(
        subscribe=topic,
        startingOffsets="earliest",
        maxOffsetsPerTrigger="3",
        minOffsetsPerTrigger="3",
        groupId=f"{topic}-lag",
    )
    query.reader.prepareForTriggerAvailableNow()
    produce(brokers, topic, *"fgh")
    admin.create_partitions(topic, 2)
    assert b"".join(query.batch()) == b"abc"
    assert b"".join(query.batch()) == b"de"
    assert query.plan() == query.offset
    assert admin.group_offsets(f"{topic}-lag") == {TopicPartition(topic, 0): 5}
    assert f"{topic}-lag" in admin.list_groups()
    # Committed offsets only show the lag: another query of that group starts where its own options say.
    assert (
        b"".join(query_of(subscribe=topic, startingOffsets="earliest", groupId=f"{topic}-lag").batch()) == b"abcdefgh"
    )
    query.run().reader.prepareForTriggerAvailableNow()
    assert b"".join(query.batch()) == b"fgh"
    assert query.plan() == query.offset


def test_a_query_reports_deleted_and_recreated_topics(
    query_of: Callable[..., Query], brokers: ProcessCluster, admin: Admin, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = f"{topic}-other"
    for name in (topic, other):
        admin.create_topic(name, partitions=1)
        produce(brokers, name, *"ab")
    query = query_of(subscribe=f"{topic},{other}", startingOffsets="earliest")
    finished = query.plan()
    produce(brokers, topic, *"c")
    query.offset = finished
    unfinished = query.plan()
    admin.delete_topic(topic)
    admin.create_topic(topic, partitions=1)
    produce(brokers, topic, *"xyz")
    # A batch that can no longer be replayed, and the next batch.
    with pytest.raises(
        DataLoss, match=f"{topic}-0: the batch needs offsets 2 to 3 of the topic with id .*, which does not exist"
    ):
        query.run().rows(unfinished)
    with pytest.raises(
        DataLoss, match=f"{topic}-0: the topic was deleted and created again; it was read up to offset 2"
    ):
        query.plan()
    query.run(failOnDataLoss="false")
    with caplog.at_level(logging.WARNING):
        assert query.rows(unfinished) == []
        assert query.batch() == [b"x", b"y", b"z"]
    assert "created again" in caplog.text

    admin.delete_topic(other)
    with pytest.raises(
        DataLoss, match=f"{other}-0 was deleted, or the query no longer reads it; it was read up to offset 2"
    ):
        query.run(failOnDataLoss="true").plan()
    query.run(failOnDataLoss="false")
    assert query.batch() == []
    produce(brokers, topic, *"w")
    # The offset no longer contains the deleted topic, so the query continues without failOnDataLoss=false.
    query.run(failOnDataLoss="true", subscribe=topic)
    assert query.batch() == [b"w"]


def test_a_topic_is_deleted_between_planning_and_reading(
    query_of: Callable[..., Query], brokers: ProcessCluster, admin: Admin, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    admin.create_topic(topic, partitions=1)
    produce(brokers, topic, *"ab")
    strict = query_of(subscribe=topic, startingOffsets="earliest")
    lenient = query_of(subscribe=topic, startingOffsets="earliest", failOnDataLoss="false")
    tasks = [
        next(iter(query.reader.partitions(query.reader.initialOffset(), query.plan()))) for query in (strict, lenient)
    ]
    admin.delete_topic(topic)
    with pytest.raises(DataLoss, match=f"offsets 0 to 2 of {topic}-0: UNKNOWN_TOPIC_OR_PARTITION"):
        list(strict.reader.read(tasks[0]))
    with caplog.at_level(logging.WARNING):
        assert list(lenient.reader.read(tasks[1])) == []
    assert "of offsets 0 to 2 only 2 to 2 can be read" in caplog.text


def test_retention_deletes_records_of_a_running_stream(caplog: pytest.LogCaptureFixture) -> None:
    """The records belong to a planned batch and to the next one."""
    with ProcessCluster(1, settings={"log.retention.check.interval.ms": "200"}) as cluster:
        tp = TopicPartition("taken", 0)
        with Admin(cluster.bootstrap) as admin, Producer(cluster.bootstrap, batch_bytes=16_384) as producer:
            config = {"segment.bytes": "65536", "retention.bytes": "65536"}
            admin.create_topic(tp.topic, partitions=1, replication_factor=1, config=config)
            produce(cluster, tp.topic, *"abcde")
            query = Query(cluster.bootstrap, subscribe=tp.topic, startingOffsets="earliest", maxOffsetsPerTrigger="3")
            assert query.batch() == [b"a", b"b", b"c"]
            planned = query.plan()
            for number in range(200):
                producer.send(tp.topic, b"%d" % number + bytes(2000))
            producer.flush()
            wait_until(lambda: admin.list_offsets([tp], at="earliest")[tp] > 100, 180, "retention")
        with pytest.raises(DataLoss, match="offsets 3 to 5 of taken-0: OFFSET_OUT_OF_RANGE"):
            query.run().rows(planned)
        with pytest.raises(DataLoss, match=r"taken-0: offsets 3 to \d+ were deleted"):
            query.plan()
        query.run(failOnDataLoss="false")
        with caplog.at_level(logging.WARNING):
            assert query.rows(planned) == []
            offsets = [offset for _, _, offset, _ in query.rows(query.plan(ReadAllAvailable()))]
        assert offsets[0] > 100 and offsets == list(range(offsets[0], 205))
        assert "records were lost" in caplog.text and "were deleted" in caplog.text
        query.reader.stop()


def test_a_new_topic_with_another_schema_fails_the_query(
    query_of: Callable[..., Query], brokers: ProcessCluster, admin: Admin, topic: str
) -> None:
    admin.create_topic(topic, partitions=1)
    query = query_of(subscribePattern=f"{topic}.*", startingOffsets="earliest")
    query.batch()
    admin.create_topic(f"{topic}-typed", partitions=1, schema=pa.schema([("x", pa.int64())]))

    def plan() -> bool:
        query.plan()  # succeeds as long as the broker that is asked does not know the topic
        return False

    with pytest.raises(BrokerError, match=f"SCHEMA_MISMATCH: topic {topic}-typed: key: not a column"):
        wait_until(plan, 60, "a plan with the new topic")


def test_a_stream_of_an_unknown_topic_fails(
    query_of: Callable[..., Query], brokers: ProcessCluster, topic: str
) -> None:
    with pytest.raises(BrokerError, match="UNKNOWN_TOPIC_OR_PARTITION"):
        query_of(subscribe=topic).plan()
