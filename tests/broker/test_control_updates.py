"""Tests of a broker's responses to updates that it does not follow."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any, cast

import pytest

from sparklog.broker.context import BrokerContext
from sparklog.broker.replication import leader_and_isr
from sparklog.errors import ErrorCode
from sparklog.model import BrokerEndpoint, TopicPartition
from sparklog.protocol.messages import ControlUpdate, ControlUpdateReply, TopicChange
from tests.broker.support import broker_context, control_updates


class Answers:
    """A connection as far as a response needs it."""

    def __init__(self) -> None:
        self.given: list[ControlUpdateReply] = []

    def reply(self, answer: ControlUpdateReply) -> None:
        self.given.append(answer)


@pytest.fixture
def broker() -> BrokerContext:
    broker = broker_context()
    broker.incarnation = 4
    return broker


def update(*, epoch: int, sequence: int, incarnation: int = 4) -> ControlUpdate:
    return ControlUpdate(0, "c", epoch, incarnation, False, None, (), (), sequence=sequence)


@pytest.mark.parametrize(
    ("late", "code"),
    [
        (update(epoch=6, sequence=9), ErrorCode.STALE_CONTROLLER_EPOCH),
        (update(epoch=7, sequence=2), ErrorCode.STALE_CONTROLLER_EPOCH),
        (update(epoch=7, sequence=4, incarnation=3), ErrorCode.STALE_BROKER_EPOCH),
    ],
    ids=["of an earlier controller", "overtaken within its epoch", "meant for an earlier incarnation"],
)
def test_an_update_of_an_earlier_term_is_never_acknowledged(
    broker: BrokerContext, late: ControlUpdate, code: ErrorCode
) -> None:
    """A controller that starts its numbers again in an epoch that already had a term would send its brokers nothing,
    and believe that they had its updates."""
    broker.cache.apply(update(epoch=7, sequence=3))
    answers = Answers()
    control_updates(broker, [], []).handle(cast(Any, answers), late, memoryview(b""))
    assert [answer.code for answer in answers.given] == [code]
    assert broker.counters["control.updates"] == 0


class Replica:
    """A replica that is hosted and receives the live brokers."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.tp = TopicPartition("t", 0)
        self.topic_id = "t-id"
        self.stopped = False

    def step(self, event: object) -> None:
        self.told.append(event)


class Hosted(list[Replica]):
    """Return replicas, the last ten of which lead here."""

    def leading(self) -> list[Replica]:
        return self[-10:]


def test_thousands_of_replicas_learn_of_brokers_in_several_turns(broker: BrokerContext) -> None:
    """When a broker stops, many in-sync sets shrink. A broker that shrinks all of them in one turn responds to no
    request meanwhile."""
    hosted = Hosted(Replica() for _ in range(350))
    control = control_updates(broker, hosted, hosted)
    endpoints = (BrokerEndpoint(1, "host", 9092, 4), BrokerEndpoint(2, "host", 9093, 1))
    answers = Answers()

    async def test() -> list[int]:
        request = ControlUpdate(0, "c", 7, 4, False, endpoints, (), (), sequence=1)
        control.handle(cast(Any, answers), request, memoryview(b""))
        turns = []
        while not answers.given:
            turns.append(sum(len(replica.told) for replica in hosted))
            assert turns[-1] == 0 or all(replica.told for replica in hosted.leading()), "the replicas must have work"
            await asyncio.sleep(0)
        await broker.end_tasks()
        return turns

    turns = asyncio.run(test())
    assert [turn for turn in dict.fromkeys(turns) if turn] == [100, 200, 300], "and the rest with the response"
    assert all(len(replica.told) == 1 for replica in hosted)
    assert [answer.code for answer in answers.given] == [ErrorCode.NONE]


class Topic(Hosted):
    """All replicas of one topic, which are dropped and reconfigured."""

    def __init__(self, count: int) -> None:
        super().__init__(Replica() for _ in range(count))
        self.dropped: list[Replica] = []
        self.tuned: list[Replica] = []

    def unclaimed_logs(self) -> list[Any]:
        return []

    def drop(self, replica: Replica, *, keep: str = "") -> None:
        self.dropped.append(replica)

    def drop_log(self, tp: TopicPartition, *, keep: str = "") -> None:
        raise AssertionError(f"no log of {tp}")

    def apply_topic_config(self, replica: Replica, topic: object) -> bool:
        self.tuned.append(replica)
        return False


@pytest.mark.parametrize("full", [False, True])
def test_dropped_replicas_do_not_take_a_turn_each(
    broker: BrokerContext, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next update waits until the last replica is dropped, and clients can make each turn long."""
    monkeypatch.setattr(leader_and_isr, "_DROPS_S", 60.0)
    hosted = Topic(350)
    control = control_updates(broker, hosted, hosted)
    answers = Answers()

    async def test() -> int:
        request = ControlUpdate(0, "c", 7, 4, full, None, (), (), () if full else (("t", "t-id"),), sequence=1)
        control.handle(cast(Any, answers), request, memoryview(b""))
        turns = 0
        while not answers.given:
            turns += 1
            await asyncio.sleep(0)
        await broker.end_tasks()
        return turns

    assert asyncio.run(test()) < 20
    assert len(hosted.dropped) == 350


@pytest.mark.parametrize("what", ["deleted", "changed"])
def test_thousands_of_replicas_of_one_topic_change_in_several_turns(broker: BrokerContext, what: str) -> None:
    hosted = Topic(350)
    control = control_updates(broker, hosted, hosted)
    answers = Answers()
    topic = TopicChange("t", "t-id", (), (), None, {})
    topics, deleted = ((topic,), ()) if what == "changed" else ((), (("t", "t-id"),))

    async def test() -> list[int]:
        request = ControlUpdate(0, "c", 7, 4, False, None, topics, (), deleted, sequence=1)
        control.handle(cast(Any, answers), request, memoryview(b""))
        done = []
        while not answers.given:
            done.append(len(hosted.dropped) + len(hosted.tuned))
            await asyncio.sleep(0)
        await broker.end_tasks()
        return done

    done = asyncio.run(test())
    assert len(set(done)) > 3 and len(hosted.dropped) + len(hosted.tuned) == 350
    assert max(after - before for before, after in pairwise(done)) <= 100


def test_relief_of_an_earlier_incarnation_is_not_a_later_ones(broker: BrokerContext) -> None:
    """With a new registration leaders may add it again, so it must not exit because of the earlier relief."""
    broker.cache.apply(ControlUpdate(0, "c", 7, 4, False, None, (), (), sequence=1, relieved=True))
    assert broker.cache.relieved
    broker.incarnation = 5
    assert not broker.cache.relieved
