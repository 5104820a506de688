"""Tests of delegation tokens in ZooKeeper."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import USER, Principal
from sparklog.protocol.sasl import SCRAM_SHA_256
from sparklog.protocol.scram import ScramCredential
from sparklog.security.delegation_tokens import DelegationToken
from sparklog.zk import paths
from sparklog.zk.session import ZkSession
from sparklog.zk.token_store import StoredToken, TokenStore, decode_index
from sparklog.zk.unreadable import Unreadable

pytestmark = pytest.mark.integration

CREDENTIAL = ScramCredential(b"salt of token", 4096, b"s" * 32, b"k" * 32)


def stored(token_id: str = "t1") -> StoredToken:
    owner, renewer = Principal(USER, "anna"), Principal(USER, "otto")
    return StoredToken(DelegationToken(token_id, owner, (renewer,), 1, 2, 3), {SCRAM_SHA_256: CREDENTIAL})


def play(scenario: Callable[[ZkSession, TokenStore], Awaitable[None]], connect: str) -> None:
    async def run() -> None:
        session = await ZkSession.open(connect, session_timeout_ms=2000)
        try:
            await scenario(session, TokenStore(session, Unreadable()))
        finally:
            await session.close()

    asyncio.run(run())


def later(token: DelegationToken) -> DelegationToken:
    return msgspec.structs.replace(token, expiry_ms=token.expiry_ms + 10)


def test_tokens_are_created_changed_and_deleted(connect: str) -> None:
    async def scenario(session: ZkSession, store: TokenStore) -> None:
        assert await store.all_tokens() == {}
        versions = [await store.create(stored("t1")), await store.create(stored("t2"))]
        assert await store.all_tokens() == {"t1": stored("t1"), "t2": stored("t2")}
        versions.append(await store.change("t1", later))
        assert (await store.tokens(["t1", "none", "../users"]))["t1"].token.expiry_ms == 12
        versions.append(await store.change("t2", lambda token: None))
        assert list(await store.all_tokens()) == ["t1"]
        assert versions == [1, 2, 3, 4]
        assert decode_index(await session.get(paths.TOKENS)).changed == ("t1", "t2", "t1", "t2")

    play(scenario, connect)


@pytest.mark.parametrize("token_id", ["none", "../users", "", "x" * 1000, "a/b"])
def test_a_missing_token_is_not_changed(connect: str, token_id: str) -> None:
    async def scenario(session: ZkSession, store: TokenStore) -> None:
        await store.create(stored())
        with pytest.raises(BrokerError) as error:
            await store.change(token_id, later)
        assert error.value.code is ErrorCode.DELEGATION_TOKEN_NOT_FOUND
        assert (await session.get(paths.TOKENS)).version == 1

    play(scenario, connect)


def test_a_token_is_created_once(connect: str) -> None:
    async def scenario(session: ZkSession, store: TokenStore) -> None:
        await store.create(stored())
        with pytest.raises(BrokerError) as error:
            await store.create(stored())
        assert error.value.code is ErrorCode.DUPLICATE_RESOURCE

    play(scenario, connect)


def test_concurrent_renewals_lose_no_change(connect: str) -> None:
    async def scenario(session: ZkSession, store: TokenStore) -> None:
        await store.create(stored())
        await asyncio.gather(*(store.change("t1", later) for _ in range(5)))
        assert (await store.all_tokens())["t1"].token.expiry_ms == 52

    play(scenario, connect)


def test_an_unreadable_token_is_skipped_without_its_content(connect: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(session: ZkSession, store: TokenStore) -> None:
        await store.create(stored())
        await session.create(f"{paths.TOKENS}/damaged", b"canary")
        assert list(await store.all_tokens()) == ["t1"]

    play(scenario, connect)
    assert "damaged" in caplog.text and "canary" not in caplog.text
