"""Tests of users in ZooKeeper: their nodes, the index, and a broker's cache that follows them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from sparklog.broker.security.users import Users
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import USER, Principal
from sparklog.protocol.sasl import SCRAM_SHA_256, SCRAM_SHA_512
from sparklog.protocol.scram import ScramCredential
from sparklog.zk import paths
from sparklog.zk.codecs import ZkFormatError
from sparklog.zk.session import ZkSession
from sparklog.zk.unreadable import Unreadable
from sparklog.zk.user_store import UserStore, decode_credential, decode_index, encode_credential, user_path

from .support import expire, until

KEY = b"k" * 32


def credential(mark: int, mechanism: str = SCRAM_SHA_256) -> ScramCredential:
    size = 32 if mechanism == SCRAM_SHA_256 else 64
    return ScramCredential(b"salt of user", 4096 + mark, bytes([mark]) * size, bytes([mark + 1]) * size)


Scenario = Callable[[ZkSession, UserStore], Awaitable[None]]


def play(scenario: Scenario, connect: str) -> None:
    async def run() -> None:
        session = await ZkSession.open(connect, session_timeout_ms=2000)
        try:
            await scenario(session, UserStore(session, Unreadable()))
        finally:
            await session.close()

    asyncio.run(run())


@pytest.mark.integration
def test_a_node_has_kafkas_form(connect: str) -> None:
    async def scenario(session: ZkSession, store: UserStore) -> None:
        await store.alter("anna", {SCRAM_SHA_256: credential(1)}, new_key=KEY)
        data = json.loads((await session.get("/config/users/anna")).data)
        assert data["version"] == 1 and list(data["config"]) == [SCRAM_SHA_256]
        parts = dict(part.split("=", 1) for part in data["config"][SCRAM_SHA_256].split(","))
        assert list(parts) == ["salt", "stored_key", "server_key", "iterations"] and parts["iterations"] == "4097"

    play(scenario, connect)


def test_a_node_that_kafka_wrote_is_read() -> None:
    text = (
        "salt=MWx2NHBmbnc0ZndxN25vdGN4bTB5eTE3NHI=,stored_key=mGCJy5k3LrE2gs6Dp4ALRhgy37l1WYPUIdoOncCF+N4=,"
        "server_key=3jqWsLbjNgTJyzhTBlKBZQFNXVHRpcmpjg2sSBHpHRo=,iterations=8192"
    )
    found = decode_credential(SCRAM_SHA_256, text)
    assert found.iterations == 8192
    assert encode_credential(found) == text


@pytest.mark.parametrize("text", ["", "sugar", "salt=x,stored_key=x,server_key=x,iterations=x", "iterations=10"])
def test_an_invalid_credential_is_not_quoted(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        decode_credential(SCRAM_SHA_256, text)
    assert not text or text not in str(error.value)


@pytest.mark.integration
def test_credentials_are_set_replaced_and_deleted(connect: str) -> None:
    async def scenario(session: ZkSession, store: UserStore) -> None:
        assert await store.all_users() == {}
        one, other = credential(1), credential(2, SCRAM_SHA_512)
        versions = [
            await store.alter("anna", {SCRAM_SHA_256: one}, new_key=KEY),
            await store.alter("anna", {SCRAM_SHA_512: other}, new_key=b"another"),
        ]
        assert await store.all_users() == {"anna": {SCRAM_SHA_256: one, SCRAM_SHA_512: other}}
        versions.append(
            await store.alter("anna", {SCRAM_SHA_256: None, SCRAM_SHA_512: credential(3, SCRAM_SHA_512)}, new_key=KEY)
        )
        assert await store.users(["anna", "otto"]) == {"anna": {SCRAM_SHA_512: credential(3, SCRAM_SHA_512)}}
        versions.append(await store.alter("anna", {SCRAM_SHA_512: None}, new_key=KEY))
        assert await store.all_users() == {}
        assert not await session.exists(user_path("anna"))
        assert versions == [1, 2, 3, 4]
        index = decode_index(await session.get(paths.USERS))
        assert (index.changed, index.unknown_users_key) == (("anna",) * 4, KEY)

    play(scenario, connect)


@pytest.mark.integration
def test_deleting_a_missing_credential_changes_nothing(connect: str) -> None:
    async def scenario(session: ZkSession, store: UserStore) -> None:
        await store.alter("anna", {SCRAM_SHA_256: credential(1)}, new_key=KEY)
        for name in ("anna", "otto"):
            with pytest.raises(BrokerError) as error:
                await store.alter(name, {SCRAM_SHA_512: None}, new_key=KEY)
            assert error.value.code is ErrorCode.RESOURCE_NOT_FOUND
        assert (await session.get(paths.USERS)).version == 1

    play(scenario, connect)


@pytest.mark.integration
def test_other_settings_of_a_user_are_kept(connect: str) -> None:
    async def scenario(session: ZkSession, store: UserStore) -> None:
        await store.alter("anna", {SCRAM_SHA_256: credential(1)}, new_key=KEY)
        node = json.loads((await session.get(user_path("anna"))).data)
        node["config"]["producer_byte_rate"] = "1024"
        await session.set(user_path("anna"), json.dumps(node).encode())
        await store.alter("anna", {SCRAM_SHA_256: None}, new_key=KEY)
        assert json.loads((await session.get(user_path("anna"))).data)["config"] == {"producer_byte_rate": "1024"}
        assert await store.all_users() == {}

    play(scenario, connect)


@pytest.mark.integration
@pytest.mark.parametrize("name", [".", "..", "a/b", "CN=anna, O=x", "ä€", "%2E", "a b", "\x01", "x" * 255])
def test_any_name_has_its_own_node(connect: str, name: str) -> None:
    async def scenario(session: ZkSession, store: UserStore) -> None:
        await store.alter(name, {SCRAM_SHA_256: credential(1)}, new_key=KEY)
        await store.alter("anna", {SCRAM_SHA_256: credential(2)}, new_key=KEY)
        assert await store.all_users() == {name: {SCRAM_SHA_256: credential(1)}, "anna": {SCRAM_SHA_256: credential(2)}}

    play(scenario, connect)


@pytest.mark.integration
def test_concurrent_writers_lose_no_change(connect: str) -> None:
    async def scenario(session: ZkSession, store: UserStore) -> None:
        mechanisms = (
            (SCRAM_SHA_256, "anna"),
            (SCRAM_SHA_512, "anna"),
            (SCRAM_SHA_256, "otto"),
            (SCRAM_SHA_512, "otto"),
        )
        wanted = [store.alter(name, {one: credential(1, one)}, new_key=KEY) for one, name in mechanisms]
        versions = await asyncio.gather(*wanted)
        assert sorted(versions) == [1, 2, 3, 4]
        both = {one: credential(1, one) for one in (SCRAM_SHA_256, SCRAM_SHA_512)}
        assert await store.all_users() == {"anna": both, "otto": both}

    play(scenario, connect)


@pytest.mark.integration
def test_an_unreadable_user_is_skipped_without_its_content(connect: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(session: ZkSession, store: UserStore) -> None:
        await store.alter("anna", {SCRAM_SHA_256: credential(1)}, new_key=KEY)
        for number, data in enumerate(
            (b"canary", b'{"version":1,"config":{"SCRAM-SHA-256":"canary"}}', b'{"version":9}')
        ):
            await session.create(user_path(f"damaged{number}"), data)
        assert list(await store.all_users()) == ["anna"]
        with pytest.raises(ZkFormatError) as error:
            await store.alter("damaged0", {SCRAM_SHA_256: credential(1)}, new_key=KEY)
        assert "canary" not in str(error.value)

    play(scenario, connect)
    assert len(caplog.records) >= 3 and "canary" not in caplog.text


# --- the cache of a broker --------------------------------------------------------------------------------------------


def follow(scenario: Callable[[ZkSession, UserStore, Users, list[Principal]], Awaitable[None]], connect: str) -> None:
    """Run ``scenario`` with a writer's store, and a cache on a session of its own with the principals it reports."""

    async def run() -> None:
        writer = await ZkSession.open(connect, session_timeout_ms=2000)
        reader = await ZkSession.open(connect, session_timeout_ms=2000)
        revoked: list[Principal] = []
        users = Users()
        users.revoked_listeners.append(revoked.append)
        try:
            users.open(reader)
            await users.follower.loaded()
            await scenario(reader, UserStore(writer, Unreadable()), users, revoked)
        finally:
            users.close()
            await writer.close()
            await reader.close()

    asyncio.run(run())


ANNA = Principal(USER, "anna")


@pytest.mark.integration
def test_a_broker_learns_of_every_change(connect: str) -> None:
    async def scenario(reader: ZkSession, store: UserStore, users: Users, revoked: list[Principal]) -> None:
        assert users.credential(SCRAM_SHA_256, "anna") is None
        version = await store.alter("anna", {SCRAM_SHA_256: credential(1)}, new_key=KEY)
        await users.follower.applied(version, timeout_s=60)
        assert users.credential(SCRAM_SHA_256, "anna") == credential(1)
        assert users.credential(SCRAM_SHA_512, "anna") is None
        assert users.unknown_users_key == KEY
        await users.follower.applied(
            await store.alter("anna", {SCRAM_SHA_512: credential(1, SCRAM_SHA_512)}, new_key=KEY), timeout_s=60
        )
        assert not revoked, "a further credential ends no connection"
        await users.follower.applied(
            await store.alter("anna", {SCRAM_SHA_256: credential(2)}, new_key=KEY), timeout_s=60
        )
        assert revoked == [ANNA] and users.credential(SCRAM_SHA_256, "anna") == credential(2)
        await users.follower.applied(
            await store.alter("anna", {SCRAM_SHA_256: None, SCRAM_SHA_512: None}, new_key=KEY), timeout_s=60
        )
        assert revoked == [ANNA, ANNA] and users.credential(SCRAM_SHA_256, "anna") is None

    follow(scenario, connect)


@pytest.mark.integration
def test_many_changes_at_once_are_all_applied(connect: str) -> None:
    async def scenario(reader: ZkSession, store: UserStore, users: Users, revoked: list[Principal]) -> None:
        names = [f"user{number}" for number in range(150)]
        version = 0
        for name in names:
            version = await store.alter(name, {SCRAM_SHA_256: credential(1)}, new_key=KEY)
        await users.follower.applied(version, timeout_s=60)
        assert all(users.credential(SCRAM_SHA_256, name) == credential(1) for name in names)

    follow(scenario, connect)


@pytest.mark.integration
def test_changes_during_an_expired_session_are_applied(connect: str) -> None:
    """More changes than the index names, so all users have to be read again."""

    async def scenario(reader: ZkSession, store: UserStore, users: Users, revoked: list[Principal]) -> None:
        await users.follower.applied(
            await store.alter("anna", {SCRAM_SHA_256: credential(1)}, new_key=KEY), timeout_s=60
        )
        await store.alter("otto", {SCRAM_SHA_256: credential(1)}, new_key=KEY)
        expiring = asyncio.get_running_loop().create_task(expire(reader))
        await store.alter("anna", {SCRAM_SHA_256: None}, new_key=KEY)
        for number in range(120):
            await store.alter("otto", {SCRAM_SHA_256: credential(number)}, new_key=KEY)
        await expiring
        await until(lambda: users.credential(SCRAM_SHA_256, "otto") == credential(119), "the last change")
        assert users.credential(SCRAM_SHA_256, "anna") is None
        assert ANNA in revoked

    follow(scenario, connect)
