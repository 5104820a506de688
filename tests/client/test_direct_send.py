"""Tests of a record that the caller's thread sends directly: its results equal those of a buffered record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from sparklog import Producer
from sparklog.client.errors import ClientTimeout, ProducerClosed
from sparklog.client.producer import direct_send as module
from sparklog.client.producer.direct_send import DirectSender
from sparklog.errors import ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import Produce
from sparklog.record.partitioner import partition_for_key
from tests.client.fake_cluster import FakeCluster
from tests.client.producing import produce_requests, refuse, say_nothing, times, values
from tests.client.test_loop_handoff import acting, until

_TIMEOUT_S = 30.0


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record for each offered record whether it was sent directly."""
    went: list[bool] = []
    send = DirectSender.try_send

    def noted(self: DirectSender, *arguments: Any) -> Any:
        chunk = send(self, *arguments)
        went.append(chunk is not None)
        return chunk

    monkeypatch.setattr(DirectSender, "try_send", noted)
    return went


def send_until(producer: Producer, alone: list[bool], send: Callable[[], Any]) -> Any:
    """Send records until one was sent directly: the loop may be reclaimed at any time."""
    for _ in range(1000):
        acting(producer)
        alone.clear()
        future = send()
        if alone and alone[-1]:
            return future
        future.result()
    raise AssertionError("no record was sent directly")


@pytest.mark.parametrize(("acks", "idempotent"), [("all", True), ("all", False), (1, True)])
def test_records_arrive_as_sent(fake: FakeCluster, alone: list[bool], acks: str | int, idempotent: bool) -> None:
    fake.create("t", partitions=1)
    sent: list[Any] = [b"bytes", "text", "Größe", None, b"", b"x" * 1000, b"y" * 100_000]
    with Producer(fake.bootstrap, acks=acks, idempotent=idempotent) as producer:
        before = acting(producer)
        alone.clear()
        for number, value in enumerate(sent):
            key = "k" if number % 2 else None
            told = producer.send("t", value, key=key, timestamp=number).result()
            assert (told.partition, told.offset, told.timestamp_us) == (0, before + number, number)
        send_until(producer, alone, lambda: producer.send("t", b"last")).result()
    found = pa.Table.from_batches(fake.records("t")).slice(before, len(sent))
    wanted = [value.encode() if isinstance(value, str) else value for value in sent]
    assert found.column("value").to_pylist() == wanted
    assert found.column("key").to_pylist() == [b"k" if number % 2 else None for number in range(len(sent))]
    assert found.column("timestamp").cast(pa.int64()).to_pylist() == list(range(len(sent)))


def test_sequences_continue_across_the_direct_and_buffered_paths(fake: FakeCluster, alone: list[bool]) -> None:
    """The broker would refuse a sequence out of order."""
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        acting(producer)
        before = len(values(fake, "t"))
        alone.clear()
        for number in range(100):
            headers = {"h": b""} if number % 3 == 0 else None
            producer.send("t", b"%d" % number, headers=headers).result()
        assert producer._sender.sequence_resets == 0
    assert values(fake, "t")[before:] == [b"%d" % number for number in range(100)]
    assert any(alone) and not all(alone)


@pytest.mark.parametrize("code", [ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER])
def test_a_refused_record_is_sent_again(fake: FakeCluster, alone: list[bool], code: ErrorCode) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        acting(producer)

        def refused() -> Any:
            for broker in fake.brokers:
                fake.fault(broker.broker_id, times(1, Produce, refuse(code)))
            return producer.send("t", b"again")

        send_until(producer, alone, refused).result()
        producer.send("t", b"more").result()
    found = values(fake, "t")
    assert found[-1] == b"more" and found[-2] == b"again"


def test_a_direct_send_follows_a_new_leader(fake: FakeCluster, alone: list[bool]) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        sent = acting(producer)
        for leader in (1, 0, 1):
            fake.move(TopicPartition("t", 0), leader)
            assert producer.send("t", b"v").result().offset == sent
            sent += 1 + acting(producer)


def test_flush_and_close_wait_for_a_direct_send(fake: FakeCluster, alone: list[bool]) -> None:
    fake.create("t", partitions=1)
    producer = Producer(fake.bootstrap)
    acting(producer)

    future = send_until(producer, alone, lambda: producer.send("t", b"v"))
    producer.flush(_TIMEOUT_S)
    assert future.done()
    acting(producer)
    for broker in fake.brokers:
        fake.fault(broker.broker_id, times(10**6, Produce, say_nothing))
    future = producer.send("t", b"v")
    with pytest.raises(ClientTimeout, match="flush"):
        producer.flush(0.05)
    assert not future.done()
    with pytest.raises((ClientTimeout, ProducerClosed)):
        producer.close(0.05)
    with pytest.raises(ProducerClosed):
        future.result(_TIMEOUT_S)
    with pytest.raises(ProducerClosed):
        producer.send("t", b"v")


def test_only_the_first_of_several_records_is_sent_directly(fake: FakeCluster, alone: list[bool]) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        first = send_until(producer, alone, lambda: producer.send("t", b"first"))
        before = len(produce_requests(fake))
        others = [producer.send("t", b"%d" % number) for number in range(500)]
        assert [future.result().offset for future in others] == [
            first.result().offset + 1 + number for number in range(500)
        ]
        assert len(produce_requests(fake)) - before < 500, "the other records must share a request"


def test_keys_and_turns_choose_the_same_partitions_as_usual(fake: FakeCluster, alone: list[bool]) -> None:
    fake.create("t", partitions=6)
    with Producer(fake.bootstrap) as producer:
        for _ in range(3):  # the first record of each partition has no sequence to continue
            for key in range(30):
                for idle in range(6):
                    producer.send("t", b"v", partition=idle).result()
                told = producer.send("t", b"v", key=b"%d" % key).result()
                assert told.partition == partition_for_key(b"%d" % key, 6)
    assert any(alone)


def test_records_without_a_key_go_to_all_partitions_in_turn(fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    with Producer(fake.bootstrap) as producer:
        turns = [producer.send("t", b"v").result().partition for _ in range(100)]
    assert turns in ([0, 1] * 50, [1, 0] * 50)


def test_compressed_records_take_the_buffered_path(fake: FakeCluster, alone: list[bool]) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap, compression="lz4") as producer:
        acting(producer)
        producer.send("t", b"v" * 500).result()
    assert alone == []


def test_a_thread_with_two_producers_mixes_nothing_up(fake: FakeCluster) -> None:
    for name in ("a", "b"):
        fake.create(name, partitions=1)
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as one, Producer(fake.bootstrap) as other:
        acting(one)
        acting(other)
        for number in range(100):
            assert one.send("a", b"%d" % number).result().offset == number
            assert other.send("b", b"%d" % number).result().offset == number
    until(lambda: values(fake, "a") == values(fake, "b") == [b"%d" % number for number in range(100)])


def test_a_signal_handlers_error_during_encoding_reaches_the_caller(
    fake: FakeCluster, alone: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.create("t", partitions=1)

    def alarm(*_: Any, **__: Any) -> None:
        raise TimeoutError("alarm")

    with Producer(fake.bootstrap) as producer:
        acting(producer)
        with monkeypatch.context() as patch:
            patch.setattr(module, "single_record_body", alarm)
            with pytest.raises(TimeoutError, match="alarm"):
                for _ in range(1000):
                    producer.send("t", b"v").result()
        acting(producer)
        assert producer.send("t", b"more").result().offset == len(values(fake, "t")) - 1
