"""A term whose ZooKeeper connection breaks under what it reads: it asks again, in time, and does not end of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from sparklog.cluster.controller_term import ControllerTerm
from sparklog.controller.controller import Controller, ControllerSettings
from sparklog.controller.effects import DeleteTopic
from sparklog.controller.events import (
    BrokersRead,
    Event,
    StoppingRead,
    TopicDeleted,
    TopicGone,
    TopicRead,
    TopicSnapshot,
)
from sparklog.model import TopicRecord
from sparklog.zk.errors import ZkUnreachable
from sparklog.zk.session import PAUSE_S, SessionState
from sparklog.zk.unreadable import Unreadable


class BreakingSession:
    """A session whose connection breaks under each request, up to a number of times, and is back at once."""

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


def term_on(session: BreakingSession, events: list[Event]) -> ControllerTerm:
    store: Any = SimpleNamespace(session=session, cluster=session, unreadable=Unreadable())
    core = Controller(controller_id="c", controller_epoch=1, settings=ControllerSettings())
    core.step = lambda event, now_ms: events.append(event) or []  # type: ignore[method-assign, func-returns-value]
    return ControllerTerm(store, core, cluster_id="", session_timeout_ms=1000, on_change=lambda: None)


def test_a_request_that_breaks_every_connection_is_not_retried_at_once() -> None:
    async def scenario() -> None:
        session, read = BreakingSession(2), asyncio.Event()

        async def looked() -> None:
            read.set()

        term = term_on(session, [])
        began = asyncio.get_running_loop().time()
        level = asyncio.ensure_future(term._level("/isr_change_notification", looked))
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
        term._start(term._look_for_topic("gone"), "look")
        [task] = term._tasks
        await asyncio.wait({task}, timeout=30)
        assert events == [TopicGone("gone")]
        assert not term._over.done()
        assert session.asked == 2

    asyncio.run(scenario())


def test_a_recreated_topic_is_deleted_during_its_predecessors_deletion() -> None:
    async def scenario() -> None:
        events, answered = list[Event](), asyncio.Event()
        term = term_on(BreakingSession(0), events)

        async def delete(name: str, topic_id: str) -> bool:
            if topic_id == "id-1":
                await answered.wait()
            return True

        term._store = cast(Any, SimpleNamespace(delete_topic=delete, unreadable=Unreadable()))
        term._perform(DeleteTopic("t", "id-1"))
        term._perform(DeleteTopic("t", "id-1"))
        term._perform(DeleteTopic("t", "id-2"))
        tasks = set(term._tasks)
        await asyncio.wait(tasks, timeout=1, return_when=asyncio.FIRST_COMPLETED)
        assert events == [TopicDeleted("t", "id-2")]
        await term._look_for_topic("t")
        answered.set()
        await asyncio.wait(tasks, timeout=30)
        assert events[1:] == [TopicDeleted("t", "id-1")]
        assert not term._over.done()

    asyncio.run(scenario())


def test_a_recreated_topic_is_read_during_its_predecessors_deletion() -> None:
    async def scenario() -> None:
        events, answered = list[Event](), asyncio.Event()
        term = term_on(BreakingSession(0), events)
        found: dict[str, tuple[TopicRecord, int]] = {}

        async def delete(name: str, topic_id: str) -> bool:
            await answered.wait()
            return True

        async def read(name: str) -> tuple[TopicRecord, int] | None:
            return found.get(name)

        term._store = cast(Any, SimpleNamespace(delete_topic=delete, read_topic_again=read, unreadable=Unreadable()))
        term._perform(DeleteTopic("t", "id-1"))
        tasks = set(term._tasks)
        await term._read_topic("t")
        found["t"] = (TopicRecord("t", "id-1", (), ()), 0)
        await term._read_topic("t")
        assert events == [], "the deletion tells of its end"
        found["t"] = (TopicRecord("t", "id-2", (), ()), 0)
        await term._read_topic("t")
        assert events == [TopicRead(TopicSnapshot(found["t"][0], {}, 0))]
        answered.set()
        await asyncio.wait(tasks, timeout=30)

    asyncio.run(scenario())


def test_an_ended_broker_is_gone_before_its_stop_request_is() -> None:
    """Its request and its registration go together. In the other order it would be shown to all again, and its
    leaders would be told thousands of states while it ends."""

    async def scenario() -> None:
        asked = {1: 3}
        events = list[Event]()
        term = term_on(BreakingSession(0), events)
        term.core.brokers.stopping = frozenset({1})

        async def answer(found: object) -> Any:
            return found

        term._store = cast(
            Any,
            SimpleNamespace(
                read_stopping=lambda: answer(dict(asked)),
                read_brokers=lambda: answer(()),
                read_retired=lambda live: answer(frozenset()),
                unreadable=Unreadable(),
            ),
        )
        await term._read_stopping()
        assert events == [StoppingRead({1: 3})]
        asked.clear()
        await term._read_stopping()
        assert events[1:] == [BrokersRead((), frozenset()), StoppingRead({})]

    asyncio.run(scenario())
