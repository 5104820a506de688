"""Tests of a producer's loop that is lent to a caller which would otherwise wait for the producer's thread."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any

import pyarrow as pa
import pytest

from sparklog import Producer
from sparklog.client.errors import ProducerClosed
from sparklog.client.producer import loop_handoff
from sparklog.client.producer.caller_io import CallerIo
from sparklog.client.producer.loop_handoff import LoopHandoff
from sparklog.client.producer.spin_policy import SpinPolicy
from sparklog.errors import ErrorCode
from sparklog.net.async_client import AsyncConnection
from sparklog.net.loop import new_event_loop
from sparklog.protocol.connection import ClientEnd
from sparklog.protocol.messages import Produce
from tests.client.fake_cluster import FakeCluster
from tests.client.interrupting import interrupted_in, lines
from tests.client.producing import LoseAnswers, refuse, times, values

_TIMEOUT_S = 30.0


@pytest.fixture
def handoff() -> Iterator[LoopHandoff]:
    loop = new_event_loop()
    subject = LoopHandoff(loop)
    thread = threading.Thread(target=subject.run)
    thread.start()
    yield subject
    subject.post(subject.stop)
    thread.join(_TIMEOUT_S)
    assert not thread.is_alive()
    loop.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def borrowed(handoff: LoopHandoff) -> None:
    """Lend the loop, and enter it in this thread."""

    def entered() -> bool:
        handoff.borrow(lambda: True)
        return handoff.enter()

    until(entered)


def test_only_the_thread_that_entered_may_act_for_the_loop(handoff: LoopHandoff) -> None:
    assert not handoff.enter()
    until(lambda: handoff.thread is not None)
    home = handoff.thread
    borrowed(handoff)
    assert handoff.thread == threading.get_ident() != home
    others = []
    other = threading.Thread(target=lambda: others.append(handoff.enter()))
    other.start()
    other.join(_TIMEOUT_S)
    handoff.leave()
    assert others == [False] and handoff.thread == home


def test_posted_work_reclaims_the_loop_after_the_current_thread_leaves(handoff: LoopHandoff) -> None:
    borrowed(handoff)
    done: Future[int] = Future()
    handoff.post(lambda: done.set_result(threading.get_ident()))
    assert not done.done() and handoff.lent
    handoff.leave()
    assert done.result(_TIMEOUT_S) == handoff.thread
    assert not handoff.lent


def test_an_unused_loop_returns_to_the_io_thread(handoff: LoopHandoff) -> None:
    borrowed(handoff)
    turned = threading.Event()
    handoff._loop.call_soon(turned.set)
    handoff.leave()
    assert turned.wait(_TIMEOUT_S)


def test_a_constantly_used_loop_still_runs_its_callbacks(handoff: LoopHandoff) -> None:
    borrowed(handoff)
    turned = threading.Event()
    handoff._loop.call_later(0.001, turned.set)
    handoff.leave()
    deadline = time.monotonic() + _TIMEOUT_S
    while not turned.is_set():
        assert time.monotonic() < deadline
        if handoff.enter():
            handoff.leave()


def test_a_needed_loop_is_not_lent(handoff: LoopHandoff) -> None:
    handoff.borrow(lambda: False)
    assert not handoff.lent and not handoff.enter()


def test_a_loop_that_is_stopped_while_lent_ends(handoff: LoopHandoff) -> None:
    borrowed(handoff)
    handoff.stop()
    handoff.recall()
    handoff.leave()


# --- the loop in the producer ---


def acting(producer: Producer) -> int:
    """Send records one after the other until this thread acts for the loop. Return their number."""
    handoff = producer._sender.thread.handoff
    deadline = time.monotonic() + _TIMEOUT_S
    for count in itertools.count(1):
        before = handoff._entered
        producer.send("t", b"v").result()
        if handoff.lent and handoff._entered >= before + 2:  # this thread has sent and received
            return count
        assert time.monotonic() < deadline
    raise AssertionError("unreachable")


def test_a_thread_that_waits_for_each_record_does_its_own_io(fake: FakeCluster) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        sent = acting(producer)
        found = [producer.send("t", b"%d" % number).result().offset for number in range(200)]
        assert found == list(range(sent, sent + 200))
    assert values(fake, "t")[sent:] == [b"%d" % number for number in range(200)]


def test_records_with_no_waiter_are_acknowledged(fake: FakeCluster) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        acting(producer)
        future = producer.send("t", b"v")
        until(future.done)
        acting(producer)
        told = threading.Event()
        producer.send("t", b"v").add_done_callback(lambda _: told.set())
        assert told.wait(_TIMEOUT_S)
        acting(producer)
        futures = [producer.send("t", b"v") for _ in range(100)]
        producer.flush(_TIMEOUT_S)
        assert all(future.done() for future in futures)
        acting(producer)
        assert producer.write("t", pa.table({"value": [b"a", b"b"]})).result(_TIMEOUT_S).record_count == 2
        acting(producer)
        fake.create("other", partitions=1)
        assert producer.send("other", b"v").result(_TIMEOUT_S).offset == 0


def test_many_threads_may_wait_for_each_record(fake: FakeCluster) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        acting(producer)
        before = len(values(fake, "t"))

        def send_all(name: int) -> None:
            for number in range(50):
                producer.send("t", b"%d-%d" % (name, number)).result()

        threads = [threading.Thread(target=send_all, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_TIMEOUT_S)
            assert not thread.is_alive()
    found = values(fake, "t")[before:]
    for name in range(4):
        assert [value for value in found if value.startswith(b"%d-" % name)] == [
            b"%d-%d" % (name, number) for number in range(50)
        ]
    assert len(found) == 200


def test_a_request_whose_response_was_lost_is_repeated(fake: FakeCluster) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        sent = acting(producer)
        for broker in fake.brokers:
            fake.fault(broker.broker_id, LoseAnswers(1))
        assert producer.send("t", b"once").result().offset == sent
        assert producer.send("t", b"more").result().offset == sent + 1
    assert values(fake, "t")[sent:] == [b"once", b"more"]


@pytest.mark.parametrize(
    ("owner", "method"), [(AsyncConnection, "wait_readable"), (SpinPolicy, "on_response")], ids=["waits", "has waited"]
)
def test_an_interrupted_wait_loses_no_record(
    fake: FakeCluster, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        sent = acting(producer)
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, _interrupted)
            future = producer.send("t", b"v")
            with pytest.raises(KeyboardInterrupt):
                future.result()
        assert future.result(_TIMEOUT_S).offset == sent
        assert producer.send("t", b"v").result(_TIMEOUT_S).offset == sent + 1


@pytest.mark.parametrize(
    ("method", "line"),
    lines(CallerIo._receive, AsyncConnection.read_now, AsyncConnection.buffer_updated, ClientEnd.decode_single),
)
def test_an_interrupt_outside_a_callback_loses_only_the_connection(
    fake: FakeCluster, method: Callable[..., Any], line: int
) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        sent = acting(producer)
        futures = []

        def send_some() -> None:
            for number in range(50):
                futures.append(producer.send("t", b"%d" % number))
                futures[-1].result()

        interrupted_in(method, line, send_some)
        futures.append(producer.send("t", b"more"))
        offsets = [future.result(_TIMEOUT_S).offset for future in futures]
    assert offsets == list(range(sent, sent + len(futures)))
    assert values(fake, "t")[sent:] == [b"%d" % number for number in range(len(futures) - 1)] + [b"more"]


@pytest.mark.parametrize(("work", "headers"), [("drain", {"h": b""}), ("start", None), ("succeeded", None)])
def test_an_interrupt_during_io_reaches_the_caller_and_ends_the_producer(
    fake: FakeCluster, monkeypatch: pytest.MonkeyPatch, work: str, headers: dict[str, bytes] | None
) -> None:
    fake.create("t", partitions=1)
    producer = Producer(fake.bootstrap)
    acting(producer)
    with monkeypatch.context() as patch:
        patch.setattr(producer._sender._queues, work, _interrupted)
        with pytest.raises(KeyboardInterrupt):
            _send_while_lent(producer, headers)
    with pytest.raises(ProducerClosed) as closed:
        producer.send("t", b"v").result(_TIMEOUT_S)
    assert isinstance(closed.value.__cause__, KeyboardInterrupt)
    with contextlib.suppress(ProducerClosed):
        producer.close()


def test_an_interrupt_while_a_future_is_resolved_is_the_callers(
    fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.create("t", partitions=1)
    producer = Producer(fake.bootstrap)
    acting(producer)
    ended = producer._writes.ended
    raised: list[bool] = []

    def interrupted(completion: Any) -> None:
        if not raised:
            raised.append(True)
            raise KeyboardInterrupt
        ended(completion)

    with monkeypatch.context() as patch:
        patch.setattr(producer._writes, "ended", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _send_while_lent(producer)
    with contextlib.suppress(ProducerClosed):
        producer.close(_TIMEOUT_S)
    assert not producer._sender.thread._io_thread.is_alive()


def test_a_second_interrupt_during_the_end_leaves_no_waiter(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.create("t", partitions=1)
    producer = Producer(fake.bootstrap)
    acting(producer)
    fail_all, main = producer._writes.fail_all, threading.get_ident()
    raised: list[bool] = []

    def interrupted(error: BaseException) -> None:
        if threading.get_ident() == main:
            raised.append(True)
            raise KeyboardInterrupt
        fail_all(error)

    with monkeypatch.context() as patch:
        patch.setattr(producer._writes, "fail_all", interrupted)
        patch.setattr(producer._sender._queues, "start", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            _send_while_lent(producer)
        assert raised
        producer._sender.thread._io_thread.join(_TIMEOUT_S)
    assert not producer._sender.thread._io_thread.is_alive()
    with contextlib.suppress(ProducerClosed):
        producer.flush(_TIMEOUT_S)
    producer.close()


@pytest.mark.parametrize(("method", "line"), lines(LoopHandoff.enter, LoopHandoff.leave))
def test_an_interrupt_while_entering_or_leaving_keeps_no_thread_inside(
    fake: FakeCluster, method: Callable[..., Any], line: int
) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        acting(producer)

        def send_some() -> None:
            for _ in range(20):
                producer.send("t", b"v").result()

        interrupted_in(method, line, send_some)
        handoff = producer._sender.thread.handoff
        until(lambda: not handoff.lent)
        producer.send("t", b"v").result(_TIMEOUT_S)
        acting(producer)


def test_a_waiter_in_a_running_loop_keeps_that_loop(fake: FakeCluster) -> None:
    fake.create("t", partitions=1)

    async def send_some() -> list[int]:
        sent = acting(producer)
        found = []
        for _ in range(50):
            found.append(producer.send("t", b"v").result().offset)
            await asyncio.sleep(0)
        found += [(await asyncio.wrap_future(producer.send("t", b"v"))).offset for _ in range(5)]
        return [offset - sent for offset in found]

    with Producer(fake.bootstrap) as producer:
        assert asyncio.run(send_some()) == list(range(55))


def test_work_started_by_a_waiter_runs_in_the_producers_loop(
    fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiter's own loop may end earlier, and its thread does not run it while it waits."""
    fake.create("t", partitions=1)
    begun: list[tuple[int, asyncio.AbstractEventLoop]] = []

    async def refused_some() -> None:
        main = threading.get_ident()
        deadline = time.monotonic() + _TIMEOUT_S
        while not any(thread == main for thread, _ in begun):  # otherwise the loop was reclaimed before the response
            assert time.monotonic() < deadline
            acting(producer)
            for broker in fake.brokers:
                broker.faults.clear()
                fake.fault(broker.broker_id, times(1, Produce, refuse(ErrorCode.NOT_LEADER_OR_FOLLOWER)))
            assert producer.send("t", b"refused").result().offset >= 0

    with Producer(fake.bootstrap) as producer:
        producer.send("t", b"v").result(_TIMEOUT_S)
        link = producer._sender._cluster
        start = link.start

        def noted(work: Coroutine[Any, Any, None]) -> None:
            start(work)
            begun.extend((threading.get_ident(), task.get_loop()) for task in link.tasks)

        monkeypatch.setattr(link, "start", noted)
        asyncio.run(refused_some())
        assert {loop for _, loop in begun} == {producer._sender.thread.loop}


def test_a_forked_child_does_not_act_for_its_parents_loop(
    handoff: LoopHandoff, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_handoff, "_IDLE_S", _TIMEOUT_S)
    monkeypatch.setattr(loop_handoff, "_LONGEST_S", _TIMEOUT_S)
    borrowed(handoff)
    handoff.leave()

    def lent() -> bool:
        handoff.borrow(lambda: True)
        return handoff.lent

    until(lent)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the fork happens beside other threads
        child = os.fork()
    if not child:
        try:
            os._exit(int(handoff.enter()))
        finally:  # the child must not continue with its parent's tests
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert handoff.enter(), "the loop must stay lent"
    handoff.leave()


def test_a_wait_begun_after_the_threads_end_returns(fake: FakeCluster) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        producer.send("t", b"v").result(_TIMEOUT_S)
    for _ in range(10):
        producer._sender.thread.wait_helping(lambda: False)


def _send_while_lent(producer: Producer, headers: dict[str, bytes] | None = None) -> None:
    """Send records until this thread has acted, which may take several."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        producer.send("t", b"v", headers=headers).result()
    raise AssertionError("never interrupted")


def _interrupted(*_: object, **__: object) -> bool:
    raise KeyboardInterrupt
