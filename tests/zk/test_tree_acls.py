"""Tests of closing and opening a tree that exists: counts, interruptions, secrets, and nodes of others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from kazoo.client import KazooClient

from sparklog.cluster.zookeeper_acls import secure, unsecure
from sparklog.errors import ClusterError, ConfigError
from sparklog.model import LeaderAndIsr, TopicRecord, TopicSchema
from sparklog.zk import paths
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.errors import ZkNoAuth
from sparklog.zk.kazoo_patches import OPEN_ENTRIES, READ_BY_ALL
from sparklog.zk.security import ZooKeeperSecurity
from sparklog.zk.session import Create, ZkSession
from sparklog.zk.tree_acls import TreeCount, roots_of

from .support import opened, put_state

SECRETS = (paths.USERS, f"{paths.USERS}/anna")


@pytest.fixture
def own(tmp_path: Path) -> ZooKeeperSecurity:
    return with_digest(tmp_path / "digest", "sparklog:right")


def with_digest(path: Path, *credentials: str) -> ZooKeeperSecurity:
    path.write_text("\n".join(credentials))
    path.chmod(0o600)
    return ZooKeeperSecurity(digest_file=str(path))


def made(connect: str) -> int:
    """Create a tree of open nodes, and return the number of its nodes."""

    async def make() -> int:
        async with opened(connect) as store:
            await store.cluster_id()
            await put_state(store)
            for path in SECRETS:
                await store.session.create(path, b"salted")
            return 1 + await _below(store.session, "/")

    return asyncio.run(make())


async def _below(session: ZkSession, path: str) -> int:
    names = await session.children(path)
    return len(names) + sum([await _below(session, f"{path.rstrip('/')}/{name}") for name in names])


def ignore(_: int) -> None:
    pass


def closed(connect: str, own: ZooKeeperSecurity, *, progress: Callable[[int], None] = ignore) -> TreeCount:
    return asyncio.run(secure(connect, own, force=False, progress=progress))


def opened_again(connect: str, own: ZooKeeperSecurity, *, with_secrets: bool = False) -> TreeCount:
    return asyncio.run(unsecure(connect, own, with_secrets=with_secrets, force=False, progress=ignore))


def stranger_opens(connect: str, *names: str) -> list[bool]:
    """Return for each node whether a session without credentials may read it, and write it."""

    async def attempt() -> list[bool]:
        session = await ZkSession.open(connect)
        requests: list[Awaitable[object]] = []
        for name in names:
            requests += [session.get(name), session.set(name, b"stranger")]
        found = await asyncio.gather(*requests, return_exceptions=True)
        await session.close()
        assert all(isinstance(one, ZkNoAuth) for one in found if isinstance(one, BaseException)), found
        return [not isinstance(one, BaseException) for one in found]

    return asyncio.run(attempt())


def test_a_tree_is_closed_and_opened_again(connect: str, own: ZooKeeperSecurity) -> None:
    nodes = made(connect)
    assert stranger_opens(connect, paths.TOPICS, SECRETS[1]) == [True, True, True, True]
    shown: list[int] = []
    assert closed(connect, own, progress=shown.append) == TreeCount(nodes, nodes)
    assert shown[-1] == nodes, "the bar shows the nodes of the last walk"
    assert closed(connect, own) == TreeCount(nodes, 0)
    assert stranger_opens(connect, paths.TOPICS, "/", SECRETS[1]) == [True, False, True, False, False, False]

    assert opened_again(connect, own) == TreeCount(nodes - len(SECRETS), nodes - len(SECRETS))
    assert opened_again(connect, own) == TreeCount(nodes - len(SECRETS), 0)
    assert stranger_opens(connect, paths.TOPICS, "/", SECRETS[1]) == [True, True, True, True, False, False]
    assert opened_again(connect, own, with_secrets=True) == TreeCount(nodes, len(SECRETS))
    assert stranger_opens(connect, SECRETS[1]) == [True, True]


def test_an_interrupted_walk_is_continued(connect: str, own: ZooKeeperSecurity) -> None:
    nodes = made(connect)

    def interrupt(so_far: int) -> None:
        if so_far > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        closed(connect, own, progress=interrupt)
    count = closed(connect, own)
    assert count.nodes == nodes and 0 < count.changed < nodes - 5
    assert stranger_opens(connect, paths.TOPICS) == [True, False]


def test_nodes_that_appear_during_the_walk_are_closed(connect: str, own: ZooKeeperSecurity) -> None:
    nodes = made(connect)
    client = KazooClient(connect)
    client.start()
    client.add_auth("digest", "sparklog:right")
    late = iter(["/late"])

    def create_one(_: int) -> None:
        if path := next(late, None):
            client.create(path)  # open, as a session without ACLs creates it

    try:
        assert closed(connect, own, progress=create_one).nodes == nodes + 1
    finally:
        client.stop()
        client.close()
    assert stranger_opens(connect, "/late") == [True, False]


def test_a_session_that_keeps_creating_open_nodes_is_reported(connect: str, own: ZooKeeperSecurity) -> None:
    made(connect)
    client = KazooClient(connect)
    client.start()
    client.add_auth("digest", "sparklog:right")
    try:
        with pytest.raises(ClusterError, match=r"created open.*without zookeeper\.set\.acl"):
            closed(connect, own, progress=lambda _: client.create("/late-", sequence=True) and None)
    finally:
        client.stop()
        client.close()


def test_other_credentials_cannot_close_or_open_the_tree(connect: str, own: ZooKeeperSecurity, tmp_path: Path) -> None:
    made(connect)
    closed(connect, own)
    other = with_digest(tmp_path / "other", "sparklog:wrong")
    for migrate in (closed, opened_again):
        with pytest.raises(ClusterError, match="other credentials"):
            migrate(connect, other)
    assert stranger_opens(connect, paths.TOPICS) == [True, False]


def test_credentials_are_changed_in_two_steps(connect: str, own: ZooKeeperSecurity, tmp_path: Path) -> None:
    nodes = made(connect)
    closed(connect, own)
    both = with_digest(tmp_path / "both", "sparklog:new", "sparklog:right")
    new = with_digest(tmp_path / "new", "sparklog:new")
    assert closed(connect, both).changed == nodes
    assert closed(connect, new).changed == nodes
    with pytest.raises(ClusterError, match="other credentials"):
        closed(connect, own)


def test_processes_without_the_setting_are_named(connect: str, own: ZooKeeperSecurity, tmp_path: Path) -> None:
    made(connect)

    async def scenario() -> None:
        async def make(security: ZooKeeperSecurity | None, *created: str) -> ZkSession:
            session = await ZkSession.open(connect, security=security)
            await session.multi([Create(path, b"{}", ephemeral=True) for path in created])
            return session

        careful = ZooKeeperSecurity(digest_file=own.digest_file, set_acl=True)
        sessions = [await make(None, f"{paths.BROKER_IDS}/10", f"{paths.BROKER_IDS}/9", paths.CONTROLLER)]
        sessions += [await make(careful, f"{paths.BROKER_IDS}/2", paths.DRIVER)]
        try:
            with pytest.raises(ClusterError, match=r"^broker 9, broker 10, the controller: zookeeper\.set\.acl is not"):
                await secure(connect, own, force=False, progress=ignore)
            assert await sessions[0].acl(paths.TOPICS) == OPEN_ENTRIES, "nothing was changed"
            with pytest.raises(ClusterError, match=r"^broker 2, the driver: zookeeper\.set\.acl is true"):
                await unsecure(connect, own, with_secrets=False, force=False, progress=ignore)
            await secure(connect, own, force=True, progress=ignore)
            assert await sessions[0].acl(paths.TOPICS) > READ_BY_ALL
        finally:
            for session in sessions:
                await session.close()

    asyncio.run(scenario())


def test_a_zookeeper_without_a_chroot_keeps_the_nodes_of_others(connect: str, own: ZooKeeperSecurity) -> None:
    made(connect)
    whole = connect.partition("/")[0]

    async def scenario() -> None:
        session = await ZkSession.open(whole)
        store = ClusterStore(session)
        try:
            await store.prepare()
            await store.cluster_id()
            assert "/tests" not in await roots_of(session)
            await secure(whole, own, force=False, progress=ignore)
            assert await session.acl("/") == await session.acl("/tests") == OPEN_ENTRIES
            assert await session.acl(paths.TOPICS) != OPEN_ENTRIES
        finally:
            await unsecure(whole, own, with_secrets=True, force=False, progress=ignore)
            await session.close()

    asyncio.run(scenario())


def test_a_place_without_a_cluster_is_left_alone(connect: str, own: ZooKeeperSecurity) -> None:
    with pytest.raises(ClusterError, match="no sparklog cluster"):
        closed(f"{connect}/mistyped", own)
    with pytest.raises(ConfigError, match="no credentials"):
        closed(connect, ZooKeeperSecurity())


def test_the_top_nodes_include_those_of_all_paths() -> None:
    named = {value for name, value in vars(paths).items() if name.isupper() and isinstance(value, str)}
    assert {"/" + path.split("/")[1] for path in named} <= paths.TOP


def test_topics_can_be_created_and_deleted_in_a_closed_tree(connect: str, own: ZooKeeperSecurity) -> None:
    made(connect)
    closed(connect, own)

    async def scenario() -> None:
        session = await ZkSession.open(connect, security=ZooKeeperSecurity(digest_file=own.digest_file, set_acl=True))
        try:
            store = ClusterStore(session)
            record = TopicRecord("new", "id-new", ((1,),), (TopicSchema(0, b"schema"),), config={})
            await store.create_topic(record)
            await store.restore_topic(
                TopicRecord("old", "id-old", ((1,),), (TopicSchema(0, b"schema"),), config={}),
                {0: LeaderAndIsr(1, 0, (1,), 1)},
            )
            assert await session.acl(paths.topic("new")) > READ_BY_ALL
        finally:
            await session.close()

    asyncio.run(scenario())
    assert closed(connect, own).changed == 0
