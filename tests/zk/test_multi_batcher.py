"""Tests of small multis that are sent together to a real ZooKeeper: each has the result that it would have alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sparklog.zk.errors import ZkBadVersion, ZkMultiFailed, ZkNoNode, ZkUnreachable
from sparklog.zk.multi_batcher import MultiBatcher
from sparklog.zk.ops import Check, Op, SetData
from sparklog.zk.session import ZkSession

from .support import opened

_NODES = 200


class Counted:
    """The session's multi, and the operations that were sent with it."""

    def __init__(self, session: ZkSession) -> None:
        self._session = session
        self.sent: list[Sequence[Op]] = []

    def multi(self, ops: Sequence[Op]) -> asyncio.Future[tuple[Any, ...]]:
        self.sent.append(ops)
        return self._session.multi(ops)


async def _nodes(session: ZkSession) -> None:
    await session.ensure("/fence")
    await asyncio.gather(*(session.create(f"/n{i}") for i in range(_NODES)))


def test_many_writes_share_few_requests_and_get_their_own_versions(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            session = store.session
            await _nodes(session)
            await session.set("/n7", b"")
            counted = Counted(session)
            company = MultiBatcher(counted.multi)
            fence = Check("/fence", 0)
            results = await asyncio.gather(
                *(company.multi([fence, SetData(f"/n{i}", b"%d" % i, int(i == 7))]) for i in range(_NODES))
            )
            assert results == [(None, 1 + (i == 7)) for i in range(_NODES)]
            assert len(counted.sent) == 4
            assert [sum(op == fence for op in ops) for ops in counted.sent] == [1] * 4
            assert (await session.get("/n199")).data == b"199"

    asyncio.run(scenario())


def test_a_refused_write_fails_alone_with_its_reason(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            session = store.session
            await _nodes(session)
            company = MultiBatcher(session.multi)
            stale, missing = 3, 60
            writes = [
                company.multi(
                    [
                        Check("/fence", 0),
                        SetData("/none" if i == missing else f"/n{i}", b"new", 9 if i == stale else 0),
                    ]
                )
                for i in range(_NODES)
            ]
            results = await asyncio.gather(*writes, return_exceptions=True)
            for number, cause in ((stale, ZkBadVersion), (missing, ZkNoNode)):
                error = results[number]
                assert isinstance(error, ZkMultiFailed)
                assert error.index == 1
                assert isinstance(error.cause, cause)
            assert all(results[i] == (None, 1) for i in range(_NODES) if i not in {stale, missing})
            assert (await session.get(f"/n{stale}")).data == b""

    asyncio.run(scenario())


def test_a_failed_fence_refuses_all_writes(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            session = store.session
            await _nodes(session)
            await session.set("/fence", b"another")
            company = MultiBatcher(session.multi)
            writes = [company.multi([Check("/fence", 0), SetData(f"/n{i}", b"new", 0)]) for i in range(_NODES)]
            results = await asyncio.gather(*writes, return_exceptions=True)
            assert all(isinstance(error, ZkMultiFailed) and error.index == 0 for error in results)
            assert {(await session.get(f"/n{i}")).version for i in range(_NODES)} == {0}

    asyncio.run(scenario())


def test_writes_to_one_node_keep_their_order(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            session = store.session
            await session.ensure("/n")
            company = MultiBatcher(session.multi)
            writes = [company.multi([SetData("/n", b"%d" % i, i)]) for i in range(_NODES)]
            assert await asyncio.gather(*writes) == [(i + 1,) for i in range(_NODES)]

    asyncio.run(scenario())


def test_a_single_write_does_not_wait_for_others(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            session = store.session
            await session.ensure("/n")
            counted = Counted(session)
            assert await MultiBatcher(counted.multi).multi([SetData("/n", b"x", 0)]) == (1,)
            assert counted.sent == [[SetData("/n", b"x", 0)]]

    asyncio.run(scenario())


def test_a_broken_connection_separates_sent_from_unsent_writes() -> None:
    async def scenario() -> None:
        under_way: list[asyncio.Future[tuple[Any, ...]]] = []
        connected = True

        def send(_ops: Sequence[Op]) -> asyncio.Future[tuple[Any, ...]]:
            future: asyncio.Future[tuple[Any, ...]] = asyncio.get_running_loop().create_future()
            if connected:
                under_way.append(future)
            else:
                future.set_exception(ZkUnreachable("disconnected"))
            return future

        company = MultiBatcher(send)
        writes = [company.multi([SetData(f"/n{i}", b"", 0)]) for i in range(_NODES)]
        await asyncio.sleep(0)
        assert len(under_way) == 2
        connected = False
        for future in under_way:
            future.set_exception(ZkUnreachable("connection loss", sent=True))
        errors = await asyncio.gather(*writes, return_exceptions=True)
        assert [isinstance(error, ZkUnreachable) and error.sent for error in errors] == [True] * 100 + [False] * 100

    asyncio.run(scenario())
