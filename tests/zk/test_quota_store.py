"""Tests of quotas in a real ZooKeeper: Kafka's nodes, the index, and changes of several brokers at a time."""

from __future__ import annotations

import asyncio
import json

import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.security.quotas import CONSUMER_BYTE_RATE, DEFAULT, PRODUCER_BYTE_RATE, QuotaEntity
from sparklog.zk import paths, quota_store
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.quota_store import QuotaStore, decode_index, quota_path
from sparklog.zk.session import Node
from sparklog.zk.unreadable import Unreadable

from .support import opened, until

ANNA = QuotaEntity("anna")


def quotas_of(store: ClusterStore) -> QuotaStore:
    return QuotaStore(store.session, Unreadable())


def test_the_nodes_are_those_of_kafka() -> None:
    assert quota_path(QuotaEntity("anna")) == "/config/users/anna"
    assert quota_path(QuotaEntity(DEFAULT)) == "/config/users/<default>"
    assert quota_path(QuotaEntity("a/b c", "<default>")) == "/config/users/a%2Fb%20c/clients/%3Cdefault%3E"
    assert quota_path(QuotaEntity(DEFAULT, DEFAULT)) == "/config/users/<default>/clients/<default>"
    assert quota_path(QuotaEntity(None, "..")) == "/config/clients/%2E%2E"
    assert quota_path(QuotaEntity(None, DEFAULT)) == "/config/clients/<default>"
    assert quota_path(QuotaEntity(ip="::1")) == "/config/ips/%3A%3A1"


def test_quotas_are_written_read_and_removed(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            quotas = quotas_of(store)
            assert await quotas.current() == {}
            both = QuotaEntity("anna", "app")
            await quotas.alter(ANNA, {PRODUCER_BYTE_RATE: 1024.0, CONSUMER_BYTE_RATE: 0.5})
            await quotas.alter(both, {PRODUCER_BYTE_RATE: 2048.0})
            await quotas.alter(ANNA, {CONSUMER_BYTE_RATE: None})
            found = await quotas.current()
            assert found == {ANNA: {PRODUCER_BYTE_RATE: 1024.0}, both: {PRODUCER_BYTE_RATE: 2048.0}}
            await quotas.alter(both, {PRODUCER_BYTE_RATE: None})
            await quotas.alter(ANNA, {PRODUCER_BYTE_RATE: None})
            assert await quotas.current() == {}
            assert not await store.session.exists(quota_path(both))

    asyncio.run(scenario())


def test_other_keys_of_a_users_node_are_kept(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            await store.session.ensure(paths.USERS)
            stored = {"version": 1, "config": {"SCRAM-SHA-256": "salt=1"}}
            await store.session.create(quota_path(ANNA), json.dumps(stored).encode())
            quotas = quotas_of(store)
            await quotas.alter(ANNA, {PRODUCER_BYTE_RATE: 1024.0})
            node = json.loads((await store.session.get(quota_path(ANNA))).data)
            assert node["config"] == {"SCRAM-SHA-256": "salt=1", PRODUCER_BYTE_RATE: "1024"}
            assert await quotas.current() == {ANNA: {PRODUCER_BYTE_RATE: 1024.0}}
            await quotas.alter(ANNA, {PRODUCER_BYTE_RATE: None})
            assert json.loads((await store.session.get(quota_path(ANNA))).data) == stored

    asyncio.run(scenario())


def test_the_last_quota_of_a_users_clients_leaves_no_node(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            quotas, session = quotas_of(store), store.session
            one, two = QuotaEntity("anna", "one"), QuotaEntity("anna", "two")
            for entity in (one, two):
                await quotas.alter(entity, {PRODUCER_BYTE_RATE: 5.0})
            await quotas.alter(one, {PRODUCER_BYTE_RATE: None})
            assert await session.children(quota_path(ANNA) + "/clients") == ("two",)
            await quotas.alter(ANNA, {PRODUCER_BYTE_RATE: 7.0})
            await quotas.alter(two, {PRODUCER_BYTE_RATE: None})
            assert await session.children(quota_path(ANNA)) == ()
            await quotas.alter(two, {PRODUCER_BYTE_RATE: 5.0})
            await quotas.alter(ANNA, {PRODUCER_BYTE_RATE: None})
            await quotas.alter(two, {PRODUCER_BYTE_RATE: None})
            assert await session.children(paths.USERS) == ()

    asyncio.run(scenario())


def test_simultaneous_changes_are_all_kept(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store, opened(connect) as other:
            changes = [
                quotas_of((store, other)[number % 2]).alter(QuotaEntity(f"user {number}"), {PRODUCER_BYTE_RATE: 5.0})
                for number in range(20)
            ]
            versions = await asyncio.gather(*changes)
            found = await quotas_of(store).current()
            assert len(found) == 20
            index = await quotas_of(store).index()
            assert sorted(versions) == list(range(1, 21)) and index is not None and index.version == 20

    asyncio.run(scenario())


def test_a_watcher_reads_only_what_has_changed(connect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[QuotaEntity] = []
    plain = QuotaStore._read_one

    async def counted(self: QuotaStore, entity: QuotaEntity) -> object:
        read.append(entity)
        return await plain(self, entity)

    monkeypatch.setattr(QuotaStore, "_read_one", counted)

    async def scenario() -> None:
        async with opened(connect) as store, opened(connect) as admin:
            quotas, nodes = quotas_of(store), list[Node | None]()
            stop = quotas.watch(nodes.append)
            for number in range(5):
                await quotas_of(admin).alter(QuotaEntity(f"user {number}"), {PRODUCER_BYTE_RATE: 5.0})
            await until(lambda: bool(nodes) and nodes[-1] is not None and nodes[-1].version == 5, "the index")
            known = await quotas.read(nodes[-1])
            assert len(read) == 5
            read.clear()
            await quotas_of(admin).alter(ANNA, {PRODUCER_BYTE_RATE: 1.0})
            await quotas_of(admin).alter(QuotaEntity("user 3"), {PRODUCER_BYTE_RATE: None})
            await until(lambda: nodes[-1] is not None and nodes[-1].version == 7, "the index")
            changed = frozenset(decode_index(nodes[-1]).changed[-2:])
            after = await quotas.read(nodes[-1], known, changed)
            assert read == [ANNA]
            assert after == await quotas.current()
            assert ANNA in after and QuotaEntity("user 3") not in after
            stop()

    asyncio.run(scenario())


def test_unreadable_values_are_skipped(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            quotas = quotas_of(store)
            await quotas.alter(ANNA, {PRODUCER_BYTE_RATE: 1024.0, CONSUMER_BYTE_RATE: 5.0})
            broken = {"version": 1, "config": {PRODUCER_BYTE_RATE: "-3", CONSUMER_BYTE_RATE: "7"}}
            await store.session.set(quota_path(ANNA), json.dumps(broken).encode())
            assert await quotas.current() == {ANNA: {CONSUMER_BYTE_RATE: 7.0}}
            await store.session.set(quota_path(ANNA), b"{")
            assert await quotas.current() == {}

    asyncio.run(scenario())


def test_the_number_of_entities_is_bounded(connect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_store, "MAX_ENTITIES", 2)

    async def scenario() -> None:
        async with opened(connect) as store:
            quotas = quotas_of(store)
            for name in ("a", "b"):
                await quotas.alter(QuotaEntity(name), {PRODUCER_BYTE_RATE: 1.0})
            with pytest.raises(BrokerError) as refused:
                await quotas.alter(QuotaEntity("c"), {PRODUCER_BYTE_RATE: 1.0})
            assert refused.value.code is ErrorCode.INVALID_CONFIG
            await quotas.alter(QuotaEntity("b"), {PRODUCER_BYTE_RATE: 2.0})
            assert len(await quotas.current()) == 2

    asyncio.run(scenario())
