"""Transactional producers and sinks against the fake cluster, whose coordinator is the production core: what goes out
when, what becomes of lost answers, and what readers see."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from sparklog.client import fetched
from sparklog.client.admin import Admin
from sparklog.client.consumer import Consumer
from sparklog.client.errors import ClientTimeout, CommitOutcomeUnknown, ProducerFenced, TransactionStateError
from sparklog.client.isolation import Isolation
from sparklog.client.producer import Producer
from sparklog.client.reader import PartitionReader
from sparklog.client.sink_transaction import AlreadyCommitted, Decided, decide, join
from sparklog.client.transaction_run import Joined
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.server import ServerConnection
from sparklog.protocol.messages import (
    AddToTransaction,
    BeginTransaction,
    EndTransaction,
    ErrorReply,
    Produce,
    Request,
    TouchTransaction,
)
from sparklog.record import codec
from sparklog.record.header import BatchHeader, Flag
from sparklog.testing.process_cluster import wait_until
from tests.client.fake_cluster import FakeBroker, FakeCluster, Fault
from tests.client.producing import hang_up, refuse, times

K = TypeVar("K", bound=Request)


def seen(fake: FakeCluster, topic: str, isolation: Isolation = "read_committed") -> list[bytes]:
    with Consumer(fake.bootstrap, topic, isolation=isolation) as consumer:
        values: list[bytes] = consumer.to_table(timeout_s=5).column("value").to_pylist()
        return values


def requests(fake: FakeCluster, kind: type[K]) -> list[K]:
    return [request for broker in fake.brokers for request in broker.requests if isinstance(request, kind)]


def headers(fake: FakeCluster, topic: str) -> list[BatchHeader]:
    return fake.do(lambda: [header for log in fake.topics[topic].logs for header, _ in log.batches])


def lose_answer(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
    """The request is carried out, then the connection ends instead of the answer."""
    reply = connection.reply

    def lose(*_: object, **__: object) -> None:
        connection.reply = reply  # type: ignore[method-assign]
        connection.close()

    connection.reply = lose  # type: ignore[method-assign]
    return False


def answer(code: ErrorCode) -> Fault:
    def act(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        connection.reply(ErrorReply(request.cid, int(code), "on purpose"))
        return True

    return act


class Held:
    """Keeps requests back until told to let them go."""

    def __init__(self, fake: FakeCluster, wanted: Callable[[Request], bool]) -> None:
        self._fake = fake
        self._wanted = wanted
        self._open = False
        self._kept: list[tuple[FakeBroker, ServerConnection, Request]] = []
        fake.fault(0, self)

    def __call__(self, broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if self._open or not self._wanted(request):
            return False
        self._kept.append((broker, connection, request))
        return True

    def wait(self) -> None:
        wait_until(lambda: self._kept, 5, "a request to hold")

    def release(self) -> None:
        def go() -> None:
            self._open = True
            for broker, connection, request in self._kept:
                self._fake.coordinator.handle(broker.broker_id, request, connection.reply)  # type: ignore[arg-type]

        self._fake.do(go)


def adds(topic: str, partition: int) -> Callable[[Request], bool]:
    return lambda request: isinstance(request, AddToTransaction) and (topic, partition) in request.partitions


# --- commit and abort ---


def test_a_transaction_is_seen_as_a_whole_or_not_at_all(fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        producer.begin()
        producer.send("t", b"a", partition=0)
        producer.send("t", b"b", partition=1)
        producer.flush()
        assert seen(fake, "t") == []
        assert seen(fake, "t", "read_uncommitted") == [b"a", b"b"]
        producer.commit()
        assert seen(fake, "t") == [b"a", b"b"]
        producer.begin()
        lost = producer.send("t", b"c", partition=0)
        producer.flush()
        producer.abort()
        assert lost.result(30).offset == 2  # it was in the log
        assert seen(fake, "t") == [b"a", b"b"]
        producer.begin()
        producer.send("t", b"d", partition=0)
        producer.commit()
    assert sorted(seen(fake, "t")) == [b"a", b"b", b"d"]
    assert sorted(seen(fake, "t", "read_uncommitted")) == [b"a", b"b", b"c", b"d"]


def test_each_transaction_has_a_producer_id_of_its_own_and_begins_at_sequence_0(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        for number in range(3):
            with producer.transaction():
                producer.send("t", b"%d" % number)
                producer.flush()
                producer.send("t", b"%d" % number)
    batches = [header for header in headers(fake, "t") if not header.flags & Flag.CONTROL]
    assert [header.first_sequence for header in batches] == [0, 1] * 3
    assert len({header.producer_id for header in batches}) == 3
    assert all(header.flags & Flag.TRANSACTIONAL for header in batches)
    assert {request.transaction for request in requests(fake, Produce)} == {"id:x"}
    assert sum(bool(header.flags & Flag.CONTROL) for header in headers(fake, "t")) == 3


def test_nothing_written_is_nothing_to_mark(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        with producer.transaction():
            pass
        producer.begin()
        producer.abort()
    ends = requests(fake, EndTransaction)
    assert [(end.commit, end.winners) for end in ends] == [(True, ()), (False, ())]
    assert not requests(fake, AddToTransaction) and not requests(fake, Produce)


def test_a_block_that_raises_is_aborted(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        with pytest.raises(KeyError, match="why"), producer.transaction():
            producer.send("t", b"never")
            raise KeyError("why")
        with producer.transaction():
            producer.send("t", b"kept")
    assert seen(fake, "t") == [b"kept"]


def test_offsets_are_the_groups_when_the_transaction_commits(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        producer.begin()
        producer.send_offsets({TopicPartition("in", 0): 5}, group="g")
        producer.abort()
        assert fake.coordinator.offsets == {}
        with producer.transaction():
            producer.send("t", b"a")
            producer.send_offsets({TopicPartition("in", 0): 7, TopicPartition("in", 1): 1}, group="g")
            producer.send_offsets({TopicPartition("in", 0): 8}, group="g")
            assert fake.coordinator.offsets == {}
    assert fake.coordinator.offsets == {("g", "in", 0): 8, ("g", "in", 1): 1}


def test_offsets_that_were_refused_are_not_left_out_of_a_commit(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        producer.begin()
        producer.send("t", b"a").result(30)
        fake.fault(0, times(1, AddToTransaction, answer(ErrorCode.INVALID_REQUEST)))
        with pytest.raises(BrokerError, match="INVALID_REQUEST"):
            producer.send_offsets({TopicPartition("in", 0): 5}, group="g")
        with pytest.raises(TransactionStateError, match="INVALID_REQUEST"):
            producer.commit()
    assert seen(fake, "t") == []


def test_closing_aborts_what_is_open(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        producer.begin()
        producer.send("t", b"never").result(30)
    assert seen(fake, "t") == []
    assert seen(fake, "t", "read_uncommitted") == [b"never"]
    assert fake.coordinator.broker_id == 0
    ends = requests(fake, EndTransaction)
    assert [end.commit for end in ends] == [False]


# --- registration ---


def test_a_batch_goes_out_when_its_partition_is_registered_and_others_do_not_wait(fake: FakeCluster) -> None:
    fake.create("t", partitions=4)
    held = Held(fake, adds("t", 1))
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        producer.begin()
        assert producer.send("t", b"0", partition=0).result(30).offset == 0
        waiting = producer.send("t", b"1", partition=1)
        held.wait()
        assert producer.send("t", b"0", partition=0).result(30).offset == 1
        gathered = [producer.send("t", b"later", partition=number) for number in (2, 3)]
        time.sleep(0.05)  # long enough for a batch that does not wait to be there
        assert not waiting.done() and not any(future.done() for future in gathered)
        assert len(headers(fake, "t")) == 2
        held.release()
        assert waiting.result(30).offset == 0
        assert [future.result(30).offset for future in gathered] == [0, 0]
        producer.commit()
    named = [request.partitions for request in requests(fake, AddToTransaction)]
    assert named[:2] == [(("t", 0),), (("t", 1),)]
    assert sorted(found for request in named[2:] for found in request) == [("t", 2), ("t", 3)]


def test_a_partition_is_registered_once_in_a_transaction(fake: FakeCluster) -> None:
    fake.create("t", partitions=3)
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        for _ in range(2):
            with producer.transaction():
                for number in range(30):
                    producer.send("t", b"v", partition=number % 3)
                    producer.flush()
    named = [tp for request in requests(fake, AddToTransaction) for tp in request.partitions]
    assert sorted(named) == sorted([("t", 0), ("t", 1), ("t", 2)] * 2)


# --- answers that do not come, coordinators that change ---


@pytest.mark.parametrize("kind", [BeginTransaction, AddToTransaction, EndTransaction, Produce])
@pytest.mark.parametrize("fault", [lose_answer, hang_up], ids=["answer lost", "request lost"])
def test_what_is_lost_is_repeated_and_done_once(fake: FakeCluster, kind: type, fault: Fault) -> None:
    fake.create("t")
    fake.fault(0, times(2, kind, fault))
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        for value in (b"a", b"b"):
            with producer.transaction():
                producer.send("t", value)
                producer.send_offsets({TopicPartition("in", 0): 3}, group="g")
    assert seen(fake, "t") == [b"a", b"b"]
    assert seen(fake, "t", "read_uncommitted") == [b"a", b"b"]
    assert fake.coordinator.offsets == {("g", "in", 0): 3}


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.BROKER_STOPPING,
    ],
)
def test_a_coordinator_that_cannot_yet_is_asked_again(fake: FakeCluster, code: ErrorCode) -> None:
    fake.create("t")
    for kind in (BeginTransaction, AddToTransaction, EndTransaction):
        fake.fault(0, times(2, kind, answer(code)))
    with Producer(fake.bootstrap, transactional_id="x") as producer, producer.transaction():
        producer.send("t", b"a")
    assert seen(fake, "t") == [b"a"]


def test_the_coordinator_moves_in_mid_transaction(fake: FakeCluster) -> None:
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


def test_a_commit_that_nobody_answers_is_unknown_and_can_be_asked_again(fake: FakeCluster) -> None:
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
        with pytest.raises(TransactionStateError, match="not known"):
            producer.abort()
        with pytest.raises(TransactionStateError, match="nothing can be written"):
            producer.send("t", b"b")
        fake.do(fake.brokers[0].faults.clear)
        producer.commit()
        with producer.transaction():
            producer.send("t", b"b")
    assert seen(fake, "t") == [b"a", b"b"]


def test_a_commit_that_was_not_waited_for_can_be_asked_about(
    fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends the wait, not the commit."""
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
        with pytest.raises(TransactionStateError, match="not known"):
            producer.begin()
        producer.commit()
        with producer.transaction():
            producer.send("t", b"b")
    assert seen(fake, "t") == [b"a", b"b"]


def test_fenced_after_a_lost_answer_the_outcome_is_unknown(fake: FakeCluster) -> None:
    """The commit went through; by the time it is repeated another producer has taken over, and the coordinator cannot
    tell any more."""
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


def test_no_coordinator_in_time(fake: FakeCluster) -> None:
    fake.fault(0, times(10_000, BeginTransaction, answer(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)))
    with Producer(fake.bootstrap, transactional_id="x", max_block_s=0.3) as producer:
        with pytest.raises(ClientTimeout, match=r"BeginTransaction.*'id:x'.*COORDINATOR_LOAD_IN_PROGRESS"):
            producer.begin()
        fake.do(fake.brokers[0].faults.clear)
        producer.begin()


def test_signs_of_life_keep_a_transaction_open(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, transactional_id="x", transaction_timeout_s=0.9) as producer:
        producer.begin()
        producer.send("t", b"a").result(30)
        wait_until(lambda: len(requests(fake, TouchTransaction)) >= 4, 5, "four touches")
        producer.commit()
        count = len(requests(fake, TouchTransaction))
        time.sleep(0.5)
        assert len(requests(fake, TouchTransaction)) == count  # none between transactions
    assert seen(fake, "t") == [b"a"]


# --- what fails, and what is not allowed ---


def test_what_failed_is_not_committed_even_when_its_future_told_so(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        producer.begin()
        producer.send("t", b"first")
        producer.flush()
        fake.fault(0, times(1, Produce, refuse(ErrorCode.MESSAGE_TOO_LARGE)))
        with pytest.raises(BrokerError, match="MESSAGE_TOO_LARGE"):
            producer.send("t", b"second").result(30)
        for _ in range(2):
            with pytest.raises(TransactionStateError, match=r"can only be aborted.*MESSAGE_TOO_LARGE"):
                producer.commit()
        producer.abort()
        producer.flush()  # of what was aborted nothing is told again
        with producer.transaction():
            producer.send("t", b"third")
    assert seen(fake, "t") == [b"third"]


def test_a_block_whose_writes_failed_is_aborted_and_says_why(fake: FakeCluster) -> None:
    fake.create("t")
    fake.fault(0, times(1, Produce, refuse(ErrorCode.MESSAGE_TOO_LARGE)))
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        with pytest.raises(TransactionStateError, match="MESSAGE_TOO_LARGE"), producer.transaction():
            producer.send("t", b"a")
        with producer.transaction():
            producer.send("t", b"b")
    assert seen(fake, "t") == [b"b"]


def test_an_abort_does_not_send_what_waits(fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    held = Held(fake, adds("t", 1))
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        producer.begin()
        producer.send("t", b"0", partition=0).result(30)
        waiting = producer.send("t", b"1", partition=1)
        held.wait()
        producer.abort()
        with pytest.raises(TransactionStateError, match="was aborted"):
            waiting.result(30)
        held.release()  # comes too late and is refused
        with producer.transaction():
            producer.send("t", b"2", partition=1)
    assert seen(fake, "t") == [b"2"]
    assert seen(fake, "t", "read_uncommitted") == [b"0", b"2"]


def test_an_abort_forgets_what_is_in_flight(fake: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    """A batch that is still being appended when its transaction ends belongs to nobody any more."""
    fake.create("t")
    kept: list[Callable[[], None]] = []

    def keep(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        reply = connection.reply

        def later(*arguments: object) -> None:
            connection.reply = reply  # type: ignore[method-assign]
            kept.append(lambda: reply(*arguments))  # type: ignore[arg-type]

        connection.reply = later  # type: ignore[method-assign, assignment]
        return False

    fake.fault(0, times(1, Produce, keep))
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        producer.begin()
        lost = producer.send("t", b"a")
        wait_until(lambda: kept, 5, "the answer to hold")
        producer.abort()
        assert isinstance(lost.exception(5), TransactionStateError)
        producer.begin()
        fake.do(kept[0])
        producer.send("t", b"b").result(30)
        producer.commit()
    assert not caplog.records, caplog.text  # of what goes wrong in a callback only the loop's log tells
    assert seen(fake, "t") == [b"b"]


def test_a_later_producer_of_the_same_id_fences_the_first(fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    with (
        Producer(fake.bootstrap, transactional_id="x") as first,
        Producer(fake.bootstrap, transactional_id="x") as second,
    ):
        first.begin()
        first.send("t", b"old", partition=0).result(30)
        second.begin()
        with pytest.raises(ProducerFenced, match="another run with this id"):
            first.send("t", b"old", partition=1).result(30)
        with pytest.raises(ProducerFenced, match="another run with this id"):
            first.commit()
        first.abort()
        with pytest.raises(ProducerFenced, match="make another"):
            first.begin()
        with pytest.raises(ProducerFenced):
            first.send("t", b"old")
        second.send("t", b"new", partition=0).result(30)
        second.commit()
    assert seen(fake, "t") == [b"new"]


def test_fenced_at_the_commit(fake: FakeCluster) -> None:
    fake.create("t")
    with (
        Producer(fake.bootstrap, transactional_id="x") as first,
        Producer(fake.bootstrap, transactional_id="x") as second,
    ):
        first.begin()
        first.send("t", b"old").result(30)
        second.begin()
        with pytest.raises(ProducerFenced):
            first.commit()
        second.commit()
    assert seen(fake, "t") == []


def test_an_operator_ends_a_transaction(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, transactional_id="x") as producer, Admin(fake.bootstrap) as admin:
        producer.begin()
        producer.send("t", b"a").result(30)
        (found,) = admin.transactions()
        assert (found.key, found.state, found.version) == ("id:x", "open", None)
        assert found.partitions == (TopicPartition("t", 0),)
        assert found.began is not None and found.deadline is not None
        assert 60 <= (found.deadline - found.began).total_seconds() < 120
        admin.abort_transaction("id:x")
        with pytest.raises(BrokerError, match="INVALID_TXN_STATE"):
            admin.abort_transaction("id:x")
        assert [found.state for found in admin.transactions()] == ["empty"]
        with pytest.raises(ProducerFenced, match="somebody aborted it"):
            producer.commit()
    assert seen(fake, "t") == []


def test_calls_that_the_state_does_not_allow(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap) as plain, pytest.raises(ConfigError, match="transactional_id"):
        plain.begin()
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        for call in (producer.commit, producer.abort, lambda: producer.send("t", b"a")):
            with pytest.raises(TransactionStateError, match="call begin"):
                call()
        with pytest.raises(TransactionStateError, match="send_offsets"):
            producer.send_offsets({TopicPartition("t", 0): 1}, group="g")
        producer.begin()
        with pytest.raises(TransactionStateError, match="is open"):
            producer.begin()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"transactional_id": ""}, "1 to 200 bytes"),
        ({"transactional_id": "x" * 201}, "1 to 200 bytes"),
        ({"transactional_id": "x", "acks": 1}, "acks='all'"),
        ({"transactional_id": "x", "idempotent": False}, "idempotent=False"),
        ({"transactional_id": "x", "transaction_timeout_s": 0}, "transaction_timeout_s=0"),
    ],
)
def test_settings_that_do_not_go_together(fake: FakeCluster, options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Producer(fake.bootstrap, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [ProducerFenced, TransactionStateError, CommitOutcomeUnknown])
def test_errors_survive_pickling(kind: type[Exception]) -> None:
    error = pickle.loads(pickle.dumps(kind("what")))
    assert type(error) is kind
    assert "what" in str(error)


def test_ending_from_a_callback_is_refused_and_does_not_hang(fake: FakeCluster) -> None:
    fake.create("t")
    errors: list[BaseException] = []
    done = threading.Event()
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        producer.begin()

        def end(_: object) -> None:
            try:
                producer.commit()
            except BaseException as error:
                errors.append(error)
            done.set()

        producer.send("t", b"a").add_done_callback(end)
        assert done.wait(30)
        assert "callback" in str(errors[0])
        producer.commit()


# --- sinks ---


def sink(fake: FakeCluster, run_id: str, version: int = 0) -> Joined:
    joined = join(fake.bootstrap, key="query:q", version=version, run_id=run_id)
    assert isinstance(joined, Joined)
    return joined


def end_sink(fake: FakeCluster, run_id: str, *winners: Joined, version: int = 0, commit: bool = True) -> Decided:
    ids = [joined.producer_id for joined in winners]
    return decide(fake.bootstrap, key="query:q", version=version, run_id=run_id, winners=ids, commit=commit)


def test_only_the_winning_attempts_of_a_sink_are_seen(fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    parts = [sink(fake, "r1") for _ in range(3)]
    assert len({joined.producer_id for joined in parts}) == 3
    for number, joined in enumerate(parts):
        with Producer(fake.bootstrap, in_transaction=pickle.loads(pickle.dumps(joined))) as producer:
            producer.send("t", b"%d" % number, partition=0)
            producer.send("t", b"%d" % number, partition=1)
            with pytest.raises(TransactionStateError, match="whoever began it"):
                producer.commit()
    assert seen(fake, "t") == []
    fake.fault(0, times(1, EndTransaction, lose_answer))
    assert end_sink(fake, "r1", parts[0], parts[2]) == Decided(complete=True, replayed=False)
    assert sorted(seen(fake, "t")) == [b"0", b"0", b"2", b"2"]
    # Again, by the same run and by a later one.
    assert join(fake.bootstrap, key="query:q", version=0, run_id="r2") == AlreadyCommitted(0)
    assert end_sink(fake, "r2") == Decided(complete=True, replayed=True)
    assert end_sink(fake, "r1", commit=False).replayed
    assert isinstance(sink(fake, "r2", version=1), Joined)


def test_a_later_run_of_a_sink_fences_the_one_before(fake: FakeCluster) -> None:
    fake.create("t")
    old = sink(fake, "r1")
    with Producer(fake.bootstrap, in_transaction=old) as zombie:
        zombie.send("t", b"old").result(30)
        new = sink(fake, "r2")
        assert (old.number, new.number) == (1, 2)
        failure = zombie.send("t", b"old").exception(5)
        assert isinstance(failure, ProducerFenced | TransactionStateError), failure
        with pytest.raises(ProducerFenced):
            end_sink(fake, "r1", old)
        with pytest.raises(ProducerFenced):
            join(fake.bootstrap, key="query:q", version=0, run_id="r1")
        with Producer(fake.bootstrap, in_transaction=new) as producer:
            producer.send("t", b"new")
        assert end_sink(fake, "r2", new).complete
    assert seen(fake, "t") == [b"new"]


def test_a_sinks_decision_that_nobody_answers(fake: FakeCluster) -> None:
    fake.create("t")
    joined = sink(fake, "r1")
    fake.fault(0, times(1000, EndTransaction, lose_answer))
    with pytest.raises(CommitOutcomeUnknown, match="version 0 may be committed"):
        decide(fake.bootstrap, key="query:q", version=0, run_id="r1", winners=[joined.producer_id], timeout_s=0.4)
    with pytest.raises(ClientTimeout):
        decide(fake.bootstrap, key="query:q", version=0, run_id="r1", commit=False, timeout_s=0.4)


# --- readers ---


@pytest.mark.alone
def test_readers_pass_over_aborted_records_without_decoding_them(
    fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        for number in range(6):
            producer.begin()
            producer.send("t", b"%d" % number).result(30)
            producer.commit() if number % 3 == 0 else producer.abort()
    decoded: list[int] = []
    decode = codec.decode_batch

    def counting(header: BatchHeader, *rest: object) -> object:
        decoded.append(header.base_offset)
        return decode(header, *rest)

    monkeypatch.setattr(fetched, "decode_batch", counting)
    tp = TopicPartition("t", 0)
    with PartitionReader(fake.bootstrap, tp, 0, 12) as reader:
        assert [batch.column("value").to_pylist() for _, batch in reader] == [[b"0"], [b"3"]]
    assert decoded == [0, 6]
    with Consumer(fake.bootstrap, "t", start={tp: 8}) as consumer:
        assert consumer.poll(0.2) == []
        assert consumer.position(tp) == 12
    assert decoded == [0, 6]
    with Consumer(fake.bootstrap, "t", start={tp: 8}) as consumer:
        began = time.monotonic()
        assert consumer.to_table().num_rows == 0
        assert time.monotonic() - began < 0.8  # does not wait for records when there is nothing but markers
    with Consumer(fake.bootstrap, "t", isolation="read_uncommitted") as consumer:
        assert consumer.to_table().num_rows == 6


def test_readers_stop_at_the_first_open_transaction(fake: FakeCluster) -> None:
    fake.create("t")
    tp = TopicPartition("t", 0)
    with (
        Producer(fake.bootstrap, transactional_id="x") as producer,
        Producer(fake.bootstrap) as plain,
        Admin(fake.bootstrap) as admin,
    ):
        plain.send("t", b"before").result(30)
        producer.begin()
        producer.send("t", b"open").result(30)
        plain.send("t", b"after").result(30)
        assert seen(fake, "t") == [b"before"]
        assert admin.list_offsets([tp]) == {tp: 1}
        assert admin.list_offsets([tp], isolation="read_uncommitted") == {tp: 3}
        # Who stands behind the last stable offset, by a group's offsets say, is not out of range.
        with Consumer(fake.bootstrap, "t", start={tp: 2}) as consumer:
            assert consumer.to_table().num_rows == 0
            assert consumer.position(tp) == 2
        with (
            PartitionReader(fake.bootstrap, tp, 0, 3, timeout_s=0.8) as reader,
            pytest.raises(ClientTimeout, match="last stable offset 1"),
        ):
            list(reader)
        producer.commit()
        assert seen(fake, "t") == [b"before", b"open", b"after"]


def test_isolation_is_one_of_two(fake: FakeCluster) -> None:
    fake.create("t")
    with pytest.raises(ConfigError, match="isolation='dirty'"):
        Consumer(fake.bootstrap, "t", isolation="dirty")  # type: ignore[arg-type]
