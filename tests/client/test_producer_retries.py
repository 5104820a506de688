"""Tests of the producer with faulty brokers: no record is lost, duplicated or reordered."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pytest

from sparklog.client.producer.producer import Producer
from sparklog.errors import ErrorCode
from sparklog.model import OffsetRange, TopicPartition, TopicSchema
from sparklog.protocol.messages import (
    Produce,
)
from sparklog.record.schema import schema_message
from tests.client.fake_cluster import FakeCluster
from tests.client.producing import LoseAnswers, hang_up, produce_requests, refuse, say_nothing, times, values

TYPED = pa.schema([("carrier", pa.string()), ("delay", pa.float64())])


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.BROKER_STOPPING,
    ],
)
def test_a_produce_request_with_a_retriable_error_is_retried(fake: FakeCluster, code: ErrorCode) -> None:
    fake.create("t")
    fake.fault(0, times(3, Produce, refuse(code)))
    with Producer(fake.bootstrap) as producer:
        assert producer.send("t", b"v").result(30).offset == 0
    assert len(produce_requests(fake)) == 4


def test_a_lost_response_makes_no_duplicate(fake: FakeCluster) -> None:
    fake.create("t")
    fake.fault(0, LoseAnswers(3))
    with Producer(fake.bootstrap) as producer:
        futures = [producer.send("t", b"%d" % index) for index in range(3)]
        assert [future.result(30).offset for future in futures] == [0, 1, 2]
        futures += [producer.send("t", b"%d" % index) for index in range(3, 6)]
        assert [future.result(30).offset for future in futures] == [0, 1, 2, 3, 4, 5]
    assert values(fake, "t") == [b"%d" % index for index in range(6)]


def test_pipelined_batches_keep_their_order_through_faults(fake: FakeCluster) -> None:
    fake.create("t")
    fake.fault(0, times(1, Produce, refuse(ErrorCode.NOT_LEADER_OR_FOLLOWER)))
    fake.fault(0, LoseAnswers(2))
    fake.fault(0, times(2, Produce, hang_up))
    table = pa.table({"value": [b"%d" % index for index in range(5000)]})
    with Producer(fake.bootstrap, batch_bytes=4000) as producer:
        writing = producer.write("t", table, partition=0)
        result = writing.result(20)
    assert result.ranges[0].offsets == OffsetRange(0, 5000)
    assert values(fake, "t") == table.column("value").to_pylist()


def test_a_moved_leader_is_found(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap) as producer:
        producer.send("t", b"a").result(30)
        fake.move(TopicPartition("t", 0), 1)
        assert producer.send("t", b"b").result(30).offset == 1
        fake.move(TopicPartition("t", 0), 0)
        fake.stop(1)
        assert producer.send("t", b"c").result(30).offset == 2
    assert values(fake, "t") == [b"a", b"b", b"c"]


def test_a_leader_that_hangs_is_left_when_another_is_elected(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, request_timeout_s=60) as producer:
        producer.send("t", b"a").result(30)
        fake.fault(0, times(100, Produce, say_nothing))
        future = producer.send("t", b"b")
        fake.move(TopicPartition("t", 0), 1)
        assert future.result(30).offset == 1


def test_a_cluster_that_returns_gets_every_record(fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    with Producer(fake.bootstrap) as producer:
        producer.send("t", b"0").result(30)
        fake.stop(0)
        fake.stop(1)
        futures = [producer.send("t", b"%d" % index) for index in range(1, 50)]
        fake.start(0)
        fake.start(1)
        producer.flush(20)
        assert all(future.done() for future in futures)
    assert Counter(values(fake, "t")) == Counter(b"%d" % index for index in range(50))


def test_a_forgotten_producer_continues_with_a_new_id(fake: FakeCluster) -> None:
    topic = fake.create("t")
    with Producer(fake.bootstrap) as producer:
        producer.send("t", b"a").result(30)
        fake.do(topic.logs[0].producers.clear)
        assert producer.send("t", b"b").result(30).offset == 1
        assert producer.send("t", b"c").result(30).offset == 2
    ids = {header.producer_id for header, _ in topic.logs[0].batches}
    assert len(ids) == 2


def test_records_of_an_older_schema_are_written_with_the_newest(fake: FakeCluster) -> None:
    topic = fake.create("t", schema=TYPED)
    with Producer(fake.bootstrap, compression="lz4") as producer:
        producer.write("t", pa.table({"delay": [1.0]})).result(30)
        longer = TYPED.append(pa.field("added", pa.int32()))
        fake.do(lambda: topic.schemas.append(TopicSchema(1, schema_message(longer))))
        producer.write("t", pa.table({"delay": [2.0]})).result(30)
    assert [header.schema_id for header, _ in topic.logs[0].batches] == [0, 1]
    assert fake.records("t")[1].to_pylist() == [{"carrier": None, "delay": 2.0, "added": None}]
