"""Tests of a ZooKeeper that is protected by the cluster's secret: other clients read, and change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.errors import ClusterError
from sparklog.protocol.proof import KeyRing, Secret
from sparklog.zk import paths
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.errors import ZkError, ZkMultiFailed, ZkNoAuth
from sparklog.zk.protection import is_fresh, protect
from sparklog.zk.session import Create, Delete, SetData, ZkSession

ONE, OTHER = Secret(b"1" * 32), Secret(b"2" * 32)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedZookeeper]:
    """Return the connect string without a chroot, as the cluster uses it."""
    server = EmbeddedZookeeper.start(tmp_path / "zookeeper")
    yield server
    server.stop()


Scenario = Callable[..., Awaitable[None]]


def play(scenario: Scenario, server: EmbeddedZookeeper, *rings: KeyRing | None) -> None:
    """Run ``scenario`` with one session for each ring."""

    async def run() -> None:
        sessions = [await ZkSession.open(server.connect, keys=keys) for keys in rings]
        try:
            await scenario(*sessions)
        finally:
            for session in sessions:
                await session.close()

    asyncio.run(run())


async def refused(request: Awaitable[object]) -> bool:
    try:
        await request
    except ZkMultiFailed as error:
        return isinstance(error.cause, ZkNoAuth)
    except ZkNoAuth:
        return True
    return False


async def is_closed(session: ZkSession, path: str) -> bool:
    """Return whether this session can neither write, delete nor add a child, nor change the node's ACL."""
    below = f"{path.rstrip('/')}/stranger"
    tried: list[Awaitable[object]] = [session.create(below), session.multi([Create(below, b"")]), session.set_acl(path)]
    if path != "/":
        tried += [session.set(path, b"stranger"), session.multi([SetData(path, b"s")]), session.multi([Delete(path)])]
    return all([await refused(one) for one in tried])


def test_a_client_without_the_secret_reads_and_changes_nothing(server: EmbeddedZookeeper) -> None:
    async def scenario(own: ZkSession, stranger: ZkSession, wrong: ZkSession) -> None:
        assert await is_fresh(own)
        await own.create("/left-open", b"by an earlier release")
        await own.create("/left-open/below", b"")
        await protect(own, KeyRing([ONE]))
        store = ClusterStore(own)
        await store.prepare()
        cluster_id = await store.cluster_id()
        await own.create(paths.CONTROLLER, b"c", ephemeral=True)
        await own.multi([Create(f"{paths.BROKER_IDS}/0", b"{}", ephemeral=True), Create(f"{paths.TOPICS}/t", b"")])
        every = ["/", "/left-open", "/left-open/below", *paths.BASE, paths.CLUSTER_ID, paths.CONTROLLER]
        every += [f"{paths.BROKER_IDS}/0", f"{paths.TOPICS}/t", paths.PROTECTED]
        for session in (stranger, wrong):
            for path in every:
                assert await is_closed(session, path), path
            assert (await session.get(paths.CLUSTER_ID)).data.decode() == cluster_id
        await own.set(f"{paths.TOPICS}/t", b"own")
        await own.multi([Delete(f"{paths.BROKER_IDS}/0")])

    play(scenario, server, KeyRing([ONE]), None, KeyRing([OTHER]))


def test_sessions_opened_before_protect_new_nodes_from_then_on(server: EmbeddedZookeeper) -> None:
    async def scenario(driver: ZkSession, broker: ZkSession, stranger: ZkSession) -> None:
        await broker.create("/before")
        await stranger.set("/before", b"open to all")
        await protect(driver, KeyRing([ONE]))
        assert await is_closed(stranger, "/before")
        number = 0

        async def closed() -> bool:
            nonlocal number
            number += 1
            try:
                await broker.create(f"/later-{number}")
            except ZkError:
                return False
            return await is_closed(stranger, f"/later-{number}")

        for _ in range(2000):  # until its watch has notified the broker's session
            if await closed():
                break
            await asyncio.sleep(0.01)
        assert await is_closed(stranger, f"/later-{number}")
        await broker.set("/before", b"by the broker")

    play(scenario, server, KeyRing([ONE]), KeyRing([ONE]), None)


def test_an_authentication_among_requests_mixes_up_no_responses(server: EmbeddedZookeeper) -> None:
    """ZooKeeper responds to it before earlier requests."""

    async def scenario(own: ZkSession) -> None:
        for number in range(100):
            await own.create(f"/node-{number}", b"%d" % number)
        asked = []
        for _ in range(5):
            asked += [own.get(f"/node-{number}") for number in range(100)]
            await own.authenticate()
        found = await asyncio.gather(*asked)
        assert [node.data for node in found] == [b"%d" % number for number in range(100)] * 5

    play(scenario, server, KeyRing([ONE]))


def test_a_session_is_still_authenticated_after_a_lost_connection(server: EmbeddedZookeeper, tmp_path: Path) -> None:
    async def scenario(own: ZkSession) -> None:
        await protect(own, KeyRing([ONE]))
        await own.create("/kept")
        await asyncio.to_thread(server.stop)
        again = await asyncio.to_thread(EmbeddedZookeeper.start, tmp_path / "zookeeper")
        try:
            await own.connected(timeout_ms=60_000)
            await own.set("/kept", b"again")
        finally:
            await asyncio.to_thread(again.stop)

    play(scenario, server, KeyRing([ONE]))


def test_a_secret_is_changed_while_both_are_valid(server: EmbeddedZookeeper) -> None:
    async def first(own: ZkSession) -> None:
        await protect(own, KeyRing([ONE]))
        await own.create("/of-one")

    async def both(own: ZkSession, old: ZkSession) -> None:
        await protect(own, KeyRing([OTHER, ONE]))
        await old.create("/of-one-alone")
        await protect(own, KeyRing([OTHER, ONE]))

    async def second(own: ZkSession, old: ZkSession) -> None:
        await old.set("/of-one", b"still")
        await protect(own, KeyRing([OTHER]))
        assert await is_closed(old, "/of-one")
        await own.set("/of-one", b"other")
        await own.set("/of-one-alone", b"other")

    play(first, server, KeyRing([ONE]))
    play(both, server, KeyRing([OTHER, ONE]), KeyRing([ONE]))
    play(second, server, KeyRing([OTHER]), KeyRing([ONE]))


@pytest.mark.extended
def test_a_driver_with_another_secret_gets_working_advice(server: EmbeddedZookeeper, tmp_path: Path) -> None:
    async def closed(own: ZkSession) -> None:
        await protect(own, KeyRing([ONE]))

    async def lost(own: ZkSession) -> None:
        with pytest.raises(ClusterError, match=r"cluster\.secret") as error:
            await protect(own, KeyRing([OTHER]))
        assert OTHER.hex() not in str(error.value)

    play(closed, server, KeyRing([ONE]))

    async def works(own: ZkSession) -> None:
        await protect(own, KeyRing([OTHER]))
        await own.create("/of-the-other")

    play(lost, server, KeyRing([OTHER]))
    for settings in ({"skipACL": "yes"}, {}):
        server.stop()
        server = EmbeddedZookeeper.start(tmp_path / "zookeeper", settings=settings)
        try:
            play(works, server, KeyRing([OTHER])) if settings else play(closed_again, server, KeyRing([OTHER]), None)
        finally:
            server.stop()


async def closed_again(own: ZkSession, stranger: ZkSession) -> None:
    await own.set("/of-the-other", b"own")
    assert await is_closed(stranger, "/of-the-other")
