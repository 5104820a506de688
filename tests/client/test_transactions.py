"""Tests of transactional producers with the fake cluster and the production core as its coordinator: requests,
failures and refusals."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.consumer.group_session import GroupMetadata
from sparklog.client.errors import CommitOutcomeUnknown, ProducerFenced, TransactionStateError
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    AddToTransaction,
    EndTransaction,
    Produce,
    Request,
)
from sparklog.record.header import Flag
from sparklog.testing.process_cluster import wait_until
from tests.client.fake_cluster import FakeBroker, FakeCluster
from tests.client.producing import refuse, times
from tests.client.transacting import Held, adds, answer, headers, requests, seen

# --- commit and abort ---


def test_a_transaction_is_visible_completely_or_not_at_all(fake: FakeCluster) -> None:
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
        assert lost.result(30).offset == 2  # the record was in the log
        assert seen(fake, "t") == [b"a", b"b"]
        producer.begin()
        producer.send("t", b"d", partition=0)
        producer.commit()
    assert sorted(seen(fake, "t")) == [b"a", b"b", b"d"]
    assert sorted(seen(fake, "t", "read_uncommitted")) == [b"a", b"b", b"c", b"d"]


def test_each_transaction_has_its_own_producer_id_and_sequences_from_0(fake: FakeCluster) -> None:
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


def test_an_empty_transaction_writes_no_markers(fake: FakeCluster) -> None:
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


def test_offsets_take_effect_when_the_transaction_commits(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        producer.begin()
        producer.send_offsets({TopicPartition("in", 0): 5}, group="g")
        producer.abort()
        assert fake.groups.offsets == {}
        with producer.transaction():
            producer.send("t", b"a")
            producer.send_offsets({TopicPartition("in", 0): 7, TopicPartition("in", 1): 1}, group="g")
            producer.send_offsets({TopicPartition("in", 0): 8}, group="g")
            assert fake.groups.offsets == {}
    assert fake.groups.offsets == {("g", "in", 0): 8, ("g", "in", 1): 1}


def test_empty_offsets_commit_nothing(fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        with producer.transaction():
            producer.send_offsets({}, group="g")
            producer.send_offsets({}, group=GroupMetadata("g", "a member without partitions", 0, {}))
        with producer.transaction():
            producer.send("t", b"a")
            producer.send_offsets({}, group="g")
    assert seen(fake, "t") == [b"a"]
    assert not fake.groups.offsets


def test_refused_offsets_prevent_a_commit(fake: FakeCluster) -> None:
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


def test_closing_aborts_an_open_transaction(fake: FakeCluster) -> None:
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


def test_a_batch_is_sent_after_its_partition_is_registered(fake: FakeCluster) -> None:
    fake.create("t", partitions=4)
    held = Held(fake, adds("t", 1))
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        producer.begin()
        assert producer.send("t", b"0", partition=0).result(30).offset == 0
        waiting = producer.send("t", b"1", partition=1)
        held.wait()
        assert producer.send("t", b"0", partition=0).result(30).offset == 1
        gathered = [producer.send("t", b"later", partition=number) for number in (2, 3)]
        time.sleep(0.05)  # long enough for a batch to arrive that does not wait
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


# --- failures and refusals ---


def test_a_reported_failure_still_prevents_a_commit(fake: FakeCluster) -> None:
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
        producer.flush()  # an aborted record is not reported again
        with producer.transaction():
            producer.send("t", b"third")
    assert seen(fake, "t") == [b"third"]


def test_a_block_with_failed_writes_aborts_and_raises_the_reason(fake: FakeCluster) -> None:
    fake.create("t")
    fake.fault(0, times(1, Produce, refuse(ErrorCode.MESSAGE_TOO_LARGE)))
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        with pytest.raises(TransactionStateError, match="MESSAGE_TOO_LARGE"), producer.transaction():
            producer.send("t", b"a")
        with producer.transaction():
            producer.send("t", b"b")
    assert seen(fake, "t") == [b"b"]


def test_an_abort_does_not_send_buffered_records(fake: FakeCluster) -> None:
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
        held.release()  # it comes too late and is refused
        with producer.transaction():
            producer.send("t", b"2", partition=1)
    assert seen(fake, "t") == [b"2"]
    assert seen(fake, "t", "read_uncommitted") == [b"0", b"2"]


def test_an_abort_drops_batches_in_flight(fake: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    """A batch that is still being appended when its transaction ends belongs to no transaction any more."""
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
    assert not caplog.records, caplog.text  # an error in a callback is only in the loop's log
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
        with pytest.raises(ProducerFenced, match="a later run with this id"):
            first.send("t", b"old", partition=1).result(30)
        with pytest.raises(ProducerFenced, match="a later run with this id"):
            first.commit()
        first.abort()
        with pytest.raises(ProducerFenced, match="create another"):
            first.begin()
        with pytest.raises(ProducerFenced):
            first.send("t", b"old")
        second.send("t", b"new", partition=0).result(30)
        second.commit()
    assert seen(fake, "t") == [b"new"]


def test_a_producer_is_fenced_at_its_commit(fake: FakeCluster) -> None:
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
        with pytest.raises(ProducerFenced, match="an administrator aborted it"):
            producer.commit()
    assert seen(fake, "t") == []


def test_calls_that_the_state_does_not_allow_are_refused(fake: FakeCluster) -> None:
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
        with pytest.raises(TransactionStateError, match="is still open"):
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
def test_contradictory_settings_are_refused(fake: FakeCluster, options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Producer(fake.bootstrap, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [ProducerFenced, TransactionStateError, CommitOutcomeUnknown])
def test_errors_survive_pickling(kind: type[Exception]) -> None:
    error = pickle.loads(pickle.dumps(kind("what")))
    assert type(error) is kind
    assert "what" in str(error)


def test_an_end_in_a_callback_is_refused_and_does_not_hang(fake: FakeCluster) -> None:
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
