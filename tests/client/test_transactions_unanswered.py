"""Tests of transactional producers with lost responses or changing coordinators: an end takes effect once, or its
outcome is unknown."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.errors import (
    ClientTimeout,
    CommitOutcomeUnknown,
    ProducerClosed,
    ProducerFenced,
    TransactionStateError,
)
from sparklog.client.producer.producer import Producer
from sparklog.errors import ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    AddToTransaction,
    BeginTransaction,
    EndTransaction,
    ErrorReply,
    Produce,
    Request,
    TouchTransaction,
)
from sparklog.testing.process_cluster import wait_until
from tests.client.fake_cluster import FakeBroker, FakeCluster, Fault
from tests.client.producing import hang_up, times
from tests.client.transacting import answer, lose_answer, requests, seen


@pytest.mark.parametrize("kind", [BeginTransaction, AddToTransaction, EndTransaction, Produce])
@pytest.mark.parametrize("fault", [lose_answer, hang_up], ids=["answer lost", "request lost"])
def test_a_lost_request_is_repeated_and_takes_effect_once(fake: FakeCluster, kind: type, fault: Fault) -> None:
    fake.create("t")
    fake.fault(0, times(2, kind, fault))
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        for value in (b"a", b"b"):
            with producer.transaction():
                producer.send("t", value)
                producer.send_offsets({TopicPartition("in", 0): 3}, group="g")
    assert seen(fake, "t") == [b"a", b"b"]
    assert seen(fake, "t", "read_uncommitted") == [b"a", b"b"]
    assert fake.groups.offsets == {("g", "in", 0): 3}


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.BROKER_STOPPING,
    ],
)
def test_a_coordinator_that_is_not_ready_is_asked_again(fake: FakeCluster, code: ErrorCode) -> None:
    fake.create("t")
    for kind in (BeginTransaction, AddToTransaction, EndTransaction):
        fake.fault(0, times(2, kind, answer(code)))
    with Producer(fake.bootstrap, transactional_id="x") as producer, producer.transaction():
        producer.send("t", b"a")
    assert seen(fake, "t") == [b"a"]


def test_the_coordinator_moves_during_a_transaction(fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        for round_ in range(3):
            producer.begin()
            producer.send("t", b"%d" % round_, partition=0).result(30)
            fake.do(lambda: fake.coordinator.move(1 - fake.coordinator.broker_id))
            producer.send("t", b"%d" % round_, partition=1).result(30)
            fake.do(lambda: fake.coordinator.move(1 - fake.coordinator.broker_id))
            producer.commit()
    assert sorted(seen(fake, "t")) == [b"0", b"0", b"1", b"1", b"2", b"2"]


def test_a_commit_without_response_is_unknown_and_repeatable(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, transactional_id="x", max_block_s=0.6) as producer:
        producer.begin()
        producer.send("t", b"a")
        producer.flush()
        fake.fault(0, times(100, EndTransaction, lose_answer))
        with pytest.raises(CommitOutcomeUnknown, match=r"'id:x' may be committed or aborted"):
            producer.commit()
        with pytest.raises(TransactionStateError, match="call commit"):
            producer.begin()
        with pytest.raises(TransactionStateError, match="is unknown"):
            producer.abort()
        with pytest.raises(TransactionStateError, match="nothing can be written"):
            producer.send("t", b"b")
        fake.do(fake.brokers[0].faults.clear)
        producer.commit()
        with producer.transaction():
            producer.send("t", b"b")
    assert seen(fake, "t") == [b"a", b"b"]


def test_an_unknown_commit_stays_unknown_after_a_successor_began(
    fake: FakeCluster,
) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, transactional_id="x", max_block_s=0.6) as first:
        first.begin()
        first.send("t", b"a").result(30)
        fake.fault(0, times(100, EndTransaction, lose_answer))
        with pytest.raises(CommitOutcomeUnknown):
            first.commit()
        fake.do(fake.brokers[0].faults.clear)
        with Producer(fake.bootstrap, transactional_id="x") as second:
            second.begin()
            with pytest.raises(CommitOutcomeUnknown, match="may be committed or aborted"):
                first.commit()
            second.abort()
        with pytest.raises(CommitOutcomeUnknown):
            first.commit()
    assert seen(fake, "t") == [b"a"], "a report of an abort would have been wrong"


def test_a_commit_with_a_failing_coordinator_can_be_repeated(fake: FakeCluster) -> None:
    fake.create("t")

    def decided_and_failed(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        fake.coordinator.handle(0, request, lambda reply: None)  # type: ignore[arg-type]
        connection.reply(ErrorReply(request.cid, int(ErrorCode.UNKNOWN_SERVER_ERROR), "on purpose"))
        return True

    fake.fault(0, times(1, EndTransaction, decided_and_failed))
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        producer.begin()
        producer.send("t", b"a").result(30)
        with pytest.raises(CommitOutcomeUnknown, match="on purpose"):
            producer.commit()
        producer.commit()
    assert seen(fake, "t") == [b"a"]


def test_a_commit_whose_producer_fails_first_is_unknown(fake: FakeCluster) -> None:
    fake.create("t")
    producer = Producer(fake.bootstrap, transactional_id="x")

    def committed_unanswered(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        producer._sender.thread.loop.call_soon_threadsafe(_fail)
        return lose_answer(broker, connection, request)

    producer.begin()
    producer.send("t", b"a").result(30)
    fake.fault(0, times(1, EndTransaction, committed_unanswered))
    with pytest.raises(CommitOutcomeUnknown, match="on purpose"):
        producer.commit()
    with pytest.raises(CommitOutcomeUnknown, match="on purpose"):
        producer.commit()
    producer.close()
    assert seen(fake, "t") == [b"a"]


def test_a_commit_of_a_failed_producer_is_reported_as_never_sent(fake: FakeCluster) -> None:
    fake.create("t")
    producer = Producer(fake.bootstrap, transactional_id="x")
    producer.begin()
    producer.send("t", b"a").result(30)
    producer._sender.thread.loop.call_soon_threadsafe(_fail)
    producer._sender.thread._io_thread.join(30)
    with pytest.raises(ProducerClosed, match="on purpose"):
        producer.commit()
    with pytest.raises(TransactionStateError, match="no transaction"):
        producer.commit()
    producer.close()
    assert not requests(fake, EndTransaction)
    with Producer(fake.bootstrap, transactional_id="x") as second, second.transaction():
        second.send("t", b"a")
    assert seen(fake, "t") == [b"a"]


def _fail() -> None:
    raise ValueError("on purpose")


def test_an_unknown_commit_that_was_aborted_is_reported_so(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, transactional_id="x", max_block_s=0.6) as producer, Admin(fake.bootstrap) as admin:
        producer.begin()
        producer.send("t", b"a").result(30)
        fake.fault(0, times(100, EndTransaction, hang_up))
        with pytest.raises(CommitOutcomeUnknown):
            producer.commit()
        fake.do(fake.brokers[0].faults.clear)
        admin.abort_transaction("id:x")
        with pytest.raises(ProducerFenced):
            producer.commit()
    assert seen(fake, "t") == []


def test_an_interrupted_commit_can_be_repeated(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the wait and not the commit."""
    fake.create("t")
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        with producer.transaction():
            pass
        call = producer._sender.call

        def interrupted(work: Callable[[], Coroutine[Any, Any, object]]) -> object:
            call(work)
            raise KeyboardInterrupt

        producer.begin()
        producer.send("t", b"a")
        monkeypatch.setattr(producer._sender, "call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            producer.commit()
        monkeypatch.undo()
        with pytest.raises(TransactionStateError, match="is unknown"):
            producer.begin()
        producer.commit()
        with producer.transaction():
            producer.send("t", b"b")
    assert seen(fake, "t") == [b"a", b"b"]


def test_a_fenced_producer_does_not_know_a_lost_outcome(fake: FakeCluster) -> None:
    """The commit succeeded. When it is repeated, another producer has taken over, and the coordinator no longer
    knows the outcome."""
    fake.create("t")

    def lose_and_take_over(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        lose_answer(broker, connection, request)
        fake.coordinator.handle(0, request, connection.reply)  # type: ignore[arg-type]
        fake.coordinator.handle(0, BeginTransaction(0, "id:x", "another run", -1, 60_000), lambda reply: None)
        return True

    fake.fault(0, times(1, EndTransaction, lose_and_take_over))
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        producer.begin()
        producer.send("t", b"a")
        with pytest.raises(CommitOutcomeUnknown, match="may be committed"):
            producer.commit()
    assert seen(fake, "t") == [b"a"]


def test_a_missing_coordinator_times_out(fake: FakeCluster) -> None:
    fake.fault(0, times(10_000, BeginTransaction, answer(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)))
    with Producer(fake.bootstrap, transactional_id="x", max_block_s=0.3) as producer:
        with pytest.raises(ClientTimeout, match=r"BeginTransaction.*'id:x'.*COORDINATOR_LOAD_IN_PROGRESS"):
            producer.begin()
        fake.do(fake.brokers[0].faults.clear)
        producer.begin()


def test_heartbeats_keep_a_transaction_open(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, transactional_id="x", transaction_timeout_s=0.9) as producer:
        producer.begin()
        producer.send("t", b"a").result(30)
        wait_until(lambda: len(requests(fake, TouchTransaction)) >= 4, 5, "four touches")
        producer.commit()
        count = len(requests(fake, TouchTransaction))
        time.sleep(0.5)
        assert len(requests(fake, TouchTransaction)) == count  # no heartbeats between transactions
    assert seen(fake, "t") == [b"a"]
