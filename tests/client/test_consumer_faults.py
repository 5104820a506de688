"""Tests of the consumer with failing leaders, logs and topics: it continues if possible, and reports an error if
not."""

from __future__ import annotations

import time

import pyarrow as pa
import pytest

from sparklog.client.consumer.consumer import Consumer
from sparklog.client.errors import ClientTimeout, LogTruncated
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import Fetch, FetchedPartition, FetchReply, Request
from tests.client.fake_cluster import FakeBroker, FakeCluster
from tests.client.reading import TP, TYPED, add, drained, fill, numbers, refuse


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.OFFSET_NOT_AVAILABLE,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
    ],
)
def test_retriable_errors_are_retried(fake: FakeCluster, code: ErrorCode) -> None:
    fill(fake)
    fake.fault(0, refuse(code, 3))
    with Consumer(fake.bootstrap, "t") as consumer:
        assert numbers(drained(consumer, 100)) == list(range(100))


def test_a_consumer_survives_moved_dead_and_returning_leaders(fake: FakeCluster) -> None:
    fill(fake, partitions=2)
    with Consumer(fake.bootstrap, "t") as consumer:
        drained(consumer, 200)
        fake.move(TP, 1)
        add(fake, records=10, partitions=2)
        drained(consumer, 20)
        fake.stop(0)
        add(fake, records=10, partitions=2)
        drained(consumer, 20)
        fake.stop(1)
        fake.start(0)
        fake.start(1)
        fake.move(TP, 0)
        add(fake, records=10, partitions=2)
        found = drained(consumer, 20)
        assert sorted(numbers(found)) == sorted([*range(120, 130)] * 2)


def test_a_leader_that_hangs_is_left_when_another_is_elected(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t") as consumer:
        drained(consumer, 100)
        fake.fault(0, lambda broker, connection, request: isinstance(request, Fetch))
        consumer.poll(1.0)
        fake.move(TP, 1)
        add(fake, records=10)
        assert numbers(drained(consumer, 10)) == list(range(100, 110))


def test_a_slow_reader_does_not_suspect_its_leader(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparklog.client.consumer.fetcher._SUSPECT_AFTER_S", 0.05)
    fill(fake, records=1000)
    with Consumer(fake.bootstrap, "t", max_bytes=1, timeout_s=0.5) as consumer:
        found = []
        for _ in range(10):
            found += consumer.poll(1.0)
            time.sleep(0.15)  # the next response is in the socket meanwhile
        assert numbers(found) == list(range(len(found) * 10))
    fetches = [request for broker in fake.brokers for request in broker.requests if isinstance(request, Fetch)]
    assert len(fetches) <= 12, "no response may be dropped"


def test_an_offset_out_of_range_is_reported_or_reset(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t", start={TP: 500}) as consumer:
        with pytest.raises(BrokerError, match=r"t-0 at offset 500: 500 not in \[0, 100\]") as caught:
            consumer.poll(5.0)
        assert caught.value.code == ErrorCode.OFFSET_OUT_OF_RANGE
        assert consumer.position(TP) == 500
    with Consumer(fake.bootstrap, "t", start={TP: 500}, on_out_of_range="earliest") as consumer:
        assert numbers(drained(consumer, 100)) == list(range(100))
    with Consumer(fake.bootstrap, "t", start={TP: 500}, on_out_of_range="latest") as consumer:
        assert consumer.poll(0.2) == []
        assert consumer.position(TP) == 100


def test_a_table_from_beyond_the_end_is_out_of_range(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t", start={TP: 101}) as consumer:
        with pytest.raises(BrokerError, match="OFFSET_OUT_OF_RANGE: t-0: position 101 found; the log ends at 100"):
            consumer.to_table()
        consumer.seek(TP, 100)
        assert consumer.to_table().num_rows == 0
    with Consumer(fake.bootstrap, "t", start={TP: 101}, on_out_of_range="earliest") as consumer:
        assert consumer.to_table().num_rows == 100


def test_a_truncated_log_is_reported_to_its_reader(fake: FakeCluster) -> None:
    """Each fetch contains the epoch of the last record read, so a leader without that record can report it."""
    fill(fake, records=50)
    fake.do(lambda: setattr(fake.topics["t"].logs[0], "epoch", 3))
    add(fake, records=50)
    asked: list[tuple[int, int]] = []

    def cut(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if not isinstance(request, Fetch):
            return False
        (part,) = request.partitions
        asked.append((part.fetch_offset, part.last_epoch))
        if part.last_epoch != 3:
            return False
        answer = FetchedPartition("t", 0, 0, 50, 50, 0, 50, diverging=(1, 40))
        connection.reply(FetchReply(request.cid, 0, 0, (answer,)))
        return True

    fake.fault(0, cut)
    with Consumer(fake.bootstrap, "t") as consumer:
        drained(consumer, 100)
        for _ in range(2):
            with pytest.raises(LogTruncated, match="read up to offset 100, the log diverges at offset 40") as caught:
                drained(consumer, 1)
            assert caught.value.code == ErrorCode.OFFSET_OUT_OF_RANGE
        assert consumer.position(TP) == 100
        consumer.seek(TP, caught.value.offset)
        assert numbers(drained(consumer, 60)) == list(range(40, 100))
    assert set(asked) >= {(0, -1), (100, 3), (40, -1)}
    with Consumer(fake.bootstrap, "t", on_out_of_range="latest") as consumer:
        assert numbers(drained(consumer, 160)) == [*range(100), *range(40, 100)]


def test_a_corrupt_batch_raises_after_the_records_before_it(fake: FakeCluster) -> None:
    fill(fake)
    log = fake.topics["t"].logs[0]

    def corrupt() -> None:
        header, body = log.batches[5]
        log.batches[5] = (header, body[:-8] + b"\xff" * 8)

    fake.do(corrupt)
    with Consumer(fake.bootstrap, "t") as consumer:
        assert numbers(drained(consumer, 50)) == list(range(50))
        for _ in range(2):
            with pytest.raises(BrokerError, match="t-0 at offset 50") as caught:
                drained(consumer, 1)
            assert caught.value.code == ErrorCode.CORRUPT_MESSAGE
        assert consumer.position(TP) == 50
        consumer.seek(TP, 60)
        assert numbers(drained(consumer, 40)) == list(range(60, 100))


def test_a_corrupt_batch_is_reported_beside_records_of_other_partitions(fake: FakeCluster) -> None:
    fill(fake, partitions=4)  # two at each broker, so that one response has both

    def corrupt() -> None:
        batches = fake.topics["t"].logs[0].batches
        header, body = batches[0]
        batches[0] = (header, body[:-8] + b"\xff" * 8)

    fake.do(corrupt)
    with Consumer(fake.bootstrap, "t") as consumer:
        found: list[pa.RecordBatch] = []
        with pytest.raises(BrokerError, match="t-0 at offset 0"):
            found += drained(consumer, 400)
        assert consumer.position(TP) == 0


def test_a_recreated_topic_is_not_mistaken_for_the_old_one(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t") as consumer:
        drained(consumer, 100)
        fake.create("t", schema=TYPED)
        with pytest.raises(BrokerError) as caught:
            drained(consumer, 1)
        assert caught.value.code == ErrorCode.INCONSISTENT_TOPIC_ID


def test_a_deleted_topic_is_reported(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t") as consumer:
        drained(consumer, 100)
        fake.do(lambda: fake.topics.pop("t"))
        with pytest.raises(BrokerError) as caught:
            drained(consumer, 1)
        assert caught.value.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_no_reachable_broker_times_out_with_the_position(fake: FakeCluster) -> None:
    fill(fake)
    with Consumer(fake.bootstrap, "t", timeout_s=1.0) as consumer:
        drained(consumer, 100)
        fake.stop(0)
        fake.stop(1)
        with pytest.raises(ClientTimeout, match="t-0 at offset 100: not possible for 1 s"):
            drained(consumer, 1)


def test_added_partitions_are_read_from_their_start(fake: FakeCluster) -> None:
    fill(fake, records=10)
    with Consumer(fake.bootstrap, "t", start="latest", metadata_max_age_ms=50) as consumer:
        log_type = type(fake.topics["t"].logs[0])
        fake.do(lambda: fake.topics["t"].logs.append(log_type()))
        with Producer(fake.bootstrap) as producer:
            producer.write("t", pa.table({"n": [7]}), partition=1)
        assert numbers(drained(consumer, 1)) == [7]
