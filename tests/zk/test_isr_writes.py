"""Tests of a leader's ISR write, from the broker's registry to a real ZooKeeper: the partition always gets an outcome.

A change in flight blocks every later one of its epoch. A write without an outcome would keep a dead follower in the set
permanently.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparklog.broker.context import BrokerContext
from sparklog.broker.lifecycle import zk_registration as registry_module
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.replication.partition import Partition
from sparklog.model import LeaderAndIsr, TopicPartition, TopicStates, VersionedState
from sparklog.replica.effects import WriteIsr
from sparklog.replica.events import Event, IsrRefused, IsrWriteFailed, IsrWritten
from sparklog.zk import codecs, paths
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.errors import ZkError, ZkUnreachable
from sparklog.zk.ops import Op
from sparklog.zk.session import ZkSession
from tests.broker.support import broker_context

from .support import STATE, TOPIC, TP, broker, opened, put_state, until

SHRINK = WriteIsr(1, 0, 1, (1, 2), expected_version=0, added=())


class Leading:
    """A partition that stores its events and repeats a write with an unknown outcome, as the replica core does."""

    def __init__(self, registry: ZkRegistration) -> None:
        self.tp: TopicPartition = TP
        self.topic_id = TOPIC.topic_id
        self.stopped = False
        self.events: list[Event] = []
        self._registry = registry
        self._unknown = False

    def write(self) -> None:
        self._registry.write_isr(cast(Partition, self), SHRINK)

    def step(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, IsrWriteFailed):
            self._unknown = True
        elif isinstance(event, IsrRefused) and self._unknown:
            self._unknown = False
            self.write()


def leading(store: ClusterStore, directory: Path) -> tuple[Leading, BrokerContext]:
    context = broker_context()
    return Leading(registered(context, store)), context


def registered(context: BrokerContext, store: ClusterStore) -> ZkRegistration:
    """Return the registry on an open session, without a registration."""
    registry = ZkRegistration(context, cast(Any, None), lambda error: None)
    registry._opened = registry._use(store.session, broker(1))
    return registry


def answer_once(session: ZkSession, error: ZkError, *, carry_out: bool) -> None:
    """Let the next shared multi have this result, whether it was performed or not."""
    really: Callable[[Sequence[Op]], asyncio.Future[Any]] = session.multi_batched

    def answer(ops: Sequence[Op]) -> asyncio.Future[Any]:
        session.multi_batched = really  # type: ignore[assignment, method-assign]

        async def refuse() -> None:
            if carry_out:
                await really(ops)
            raise error

        return asyncio.ensure_future(refuse())

    session.multi_batched = answer  # type: ignore[method-assign]


@pytest.mark.parametrize("carry_out", [False, True])
@pytest.mark.parametrize("error", [ZkError("ZooKeeper: UnknownError -127"), ZkUnreachable("gone", sent=True)])
def test_a_write_that_ends_in_any_error_gets_an_outcome(
    connect: str, tmp_path: Path, error: ZkError, carry_out: bool
) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            await store.create_topic(TOPIC)
            await put_state(store)
            subject, state = leading(store, tmp_path)
            answer_once(store.session, error, carry_out=carry_out)
            subject.write()
            shrunk = LeaderAndIsr(1, 0, (1, 2), 1)
            if carry_out:
                expected: list[Event] = [IsrWriteFailed(0), IsrRefused(shrunk, 1, 0)]
            else:
                expected = [IsrWriteFailed(0), IsrRefused(STATE, 0, 0), IsrWritten((1, 2), 1)]
            await until(lambda: subject.events[: len(expected)] == expected, "the write's fate")
            await state.end_tasks()
            assert not state.counters["tasks.failed"]

    asyncio.run(scenario())


@pytest.mark.parametrize("asked", [paths.state(TP), paths.topic_id(TOPIC.topic_id)])
def test_a_refused_isr_write_reads_the_node_until_it_succeeds(connect: str, tmp_path: Path, asked: str) -> None:
    """The node has changed. The read that would show it is refused for an unknown reason."""

    async def scenario() -> None:
        async with opened(connect) as store:
            await store.create_topic(TOPIC)
            await put_state(store)
            await store.session.set(paths.state(TP), (await store.session.get(paths.state(TP))).data)
            subject, state = leading(store, tmp_path)
            session = store.session
            refused = _refuse_once(session, asked)
            subject.write()
            await until(lambda: IsrRefused(STATE, 1, 0) in subject.events, "what the node holds")
            assert refused == [asked]
            await state.end_tasks()
            assert not state.counters["tasks.failed"]

    asyncio.run(scenario())


def _refuse_once(session: ZkSession, asked: str) -> list[str]:
    """Let the next ``get`` or ``exists`` of this path fail. Return the refused calls."""
    refused: list[str] = []

    def faulty(request: Callable[..., asyncio.Future[Any]]) -> Callable[..., asyncio.Future[Any]]:
        def ask(path: str, **options: Any) -> asyncio.Future[Any]:
            if path != asked or refused:
                return request(path, **options)
            refused.append(path)
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            future.set_exception(ZkError("ZooKeeper: UnknownError -127"))
            return future

        return ask

    session.get = faulty(session.get)  # type: ignore[method-assign]
    session.exists = faulty(session.exists)  # type: ignore[method-assign]
    return refused


def stored(number: int) -> VersionedState:
    return VersionedState(STATE, number + 1, 7)


def changed(registry: ZkRegistration, number: int) -> None:
    """Report a written ISR to a partition, which announces the change."""
    replica = SimpleNamespace(version=stored(number).version)
    partition = SimpleNamespace(tp=TopicPartition("t", number), topic_id="id", replica=replica)
    partition.step = lambda _: registry.isr_changed(cast(Partition, partition))
    registry._give_state(cast(Partition, partition), stored(number), IsrWritten(STATE.isr, number + 1))


def write_under_way(registry: ZkRegistration) -> asyncio.Future[tuple[int, ...]]:
    """Let the registry send one more write, whose result is the future's."""
    answer: asyncio.Future[tuple[int, ...]] = asyncio.get_running_loop().create_future()
    registry._store.states.send_isr = lambda *_, **__: answer  # type: ignore[method-assign]
    partition = SimpleNamespace(tp=TopicPartition("t", 999), topic_id="id", stopped=True)
    registry.write_isr(cast(Partition, partition), SHRINK)
    return answer


def test_isr_changes_are_gathered_while_more_are_in_flight(connect: str, tmp_path: Path) -> None:
    """The controller sends each announced change to all brokers, so the rest of a failure should be written first."""

    async def scenario() -> None:
        async with opened(connect) as store:
            state = leading(store, tmp_path)[1]
            registry = registered(state, store)
            write_under_way(registry)
            begun = time.monotonic()
            for number in range(200):
                changed(registry, number)
            await asyncio.sleep(0)
            for number in range(200, 400):
                changed(registry, number)
            path, told = paths.isr_change(1), asyncio.Event()
            assert not await store.session.exists(path, on_change=told.set)
            await told.wait()
            assert time.monotonic() - begun >= 0.1
            said = codecs.decode_isr_changes(path, (await store.session.get(path)).data).reported
            assert said == (TopicStates("t", "id", {number: stored(number) for number in range(400)}),)
            await state.end_tasks()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_isr_changes_are_not_delayed_without_a_write_in_flight(
    connect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last changes of a failure: the stopping broker waits for the controller's update about them."""
    monkeypatch.setattr(registry_module, "_NOTIFY_LATEST_MS", 600_000)
    monkeypatch.setattr(registry_module, "_NOTIFY_PARTITION_MS", 600_000)

    async def scenario() -> None:
        async with opened(connect) as store:
            state = leading(store, tmp_path)[1]
            registry = registered(state, store)
            answer = write_under_way(registry)
            changed(registry, 0)
            await asyncio.sleep(0.1)
            assert not await store.session.exists(paths.isr_change(1))
            answer.set_result((1,))
            await until(lambda: not registry._changed, "the notification of the controller")
            await state.end_tasks()

    asyncio.run(asyncio.wait_for(scenario(), 60))
