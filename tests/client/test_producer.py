"""The producer against real sockets and a broker that misbehaves on demand: nothing is lost, doubled or left open."""

from __future__ import annotations

import asyncio
import concurrent.futures
import datetime as dt
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from sparklog.client.errors import BufferFull, ClientTimeout, ProducerClosed
from sparklog.client.producer import Producer
from sparklog.client.results import RecordMetadata
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import OffsetRange, TopicPartition, TopicSchema
from sparklog.net.server import ServerConnection
from sparklog.protocol.messages import (
    ErrorReply,
    InitProducerId,
    Metadata,
    Produce,
    ProduceReply,
    ProduceResult,
    Request,
)
from sparklog.record.schema import schema_message
from sparklog.testing.process_cluster import wait_until
from tests.client.fake_cluster import FakeBroker, FakeCluster, Fault

TYPED = pa.schema([("carrier", pa.string()), ("delay", pa.float64())])


def times(count: int, wanted: type, act: Fault) -> Fault:
    """Apply ``act`` to the first ``count`` requests of a type."""
    left = count

    def fault(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        nonlocal left
        if not isinstance(request, wanted) or not left:
            return False
        left -= 1
        return act(broker, connection, request)

    return fault


def refuse(code: ErrorCode) -> Fault:
    def act(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        assert isinstance(request, Produce)
        results = tuple(ProduceResult(int(code), -1, 0, 0, "on purpose") for _ in request.partitions)
        connection.reply(ProduceReply(request.cid, results))
        return True

    return act


def hang_up(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
    connection.close()
    return True


def say_nothing(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
    return True


class LoseAnswers:
    """Requests are carried out, then the connection ends instead of the answer."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if isinstance(request, Produce) and self.left:
            self.left -= 1
            reply = connection.reply

            def lose(*_: object, **__: object) -> None:
                connection.reply = reply  # type: ignore[method-assign]
                connection.close()

            connection.reply = lose  # type: ignore[method-assign]
        return False


def values(fake: FakeCluster, topic: str) -> list[bytes]:
    return [value for batch in fake.records(topic) for value in batch.column("value").to_pylist()]


def produce_requests(fake: FakeCluster) -> list[Produce]:
    return [request for broker in fake.brokers for request in broker.requests if isinstance(request, Produce)]


# --- the happy path ---


def test_a_record_comes_back_with_its_place(fake: FakeCluster) -> None:
    fake.create("t", partitions=3)
    moment = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)
    with Producer(fake.bootstrap) as producer:
        first = producer.send("t", b"v", key="k", headers={"h": b"1", "n": None}, timestamp=moment, partition=2)
        found = first.result(10)
        assert found == RecordMetadata("t", 2, 0, 1_767_225_600_000_000)
        assert producer.send("t", "text", partition=2).result(10).offset == 1
    records = [row for batch in fake.records("t") for row in batch.to_pylist()]
    assert records[0] == {
        "key": b"k",
        "value": b"v",
        "headers": [{"key": "h", "value": b"1"}, {"key": "n", "value": None}],
        "timestamp": moment,
    }
    assert records[1]["value"] == b"text"


def test_many_records_each_once_and_in_order_of_their_partition(fake: FakeCluster) -> None:
    fake.create("t", partitions=4)
    with Producer(fake.bootstrap, batch_bytes=20_000) as producer:
        futures = [producer.send("t", b"%d" % index, key=b"%d" % (index % 50)) for index in range(20_000)]
        producer.flush(20)
        assert all(future.done() for future in futures)
        places = [future.result() for future in futures]
    assert len(set(places)) == len(places)
    assert Counter(values(fake, "t")) == Counter(b"%d" % index for index in range(20_000))
    by_key: dict[bytes, list[int]] = {}
    for batch in fake.records("t"):
        for row in batch.to_pylist():
            by_key.setdefault(row["key"], []).append(int(row["value"]))
    assert all(found == sorted(found) for found in by_key.values())
    log = fake.topics["t"].logs[places[7].partition]
    header, body = next(
        entry for entry in log.batches if entry[0].base_offset <= places[7].offset < entry[0].next_offset
    )
    batch = pa.ipc.read_record_batch(pa.py_buffer(body), fake.records("t")[0].schema)
    assert batch.column("value")[places[7].offset - header.base_offset].as_py() == b"7"


def test_tables_tell_their_ranges(fake: FakeCluster) -> None:
    fake.create("t", partitions=2, schema=TYPED, key=("carrier",))
    table = pa.table({"delay": [float(index) for index in range(1000)], "carrier": ["UA", "AA"] * 500})
    with Producer(fake.bootstrap, compression="zstd") as producer:
        result = producer.write("t", table).result(10)
        again = producer.write("t", table.slice(0, 10), partition=1).result(10)
    assert result.record_count == 1000
    assert sum(found.offsets.end - found.offsets.start for found in result.ranges) == 1000
    ends = {found.partition: found.offsets.end for found in result.ranges}
    assert again.ranges[0].offsets == OffsetRange(ends.get(1, 0), ends.get(1, 0) + 10)
    delays = sorted(value for batch in fake.records("t") for value in batch.column("delay").to_pylist())
    assert delays == sorted([*map(float, range(1000)), *map(float, range(10))])


def test_rows_of_typed_topics(fake: FakeCluster) -> None:
    fake.create("t", schema=TYPED)
    with Producer(fake.bootstrap) as producer:
        assert producer.send("t", {"carrier": "UA", "delay": 1.5}).result(10).offset == 0
        assert producer.send("t", {"carrier": "AA"}).result(10).offset == 1
        with pytest.raises(BrokerError, match="speed"):
            producer.send("t", {"speed": 1})
        with pytest.raises(TypeError, match="expects"):
            producer.send("t", b"bytes")
        with pytest.raises(BrokerError, match="SCHEMA_MISMATCH"):
            producer.send("t", {"delay": "late"}).result(10)


def test_a_row_that_does_not_fit_fails_alone(fake: FakeCluster) -> None:
    fake.create("t", schema=TYPED)
    rows: list[dict[str, object]] = [{"delay": "late" if index in {3, 4} else float(index)} for index in range(10)]
    with Producer(fake.bootstrap) as producer:
        producer.send("t", {}).result(10)
        fake.fault(0, times(1, Produce, LoseAnswers(1)))  # holds the first one up, so that the others go together
        futures = [producer.send("t", row) for row in [{}, *rows]][1:]
        assert [future.exception(10) is None for future in futures] == [index not in {3, 4} for index in range(10)]
        offsets = [future.result().offset for future in futures if future.exception() is None]
    delays = [value for batch in fake.records("t") for value in batch.column("delay").to_pylist()]
    assert [delays[offset] for offset in offsets] == [float(index) for index in range(10) if index not in {3, 4}]


def test_an_idle_producer_does_not_linger(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, linger_ms=60_000) as producer:
        for index in range(5):
            assert producer.send("t", b"x").result(10).offset == index


def test_acks_0_and_1(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, acks=0) as producer:
        assert producer.send("t", b"a").result(10).offset == -1
    with Producer(fake.bootstrap, acks=1) as producer:
        assert producer.send("t", b"b").result(10).offset == 1
    assert values(fake, "t") == [b"a", b"b"]
    assert not any(isinstance(request, InitProducerId) for broker in fake.brokers for request in broker.requests)


def test_futures_work_with_wait_as_completed_callbacks_and_asyncio(fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    with Producer(fake.bootstrap) as producer:
        futures = [producer.send("t", b"x") for _ in range(20)]
        done, left = concurrent.futures.wait(futures, timeout=10)
        assert (done, left) == (set(futures), set())
        assert len(list(concurrent.futures.as_completed([producer.send("t", b"y") for _ in range(20)], 10))) == 20
        told = threading.Event()
        future = producer.send("t", b"z")
        future.add_done_callback(lambda found: told.set() if found is future else None)
        assert told.wait(10)
        assert not future.cancel()

        async def wrapped() -> RecordMetadata:
            return await asyncio.wait_for(asyncio.wrap_future(producer.send("t", b"w")), 10)

        assert asyncio.run(wrapped()).topic == "t"


# --- retries ---


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.BROKER_STOPPING,
    ],
)
def test_what_is_retriable_is_retried(fake: FakeCluster, code: ErrorCode) -> None:
    fake.create("t")
    fake.fault(0, times(3, Produce, refuse(code)))
    with Producer(fake.bootstrap) as producer:
        assert producer.send("t", b"v").result(10).offset == 0
    assert len(produce_requests(fake)) == 4


def test_a_lost_answer_is_no_duplicate(fake: FakeCluster) -> None:
    fake.create("t")
    fake.fault(0, LoseAnswers(3))
    with Producer(fake.bootstrap) as producer:
        futures = [producer.send("t", b"%d" % index) for index in range(3)]
        assert [future.result(10).offset for future in futures] == [0, 1, 2]
        futures += [producer.send("t", b"%d" % index) for index in range(3, 6)]
        assert [future.result(10).offset for future in futures] == [0, 1, 2, 3, 4, 5]
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
        producer.send("t", b"a").result(10)
        fake.move(TopicPartition("t", 0), 1)
        assert producer.send("t", b"b").result(10).offset == 1
        fake.move(TopicPartition("t", 0), 0)
        fake.stop(1)
        assert producer.send("t", b"c").result(10).offset == 2
    assert values(fake, "t") == [b"a", b"b", b"c"]


def test_a_leader_that_hangs_is_left_when_another_is_elected(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, request_timeout_s=60) as producer:
        producer.send("t", b"a").result(10)
        fake.fault(0, times(100, Produce, say_nothing))
        future = producer.send("t", b"b")
        fake.move(TopicPartition("t", 0), 1)
        assert future.result(10).offset == 1


def test_a_cluster_that_comes_back_gets_everything(fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    with Producer(fake.bootstrap) as producer:
        producer.send("t", b"0").result(10)
        fake.stop(0)
        fake.stop(1)
        futures = [producer.send("t", b"%d" % index) for index in range(1, 50)]
        fake.start(0)
        fake.start(1)
        producer.flush(20)
        assert all(future.done() for future in futures)
    assert Counter(values(fake, "t")) == Counter(b"%d" % index for index in range(50))


def test_a_forgotten_producer_goes_on_under_a_new_id(fake: FakeCluster) -> None:
    topic = fake.create("t")
    with Producer(fake.bootstrap) as producer:
        producer.send("t", b"a").result(10)
        fake.do(topic.logs[0].producers.clear)
        assert producer.send("t", b"b").result(10).offset == 1
        assert producer.send("t", b"c").result(10).offset == 2
    ids = {header.producer_id for header, _ in topic.logs[0].batches}
    assert len(ids) == 2


def test_records_under_an_older_schema_are_written_under_the_newest(fake: FakeCluster) -> None:
    topic = fake.create("t", schema=TYPED)
    with Producer(fake.bootstrap, compression="lz4") as producer:
        producer.write("t", pa.table({"delay": [1.0]})).result(10)
        longer = TYPED.append(pa.field("added", pa.int32()))
        fake.do(lambda: topic.schemas.append(TopicSchema(1, schema_message(longer))))
        producer.write("t", pa.table({"delay": [2.0]})).result(10)
    assert [header.schema_id for header, _ in topic.logs[0].batches] == [0, 1]
    assert fake.records("t")[1].to_pylist() == [{"carrier": None, "delay": 2.0, "added": None}]


# --- failures ---


def test_what_is_not_retriable_fails_at_once(fake: FakeCluster) -> None:
    fake.create("t")
    fake.fault(0, times(1, Produce, refuse(ErrorCode.INVALID_RECORD)))
    with Producer(fake.bootstrap) as producer:
        with pytest.raises(BrokerError, match="INVALID_RECORD: on purpose"):
            producer.send("t", b"bad").result(10)
        assert producer.send("t", b"good").result(10).offset == 0


def test_what_is_never_acknowledged_fails_with_the_last_reason(fake: FakeCluster) -> None:
    fake.create("t")
    fake.fault(0, times(10_000, Produce, refuse(ErrorCode.NOT_ENOUGH_REPLICAS)))
    with Producer(fake.bootstrap, delivery_timeout_s=0.5) as producer:
        started = time.monotonic()
        with pytest.raises(ClientTimeout, match=r"1 records to t-0: .* 0.5 s, last: NOT_ENOUGH_REPLICAS: on purpose"):
            producer.send("t", b"v").result(10)
        assert 0.4 < time.monotonic() - started < 5


def test_a_broker_that_falls_silent_does_not_hide_the_reason_it_gave_before(fake: FakeCluster) -> None:
    fake.create("t")
    fake.fault(0, times(1, Produce, refuse(ErrorCode.NOT_ENOUGH_REPLICAS)))
    fake.fault(0, times(10_000, Produce, say_nothing))
    with Producer(fake.bootstrap, delivery_timeout_s=1.0, request_timeout_s=0.3) as producer:
        reasons = r"last: NETWORK_EXCEPTION: .*; before that: NOT_ENOUGH_REPLICAS: on purpose"
        with pytest.raises(ClientTimeout, match=reasons):
            producer.send("t", b"v").result(10)


def test_a_broker_that_waits_as_long_as_it_may_is_still_heard(fake: FakeCluster) -> None:
    """As a leader does that waits for followers: its answer comes before the request is given up."""
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
        pytest.raises(ClientTimeout, match="last: NOT_ENOUGH_REPLICAS_AFTER_APPEND: as late as may be"),
    ):
        producer.send("t", b"v").result(10)


def test_a_broker_that_never_answers_is_given_up_in_time(fake: FakeCluster) -> None:
    fake.create("t")
    fake.fault(0, times(10_000, Produce, say_nothing))
    with Producer(fake.bootstrap, delivery_timeout_s=0.6, request_timeout_s=30) as producer:
        started = time.monotonic()
        with pytest.raises(ClientTimeout):
            producer.send("t", b"v").result(10)
        assert time.monotonic() - started < 5


def test_one_bad_partition_fails_its_records_only(fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    fake.fault(1, times(10_000, Produce, refuse(ErrorCode.INVALID_RECORD)))
    with Producer(fake.bootstrap) as producer:
        futures = [producer.send("t", b"x", key=b"%d" % index) for index in range(40)]
        outcomes = [future.exception(10) for future in futures]
    partitions = {future.result().partition for future, error in zip(futures, outcomes, strict=True) if error is None}
    assert partitions == {0}
    assert 0 < sum(error is not None for error in outcomes) < 40


def test_flush_and_close_tell_what_no_future_has_told(fake: FakeCluster) -> None:
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


def test_close_gives_up_after_its_time(fake: FakeCluster) -> None:
    fake.create("t")
    producer = Producer(fake.bootstrap)
    producer.send("t", b"0").result(10)
    fake.fault(0, times(10_000, Produce, say_nothing))
    future = producer.send("t", b"1")
    with pytest.raises(ClientTimeout, match="flush"):
        producer.close(0.2)
    with pytest.raises(ProducerClosed):
        future.result(10)


def test_what_is_under_way_at_the_end_leaves_no_complaints(fake: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    """Its futures fail with the connections, when nobody waits for them any more."""
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


def test_an_unknown_topic_is_told_soon(fake: FakeCluster) -> None:
    with Producer(fake.bootstrap) as producer:
        started = time.monotonic()
        with pytest.raises(BrokerError, match="UNKNOWN_TOPIC_OR_PARTITION"):
            producer.send("nowhere", b"v")
        assert time.monotonic() - started < 8
        fake.create("nowhere")
        assert producer.send("nowhere", b"v").result(10).offset == 0


def test_an_unknown_partition_is_refused(fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    with (
        Producer(fake.bootstrap) as producer,
        pytest.raises(BrokerError, match="partition 2: topic 't' has 2 partitions"),
    ):
        producer.send("t", b"v", partition=2)


def test_a_deleted_topic_fails_what_is_under_way(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap) as producer:
        producer.send("t", b"v").result(10)
        fake.do(lambda: fake.topics.pop("t"))
        with pytest.raises(BrokerError, match="UNKNOWN_TOPIC_OR_PARTITION"):
            producer.send("t", b"v").result(10)


def test_a_recreated_topic_does_not_get_the_old_ones_records(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap) as producer:
        producer.send("t", b"v").result(10)
        fake.create("t")
        with pytest.raises(BrokerError, match="INCONSISTENT_TOPIC_ID"):
            producer.send("t", b"old").result(10)
        assert producer.send("t", b"new").result(10).offset == 0
    assert values(fake, "t") == [b"new"]


def test_a_topic_recreated_while_a_batch_is_in_flight_fails_that_one_too(fake: FakeCluster) -> None:
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
            producer.send("t", b"old", partition=1).result(10)
        fake.do(held[0])
        with pytest.raises(BrokerError, match="INCONSISTENT_TOPIC_ID"):
            in_flight.result(10)
        assert producer.send("t", b"new", partition=0).result(10).offset == 0


def test_a_topic_that_is_there_again_fails_what_waited_for_the_old_one(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap) as producer:
        producer.send("t", b"v").result(10)
        fake.do(lambda: fake.topics.pop("t"))
        waiting = producer.send("t", b"old")
        wait_until(lambda: "t" not in producer._sender.topics, 10, "the topic to be missed")
        fake.create("t")
        with pytest.raises(BrokerError, match="INCONSISTENT_TOPIC_ID"):
            waiting.result(10)
    assert values(fake, "t") == []


def test_nobody_there_is_a_timeout_that_names_the_addresses() -> None:
    with Producer("127.0.0.1:1", max_block_s=0.3) as producer, pytest.raises(ClientTimeout, match=r"127\.0\.0\.1:1"):
        producer.send("t", b"v")


def test_a_full_buffer_blocks_and_then_tells(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, buffer_bytes=2000, max_block_s=0.3) as producer:
        producer.send("t", b"0").result(10)
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
        assert producer.send("t", b"room again").result(10)


def test_back_pressure_lets_writes_through_in_the_end(fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    with Producer(fake.bootstrap, buffer_bytes=50_000, batch_bytes=5_000) as producer:
        for index in range(3000):
            producer.send("t", b"%d" % index + b"x" * 90)
        producer.write("t", pa.table({"value": [b"y" * 100] * 3000}))
    assert len(values(fake, "t")) == 6000


def test_a_callback_may_send(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, buffer_bytes=300) as producer:
        done = threading.Event()

        def again(_: object) -> None:
            producer.send("t", b"x" * 200).add_done_callback(lambda _: done.set())

        producer.send("t", b"x" * 200).add_done_callback(again)
        assert done.wait(10)


def test_values_of_other_types_are_refused(fake: FakeCluster) -> None:
    fake.create("t")
    array: Any = bytearray(b"b")
    with Producer(fake.bootstrap) as producer:
        for arguments in ({"value": 1}, {"value": b"", "key": 1.0}, {"headers": {"a": 1}}, {"headers": {1: b"a"}}):
            with pytest.raises(TypeError):
                producer.send("t", **arguments)
        assert producer.send("t", array).result(10).offset == 0
    assert values(fake, "t") == [b"b"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"acks": 2},
        {"acks": "most"},
        {"compression": "gzip"},
        {"batch_bytes": 0},
        {"linger_ms": -1},
        {"buffer_bytes": 0},
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(arguments))}="):
        Producer("localhost", **arguments)  # type: ignore[arg-type]


def test_bad_addresses_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="bootstrap"):
        Producer("a:b:c")


def test_an_exception_in_the_block_is_the_one_that_comes_out(fake: FakeCluster) -> None:
    fake.create("t")
    with pytest.raises(RuntimeError, match="mine"), Producer(fake.bootstrap) as producer:
        producer.send("t", b"v")
        raise RuntimeError("mine")
    assert values(fake, "t") == [b"v"]


def test_metadata_refused_for_good_is_told(fake: FakeCluster) -> None:
    def refuse_all(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        connection.reply(ErrorReply(request.cid, ErrorCode.UNSUPPORTED_VERSION, "too old"))
        return True

    for broker in fake.brokers:
        fake.fault(broker.broker_id, times(1000, Metadata, refuse_all))
    with Producer(fake.bootstrap) as producer, pytest.raises(BrokerError, match="too old"):
        producer.send("t", b"v")
