"""Tests that a direct send and a buffered one send the same bytes and report the same outcomes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from sparklog import Producer
from sparklog.client.errors import ClientTimeout, ProducerClosed
from sparklog.client.producer import inflight_requests as requests_module
from sparklog.client.producer.direct_send import _MOST_PREPARED, DirectSender, SingleRecordCompletion
from sparklog.client.producer.record_future import RecordFuture
from sparklog.client.producer.results import RecordMetadata
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import Metadata, Produce
from sparklog.record.header import BatchHeader
from tests.client.fake_cluster import FakeCluster, Fault
from tests.client.interrupting import interrupted_in, lines
from tests.client.producing import LoseAnswers, hang_up, produce_requests, refuse, say_nothing, times, values
from tests.client.test_interrupted_outcomes import ended
from tests.client.test_loop_handoff import acting, until

_TIMEOUT_S = 30.0
_WAYS = pytest.mark.parametrize("way", ["alone", "usual"])


@contextlib.contextmanager
def acted_for(producer: Producer) -> Iterator[None]:
    """Act for the producer's thread within the block. The loop is not reclaimed meanwhile."""
    handoff = producer._sender.thread.handoff
    while True:
        acting(producer)
        with handoff._guard:
            if handoff.lent:
                yield
                return


def send(
    producer: Producer, way: str, *arguments: Any, before: Callable[[], object] = lambda: None, **options: Any
) -> Future[RecordMetadata]:
    """Send one record on this path, and do something just before."""
    alone = producer._direct_sender
    with acted_for(producer):
        before()
        if way == "usual":
            producer._direct_sender = None
        try:
            future = producer.send("t", *arguments, **options)
        finally:
            producer._direct_sender = alone
    assert isinstance(future, RecordFuture)
    assert isinstance(future._chunk, SingleRecordCompletion) == (way == "alone")
    return future


def faults(fake: FakeCluster, fault: Fault) -> None:
    for broker in fake.brokers:
        fake.fault(broker.broker_id, fault)


def sent_by(fake: FakeCluster, way: str, records: list[tuple[Any, dict[str, Any]]]) -> list[tuple[Any, ...]]:
    """Return the received requests: header and body of each, without values that always differ."""
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap, request_timeout_s=20.0) as producer:
        acting(producer)
        found = []
        for value, options in records:
            assert send(producer, way, value, **options).result().offset >= 0
            request = produce_requests(fake)[-1]
            header, body = fake.do(lambda: fake.topics["t"].logs[0].batches[-1])
            found.append((msgspec.structs.replace(request, cid=0), _own(header), bytes(body)))
    return found


def _own(header: BatchHeader) -> BatchHeader:
    return header._replace(base_offset=0, append_time=0, producer_id=0, first_sequence=0)


def test_both_paths_send_the_same_bytes() -> None:
    records: list[tuple[Any, dict[str, Any]]] = [
        (value, {"key": key, "timestamp": stamp, "partition": partition})
        for value in (b"", b"v", "text", "Größe", None, b"x" * 1000, b"y" * 60_000)
        for key, stamp, partition in ((None, 0, 0), (b"key", -1, None), ("k", 2**63 - 1, 0), ("ö", -(2**63), None))
    ]
    with FakeCluster() as one, FakeCluster() as other:
        # Topics have ids that count from the cluster's first topic on.
        alone, usual = sent_by(one, "alone", records), sent_by(other, "usual", records)
    assert alone == usual


@_WAYS
@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        (refuse(ErrorCode.INVALID_RECORD), BrokerError, "INVALID_RECORD: on purpose"),
        (
            refuse(ErrorCode.NOT_ENOUGH_REPLICAS),
            ClientTimeout,
            # On a busy machine the deadline may come while the last of many requests has no response yet.
            r"1 records to t-0: .* 0.5 s, last: (NETWORK_EXCEPTION: .*; before that: )?NOT_ENOUGH_REPLICAS",
        ),
        (say_nothing, ClientTimeout, r"1 records to t-0: .* 0.5 s, last: NETWORK_EXCEPTION"),
    ],
)
def test_the_direct_path_reports_the_same_errors(
    fake: FakeCluster, way: str, fault: Fault, error: type[Exception], text: str
) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap, delivery_timeout_s=0.5) as producer:
        began = time.monotonic()
        first = send(producer, way, b"bad", before=lambda: faults(fake, times(10**6, Produce, fault)))
        told: list[BaseException | None] = []
        first.add_done_callback(lambda future: told.append(future.exception()))
        with pytest.raises(error, match=text):
            first.result()
        assert time.monotonic() - began < _TIMEOUT_S
        assert first.done() and isinstance(first.exception(), error)
        until(lambda: told == [first.exception()])
        producer.flush(_TIMEOUT_S)  # a caller has received the error
    assert b"bad" not in values(fake, "t")


@_WAYS
def test_flush_raises_errors_that_no_future_has_reported(fake: FakeCluster, way: str) -> None:
    fake.create("t", partitions=1)
    producer = Producer(fake.bootstrap)
    refused = times(1, Produce, refuse(ErrorCode.INVALID_RECORD))
    send(producer, way, b"bad", before=lambda: faults(fake, refused))
    with pytest.raises(BrokerError, match="INVALID_RECORD"):
        producer.flush(_TIMEOUT_S)
    producer.close(_TIMEOUT_S)


@_WAYS
@pytest.mark.parametrize("fault", [hang_up, refuse(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)])
def test_an_unsent_record_is_sent_again(fake: FakeCluster, way: str, fault: Fault) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        future = send(producer, way, b"again", before=lambda: faults(fake, times(1, Produce, fault)))
        sent = future.result().offset
    assert values(fake, "t")[sent:] == [b"again"] and values(fake, "t").count(b"again") == 1


@_WAYS
def test_a_record_with_a_lost_response_is_not_stored_twice(fake: FakeCluster, way: str) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        sent = send(producer, way, b"once", before=lambda: faults(fake, LoseAnswers(1))).result().offset
        assert values(fake, "t")[sent:] == [b"once"] and values(fake, "t").count(b"once") == 1
        known_late = times(1, Produce, refuse(ErrorCode.DUPLICATE_SEQUENCE_NUMBER))
        late = send(producer, way, b"late", before=lambda: faults(fake, known_late))
        assert late.result(_TIMEOUT_S).offset == -1


@_WAYS
def test_futures_of_direct_sends_are_complete(fake: FakeCluster, way: str) -> None:
    fake.create("t", partitions=1)

    async def wrapped(future: Future[RecordMetadata]) -> RecordMetadata:
        return await asyncio.wrap_future(future)

    with Producer(fake.bootstrap) as producer:
        later = send(producer, way, b"v")
        assert not later.cancel()
        assert concurrent.futures.wait([later], _TIMEOUT_S).not_done == set()
        assert later.running() is False and later.exception(_TIMEOUT_S) is None
        assert asyncio.run(wrapped(send(producer, way, b"v"))).offset == len(values(fake, "t")) - 1
        done: list[Future[RecordMetadata]] = []
        known = send(producer, way, b"v")
        known.result()
        known.add_done_callback(done.append)
        assert done == [known]
        in_callback: list[int] = []
        again = send(producer, way, b"v")
        again.add_done_callback(lambda future: in_callback.append(future.result().offset))
        until(lambda: in_callback == [again.result().offset])


@_WAYS
def test_several_threads_wait_for_one_record(fake: FakeCluster, way: str) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        future = send(producer, way, b"v")
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: future.result().offset, range(8)))
        assert set(found) == {len(values(fake, "t")) - 1}


def test_an_older_buffered_record_is_not_overtaken(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older record is in a chunk that another thread has begun and not yet announced."""
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        with acted_for(producer):
            with monkeypatch.context() as patch:
                patch.setattr(producer._sender.thread, "on_chunk_opened", lambda: None)
                producer.send("t", b"first", headers={"h": b""})
            second = producer.send("t", b"second")
        producer.flush(_TIMEOUT_S)
        assert second.done()
    assert values(fake, "t")[-2:] == [b"first", b"second"]


def test_a_redirected_direct_send_leaves_its_leader_at_once(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer drops the partition's cached route without a request."""
    # there is no other request, however slow the test is
    monkeypatch.setattr(requests_module, "_SUSPECT_AFTER_S", _TIMEOUT_S)
    fake.create("t", partitions=1)
    sent: list[bytes] = []

    def send_some(producer: Producer, count: int) -> None:
        for _ in range(count):
            sent.append(b"%d" % len(sent))
            send(producer, "alone", sent[-1]).result()

    with Producer(fake.bootstrap) as producer:
        alone = producer._direct_sender
        assert alone is not None
        for leader in (1, 0, 1):
            send_some(producer, 1)
            way, old = alone._routes["t", 0], fake.brokers[1 - leader]
            assert way.broker_id == old.broker_id
            asked, refused = _asked(fake), len(old.requests)
            fake.move(TopicPartition("t", 0), leader)
            send_some(producer, 20)
            assert [type(request) for request in old.requests[refused:]] == [Produce]
            assert _asked(fake) == asked
            assert alone._routes["t", 0] is not way and alone._routes["t", 0].broker_id == leader
    assert [value for value in values(fake, "t") if value != b"v"] == sent


def _asked(fake: FakeCluster) -> int:
    return sum(isinstance(request, Metadata) for broker in fake.brokers for request in broker.requests)


def test_a_recreated_topic_gets_no_record_of_the_old_one(fake: FakeCluster) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        created = send(producer, "alone", b"old", before=lambda: fake.create("t", partitions=1))
        with pytest.raises(BrokerError, match=r"INCONSISTENT_TOPIC_ID|UNKNOWN_TOPIC"):
            created.result()
        until(lambda: producer.topic_id("t") == fake.topics["t"].topic_id)
        assert producer.send("t", b"new").result(_TIMEOUT_S).offset == 0
    assert values(fake, "t") == [b"new"]


def test_the_error_for_a_recreated_topic_names_the_reason(fake: FakeCluster) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap, metadata_max_age_ms=3_600_000_000) as producer:
        producer.send("t", b"v").result()
        fake.create("t", partitions=1)
        with pytest.raises(BrokerError, match="created again after the producer last read its metadata") as caught:
            producer.send("t", b"old").result()
        assert caught.value.code == ErrorCode.INCONSISTENT_TOPIC_ID
        assert producer.send("t", b"new").result(_TIMEOUT_S).offset == 0


@pytest.mark.parametrize("warm", [True, False])
def test_a_stale_topic_handle_does_not_use_its_successors_route(fake: FakeCluster, warm: bool) -> None:
    """A caller may have looked up the handle before the topic was recreated."""
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        send(producer, "alone", b"v").result()
        earlier = producer._sender.topics["t"]
        fake.create("t", partitions=1)
        with pytest.raises(BrokerError, match=r"INCONSISTENT_TOPIC_ID|UNKNOWN_TOPIC"):
            producer.send("t", b"old").result()
        until(lambda: producer.topic_id("t") == fake.topics["t"].topic_id)
        send(producer, "alone", b"v").result()
        alone = producer._direct_sender
        assert alone is not None
        with acted_for(producer):
            assert alone._routes["t", 0].topic is not earlier and alone._version == producer._sender._cluster.version
            if not warm:
                alone._routes.clear()
            assert alone.try_send(earlier, 0, (None, b"old", None, 0), 3) is None
            newest = alone.try_send(producer._sender.topics["t"], 0, (None, b"new", None, 0), 3)
        assert newest is not None and newest.result(_TIMEOUT_S).offset == len(values(fake, "t")) - 1
    assert set(values(fake, "t")) == {b"v", b"new"}


def test_requests_of_many_sizes_and_partitions_are_few(fake: FakeCluster) -> None:
    fake.create("t", partitions=3)
    sizes = [0, 1, 7, 8, 100, 1000]
    with Producer(fake.bootstrap) as producer:
        for partition in range(3):  # the first record of each partition has no sequence to continue
            producer.send("t", b"v", partition=partition).result()
        for partition in range(3):
            send(producer, "alone", b"v", partition=partition).result()
        alone = producer._direct_sender
        assert alone is not None
        with acted_for(producer):
            ways = list(alone._routes.values())
            assert len(ways) == 3
            for length in range(_MOST_PREPARED):
                for way in ways:
                    assert alone._prepare(way, 8 * length) is way.requests[8 * length]
                    assert sum(len(one.requests) for one in ways) <= _MOST_PREPARED
        for size in sizes:
            send(producer, "alone", b"x" * size, partition=size % 3).result()
    assert sorted(len(value) for value in values(fake, "t") if value != b"v") == sizes


# --- interrupts ---


@pytest.mark.parametrize(
    ("method", "line"),
    lines(DirectSender._send, DirectSender._drop_routes, DirectSender._find, DirectSender._on_response),
)
def test_an_interrupt_in_any_line_leaves_no_waiter(fake: FakeCluster, method: Callable[..., Any], line: int) -> None:
    """An interrupt there ends the producer, because its work is half done."""
    fake.create("t", partitions=1)
    producer = Producer(fake.bootstrap)
    acting(producer)
    assert producer._direct_sender is not None
    producer._direct_sender._version = -1
    futures: list[Future[RecordMetadata]] = []

    def send_some() -> None:
        for _ in range(20):
            futures.append(producer.send("t", b"v"))
            futures[-1].result()

    interrupted_in(method, line, send_some)
    flushed = threading.Thread(target=_flushed, args=(producer,), daemon=True)
    flushed.start()
    ended([flushed])
    for future in futures:
        with contextlib.suppress(ProducerClosed):
            assert future.result(_TIMEOUT_S).offset >= 0
    with contextlib.suppress(ProducerClosed):
        producer.close(_TIMEOUT_S)
    assert not producer._writes.open and not producer._sender.thread._io_thread.is_alive()
    known = [future.result().offset for future in futures if future.exception() is None]
    assert known == sorted(set(known)) and len(values(fake, "t")) >= len(known)


def _flushed(producer: Producer) -> None:
    with contextlib.suppress(ProducerClosed):
        producer.flush()
