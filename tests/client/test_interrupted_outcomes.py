"""Tests of an interrupt in a thread that acts for the producer's thread while it reports outcomes.

The producer ends then, and every thread that waits is notified nevertheless.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest

from sparklog import Producer
from sparklog.client.errors import ProducerClosed
from sparklog.client.producer.completion import Completion, CompletionLatch, notify, resolve
from sparklog.client.producer.partitioning import ProducerTopic
from sparklog.client.producer.record_buffer import RecordBuffer
from sparklog.client.producer.record_chunk import RecordChunk
from sparklog.client.producer.record_future import RecordFuture
from sparklog.client.producer.results import BatchOutcome
from sparklog.client.producer.table_write import TableWrite
from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.messages import Produce
from tests.client.fake_cluster import FakeCluster
from tests.client.interrupting import interrupted_in, lines
from tests.client.producing import refuse, times, values
from tests.client.test_loop_handoff import acting

_TIMEOUT_S = 30.0
_TOPIC = cast(ProducerTopic, SimpleNamespace(name="t"))


def interrupted_at(call: int, work: Callable[[], object], *, within: str = "") -> bool:
    """Do ``work``, with a KeyboardInterrupt at one of the places where interrupts happen: where a function begins or
    a call returns, or those ``within`` a module. Return True if there are fewer places."""
    left = call

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event in {"call", "c_return"} and frame.f_code.co_filename.endswith(within):
            left -= 1
            if left == -1:
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    except KeyboardInterrupt:
        return False
    finally:
        sys.setprofile(before)
    return True


def waiting(*waits: Callable[[], object], begun: Callable[[], bool]) -> list[threading.Thread]:
    """Start a waiting thread for each, and return when all wait."""

    def wait(one: Callable[[], object]) -> None:
        with contextlib.suppress(ProducerClosed):
            one()

    threads = [threading.Thread(target=wait, args=(one,), daemon=True) for one in waits]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _TIMEOUT_S
    while not begun():
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    return threads


def _set(event: threading.Event, _: object) -> None:
    event.set()


def _flushed(producer: Producer) -> None:
    with contextlib.suppress(ProducerClosed):
        producer.flush()


def ended(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(_TIMEOUT_S)
        assert not thread.is_alive(), "a waiting thread was not notified"


@pytest.mark.parametrize(
    ("method", "line"),
    lines(
        RecordChunk.batch_done, RecordChunk._notify, RecordChunk._notify_listeners, CompletionLatch.end, notify, resolve
    ),
)
def test_every_waiter_for_a_record_is_notified(method: Callable[..., Any], line: int) -> None:
    chunk = RecordChunk(_TOPIC, None, 0.0)
    chunk.records += [(None, b"v", None, 1)] * 2
    chunk.assign_batches([range(2)])
    open_chunks = {chunk}
    chunk.finished.then(functools.partial(open_chunks.discard, chunk))
    first, second, full = (RecordFuture(chunk, index) for index in (0, 1, 0))
    told = threading.Event()
    full.add_done_callback(lambda _: told.set())
    threads = waiting(
        first.result,
        second.result,
        chunk.finished.wait,
        begun=lambda: len(chunk._listeners) == 3 and len(chunk.finished._callbacks) == 2,
    )
    interrupted_in(method, line, lambda: chunk.batch_done(0, BatchOutcome(0, 5, 2)))
    for left in set(open_chunks):  # as the producer does at its end
        left.fail(ProducerClosed("interrupted"))
    ended(threads)
    if "resolve" not in method.__name__:  # these places are about half of what Python executes
        assert told.wait(_TIMEOUT_S)


@pytest.mark.parametrize(
    ("method", "line"), lines(TableWrite._close_one, TableWrite._notify, CompletionLatch.end, notify)
)
def test_every_waiter_for_a_table_is_notified(method: Callable[..., Any], line: int) -> None:
    table = TableWrite("t")
    assert table.add_batch() == 0
    table.seal()
    open_tables = {table}
    table.finished.then(functools.partial(open_tables.discard, table))
    threads = waiting(
        lambda: table.future.exception(_TIMEOUT_S),
        table.finished.wait,
        begun=lambda: len(table.finished._callbacks) == 2,
    )
    interrupted_in(method, line, lambda: table.batch_done(0, BatchOutcome(0, 5, 2)))
    for left in set(open_tables):
        left.fail(ProducerClosed("interrupted"))
    ended(threads)
    assert table.future.done()


def test_a_waiter_that_gives_up_leaves_no_callback() -> None:
    ending = CompletionLatch()
    assert not ending.wait(0.0) and not ending.wait(0.001)
    assert not ending._callbacks
    ending.end()
    assert ending.wait() and ending.wait(0.0) and not ending._callbacks


def test_an_interrupted_completion_is_finished_by_another_thread() -> None:
    """Interrupts happen where a function is called and where a call returns."""
    for call in range(100):
        chunk = RecordChunk(_TOPIC, None, 0.0)
        chunk.records.append((None, b"v", None, 1))
        chunk.assign_batches([range(1)])
        future = RecordFuture(chunk, 0)
        told = threading.Event()
        through = interrupted_at(call, functools.partial(future.add_done_callback, functools.partial(_set, told)))
        chunk.batch_done(0, BatchOutcome(0, 5, 1))
        assert future.exception(_TIMEOUT_S) is None
        if through:
            assert told.wait(_TIMEOUT_S)
            return
    raise AssertionError("the work never completed without an interrupt")


class _CountingIoThread:
    """Count the calls."""

    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1

    def on_chunk_opened(self) -> None:
        self.woken += 1

    def wait_helping(self, finished: Callable[[], bool]) -> None:
        raise AssertionError("no thread may wait any more")

    def recall_loop(self) -> None:
        raise AssertionError("no thread may wait any more")

    def on_io_thread(self) -> bool:
        return False

    def end(self, reason: BaseException) -> None:
        raise AssertionError("the buffer does not end the thread")


@pytest.mark.parametrize("seal", [False, True])
@pytest.mark.parametrize("batch_bytes", [1, 1000])
def test_a_record_of_an_interrupted_sender_is_stored_at_most_once(seal: bool, batch_bytes: int) -> None:
    for call in range(200):
        io_thread, opened = _CountingIoThread(), list[RecordChunk]()
        collector = RecordBuffer(
            batch_bytes=batch_bytes,
            linger_ms=0.0,
            buffer_bytes=10_000,
            max_block_s=1.0,
            io_thread=io_thread,
            opened=opened.append,
        )

        def append(collector: RecordBuffer = collector) -> None:
            collector.append(_TOPIC, None, record=(None, b"v", None, 1), size=1)

        if seal:
            append()
        io_thread.woken = 0
        through = interrupted_at(call, collector.seal if seal else append)
        there = not collector.empty
        taken = collector.consume_due(1e12, lambda _: False, 0.0)
        assert len(taken) == len(set(taken)) <= 1 and all(len(chunk) == 1 for chunk in taken)
        assert collector.used_bytes == sum(chunk.size for chunk in taken)
        assert all(chunk.finished.done for chunk in opened if chunk not in taken)
        assert there == bool(taken) and (io_thread.woken or not there or seal)
        if through:
            assert len(taken) == 1
            return
    raise AssertionError("the work never completed without an interrupt")


def test_a_record_after_an_interrupted_send_is_still_sent(fake: FakeCluster) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        producer.send("t", b"first").result(_TIMEOUT_S)
        for call in range(1000):
            through = interrupted_at(call, lambda: producer.send("t", b"v"))
            producer.send("t", b"more").result(_TIMEOUT_S)
            if through:
                break
        producer.flush(_TIMEOUT_S)
        assert producer._buffer.used_bytes == 0
    found = values(fake, "t")
    assert found.count(b"first") == 1 and found.count(b"more") == call + 1
    assert found.count(b"v") <= call + 1


def test_an_interrupt_during_a_batch_move_ends_the_producer(fake: FakeCluster) -> None:
    """The rest of its half-done work has no order."""
    fake.create("t", partitions=1)
    call = uninterrupted = 0
    while uninterrupted < 5:  # the loop may have been reclaimed at that moment
        producer = Producer(fake.bootstrap)
        acting(producer)

        def send(producer: Producer = producer) -> None:
            producer.send("t", b"v").result()

        if interrupted_at(call, send, within="partition_queues.py"):
            uninterrupted += 1
        else:
            call, uninterrupted = call + 1, 0
        flushed = threading.Thread(target=_flushed, args=(producer,), daemon=True)
        flushed.start()
        ended([flushed])
        with contextlib.suppress(ProducerClosed):
            producer.close(_TIMEOUT_S)
    assert call > 5


def test_flush_reports_an_error_that_has_just_occurred(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting thread continues before the producer has recorded the error."""
    fake.create("t", partitions=1)
    for broker in fake.brokers:
        fake.fault(broker.broker_id, times(1, Produce, refuse(ErrorCode.INVALID_RECORD)))
    flushed = threading.Event()
    with Producer(fake.bootstrap) as producer:
        note = producer._writes.ended

        def later(completion: Completion) -> None:
            flushed.wait(_TIMEOUT_S)
            note(completion)

        monkeypatch.setattr(producer._writes, "ended", later)
        producer.send("t", b"v")
        try:
            with pytest.raises(BrokerError, match="INVALID_RECORD"):
                producer.flush(_TIMEOUT_S)
        finally:
            flushed.set()
