"""Tests of the producer when it must give up: in time, with the reason, and without open requests."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pyarrow as pa
import pytest

from sparklog.client.errors import BufferFull, ClientTimeout, ProducerClosed
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    Produce,
    ProduceReply,
    ProduceResult,
    Request,
)
from sparklog.testing.process_cluster import wait_until
from tests.client.fake_cluster import FakeBroker, FakeCluster
from tests.client.producing import produce_requests, refuse, say_nothing, times, values


def test_errors_that_are_not_retriable_fail_at_once(fake: FakeCluster) -> None:
    fake.create("t")
    fake.fault(0, times(1, Produce, refuse(ErrorCode.INVALID_RECORD)))
    with Producer(fake.bootstrap) as producer:
        with pytest.raises(BrokerError, match="INVALID_RECORD: on purpose"):
            producer.send("t", b"bad").result(30)
        assert producer.send("t", b"good").result(30).offset == 0


def test_an_unacknowledged_record_fails_with_the_last_reason(fake: FakeCluster) -> None:
    fake.create("t")
    fake.fault(0, times(10_000, Produce, refuse(ErrorCode.NOT_ENOUGH_REPLICAS)))
    with Producer(fake.bootstrap, delivery_timeout_s=0.5) as producer:
        started = time.monotonic()
        with pytest.raises(ClientTimeout, match=r"1 records to t-0: .* 0.5 s, last: NOT_ENOUGH_REPLICAS: on purpose"):
            producer.send("t", b"v").result(30)
        assert 0.4 < time.monotonic() - started < 5


def test_a_broker_that_becomes_silent_keeps_its_earlier_reason(fake: FakeCluster) -> None:
    fake.create("t")
    fake.fault(0, times(1, Produce, refuse(ErrorCode.NOT_ENOUGH_REPLICAS)))
    fake.fault(0, times(10_000, Produce, say_nothing))
    with Producer(fake.bootstrap, delivery_timeout_s=1.0, request_timeout_s=0.3) as producer:
        reasons = r"last: NETWORK_EXCEPTION: .*; before that: NOT_ENOUGH_REPLICAS: on purpose"
        with pytest.raises(ClientTimeout, match=reasons):
            producer.send("t", b"v").result(30)


def test_a_response_just_before_the_timeout_is_accepted(fake: FakeCluster) -> None:
    """A leader that waits for followers does this: its response comes before the request times out."""
    fake.create("t")

    def at_the_end(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        assert isinstance(request, Produce)
        late = ProduceResult(int(ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND), -1, 0, 0, "as late as may be")
        reply = ProduceReply(request.cid, (late,))
        broker.cluster.loop.call_later(request.timeout_ms / 1000, connection.reply, reply)
        return True

    fake.fault(0, times(10_000, Produce, at_the_end))
    with (
        Producer(fake.bootstrap, delivery_timeout_s=1.5, request_timeout_s=1.5) as producer,
        pytest.raises(ClientTimeout, match="NOT_ENOUGH_REPLICAS_AFTER_APPEND: as late as may be"),
    ):
        producer.send("t", b"v").result(30)


def test_a_broker_that_never_responds_is_given_up_in_time(fake: FakeCluster) -> None:
    fake.create("t")
    fake.fault(0, times(10_000, Produce, say_nothing))
    with Producer(fake.bootstrap, delivery_timeout_s=0.6, request_timeout_s=30) as producer:
        started = time.monotonic()
        with pytest.raises(ClientTimeout):
            producer.send("t", b"v").result(30)
        assert time.monotonic() - started < 5


def test_one_bad_partition_fails_only_its_own_records(fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    fake.fault(1, times(10_000, Produce, refuse(ErrorCode.INVALID_RECORD)))
    with Producer(fake.bootstrap) as producer:
        futures = [producer.send("t", b"x", key=b"%d" % index) for index in range(40)]
        outcomes = [future.exception(10) for future in futures]
    partitions = {future.result().partition for future, error in zip(futures, outcomes, strict=True) if error is None}
    assert partitions == {0}
    assert 0 < sum(error is not None for error in outcomes) < 40


def test_flush_and_close_raise_errors_that_no_future_reported(fake: FakeCluster) -> None:
    fake.create("t")
    fake.fault(0, times(3, Produce, refuse(ErrorCode.INVALID_RECORD)))
    producer = Producer(fake.bootstrap)
    producer.send("t", b"1")
    with pytest.raises(BrokerError, match="INVALID_RECORD"):
        producer.flush(10)
    assert isinstance(producer.send("t", b"2").exception(10), BrokerError)
    producer.flush(10)
    producer.write("t", pa.table({"value": [b"3"]}))
    with pytest.raises(BrokerError, match="INVALID_RECORD"):
        producer.close(10)
    with pytest.raises(ProducerClosed):
        producer.send("t", b"4")
    with pytest.raises(ProducerClosed):
        producer.write("t", pa.table({"value": [b"4"]}))


def test_close_gives_up_after_its_timeout(fake: FakeCluster) -> None:
    fake.create("t")
    producer = Producer(fake.bootstrap)
    producer.send("t", b"0").result(30)
    fake.fault(0, times(10_000, Produce, say_nothing))
    future = producer.send("t", b"1")
    with pytest.raises(ClientTimeout, match="flush"):
        producer.close(0.2)
    with pytest.raises(ProducerClosed):
        future.result(30)


def test_requests_in_flight_at_close_log_no_warnings(fake: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    """The requests' futures fail with the connections, when no caller waits for them any more."""
    fake.create("t")
    fake.fault(0, times(10_000, Produce, say_nothing))
    producer = Producer(fake.bootstrap)
    future = producer.send("t", b"v")
    wait_until(lambda: bool(produce_requests(fake)), 10, "the request")
    with pytest.raises(ClientTimeout, match="flush"):
        producer.close(0.1)
    assert isinstance(future.exception(10), ProducerClosed)
    del producer
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_an_unknown_topic_fails_soon(fake: FakeCluster) -> None:
    with Producer(fake.bootstrap) as producer:
        started = time.monotonic()
        with pytest.raises(BrokerError, match="UNKNOWN_TOPIC_OR_PARTITION"):
            producer.send("nowhere", b"v")
        assert time.monotonic() - started < 8
        fake.create("nowhere")
        assert producer.send("nowhere", b"v").result(30).offset == 0


def test_an_unknown_partition_is_refused(fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    with (
        Producer(fake.bootstrap) as producer,
        pytest.raises(BrokerError, match="partition 2: topic 't' has 2 partitions"),
    ):
        producer.send("t", b"v", partition=2)


def test_a_deleted_topic_fails_its_records_in_flight(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap) as producer:
        producer.send("t", b"v").result(30)
        fake.do(lambda: fake.topics.pop("t"))
        with pytest.raises(BrokerError, match="UNKNOWN_TOPIC_OR_PARTITION"):
            producer.send("t", b"v").result(30)


def test_a_recreated_topic_does_not_get_the_old_topics_records(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap) as producer:
        producer.send("t", b"v").result(30)
        fake.create("t")
        with pytest.raises(BrokerError, match="INCONSISTENT_TOPIC_ID"):
            producer.send("t", b"old").result(30)
        assert producer.send("t", b"new").result(30).offset == 0
    assert values(fake, "t") == [b"new"]


def test_a_topic_recreated_during_a_request_fails_its_batch(fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    held: list[Callable[[], bool]] = []

    def hold(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        held.append(lambda: refuse(ErrorCode.INCONSISTENT_TOPIC_ID)(broker, connection, request))
        return True

    with Producer(fake.bootstrap) as producer:
        fake.fault(0, times(1, Produce, hold))
        in_flight = producer.send("t", b"old", partition=0)
        wait_until(lambda: held, 10, "the batch to arrive")
        fake.create("t", partitions=2)
        with pytest.raises(BrokerError, match="INCONSISTENT_TOPIC_ID"):
            producer.send("t", b"old", partition=1).result(30)
        fake.do(held[0])
        with pytest.raises(BrokerError, match="INCONSISTENT_TOPIC_ID"):
            in_flight.result(30)
        assert producer.send("t", b"new", partition=0).result(30).offset == 0


def test_a_recreated_topic_fails_records_that_waited_for_the_old(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap) as producer:
        producer.send("t", b"v").result(30)
        fake.do(lambda: fake.topics.pop("t"))
        waiting = producer.send("t", b"old")
        wait_until(lambda: "t" not in producer._sender.topics, 10, "the topic to be missed")
        fake.create("t")
        with pytest.raises(BrokerError, match="INCONSISTENT_TOPIC_ID"):
            waiting.result(30)
    assert values(fake, "t") == []


def test_no_reachable_broker_times_out_with_the_addresses() -> None:
    with Producer("127.0.0.1:1", max_block_s=0.3) as producer, pytest.raises(ClientTimeout, match=r"127\.0\.0\.1:1"):
        producer.send("t", b"v")


def test_a_full_buffer_blocks_then_raises(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, buffer_bytes=2000, max_block_s=0.3) as producer:
        producer.send("t", b"0").result(30)
        fault = times(10_000, Produce, say_nothing)
        fake.fault(0, fault)
        with pytest.raises(BufferFull, match=r"of 2000 bytes in use for 0.3 s"):
            for _ in range(100):
                producer.send("t", b"x" * 100)
        with pytest.raises(BufferFull):
            producer.write("t", pa.table({"value": [b"x" * 100] * 50}))
        fake.do(fake.brokers[0].faults.clear)
        fake.stop(0)
        fake.start(0)
        producer.flush(20)
        assert producer.send("t", b"room again").result(30)


def test_back_pressure_lets_writes_through_in_the_end(fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    with Producer(fake.bootstrap, buffer_bytes=50_000, batch_bytes=5_000) as producer:
        for index in range(3000):
            producer.send("t", b"%d" % index + b"x" * 90)
        producer.write("t", pa.table({"value": [b"y" * 100] * 3000}))
    assert len(values(fake, "t")) == 6000
