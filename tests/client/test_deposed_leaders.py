"""Tests of a leader that was cut off and deposed without knowing it: clients do not trust its end of the log.

Broker 0 is that leader. The clients are new and know only its address, so they know no later epoch.
"""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import LongType, StructField, StructType

from sparklog.client.admin.admin import Admin
from sparklog.client.consumer import fetcher
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.client.errors import ClientTimeout
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint, TopicPartition
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    Fetch,
    FetchedPartition,
    FetchOffsets,
    FetchOffsetsReply,
    FetchPartition,
    FetchReply,
    FindCoordinator,
    FindCoordinatorReply,
    GroupOffset,
    ListedOffset,
    ListOffsets,
    ListOffsetsReply,
    Metadata,
    MetadataReply,
    PartitionMetadata,
    Request,
    TopicMetadata,
)
from sparklog.spark.range_read import RangeRead
from sparklog.spark.read_options import parse_read_options
from sparklog.spark.reader import BatchReader, plan_read
from sparklog.spark.stream import StreamReader
from sparklog.spark.stream_offset import Position, StreamOffset
from sparklog.spark.topics import SourceTopic
from tests.client.fake_cluster import FakeBroker, FakeCluster

TP = TopicPartition("t", 0)
#: The committed end according to broker 0, its log's end, and the real log's end.
HIGH_WATERMARK, CUT_OFF_AT, END = 40, 50, 100


def picture(fake: FakeCluster) -> tuple[tuple[BrokerEndpoint, ...], tuple[TopicMetadata, ...]]:
    """Return the last update of broker 0."""
    topic = fake.topics["t"]
    leads = PartitionMetadata(0, 0, 0, (0, 1), (0, 1))
    told = TopicMetadata(0, "t", topic.topic_id, (leads,), tuple(topic.schemas), topic.key, topic.event_time)
    return tuple(broker.metadata_broker() for broker in fake.brokers), (told,)


def old_words(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
    if isinstance(request, Metadata):
        brokers, topics = picture(broker.cluster)
        connection.reply(MetadataReply(request.cid, "fake", 1, brokers, topics))
        return True
    if isinstance(request, ListOffsets):
        (asked,) = request.partitions
        listed = ListedOffset(0, CUT_OFF_AT, -1, 0)
        if asked.leader_epoch:
            listed = ListedOffset(int(ErrorCode.UNKNOWN_LEADER_EPOCH), -1, -1, -1)
        connection.reply(ListOffsetsReply(request.cid, (listed,)))
        return True
    if isinstance(request, Fetch):
        (wanted,) = request.partitions
        answer = FetchedPartition(
            "t", 0, int(verdict(wanted)), HIGH_WATERMARK, HIGH_WATERMARK, 0, CUT_OFF_AT, detail="by broker 0"
        )
        broker.cluster.loop.call_later(0.05, connection.reply, FetchReply(request.cid, 0, 0, (answer,)))
        return True
    return False


def verdict(wanted: FetchPartition) -> ErrorCode:
    if wanted.leader_epoch:
        return ErrorCode.UNKNOWN_LEADER_EPOCH
    if wanted.fetch_offset > CUT_OFF_AT:
        return ErrorCode.OFFSET_OUT_OF_RANGE
    return ErrorCode.OFFSET_NOT_AVAILABLE if wanted.fetch_offset > HIGH_WATERMARK else ErrorCode.NONE


@pytest.fixture
def deposed(fake: FakeCluster) -> FakeCluster:
    """Start a cluster in which broker 1 leads in epoch 1 and has the whole log, and broker 0 believes that it leads
    in epoch 0."""
    fake.create("t", schema=pa.schema([("n", pa.int64())]))
    with Producer(fake.bootstrap) as producer:
        producer.write("t", pa.table({"n": range(END)}), partition=0)
    fake.move(TP, 1)
    fake.fault(0, old_words)
    return fake


def at_broker_0(fake: FakeCluster) -> str:
    return f"127.0.0.1:{fake.brokers[0].port}"


def test_a_consumer_survives_a_position_beyond_a_deposed_leaders_end(deposed: FakeCluster) -> None:
    with Consumer(at_broker_0(deposed), "t", start={TP: 60}) as consumer:
        found = consumer.poll(10.0)
    assert [n for batch in found for n in batch.column("n").to_pylist()] == list(range(60, END))


def test_a_consumer_does_not_restart_there_either(deposed: FakeCluster) -> None:
    with Consumer(at_broker_0(deposed), "t", start={TP: 60}, on_out_of_range="earliest") as consumer:
        assert consumer.poll(10.0)[0].column("n")[0].as_py() == 60


def test_a_range_beyond_a_deposed_leaders_end_is_read(deposed: FakeCluster) -> None:
    with PartitionReader(at_broker_0(deposed), TP, 60, END) as reader:
        assert sum(batch.num_rows for _, batch in reader) == END - 60


@pytest.mark.parametrize("start", [HIGH_WATERMARK, CUT_OFF_AT])
def test_a_nonexistent_range_is_not_waited_for(
    deposed: FakeCluster, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "_SUSPECT_AFTER_S", 0.2)
    with PartitionReader(at_broker_0(deposed), TP, start, END, timeout_s=5.0) as reader:
        assert sum(batch.num_rows for _, batch in reader) == END - start


def test_records_never_committed_are_not_waited_for(deposed: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "_SUSPECT_AFTER_S", 0.2)
    with Consumer(at_broker_0(deposed), "t", start={TP: CUT_OFF_AT}, timeout_s=5.0) as consumer:
        assert sum(batch.num_rows for batch in consumer.poll(10.0)) == END - CUT_OFF_AT


def test_end_offsets_do_not_go_backwards(deposed: FakeCluster) -> None:
    with Consumer(at_broker_0(deposed), "t", start={TP: 60}) as consumer:
        assert consumer.end_offsets() == {TP: END}
    with Admin(at_broker_0(deposed)) as admin:
        assert admin.list_offsets([TP], known={TP: 60}) == {TP: END}
        assert admin.list_offsets([TP], known={TP: END + 1}) == {TP: END}, (
            "a client must not wait for records that no broker has"
        )


def test_a_spark_read_beyond_a_deposed_leaders_end_is_planned(deposed: FakeCluster) -> None:
    defaults = {"bootstrap.servers": at_broker_0(deposed)}
    options = parse_read_options({"subscribe": "t", "startingoffsets": '{"t": {"0": 60}}'}, defaults)
    with SourceTopic(options.bootstrap) as view:
        plan = plan_read(view, options, schema=StructType([StructField("n", LongType())]))
    (found,) = BatchReader(plan).partitions()
    assert isinstance(found, RangeRead) and (found.start, found.end) == (60, END)


def test_a_stream_beyond_a_deposed_leaders_end_continues(deposed: FakeCluster) -> None:
    """If the client believed it, the log would seem truncated, which is a loss of data."""
    options = parse_read_options(
        {"subscribe": "t", "startingoffsets": "earliest"}, {"bootstrap.servers": at_broker_0(deposed)}, streaming=True
    )
    reader = StreamReader(options, StructType([StructField("n", LongType())]))
    topic_id = picture(deposed)[1][0].topic_id
    start = StreamOffset({TP: Position(topic_id, 60, 1)}).to_json()
    end = reader.latestOffset(start, ReadAllAvailable())
    (task,) = reader.partitions(start, end)
    assert sum(batch.num_rows for batch in reader.read(task)) == END - 60
    reader.stop()


def test_a_deposed_leader_alone_is_not_trusted(deposed: FakeCluster) -> None:
    """No other broker can be asked, so the offsets are unknown."""
    deposed.stop(1)
    with (
        Consumer(at_broker_0(deposed), "t", start={TP: 60}, timeout_s=1.0) as consumer,
        pytest.raises(ClientTimeout, match="only 1 of 2 brokers confirm that broker 0 leads"),
    ):
        consumer.poll(10.0)
    with (
        PartitionReader(at_broker_0(deposed), TP, 60, END, timeout_s=1.0) as reader,
        pytest.raises(ClientTimeout, match="only 1 of 2 brokers confirm that broker 0 leads"),
    ):
        list(reader)


def test_an_error_confirmed_by_other_brokers_is_trusted(deposed: FakeCluster) -> None:
    with (
        Consumer(at_broker_0(deposed), "t", start={TP: END + 1}) as consumer,
        pytest.raises(BrokerError, match=rf"{END + 1} not in \[0, {END}\]") as caught,
    ):
        consumer.poll(10.0)
    assert caught.value.code == ErrorCode.OFFSET_OUT_OF_RANGE


def test_a_deposed_coordinator_returns_no_old_group_offsets(fake: FakeCluster) -> None:
    topic = fake.create("__consumer_offsets")
    fake.move(TopicPartition("__consumer_offsets", 0), 1)
    fake.groups.offsets["g", "t", 0] = 2
    leads = PartitionMetadata(0, 0, 0, (0, 1), (0, 1))
    told = TopicMetadata(0, "__consumer_offsets", topic.topic_id, (leads,), tuple(topic.schemas), topic.key)

    def deposed(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if isinstance(request, Metadata):
            brokers = tuple(other.metadata_broker() for other in broker.cluster.brokers)
            connection.reply(MetadataReply(request.cid, "fake", 1, brokers, (told,)))
        elif isinstance(request, FindCoordinator):
            connection.reply(FindCoordinatorReply(request.cid, broker.metadata_broker(), 0))
        elif isinstance(request, FetchOffsets):
            connection.reply(FetchOffsetsReply(request.cid, (GroupOffset("t", 0, 1),)))
        else:
            return False
        return True

    fake.fault(0, deposed)
    with Admin(at_broker_0(fake), timeout_s=30.0) as admin:
        assert admin.group_offsets("g") == {TP: 2}
