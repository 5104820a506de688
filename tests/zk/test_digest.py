"""Tests of sessions with a digest: sessions without it change nothing and read no secrets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError
from kazoo.security import OPEN_ACL_UNSAFE

from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.protocol.proof import KeyRing, Secret
from sparklog.zk import paths
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.errors import ZkMultiFailed, ZkNoAuth
from sparklog.zk.kazoo_patches import OPEN_ENTRIES
from sparklog.zk.protection import protect
from sparklog.zk.security import ZooKeeperSecurity
from sparklog.zk.session import Create, Delete, SetData, ZkSession

from .support import expire

USER = f"{paths.USERS}/anna"


@pytest.fixture
def security(tmp_path: Path) -> Callable[..., ZooKeeperSecurity]:
    """Return a function that makes the security of a session with these credentials."""

    def make(*credentials: str, set_acl: bool = True) -> ZooKeeperSecurity:
        path = tmp_path / "-".join(credentials).replace(":", "_")
        path.write_text("\n".join(credentials))
        path.chmod(0o600)
        return ZooKeeperSecurity(digest_file=str(path), set_acl=set_acl)

    return make


Make = Callable[..., ZooKeeperSecurity]


def play(scenario: Callable[..., Awaitable[None]], connect: str, *securities: ZooKeeperSecurity | None) -> None:
    """Run ``scenario`` with one session for each security."""

    async def run() -> None:
        sessions = [await ZkSession.open(connect, security=security) for security in securities]
        try:
            await scenario(*sessions)
        finally:
            for session in sessions:
                await session.close()

    asyncio.run(run())


async def _set_up(session: ZkSession) -> None:
    await ClusterStore(session).prepare()
    await session.ensure(paths.USERS)
    await session.create(USER, b"salted")
    await session.multi([Create(f"{paths.USERS}/otto", b"salted"), Create("/config/clients", b"")])


async def _is_refused(request: Awaitable[object]) -> bool:
    try:
        await request
    except (ZkNoAuth, ZkMultiFailed) as error:
        return isinstance(getattr(error, "cause", error), ZkNoAuth)
    return False


async def _may_change(session: ZkSession, path: str) -> bool:
    tried: list[Awaitable[object]] = [
        session.set(path, b"stranger"),
        session.set_acl(path),
        session.set_entries(path, OPEN_ENTRIES),
    ]
    tried += [session.create(f"{path}/stranger"), session.multi([SetData(path, b"")]), session.multi([Delete(path)])]
    return not all([await _is_refused(request) for request in tried])


def test_strangers_change_nothing_and_read_no_secrets(connect: str, security: Make) -> None:
    async def scenario(own: ZkSession, same: ZkSession, none: ZkSession, wrong: ZkSession) -> None:
        await _set_up(own)
        for stranger in (none, wrong):
            for path in (*paths.BASE, "/config/clients", paths.USERS, USER, f"{paths.USERS}/otto"):
                assert not await _may_change(stranger, path), path
            for path in (paths.USERS, USER, f"{paths.USERS}/otto"):
                assert await _is_refused(stranger.get(path)) and await _is_refused(stranger.children(path)), path
            assert await stranger.children("/config") == ("clients", "users")
        assert (await same.get(USER)).data == b"salted"
        await same.set(USER, b"salted again")
        await same.multi([Delete(f"{paths.USERS}/otto"), Delete(USER), Delete(paths.USERS)])

    good = security("sparklog:right")
    play(scenario, connect, good, good, None, security("sparklog:wrong"))


def test_a_kazoo_client_without_the_digest_is_a_stranger(connect: str, security: Make) -> None:
    play(_set_up, connect, security("sparklog:right"))
    client = KazooClient(connect)
    client.start()
    try:
        requests: tuple[Callable[[], object], ...] = (
            lambda: client.get(USER),
            lambda: client.get_children(paths.USERS),
            lambda: client.set(USER, b""),
            lambda: client.delete(USER),
            lambda: client.create(f"{paths.TOPICS}/mine"),
            lambda: client.set_acls(paths.TOPICS, OPEN_ACL_UNSAFE),
        )
        for request in requests:
            with pytest.raises(NoAuthError):
                request()
        client.add_auth("digest", "sparklog:right")
        assert client.get(USER)[0] == b"salted"
    finally:
        client.stop()
        client.close()


def test_secrets_are_unreadable_even_without_other_acls(connect: str, security: Make) -> None:
    async def scenario(own: ZkSession, stranger: ZkSession) -> None:
        assert own.keeps_secrets and not own.closes_nodes and not stranger.keeps_secrets
        await _set_up(own)
        assert await _is_refused(stranger.get(USER))
        await stranger.set("/config/clients", b"open")

    play(scenario, connect, security("sparklog:right", set_acl=False), None)


def test_a_new_session_after_an_expiry_proves_the_digest(connect: str, security: Make) -> None:
    async def scenario(own: ZkSession) -> None:
        await _set_up(own)
        await expire(own)
        await own.connected(timeout_ms=20_000)
        assert (await own.get(USER)).data == b"salted"
        await own.create(f"{paths.USERS}/new", b"")

    play(scenario, connect, security("sparklog:right"))


def test_a_password_is_changed_while_both_are_valid(connect: str, security: Make) -> None:
    async def both(new: ZkSession, old: ZkSession) -> None:
        await new.create("/of-both", b"")
        await old.set("/of-both", b"old")
        await old.create("/of-old", b"")
        await new.set("/of-old", b"new")

    play(both, connect, security("sparklog:new", "sparklog:old"), security("sparklog:old"))


def test_the_protected_zookeeper_keeps_secrets_from_strangers(tmp_path: Path) -> None:
    keys = KeyRing([Secret(b"1" * 32)])

    async def scenario(connect: str) -> None:
        own = await ZkSession.open(connect, keys=keys)
        stranger = await ZkSession.open(connect)
        try:
            await own.create("/config")
            await own.ensure(paths.USERS)
            await own.create(USER, b"salted")
            assert (await stranger.get(USER)).data == b"salted"
            await protect(own, keys)
            await own.create(f"{paths.USERS}/otto", b"salted")
            for path in (USER, f"{paths.USERS}/otto", paths.USERS):
                assert await _is_refused(stranger.get(path)), path
                assert not await _may_change(stranger, path), path
            assert (await own.get(USER)).data == b"salted"
            assert await stranger.children("/config") == ("users",)
        finally:
            await own.close()
            await stranger.close()

    server = EmbeddedZookeeper.start(tmp_path / "zookeeper")
    try:
        asyncio.run(scenario(server.connect))
    finally:
        server.stop()
