"""Tests of a term whose ZooKeeper connection breaks during its reads: it retries, not too fast, and the term
continues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparklog.cluster import partition_state_io
from sparklog.cluster.controller_term import ControllerTerm
from sparklog.controller.controller import Controller, ControllerSettings
from sparklog.controller.effects import DeleteTopicNodes
from sparklog.controller.events import (
    BrokersRead,
    DeletionsRead,
    Event,
    Loaded,
    StoppingRead,
    TopicDeleted,
    TopicGone,
    TopicRead,
    TopicSnapshot,
)
from sparklog.model import BrokerRegistration, LeaderAndIsr, TopicPartition, TopicRecord, VersionedState
from sparklog.zk.controller_store import NodeGone, StateOutcome, Written
from sparklog.zk.errors import ZkUnreachable
from sparklog.zk.session import PAUSE_S, SessionState
from sparklog.zk.unreadable import Unreadable


class BreakingSession:
    """A session whose connection breaks during each of the first requests, and reconnects immediately."""

    state = SessionState.CONNECTED
    generation = 1

    def __init__(self, breaks: int) -> None:
        self.breaks = breaks
        self.asked = 0

    async def connected(self) -> None: ...

    async def children(self, path: str, *, on_change: Callable[[], None] | None = None) -> tuple[str, ...]:
        await self.ask()
        return ()

    async def read_topic(self, name: str) -> None:
        await self.ask()

    async def ask(self) -> None:
        await asyncio.sleep(0)
        self.asked += 1
        if self.asked <= self.breaks:
            raise ZkUnreachable("the connection broke", sent=True)


def term_on(session: BreakingSession, events: list[Event], **store_methods: Any) -> ControllerTerm:
    store: Any = SimpleNamespace(session=session, cluster=session, unreadable=Unreadable(), **store_methods)
    store.levels = store
    core = Controller(controller_id="c", controller_epoch=1, settings=ControllerSettings())
    core.step = lambda event, now_ms: events.append(event) or []  # type: ignore[method-assign, func-returns-value]
    return ControllerTerm(store, core, cluster_id="", session_timeout_ms=1000, on_change=lambda: None)


def test_a_request_that_breaks_every_connection_is_retried_slowly() -> None:
    async def scenario() -> None:
        session, read = BreakingSession(2), asyncio.Event()

        async def looked() -> None:
            read.set()

        term = term_on(session, [])
        began = asyncio.get_running_loop().time()
        level = asyncio.ensure_future(term.facts.follow_level("/isr_change_notification", looked))
        await asyncio.wait_for(read.wait(), 30)
        assert session.asked == 3
        assert asyncio.get_running_loop().time() - began >= 2 * PAUSE_S * 0.99
        level.cancel()
        await asyncio.gather(level, return_exceptions=True)

    asyncio.run(scenario())


def test_a_connection_lost_during_a_topic_lookup_keeps_the_term() -> None:
    async def scenario() -> None:
        session, events = BreakingSession(1), list[Event]()
        term = term_on(session, events)
        term.runner.start(term.topics.check_unlisted("gone"), "check")
        [task] = term.runner.tasks
        await asyncio.wait({task}, timeout=30)
        assert events == [TopicGone("gone")]
        assert not term.runner.over.done()
        assert session.asked == 2

    asyncio.run(scenario())


def test_a_recreated_topic_is_deleted_during_its_predecessors_deletion() -> None:
    async def scenario() -> None:
        events, answered = list[Event](), asyncio.Event()

        async def delete(name: str, topic_id: str) -> bool:
            if topic_id == "id-1":
                await answered.wait()
            return True

        term = term_on(BreakingSession(0), events, delete_topic=delete)
        term.performer.perform(DeleteTopicNodes("t", "id-1"))
        term.performer.perform(DeleteTopicNodes("t", "id-1"))
        term.performer.perform(DeleteTopicNodes("t", "id-2"))
        tasks = set(term.runner.tasks)
        await asyncio.wait(tasks, timeout=1, return_when=asyncio.FIRST_COMPLETED)
        assert events == [TopicDeleted("t", "id-2")]
        await term.topics.check_unlisted("t")
        answered.set()
        await asyncio.wait(tasks, timeout=30)
        assert events[1:] == [TopicDeleted("t", "id-1")]
        assert not term.runner.over.done()

    asyncio.run(scenario())


def test_a_recreated_topic_is_read_during_its_predecessors_deletion() -> None:
    async def scenario() -> None:
        events, answered = list[Event](), asyncio.Event()
        found: dict[str, tuple[TopicRecord, int]] = {}

        async def delete(name: str, topic_id: str) -> bool:
            await answered.wait()
            return True

        async def read(name: str) -> tuple[TopicRecord, int] | None:
            return found.get(name)

        term = term_on(BreakingSession(0), events, delete_topic=delete, topic=read)
        term.performer.perform(DeleteTopicNodes("t", "id-1"))
        tasks = set(term.runner.tasks)
        await term.topics.read("t")
        found["t"] = (TopicRecord("t", "id-1", (), ()), 0)
        await term.topics.read("t")
        assert events == [], "the deletion itself must report its end"
        found["t"] = (TopicRecord("t", "id-2", (), ()), 0)
        await term.topics.read("t")
        assert events == [TopicRead(TopicSnapshot(found["t"][0], {}, 0))]
        answered.set()
        await asyncio.wait(tasks, timeout=30)

    asyncio.run(scenario())


def test_a_broker_ends_before_its_stop_request_ends() -> None:
    """The stop request and the registration are removed together. In the other order the controller would announce
    the broker again, and would send its leaders thousands of states while it exits."""

    async def scenario() -> None:
        asked = {1: 3}
        events = list[Event]()

        async def answer(found: object) -> Any:
            return found

        term = term_on(
            BreakingSession(0),
            events,
            stopping=lambda: answer(dict(asked)),
            brokers=lambda: answer(()),
            retired=lambda live: answer(frozenset()),
        )
        term.core.brokers.stopping = frozenset({1})
        await term.facts.read_stopping()
        assert events == [StoppingRead({1: 3})]
        asked.clear()
        await term.facts.read_stopping()
        assert events[1:] == [BrokersRead((), frozenset()), StoppingRead({})]

    asyncio.run(scenario())


class RecordingStore:
    """A store that records the writes. ``told`` has the callback of each write."""

    def __init__(self) -> None:
        self.session = BreakingSession(0)
        self.levels = self
        self.unreadable = Unreadable()
        self.written: list[tuple[int, str]] = []
        self.told: list[Callable[[StateOutcome | None], None]] = []
        self.error: Exception | None = None
        self.read = asyncio.Event()

    async def states(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, VersionedState | None]:
        await self.read.wait()
        return dict.fromkeys(tps)

    def write_state(
        self,
        tp: TopicPartition,
        state: LeaderAndIsr,
        *,
        topic_id: str,
        leader_incarnation: int,
        expected_version: int,
        on_outcome: Callable[[TopicPartition, StateOutcome | None], None],
    ) -> None:
        if self.error is not None:
            raise self.error
        self.written.append((tp.partition, topic_id))
        self.told.append(lambda outcome: on_outcome(tp, outcome))


async def term_with_live_brokers(store: RecordingStore, monkeypatch: pytest.MonkeyPatch) -> ControllerTerm:
    """Return a term that writes one state in each turn of the loop. Its brokers do not receive updates."""
    monkeypatch.setattr(partition_state_io, "_TURN_S", 0.0)
    core = Controller(controller_id="c", controller_epoch=1, settings=ControllerSettings())
    term = ControllerTerm(cast(Any, store), core, cluster_id="", session_timeout_ms=1000, on_change=lambda: None)
    monkeypatch.setattr(term.performer, "_send_update", lambda effect: asyncio.sleep(0))
    brokers = tuple(
        BrokerRegistration(broker_id, "host", 9000 + broker_id, "boot", "", incarnation=1) for broker_id in (1, 2, 3)
    )
    term.runner.step(Loaded(brokers, {}, (), {}, cautious=False))
    return term


def new_topic(topic_id: str, partitions: int = 4) -> TopicRead:
    return TopicRead(TopicSnapshot(TopicRecord("t", topic_id, ((1, 2, 3),) * partitions, ()), {}, 0))


def test_states_of_a_topic_are_not_written_during_its_deletion(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later write would create a node that the deletion has not listed, and the deletion would fail."""

    async def scenario() -> None:
        store = RecordingStore()
        term = await term_with_live_brokers(store, monkeypatch)
        monkeypatch.setattr(term.topics, "_delete", lambda name, topic_id: asyncio.sleep(0))
        term.runner.step(new_topic("id-1"))
        assert store.written == [(0, "id-1")], "the other states must be written in later turns"
        term.runner.step(DeletionsRead({"t": "id-1"}))
        await asyncio.sleep(0.05)
        assert store.written == [(0, "id-1")]
        term.runner.step(TopicDeleted("t", "id-1"))
        assert not term.core.state.topics and term.core._states.writing == 0
        await term.close()

    asyncio.run(scenario())


def test_a_recreated_topic_is_not_mistaken_for_its_predecessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The predecessor's writes are not sent, and their outcomes do not complete the writes of the new topic."""

    async def scenario() -> None:
        store = RecordingStore()
        term = await term_with_live_brokers(store, monkeypatch)
        term.runner.step(new_topic("id-1"))
        term.runner.step(new_topic("id-2"))
        await asyncio.sleep(0.05)
        assert store.written == [(0, "id-1"), *((number, "id-2") for number in range(4))]
        store.told[0](NodeGone())  # of the first topic's write
        await asyncio.sleep(0.01)
        for told in store.told[1:]:
            told(Written(0))
        await asyncio.sleep(0.01)
        stored = [partition.stored for partition in term.core.state.topics["t"].partitions]
        assert all(found is not None and found.state.leader == 1 for found in stored)
        assert not term.runner.over.done()
        await term.close()

    asyncio.run(scenario())


def test_a_read_for_a_deleted_topic_keeps_its_successors_write(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store = RecordingStore()
        term = await term_with_live_brokers(store, monkeypatch)
        term.runner.step(new_topic("id-1", partitions=1))
        store.told[0](None)  # the node has another version, so the term reads it
        await asyncio.sleep(0.01)
        term.runner.step(new_topic("id-2", partitions=1))
        store.read.set()
        await asyncio.sleep(0.01)
        store.told[1](Written(0))
        await asyncio.sleep(0.01)
        [partition] = term.core.state.topics["t"].partitions
        assert partition.stored is not None and partition.stored.state.leader == 1
        await term.close()

    asyncio.run(scenario())


def test_a_failed_state_write_in_a_later_turn_ends_the_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """A term that only logged the error would never write a state again, and would elect no leader."""

    async def scenario() -> None:
        store = RecordingStore()
        term = await term_with_live_brokers(store, monkeypatch)
        term.runner.step(new_topic("id-1"))
        store.error = ValueError("not encoded")
        assert "not encoded" in await asyncio.wait_for(term.runner.over, 30)
        assert term.failed
        await term.close()

    asyncio.run(scenario())
