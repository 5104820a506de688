"""Tests of a group coordinator without a process: the topics whose offsets it drops, and the transactions that it
waits for."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparklog.broker.groups.group_host import GroupHost
from sparklog.broker.groups.group_requests import GroupRequests
from sparklog.coordinator.assignor import TopicView
from sparklog.coordinator.effects import Assigned, Outcome, Refused
from sparklog.coordinator.group_events import HeartbeatRequested, TopicsSeen
from sparklog.coordinator.group_records import (
    FORMAT_VERSION,
    About,
    CommittedOffset,
    EpochKey,
    GroupEpoch,
    GroupKey,
    GroupValue,
    Hold,
    HoldKey,
    MemberKey,
    MemberState,
    OffsetKey,
    OwnedTopic,
    group_record,
)
from sparklog.coordinator.group_target import Target, TargetInputs
from sparklog.coordinator.membership import COMPUTED_AT_ONCE
from sparklog.errors import BrokerError, ClusterError, ErrorCode
from sparklog.protocol.messages import (
    MAX_ENTRIES,
    FetchOffsets,
    FetchOffsetsReply,
    GroupOffset,
    Heartbeat,
    ListParticipants,
    ListParticipantsReply,
    Reply,
    Request,
    TopicPartitions,
    decode_request,
    encode_message,
)
from tests.broker.staged import TOPIC_ID, Stage, until


class Zookeeper:
    """A stand-in that knows the live topics as (name, id)."""

    def __init__(self, *lives: tuple[str, str]) -> None:
        self.lives = lives
        self.asked = 0
        self.away = False
        #: The topic for which it raises an error.
        self.refused = ("", "")

    async def topic_lives(self, name: str, topic_id: str) -> bool:
        self.asked += 1
        if self.away or (name, topic_id) == self.refused:
            raise ClusterError("no answer")
        return (name, topic_id) in self.lives


def load_offsets(host: GroupHost, *topics: tuple[str, str]) -> None:
    """Start a coordinator whose group g has an offset in each topic (name, id)."""
    now_ms = time.time_ns() // 1_000_000  # the coordinator also drops offsets without commits for a long time
    host.groups.load(
        group_record(
            OffsetKey(FORMAT_VERSION, "g", topic, 0),
            CommittedOffset(FORMAT_VERSION, GroupOffset(topic, 0, 5, i), now_ms),
        )
        for topic, i in topics
    )
    host.not_ready_reason = ""


def test_offsets_of_deleted_topics_are_dropped_but_not_of_unknown_ones() -> None:
    """A broker that has just become coordinator may be the last to learn of a topic."""

    async def story() -> None:
        stage, zookeeper = Stage(), Zookeeper(("new", "new-id"), ("no-id", ""))
        stage.registry.answers = zookeeper
        host = stage.group_host()
        named = [("t", TOPIC_ID), ("new", "new-id"), ("gone", "gone-id"), ("t2", "before"), ("no-id", "")]
        load_offsets(host, *named)
        zookeeper.away = True
        host._drop_deleted()
        await until(lambda: zookeeper.asked)
        await asyncio.sleep(0)
        assert len(host.groups.offsets("g")) == 5, "offsets were dropped without proof"
        zookeeper.away = False
        host._drop_deleted()
        await until(lambda: len(host.groups.offsets("g")) == 3)
        assert {topic for topic, _ in host.groups.offsets("g")} == {"t", "new", "no-id"}
        host.end()

    asyncio.run(story())


def test_an_unknown_topic_ids_offsets_are_dropped_if_zookeeper_agrees() -> None:
    """By the time of the answer the topic may have been recreated, with offsets that must stay."""

    async def story() -> None:
        stage = Stage()
        asked: list[str] = []
        answer = asyncio.Event()

        async def lives(name: str, topic_id: str) -> bool:
            asked.append(name)
            if name == "slow":
                await answer.wait()
            return False

        stage.registry.answers = SimpleNamespace(topic_lives=lives)
        host = stage.group_host()
        load_offsets(host, ("t9", ""), ("slow", "slow-id"))
        host._drop_deleted()
        await until(lambda: "slow" in asked)
        assert asked == ["t9", "slow"]
        assert {topic for topic, _ in host.groups.offsets("g")} == {"slow"}
        load_offsets(host, ("t9", "id-again"))
        answer.set()
        await until(lambda: ("slow", 0) not in host.groups.offsets("g"))
        assert {topic for topic, _ in host.groups.offsets("g")} == {"t9"}
        host.end()

    asyncio.run(story())


def test_topics_are_looked_up_until_zookeeper_responds() -> None:
    """ZooKeeper was unreachable when the coordinator began, and no topic is deleted afterwards."""

    async def story() -> None:
        stage, zookeeper = Stage(), Zookeeper(("new", "new-id"))
        stage.registry.answers = zookeeper
        host = stage.group_host()
        load_offsets(host, ("new", "new-id"), ("gone", "gone-id"))
        zookeeper.away = True
        host._drop_deleted()
        await until(lambda: zookeeper.asked)
        zookeeper.away, zookeeper.asked = False, 0
        await until(lambda: len(host.groups.offsets("g")) == 1)
        assert {topic for topic, _ in host.groups.offsets("g")} == {"new"}
        assert zookeeper.asked == 2
        host.end()

    asyncio.run(story())


def test_a_topic_without_an_answer_does_not_delay_others() -> None:
    async def story() -> None:
        stage, zookeeper = Stage(), Zookeeper()
        zookeeper.refused = ("odd", "odd-id")
        stage.registry.answers = zookeeper
        host = stage.group_host()
        load_offsets(host, ("odd", "odd-id"), *((f"gone{number}", "gone-id") for number in range(3)))
        host._drop_deleted()
        await until(lambda: {topic for topic, _ in host.groups.offsets("g")} == {"odd"})
        host.end()

    asyncio.run(story())


def test_a_topic_deleted_during_its_lookup_is_looked_up_again() -> None:
    async def story() -> None:
        stage, zookeeper = Stage(), Zookeeper(("t9", "t9-id"))
        stage.registry.answers = zookeeper
        host = stage.group_host()
        load_offsets(host, ("t9", "t9-id"))

        async def deleted_then_told(name: str, topic_id: str) -> bool:
            stage.registry.answers = zookeeper
            zookeeper.lives = ()
            host._drop_deleted()
            await asyncio.sleep(0)
            return True  # its state at the time of the request

        zookeeper_first = SimpleNamespace(topic_lives=deleted_then_told)
        stage.registry.answers = zookeeper_first
        host._drop_deleted()
        await until(lambda: not host.groups.offsets("g"))
        host.end()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("known", "knew", "ends"),
    [
        ({}, 5, True),
        ({7: "tx"}, 5, False),
        ({8: "tx"}, 5, True),
        ({7: "another"}, 5, True),
        ({}, 4, True),
        ({}, 6, False),
    ],
    ids=[
        "over",
        "open",
        "the next one of the key is open",
        "another key's",
        "over, says a later one",
        "an earlier coordinator may not know it",
    ],
)
def test_a_waiting_group_learns_that_a_transaction_has_ended(known: dict[int, str], knew: int, ends: bool) -> None:
    """The transaction's coordinator sends a group its commits, and never its aborts."""

    async def story() -> None:
        asked = 0

        async def ask(broker_id: int, message: Request) -> Reply:
            nonlocal asked
            asked += 1
            assert isinstance(message, ListParticipants) and message.producer_ids == (7,)
            return ListParticipantsReply(0, ((0, 5),), tuple(known.items()))

        stage = Stage(ask)
        host = stage.group_host()
        now_ms = time.time_ns() // 1_000_000
        value = Hold(FORMAT_VERSION, "m1", 1, 7, knew, (("t", 0),), now_ms)
        host.groups.load([group_record(HoldKey(FORMAT_VERSION, "g", "tx"), value)])
        host.not_ready_reason = ""
        holds = host.groups.holds("g", "m2", [("t", 0)])
        assert holds == [("tx", value)] and not host.groups.holds("g", "m1", [("t", 0)])
        host.check_holds("g", holds)
        host.check_holds("g", holds)
        await until(lambda: asked and not host._asking)
        assert (asked, host.groups.holds("g", "m2", [("t", 0)])) == (1, [] if ends else holds)
        host.end()

    asyncio.run(story())


def test_a_member_learns_of_offsets_that_no_transaction_holds() -> None:
    async def story() -> None:
        async def ask(broker_id: int, message: Request) -> Reply:
            return ListParticipantsReply(0, ((0, 5),), ((7, "tx"),))

        stage = Stage(ask)
        host = stage.group_host()
        now_ms = time.time_ns() // 1_000_000
        owned = (OwnedTopic("t", TOPIC_ID, (0, 1, 2), (4, 4, 4)),)
        state: dict[GroupKey, GroupValue] = {
            EpochKey(FORMAT_VERSION, "g"): GroupEpoch(FORMAT_VERSION, 4, now_ms),
            MemberKey(FORMAT_VERSION, "g", "m2"): MemberState(FORMAT_VERSION, About(("t",)), 4, owned),
            HoldKey(FORMAT_VERSION, "g", "tx"): Hold(FORMAT_VERSION, "m1", 3, 7, 5, (("t", 0),), now_ms),
        }
        offsets = [GroupOffset("t", number, 50 + number, TOPIC_ID) for number in (0, 1)]
        for one in offsets:
            state[OffsetKey(FORMAT_VERSION, "g", "t", one.partition)] = CommittedOffset(FORMAT_VERSION, one, now_ms)
        host.groups.load([group_record(*found) for found in state.items()])
        host.not_ready_reason = ""
        replies: list[Reply] = []
        groups = SimpleNamespace(of=lambda _: host)
        requests = GroupRequests(
            stage.context,
            stage.broker.access,
            stage.broker.slices,
            groups=cast(Any, groups),
            takes_part=stage.broker.hanging.takes_part,
        )
        connection = SimpleNamespace(reply=replies.append)

        def fetch(*numbers: int) -> None:
            request = FetchOffsets(0, "g", tuple(("t", number) for number in numbers), "m2", 4)
            requests.fetch_offsets(cast(Any, connection), request, memoryview(b""))

        fetch(0, 1, 2)
        assert replies == [FetchOffsetsReply(0, (offsets[1],), (("t", 0),))]
        with pytest.raises(BrokerError) as refused:
            fetch(0)
        assert refused.value.code == ErrorCode.UNSTABLE_OFFSET_COMMIT
        await until(lambda: not host._asking)
        host.end()

    asyncio.run(story())


def test_a_heartbeat_with_too_many_topics_advises_a_pattern() -> None:
    """Decode it from the wire: a bound of the message would refuse it without the advice."""

    async def story() -> None:
        stage = Stage()
        topics = tuple(f"topic-{number}" for number in range(MAX_ENTRIES + 1))
        request = decode_request(encode_message(Heartbeat(7, "g", "m", 0, 1, topics=topics)))
        with pytest.raises(BrokerError, match="at most expected: subscribe by a pattern") as caught:
            stage.handle(SimpleNamespace(client_id="c", within_host=False, peer="host:1"), request)
        assert caught.value.code is ErrorCode.INVALID_REQUEST

    asyncio.run(story())


def test_a_thread_computes_the_target_of_a_large_group() -> None:
    async def story() -> None:
        host = Stage().group_host()
        host.not_ready_reason = ""
        host.step(TopicsSeen({"t": TopicView("t-id", 2 * COMPUTED_AT_ONCE)}))
        threads: list[int] = []
        compute = TargetInputs.compute

        def noted(inputs: TargetInputs) -> Target:
            threads.append(threading.get_ident())
            return compute(inputs)

        outcomes: list[Outcome] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TargetInputs, "compute", noted)
            host.ask(lambda ticket: HeartbeatRequested(ticket, "g", "m", 0, 1, (), About(("t",))), outcomes.append)
            assert not outcomes
            await until(lambda: outcomes)
        (outcome,) = outcomes
        assert isinstance(outcome, Assigned)
        assert len(outcome.assigned[0].partitions) == 2 * COMPUTED_AT_ONCE
        assert len(threads) == 1 and threads != [threading.get_ident()]
        host.end()

    asyncio.run(story())


def test_a_target_that_cannot_be_computed_ends_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this end the group would wait for its target forever."""

    async def story() -> None:
        host = Stage().group_host()
        host.not_ready_reason = ""
        host.step(TopicsSeen({"t": TopicView("t-id", 2 * COMPUTED_AT_ONCE)}))
        monkeypatch.setattr(TargetInputs, "compute", lambda _: 1 / 0)
        outcomes: list[Outcome] = []
        host.ask(lambda ticket: HeartbeatRequested(ticket, "g", "m", 0, 1, (), About(("t",))), outcomes.append)
        await until(lambda: outcomes)
        assert isinstance(outcomes[0], Refused) and outcomes[0].code is ErrorCode.COORDINATOR_NOT_AVAILABLE
        assert host.not_ready_reason == "failed"

    asyncio.run(story())


def test_a_member_may_own_partitions_of_very_many_topics() -> None:
    """A pattern may match more topics than a member may name."""
    owned = tuple(TopicPartitions(f"topic-{number}", "i" * 32, (0,)) for number in range(2 * MAX_ENTRIES))
    request = Heartbeat(7, "g", "m", 1, 1, owned, pattern="topic-.*")
    assert decode_request(encode_message(request)) == request
