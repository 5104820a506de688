"""Tests of transactions of many producers, of which one decision names the committed ones."""

from __future__ import annotations

import pickle

import pytest

from sparklog.client.errors import ClientTimeout, CommitOutcomeUnknown, ProducerFenced, TransactionStateError
from sparklog.client.producer.producer import Producer
from sparklog.client.producer.transaction_run import Joined
from sparklog.client.producer.two_phase_write import AlreadyCommitted, WriteDecision, decide, join
from sparklog.coordinator import transaction_end
from sparklog.errors import ClusterError
from sparklog.protocol.messages import (
    EndTransaction,
)
from tests.client.fake_cluster import FakeCluster
from tests.client.producing import times
from tests.client.transacting import lose_answer, seen


def sink(fake: FakeCluster, run_id: str, version: int = 0) -> Joined:
    joined = join(fake.bootstrap, key="query:q", version=version, run_id=run_id)
    assert isinstance(joined, Joined)
    return joined


def end_sink(fake: FakeCluster, run_id: str, *winners: Joined, version: int = 0, commit: bool = True) -> WriteDecision:
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
            with pytest.raises(TransactionStateError, match="the process that began it"):
                producer.commit()
    assert seen(fake, "t") == []
    fake.fault(0, times(1, EndTransaction, lose_answer))
    assert end_sink(fake, "r1", parts[0], parts[2]) == WriteDecision(complete=True, replayed=False)
    assert sorted(seen(fake, "t")) == [b"0", b"0", b"2", b"2"]
    # again, by the same run and by a later one
    assert join(fake.bootstrap, key="query:q", version=0, run_id="r2") == AlreadyCommitted(0)
    assert end_sink(fake, "r2") == WriteDecision(complete=True, replayed=True)
    assert end_sink(fake, "r1", commit=False).replayed
    assert isinstance(sink(fake, "r2", version=1), Joined)


def test_a_later_run_of_a_sink_fences_the_earlier_one(fake: FakeCluster) -> None:
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


def test_an_unanswered_decision_of_a_sink_times_out(fake: FakeCluster) -> None:
    fake.create("t")
    joined = sink(fake, "r1")
    fake.fault(0, times(1000, EndTransaction, lose_answer))
    with pytest.raises(CommitOutcomeUnknown, match="version 0 may be committed"):
        decide(fake.bootstrap, key="query:q", version=0, run_id="r1", winners=[joined.producer_id], timeout_s=0.4)
    with pytest.raises(ClientTimeout):
        decide(fake.bootstrap, key="query:q", version=0, run_id="r1", commit=False, timeout_s=0.4)


def test_a_sink_whose_end_has_several_parts_is_committed(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_end, "PARTICIPANTS_AT_ONCE", 1)
    fake.create("t", partitions=2)
    parts = [sink(fake, "r1") for _ in range(4)]
    for number, joined in enumerate(parts):
        with Producer(fake.bootstrap, in_transaction=pickle.loads(pickle.dumps(joined))) as producer:
            producer.send("t", b"%d" % number, partition=number % 2)
    assert end_sink(fake, "r1", *parts[1:]) == WriteDecision(complete=True, replayed=False)
    assert sorted(seen(fake, "t")) == [b"1", b"2", b"3"]


def test_a_commit_of_too_many_tasks_is_refused_with_advice() -> None:
    with pytest.raises(ClusterError, match=r"100001 tasks .* at most 100000 expected: write with fewer tasks"):
        decide("no-such-host:1", key="query:q", version=0, run_id="r1", winners=range(100_001))
