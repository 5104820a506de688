"""Tests of the bounded reader: it reads a whole range or raises an error."""

from __future__ import annotations

import pytest

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.client.errors import ClientTimeout, LogTruncated
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import Fetch, FetchedPartition, FetchReply, Request
from sparklog.record.header import BatchHeader
from tests.client.fake_cluster import FakeBroker, FakeCluster
from tests.client.reading import TP, TYPED, fill, numbers, refuse


@pytest.mark.parametrize(("start", "end"), [(0, 100), (5, 95), (10, 20), (15, 16), (0, 0), (99, 100)])
def test_a_range_is_read_exactly(fake: FakeCluster, start: int, end: int) -> None:
    fill(fake)
    with PartitionReader(fake.bootstrap, TP, start, end, max_bytes=1) as reader:
        found = list(reader.fetched())
    assert numbers([one.batch for one in found]) == list(range(start, end))
    assert [one.first_offset for one in found] == [one.batch.column("n")[0].as_py() for one in found]


def test_a_range_read_survives_its_leaders(fake: FakeCluster) -> None:
    fill(fake)
    fake.fault(0, refuse(ErrorCode.NOT_LEADER_OR_FOLLOWER, 2))
    with PartitionReader(fake.bootstrap, TP, 0, 100, max_bytes=1, columns=["n"]) as reader:
        seen: list[int] = []
        for count, (header, batch) in enumerate(reader):
            assert isinstance(header, BatchHeader)
            seen += batch.column("n").to_pylist()
            if count == 2:
                fake.move(TP, 1)
            if count == 5:
                fake.stop(0)
        assert seen == list(range(100))


def test_a_range_read_leaves_a_hanging_leader_after_an_election(fake: FakeCluster) -> None:
    fill(fake)
    fake.fault(0, lambda broker, connection, request: isinstance(request, Fetch))
    cluster = BlockingCluster(fake.bootstrap, request_timeout_s=60)
    with cluster, PartitionReader(cluster, TP, 0, 100, timeout_s=30) as reader:
        cluster.topic("t")
        fake.move(TP, 1)
        assert numbers([batch for _, batch in reader]) == list(range(100))
    assert any(isinstance(request, Fetch) for request in fake.brokers[0].requests), "it asked the hanging leader"


def test_a_range_truncated_during_the_read_raises(fake: FakeCluster) -> None:
    fill(fake)

    def cut(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if not isinstance(request, Fetch) or request.partitions[0].last_epoch < 0:
            return False
        answer = FetchedPartition("t", 0, 0, 100, 100, 0, 100, diverging=(-1, 0))
        connection.reply(FetchReply(request.cid, 0, 0, (answer,)))
        return True

    fake.fault(0, cut)
    with (
        PartitionReader(fake.bootstrap, TP, 0, 100, max_bytes=1) as reader,
        pytest.raises(LogTruncated, match="read up to offset 10, the log diverges at offset 0"),
    ):
        list(reader)


def test_two_readers_may_share_a_link(fake: FakeCluster) -> None:
    fill(fake, partitions=2)
    with BlockingCluster(fake.bootstrap) as link:
        for partition in range(2):
            with PartitionReader(link, TopicPartition("t", partition), 0, 100) as reader:
                assert numbers([batch for _, batch in reader]) == list(range(100))


@pytest.mark.parametrize(
    ("tp", "start", "end", "error"),
    [
        (TP, 90, 110, r"offsets \[90, 110\): no progress at 100 for 0.7 s"),
        (TP, 200, 210, "OFFSET_OUT_OF_RANGE"),
        (TopicPartition("t", 3), 0, 1, "partition t-3: topic 't' has 1 partitions"),
        (TopicPartition("u", 0), 0, 1, "UNKNOWN_TOPIC_OR_PARTITION"),
    ],
)
def test_a_nonexistent_range_raises(fake: FakeCluster, tp: TopicPartition, start: int, end: int, error: str) -> None:
    fill(fake)
    reader = PartitionReader(fake.bootstrap, tp, start, end, timeout_s=0.7)
    with reader, pytest.raises((BrokerError, ClientTimeout), match=error):
        list(reader)


def test_a_range_of_an_earlier_topic_of_that_name_raises(fake: FakeCluster) -> None:
    fill(fake)
    reader = PartitionReader(fake.bootstrap, TP, 0, 10, topic_id="other")
    with reader, pytest.raises(BrokerError, match="id1 found, other expected"):
        list(reader)


def test_a_topic_recreated_during_the_read_raises(fake: FakeCluster) -> None:
    fill(fake)
    with PartitionReader(fake.bootstrap, TP, 0, 100, max_bytes=1) as reader:
        ranges = iter(reader)
        next(ranges)
        fake.create("t", schema=TYPED)
        fill(fake)
        with pytest.raises(BrokerError, match="INCONSISTENT_TOPIC_ID"):
            list(ranges)
