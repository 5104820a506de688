"""Tests of watches of topics and requests on a real ZooKeeper: deleted topics leave no watch, and recreated ones are
found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.cluster.topic_io import TopicWatcher
from sparklog.zk import paths
from sparklog.zk.session import Node, ZkSession
from tests.zk.support import opened, until

pytestmark = pytest.mark.integration


def watched(session: ZkSession) -> set[str]:
    """Return the paths of watched nodes, according to ZooKeeper's responses."""
    return {path for path, watches in session._client._data_watchers.items() if watches}


def test_a_deleted_topic_leaves_no_watch(connect: str) -> None:
    found: list[tuple[str, bytes]] = []
    gone: list[str] = []

    async def scenario() -> None:
        async with opened(connect) as store, opened(connect) as other:
            root = store.session._root
            watches = TopicWatcher(
                store.session, found=lambda name, node: found.append((name, node.data)), gone=gone.append
            )
            await other.session.create(paths.topic("kept"), b"1")
            await until(
                lambda: bool(found), "the kept one is found"
            )  # else it may be found after the first of the others
            for number in range(5):
                name = f"t{number}"
                await other.session.create(paths.topic(name), b"1")
                await until(lambda name=name: found[-1:] == [(name, b"1")], "it is found")  # type: ignore[misc]
                await other.session.set(paths.topic(name), b"2")
                await until(lambda name=name: found[-1:] == [(name, b"2")], "it has changed")  # type: ignore[misc]
                await other.session.delete(paths.topic(name))
                await until(lambda name=name: gone[-1:] == [name], "it is gone")  # type: ignore[misc]
            await store.session.sync(paths.TOPICS)  # all earlier requests have a response now
            assert watched(store.session) == {root + paths.topic("kept")}
            watches.close()

    asyncio.run(scenario())
    assert gone == [f"t{number}" for number in range(5)]


def test_a_topic_recreated_before_the_next_listing_is_found(connect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list contains its name during the whole test."""
    found: list[bytes] = []
    gone: list[str] = []

    async def scenario() -> None:
        async with opened(connect) as store, opened(connect) as other:
            session, path = store.session, paths.topic("t")
            await other.session.create(path, b"1")
            watches = TopicWatcher(session, found=lambda _, node: found.append(node.data), gone=gone.append)
            await until(lambda: found == [b"1"], "it is found")
            list_names, waiting = session.children, asyncio.Event()

            def late(path: str, *, on_change: Callable[[], None] | None = None) -> asyncio.Future[tuple[str, ...]]:
                async def names() -> tuple[str, ...]:
                    waiting.set()
                    await until(lambda: watches._missing == {"t"}, "its node is found gone")
                    await other.session.create(paths.topic("t"), b"2")
                    await session.sync(paths.TOPICS)
                    return await list_names(path, on_change=on_change)

                monkeypatch.setattr(session, "children", list_names)
                return asyncio.ensure_future(names())

            monkeypatch.setattr(session, "children", late)
            await other.session.delete(path)
            await until(lambda: found == [b"1", b"2"], "it is found again")
            assert waiting.is_set() and gone == []
            await other.session.set(path, b"3")
            await until(lambda: found == [b"1", b"2", b"3"], "it is watched")
            watches.close()

    asyncio.run(scenario())


def test_a_watch_reports_the_deletion_of_its_node_last(connect: str) -> None:
    seen: list[Node | None] = []

    async def scenario() -> None:
        async with opened(connect) as store:
            session = store.session
            session.watch_data("/w", seen.append, until_gone=True)
            await until(lambda: seen == [None], "it never was there")
            await session.create("/w", b"1")
            session.watch_data("/w", seen.append, until_gone=True)
            await until(lambda: len(seen) == 2, "it is there")
            await session.delete("/w")
            await until(lambda: len(seen) == 3, "it is gone")
            assert watched(session) == set() and not session._tasks

    asyncio.run(scenario())
    assert seen == [None, Node(b"1", 0, 0), None]


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_waiting_for_the_end_of_a_request_leaves_no_watch(connect: str, is_waited_for: bool) -> None:
    """Names of requests never return, like those of deleted topics."""

    async def scenario() -> None:
        async with opened(connect) as store:
            session, path = store.session, paths.election("e1")
            if is_waited_for:
                await session.create(path, b"")
            registry: Any = SimpleNamespace(_session=session)
            waiting = asyncio.create_task(ZkRegistration.request_done(registry, path))
            if is_waited_for:
                await until(lambda: session._root + path in watched(session), "it is watched")
                await session.delete(path)
            await waiting
            await session.sync(path)
            assert watched(session) == set()

    asyncio.run(scenario())
