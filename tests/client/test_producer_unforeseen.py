"""Tests of unexpected errors: an unsuitable record fails alone, and any other error ends the producer and is reported.

No caller waits forever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from typing import Any

import pyarrow as pa
import pytest

from sparklog.client.consumer import fetch_decoder
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.errors import ProducerClosed
from sparklog.client.producer import chunk_encoder, producer_metadata
from sparklog.client.producer.partitioning import ProducerTopic, encode_parts
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.messages import Produce, TopicMetadata
from tests.client.fake_cluster import FakeCluster
from tests.client.producing import say_nothing, times, values

HALF_A_PAIR = "half a pair: \ud800"


class Unforeseen(Exception):
    """An error of a kind that the client does not know."""


def fail(*_: object, **__: object) -> Any:
    raise Unforeseen("on purpose")


@pytest.mark.parametrize(
    ("record", "error", "said"),
    [
        ({"value": HALF_A_PAIR}, ValueError, "value: no Unicode text, surrogates not allowed at 13"),
        ({"value": b"", "key": HALF_A_PAIR}, ValueError, "key: no Unicode text"),
        ({"value": b"", "headers": {"h": HALF_A_PAIR}}, ValueError, "header 'h': no Unicode text"),
        ({"value": b"", "headers": {HALF_A_PAIR: b""}}, ValueError, "header: no Unicode text"),
        ({"value": 5}, TypeError, "value: int found"),
        ({"value": b"", "timestamp": 2**63}, ValueError, "timestamp: 9223372036854775808 us found"),
        ({"value": b"", "timestamp": -(2**63) - 1}, ValueError, "timestamp: -9223372036854775809 us"),
        ({"value": b"", "timestamp": "noon"}, TypeError, "timestamp: str found, expected a datetime"),
        ({"value": b"", "timestamp": 1.5}, TypeError, "timestamp: float found"),
        ({"value": b"", "partition": 0.0}, TypeError, "float"),
    ],
)
def test_a_value_that_is_not_a_record_is_refused_at_once(
    fake: FakeCluster, record: dict[str, Any], error: type[Exception], said: str
) -> None:
    fake.create("t")
    with Producer(fake.bootstrap) as producer:
        with pytest.raises(error, match=said):
            producer.send("t", **record)
        assert producer.send("t", "größer", key="ключ", timestamp=2**63 - 1).result(30).offset == 0
    assert values(fake, "t") == ["größer".encode()]


def test_a_topic_name_that_is_not_text_is_refused(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap) as producer:
        with pytest.raises(BrokerError, match="INVALID_TOPIC_EXCEPTION"):
            producer.send(HALF_A_PAIR, b"v")
        assert producer.send("t", b"v").result(30).offset == 0


def test_a_host_name_that_cannot_exist_is_skipped(fake: FakeCluster) -> None:
    fake.create("t")
    for bootstrap in (f"a..b:1,{fake.bootstrap}", f"{fake.bootstrap},a..b:1"):
        with Producer(bootstrap) as producer, Consumer(bootstrap, "t") as consumer:
            producer.send("t", b"v").result(30)
            assert consumer.poll(30)


def gathered(producer: Producer, records: list[Any], topic: str = "t") -> list[Future[Any]]:
    """Records that are encoded together: they are sent while the I/O thread runs a callback."""
    met, go_on = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        met.set()
        go_on.wait(30)

    producer.send(topic, records[0]).add_done_callback(hold)
    assert met.wait(30)
    try:
        return [producer.send(topic, record) for record in records]
    finally:
        go_on.set()


def outcomes(futures: list[Future[Any]]) -> list[bool]:
    """Return whether each record succeeded. All have ended."""
    assert not wait_for_futures(futures, 30).not_done
    return [future.exception() is None for future in futures]


class Odd:
    """A value that cannot describe itself."""

    def __index__(self) -> int:
        raise Unforeseen("on purpose")

    __int__ = __index__


def test_a_value_that_cannot_be_encoded_fails_alone(fake: FakeCluster) -> None:
    fake.create("t", schema=pa.schema([("n", pa.int64())]))
    with Producer(fake.bootstrap) as producer:
        futures = gathered(producer, [{"n": 1}, {"n": Odd()}, {"n": 3}])
        assert outcomes(futures) == [True, False, True]
        with pytest.raises(BrokerError, match=r"SCHEMA_MISMATCH: a record of .t.: "):
            futures[1].result()
    assert [row["n"] for batch in fake.records("t") for row in batch.to_pylist()] == [1, 1, 3]


def test_a_too_large_record_fails_alone(fake: FakeCluster) -> None:
    fake.create("t", partitions=2).config["max.message.bytes"] = "4096"
    # Only their batches exceed the limit. Before ``send`` refuses a larger value, it asks for the limit, but the I/O
    # thread runs a callback.
    records = [b"1", bytes(4000), b"3", bytes(4090), b"5"]
    with Producer(fake.bootstrap) as producer:
        futures = gathered(producer, records)
        assert outcomes(futures) == [True, False, True, False, True]
        with pytest.raises(BrokerError, match=r"MESSAGE_TOO_LARGE: one record of 't' has 4\d{3} bytes"):
            futures[1].result()
        with pytest.raises(BrokerError, match=r"has 4\d{3} bytes"):
            futures[3].result()
    assert sorted(values(fake, "t")) == [b"1", b"1", b"3", b"5"]


def test_an_encoding_error_fails_the_records_of_its_batch(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is unknown to the client. Other topics continue, and so does this one."""
    fake.create("t")
    fake.create("other")

    def encode(topic: Any, *arguments: Any, **options: Any) -> Any:
        return fail() if topic.name == "t" else encode_parts(topic, *arguments, **options)

    with Producer(fake.bootstrap, compression="lz4") as producer:
        with monkeypatch.context() as patched:
            patched.setattr(chunk_encoder, "encode_parts", encode)
            with pytest.raises(BrokerError, match=r"INVALID_RECORD: a record of 't' cannot be encoded: .*on purpose"):
                producer.send("t", b"1").result(30)
            assert producer.send("other", b"2").result(30).offset == 0
        assert producer.send("t", b"3").result(30).offset == 0


def test_an_unreadable_topic_does_not_affect_others(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.create("t")
    fake.create("odd")

    def take(metadata: TopicMetadata) -> ProducerTopic:
        if metadata.name == "odd":
            raise BrokerError(ErrorCode.SCHEMA_MISMATCH, "written by a later Arrow")
        return ProducerTopic(metadata)

    monkeypatch.setattr(producer_metadata, "ProducerTopic", take)
    with Producer(fake.bootstrap) as producer:
        with pytest.raises(BrokerError, match="a later Arrow"):
            producer.send("odd", b"v")
        assert producer.send("t", b"v").result(30).offset == 0


def in_the_look(producer: Producer) -> tuple[object, str]:
    return producer._sender._queues, "drain"


def at_the_answer(producer: Producer) -> tuple[object, str]:
    return producer._sender._queues, "succeeded"


def with_a_chunk_in_hand(producer: Producer) -> tuple[object, str]:
    return producer._sender, "_encode_chunk"


def in_a_task(producer: Producer) -> tuple[object, str]:
    return producer._sender._cluster, "ask_any"


@pytest.mark.parametrize("place", [in_the_look, at_the_answer, with_a_chunk_in_hand, in_a_task])
@pytest.mark.parametrize("error", [Unforeseen, SystemExit])
def test_an_unexpected_error_fails_all_open_records_and_later_ones(
    fake: FakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    place: Callable[[Producer], tuple[object, str]],
    error: type[BaseException],
) -> None:
    fake.create("t")

    def meet(*_: object, **__: object) -> None:
        raise error("on purpose")

    producer = Producer(fake.bootstrap)
    assert producer.partitions("t") == 1
    monkeypatch.setattr(*place(producer), meet)
    futures: list[Future[Any]] = [producer.send("t", b"one")]
    with pytest.raises(ProducerClosed, match=r"the producer failed: .*on purpose") as told:
        futures[0].result(30)
    assert isinstance(told.value.__cause__, error)
    for later in (
        lambda: producer.send("t", b"two"),
        lambda: producer.write("t", pa.table({"value": [b"three"]})),
        lambda: producer.partitions("another"),
    ):
        with pytest.raises(ProducerClosed, match=r"the producer failed: .*on purpose") as told:
            later()
        assert isinstance(told.value.__cause__, error)
    producer.close(30)


def test_tables_and_transactions_do_not_wait_for_an_ended_thread(
    fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.create("t")
    producer = Producer(fake.bootstrap, transactional_id="writer", max_block_s=30)
    producer.begin()
    for broker in fake.brokers:
        fake.fault(broker.broker_id, times(1000, Produce, say_nothing))
    table = producer.write("t", pa.table({"value": [b"1", b"2"]}))
    monkeypatch.setattr(producer._sender._queues, "drain", fail)
    record = producer.send("t", b"3")
    for future in (table, record):
        with pytest.raises(ProducerClosed, match="on purpose"):
            future.result(30)
    for later in (producer.commit, producer.abort, producer.begin):
        with pytest.raises(Exception, match=r"on purpose|no transaction"):
            later()
    producer.close(30)


def test_a_callback_that_raises_systemexit_does_not_end_the_producer(fake: FakeCluster) -> None:
    fake.create("t")

    added = threading.Event()

    def leave(_: object) -> None:
        raise SystemExit(3)

    def answer_when_added(*_: object) -> bool:
        assert added.wait(30)
        return False

    for broker in fake.brokers:
        fake.fault(broker.broker_id, times(1000, Produce, answer_when_added))
    with Producer(fake.bootstrap) as producer:
        first, table = producer.send("t", b"1"), producer.write("t", pa.table({"value": [b"2"]}))
        first.add_done_callback(leave)  # the thread would be the one to end
        table.add_done_callback(leave)
        added.set()
        producer.flush(30)
        assert producer.send("t", b"3").result(30).offset >= 0
    assert sorted(values(fake, "t")) == [b"1", b"2", b"3"]


def test_a_row_is_sent_as_it_was_at_the_call(fake: FakeCluster) -> None:
    fake.create("t", partitions=1, schema=pa.schema([("n", pa.int64())]))
    row = {"n": 0}
    with Producer(fake.bootstrap) as producer:
        for number in range(100):
            row["n"] = number
            producer.send("t", row)
    assert [row["n"] for batch in fake.records("t") for row in batch.to_pylist()] == list(range(100))


def test_a_reader_skips_nothing_it_could_not_read(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.create("t", partitions=2)
    with Producer(fake.bootstrap) as producer:
        for partition in (0, 1):
            producer.send("t", b"v", partition=partition).result(30)
    with Consumer(fake.bootstrap, "t") as consumer:
        with monkeypatch.context() as patched:
            patched.setattr(fetch_decoder, "decode_partition", fail)
            with pytest.raises(Unforeseen):
                consumer.to_table(timeout_s=30)
            with pytest.raises(Unforeseen):
                consumer.poll(30)
        assert consumer.to_table(timeout_s=30).num_rows == 2
