"""Tests of the ACLs in a real ZooKeeper, and of a broker's copy of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import NamedTuple

import pytest

from sparklog.broker.security.acl_cache import AclCache
from sparklog.broker.security.authorizer import Authorizer
from sparklog.errors import BrokerError
from sparklog.protocol.proof import Identity
from sparklog.security.acls import (
    AclBinding,
    AclFilter,
    AclTable,
    Operation,
    Permission,
    ResourcePattern,
    ResourceType,
    binding,
)
from sparklog.security.principals import Principal
from sparklog.zk import paths
from sparklog.zk.acl_store import MOST_OF_PATTERN, AclStore, decode_acls, encode_acls, node_name
from sparklog.zk.codecs import ZkFormatError
from sparklog.zk.session import ZkSession
from sparklog.zk.unreadable import Unreadable
from tests.zk.support import expire, until

ORDERS = binding("topic", "orders", "User:anna", "write")
PREFIX = binding("topic", "a/b *", "User:bert", "read", pattern_type="prefixed", host="10.0.0.0/8")
GROUP = binding("group", "*", "User:anna", "read", permission="deny")


class Connection(NamedTuple):
    principal: Principal = Principal("User", "anna")
    peer_host: str = "10.0.0.1"
    listener: str = "CLIENT"
    identity: Identity | None = None
    token_id: str = ""


class Denials:
    def denied(self, connection: object, request: object, operation: str, resource: str, rule: str) -> None:
        """Keep nothing."""


def all_of(found: dict[str, frozenset[AclBinding]]) -> set[AclBinding]:
    return {acl for acls in found.values() for acl in acls}


def test_a_node_has_kafkas_field_names() -> None:
    data = encode_acls([ORDERS])
    assert data == (
        b'{"acls":[{"principal":"User:anna","operation":"Write","permissionType":"Allow","host":"*"}],"version":1}'
    )
    for acl in (ORDERS, PREFIX, GROUP):
        assert decode_acls(node_name(acl.pattern), encode_acls([acl])) == {acl}
    assert node_name(PREFIX.pattern) == "Topic:Prefixed:a%2Fb%20%2A"


@pytest.mark.parametrize("name", ["Topic:Literal:x", "Queue:Literal:x", "nonsense"])
@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"version":9,"acls":[]}', b'{"version":1,"acls":[{"principal":"x","operation":"Fly"}]}']
)
def test_an_unreadable_node_is_refused(name: str, data: bytes) -> None:
    with pytest.raises(ZkFormatError):
        decode_acls(name, data)


@pytest.mark.integration
def test_acls_are_added_read_and_removed(connect: str) -> None:
    async def run() -> None:
        session = await ZkSession.open(connect)
        try:
            store = AclStore(session, Unreadable())
            assert await store.read_all() == {}
            first = await store.add([ORDERS, PREFIX, GROUP])
            assert await store.add([ORDERS]) == first, "an existing ACL changes nothing"
            assert all_of(await store.read_all()) == {ORDERS, PREFIX, GROUP}
            both = await asyncio.gather(*(store.add([binding("topic", "t", f"User:{n}", "read")]) for n in range(8)))
            assert len(set(both)) == 8
            assert len(all_of(await store.read_all())) == 11, "writers at the same time lose nothing"

            removed, last = await store.remove([AclFilter(resource_type=ResourceType.TOPIC)])
            assert len(removed) == 10
            assert last > max(both)
            assert all_of(await store.read_all()) == {GROUP}
            assert await session.children(paths.ACLS) == (node_name(GROUP.pattern),)
            assert await store.remove([AclFilter(name="orders")]) == (frozenset(), -1)

            many = [binding("topic", "t", f"User:{n}", "read") for n in range(MOST_OF_PATTERN + 1)]
            with pytest.raises(BrokerError, match=f"at most {MOST_OF_PATTERN}"):
                await store.add(many)
        finally:
            await session.close()

    asyncio.run(run())


@pytest.mark.integration
def test_an_unreadable_node_denies_its_resources(connect: str) -> None:
    async def run() -> None:
        session = await ZkSession.open(connect)
        try:
            unreadable = Unreadable()
            store = AclStore(session, unreadable)
            await store.add([ORDERS, PREFIX])
            await session.set(f"{paths.ACLS}/{node_name(ORDERS.pattern)}", b"broken")
            await session.create(f"{paths.ACLS}/nonsense", b"{}")
            denied = AclBinding(
                ResourcePattern(ResourceType.TOPIC, "orders"),
                Principal("User", "*"),
                "*",
                Operation.ALL,
                Permission.DENY,
            )
            assert all_of(await store.read_all()) == {denied, PREFIX}
            assert unreadable.count == 2
            with pytest.raises(ZkFormatError):
                await store.add([ORDERS])
        finally:
            await session.close()

    asyncio.run(run())


@pytest.mark.integration
def test_a_broker_follows_changes_of_another_one(connect: str) -> None:
    async def run() -> None:
        mine, other = await ZkSession.open(connect), await ZkSession.open(connect)
        authorizer = Authorizer(AclTable(), Denials())
        cache = AclCache(authorizer, Counter())
        try:
            store = AclStore(other, Unreadable())
            await store.add([GROUP])
            cache.open(mine)
            await until(lambda: authorizer.table.acls == (GROUP,), "the first ACLs")

            def may_write() -> bool:
                return authorizer.allows(Connection(), Operation.WRITE, ResourceType.TOPIC, "orders")

            assert not may_write()
            version = await store.add([ORDERS])
            await cache.applied(version, timeout_s=30)
            assert may_write()
            await expire(mine)
            await store.remove([AclFilter(name="orders")])
            await until(lambda: not may_write(), "the removal after a new session")
            for number in range(60):  # more than the changes that are named
                version = await store.add([binding("topic", f"t{number}", "User:anna", "write")])
            await cache.applied(version, timeout_s=30)
            assert len(authorizer.table.acls) == 61
        finally:
            cache.close()
            await mine.close()
            await other.close()

    asyncio.run(run())
