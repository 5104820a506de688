"""Tests of markers in flight, without processes: each is sent until it arrives, whatever happens to others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparklog.broker.internal_topics import TRANSACTIONS
from sparklog.broker.requests import slices
from sparklog.broker.transactions import marker_sender
from sparklog.broker.transactions.transaction_host import TransactionHost
from sparklog.coordinator import transaction_end
from sparklog.coordinator.effects import Ended, Outcome, SendMarkers, SendOffsets
from sparklog.coordinator.events import EndRequested, MarkersWritten, OffsetsWritten
from sparklog.coordinator.records import (
    OPEN,
    Participant,
    PartitionPlace,
    RegisteredTopic,
    Transaction,
    participant_record,
    transaction_record,
)
from sparklog.errors import ClusterError
from sparklog.model import TopicPartition
from sparklog.protocol.messages import (
    CommitOffsets,
    CommitOffsetsReply,
    GroupOffset,
    PartitionResult,
    Reply,
    Request,
    TransactionMarker,
    WriteMarkers,
)
from sparklog.protocol.messages import WriteMarkersReply as Written
from sparklog.record.marker import decode_marker
from sparklog.storage.transactions import OpenTransaction
from tests.broker.staged import TOPIC_ID, Ask, Hosted, Stage, until


class Coordinator:
    """A stand-in for the host of a coordinator with epoch 9."""

    ended = False
    epoch = 9
    partition = SimpleNamespace(tp=TopicPartition(TRANSACTIONS, 0))

    def __init__(self) -> None:
        self.written: list[PartitionPlace] = []
        #: The decision and its part of each event.
        self.parts: list[tuple[int, int]] = []

    def step(self, event: MarkersWritten) -> None:
        self.written += event.places
        self.parts.append((event.decision, event.part))


class Zookeeper:
    """A stand-in for the broker's registry that knows whether a topic exists."""

    def __init__(self, *lives: bool | Exception) -> None:
        self.asked: list[tuple[str, str]] = []
        self._lives = list(lives)

    async def topic_lives(self, name: str, topic_id: str) -> bool:
        self.asked.append((name, topic_id))
        found = self._lives.pop(0) if len(self._lives) > 1 else self._lives[0]
        if isinstance(found, Exception):
            raise found
        return found


def send(stage: Stage, host: Coordinator, *markers: TransactionMarker) -> None:
    stage.broker.marker_sender.send_markers(cast(Any, host), SendMarkers("k", 1, markers))


def marker(number: int = 0, topic_id: str = TOPIC_ID) -> TransactionMarker:
    return TransactionMarker("t", number, ((7, 0),), (), topic_id)


def test_one_failing_local_marker_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        stage, host = Stage(), Coordinator()
        stage.hosted.log.open[7] = OpenTransaction(0, 3)
        write, failures = stage.broker.markers.write, [RuntimeError("a bug")]

        def fails_once(found: TransactionMarker, answered: Any) -> None:
            if failures:
                raise failures.pop()
            write(found, answered)

        monkeypatch.setattr(stage.broker.markers, "write", fails_once)
        send(stage, host, marker(topic_id=TOPIC_ID), marker(topic_id=""))
        await until(lambda: len(host.written) == 2)
        assert set(host.written) == {PartitionPlace("t", 0, TOPIC_ID), PartitionPlace("t", 0, "")}
        assert stage.context.counters["transactions.markers.failed"] == 1

    asyncio.run(story())


def test_markers_for_local_partitions_are_sent_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "TURN_S", 0.0)

    async def story() -> None:
        stage, host = Stage(), Coordinator()
        send(stage, host, *(marker() for _ in range(20)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert 0 < len(host.written) < 20
        await until(lambda: len(host.written) == 20)

    asyncio.run(story())


def test_an_invalid_response_of_another_broker_is_retried() -> None:
    async def story() -> None:
        replies = [Written(0, ()), Written(0, (PartitionResult("t", 0, 0),))]
        sent: list[Request] = []

        async def ask(broker_id: int, message: Request) -> Reply:
            sent.append(message)
            return replies.pop(0)

        stage, host = elsewhere(ask), Coordinator()
        send(stage, host, marker())
        await until(lambda: host.written)
        assert len(sent) == 2
        assert isinstance(sent[0], WriteMarkers)
        assert (sent[0].markers[0].coordinator, sent[0].markers[0].coordinator_epoch) == (0, 9)

    asyncio.run(story())


def elsewhere(ask: Ask) -> Stage:
    """Let broker 2 lead the marker's partition."""
    stage = Stage(ask)
    known = stage.context.cache.partition(stage.hosted.tp)
    assert known is not None
    state = type(known.state)(2, 2, (2,), 1)
    stage.context.cache.state_written(stage.hosted.tp, state, version=9, topic_id=TOPIC_ID)
    return stage


def test_a_topic_that_this_broker_does_not_know_gets_its_marker() -> None:
    """A coordinator's broker may be the last to learn of a topic, and must not treat its markers as needless."""

    async def story() -> None:
        stage, host = Stage(), Coordinator()
        stage.hosted.log.open[7] = OpenTransaction(0, 3)
        zookeeper = Zookeeper(ClusterError("away"), True)
        stage.registry.answers = zookeeper
        stage.tell(topics=False)
        send(stage, host, marker(), marker(1))
        await until(lambda: len(zookeeper.asked) >= 3)
        assert not host.written, "a marker was dropped although its topic exists"
        other = Hosted(TopicPartition("t", 1))
        stage.partitions[other.tp] = other
        stage.tell()
        await until(lambda: PartitionPlace("t", 0, TOPIC_ID) in host.written)
        assert len(stage.hosted.appended) == 1

    asyncio.run(story())


@pytest.mark.parametrize("recreated", [False, True])
def test_markers_of_a_deleted_topic_are_not_needed(recreated: bool) -> None:
    """Another topic may have the deleted topic's name by now."""

    async def story() -> None:
        stage, host = Stage(), Coordinator()
        zookeeper = Zookeeper(False)
        stage.registry.answers = zookeeper
        stage.tell(topics=recreated, topic_id="again")
        send(stage, host, marker(), marker(1))
        await until(lambda: len(host.written) == 2)
        assert zookeeper.asked == [("t", TOPIC_ID)], "one request for all its partitions"
        assert not stage.hosted.appended

    asyncio.run(story())


def test_offsets_are_handed_over_despite_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        replies: list[Reply] = [Written(0, ()), CommitOffsetsReply(0, (PartitionResult("t", 0, 0),))]
        told: list[OffsetsWritten] = []

        async def ask(broker_id: int, message: Request) -> Reply:
            assert isinstance(message, CommitOffsets) and message.transaction == ("k", 1)
            return replies.pop(0)

        async def is_there(name: str) -> None:
            pass

        monkeypatch.setattr(marker_sender, "coordinator_of", lambda *_: 2)
        stage = Stage(ask)
        monkeypatch.setattr(stage.broker.internal_topics, "create", is_there)
        host = SimpleNamespace(ended=False, step=told.append)
        offsets = SendOffsets("k", 1, "g", (GroupOffset("t", 0, 5),))
        stage.broker.marker_sender.send_offsets(cast(Any, host), offsets)
        await until(lambda: told)
        assert told == [OffsetsWritten("k", 1, "g")]
        assert stage.context.counters["transactions.offsets.failed"] == 1

    asyncio.run(story())


@pytest.mark.parametrize("remote", [False, True])
def test_the_coordinator_learns_of_which_part_a_marker_is(remote: bool) -> None:
    async def write(broker_id: int, request: Request) -> Reply:
        return Written(0, (PartitionResult("t", 0, 0),))

    async def story() -> None:
        stage = elsewhere(write) if remote else Stage()
        host = Coordinator()
        stage.broker.marker_sender.send_markers(cast(Any, host), SendMarkers("k", 1, (marker(),), 3))
        await until(lambda: host.parts)
        assert host.parts == [(1, 3)]

    asyncio.run(story())


def test_every_task_of_a_decision_in_parts_gets_its_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a real coordinator commit four of five tasks, whose partition this broker leads."""
    monkeypatch.setattr(transaction_end, "PARTICIPANTS_AT_ONCE", 2)

    async def story() -> None:
        stage = Stage()
        host = TransactionHost(
            stage.context,
            cast(Any, Hosted(TopicPartition(TRANSACTIONS, 0))),
            decisions=stage.broker.marker_sender,
            log_start_moved=stage.broker.fetches.log_start_moved,
        )
        host.not_ready_reason = ""
        records = [transaction_record("k", Transaction(state=OPEN, run_id="r", version=2, timeout_ms=60_000))]
        for producer_id in range(5):
            stage.hosted.log.open[producer_id] = OpenTransaction(0, 3)
            participant = Participant(0, (RegisteredTopic("t", (0,), TOPIC_ID),))
            records.append(participant_record("k", producer_id, participant))
        host._transactions.load(records)
        outcomes: list[Outcome] = []
        winners = (0, 1, 2, 4)
        host.ask(lambda ticket: EndRequested(ticket, "k", "r", 2, True, winners, 2**62), outcomes.append)
        await until(lambda: outcomes)
        assert outcomes == [Ended(True)]
        headers = [pending.batches[0] for pending in stage.hosted.appended]
        written = [decode_marker(header, body) for header, body in headers]
        assert len(written) == 3
        assert sorted(producer for found in written for producer, _ in found.committed) == list(winners)
        assert [producer for found in written for producer, _ in found.aborted] == [3]
        host.end()

    asyncio.run(story())
