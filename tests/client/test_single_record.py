"""Tests of a record that is a batch of its own: every waiting thread is notified, exactly once."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from sparklog.client.errors import ProducerClosed
from sparklog.client.producer.completion import CompletionLatch
from sparklog.client.producer.direct_send import SingleRecordCompletion
from sparklog.client.producer.open_writes import OpenWrites
from sparklog.client.producer.record_future import RecordFuture
from sparklog.client.producer.results import BatchOutcome, RecordMetadata
from tests.client.interrupting import interrupted_in, lines
from tests.client.test_interrupted_outcomes import ended, waiting

_TIMEOUT_S = 30.0


class _Thread:
    """The I/O thread, which a waiting caller cannot help."""

    def wait_helping(self, finished: Callable[[], bool]) -> None:
        pass

    def recall_loop(self) -> None:
        pass


def completion() -> tuple[SingleRecordCompletion, OpenWrites]:
    """Return the completion of a record that was sent, and the open writes that keep it."""
    writes = OpenWrites()
    record = SingleRecordCompletion(_Thread(), writes, "t", 0, 1)  # type: ignore[arg-type]
    writes.open.add(record)
    return record, writes


@pytest.mark.parametrize(
    ("method", "line"),
    lines(
        SingleRecordCompletion.batch_done,
        SingleRecordCompletion.acknowledged,
        SingleRecordCompletion.notify,
        SingleRecordCompletion._notify_listeners,
        CompletionLatch.end,
    ),
)
def test_every_waiter_for_a_single_record_is_notified(method: Callable[..., Any], line: int) -> None:
    record, writes = completion()
    first, full = RecordFuture(record, 0), RecordFuture(record, 0)
    told = threading.Event()
    full.add_done_callback(lambda _: told.set())
    threads = waiting(
        first.result,
        record.finished.wait,
        begun=lambda: len(record._listeners) == 2 and len(record.finished._callbacks) == 1,
    )
    interrupted_in(method, line, lambda: record.batch_done(0, BatchOutcome(0, 5, 1)))
    writes.fail_all(ProducerClosed("interrupted"))  # as the producer does at its end
    ended(threads)
    assert told.wait(_TIMEOUT_S) and not writes.open


def test_a_future_read_late_is_freed_with_its_record() -> None:
    """The future is freed immediately, without the garbage collector: each record has one."""
    record, _ = completion()
    record.acknowledged(7)
    record.notify()
    future = RecordFuture(record, 0)
    told: list[int] = []
    gc.disable()
    try:
        future.add_done_callback(lambda known: told.append(known.result().offset))
        assert told == [7]
        left = weakref.ref(future)
        del future, record
        assert left() is None
    finally:
        gc.enable()


class _ToldTwice:
    """Outcomes of a record whose waiter finds the outcome itself. Another thread notifies the waiter just before one
    of the steps in which it resumes."""

    def __init__(self, step: int) -> None:
        self.lock = threading.Lock()
        self.found = RecordMetadata("t", 0, 7, 1)
        self.left = step

    def wait_helping(self, index: int) -> None:
        return None

    def outcome(self, index: int) -> RecordMetadata:
        return self.found

    def recall_loop(self) -> None:
        pass

    def error_seen(self) -> None:
        pass

    def listen(self, index: int, resolve: Callable[[RecordMetadata | BaseException], None]) -> None:
        def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
            if event == "line":
                self.left -= 1
                if self.left == -1:
                    other = threading.Thread(target=resolve, args=(self.found,))
                    other.start()
                    other.join(_TIMEOUT_S)
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            resolve(self.found)
        finally:
            sys.settrace(before)


def test_a_waiter_that_is_notified_while_it_checks_continues() -> None:
    step = 0
    while True:
        outcomes = _ToldTwice(step)
        assert RecordFuture(outcomes, 0).result() == outcomes.found
        if outcomes.left >= 0:
            break
        step += 1
    assert step >= 2
