"""Tests of the producer's connections: a failed attempt is followed by another one, and a hung broker delays no
other."""

from __future__ import annotations

import asyncio

import pytest

from sparklog.client.cluster.bootstrap import Address
from sparklog.client.cluster.coordinator_search import TRANSACTION
from sparklog.client.cluster.loop_cluster import LoopCluster
from sparklog.client.cluster.loop_coordinator import Attempts, LoopCoordinator
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint
from sparklog.net.async_client import AsyncConnection
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import Ack, Metadata, MetadataReply, Request, TouchTransaction
from tests.client.fake_cluster import FakeBroker, FakeCluster
from tests.client.producing import times


class _Refused(LoopCluster):
    """A loop whose clock stands still, as it may for a moment around a timer."""

    attempts = 0

    def _now(self) -> float:
        return 0.0

    async def _open(self, address: Address) -> AsyncConnection:
        self.attempts += 1
        raise BrokerError(ErrorCode.NETWORK_EXCEPTION, f"{address}: refused")


def test_a_refused_connection_is_retried() -> None:
    async def test() -> None:
        enough = asyncio.Event()

        def pump() -> None:  # as the sender does
            link.connection(0)
            if link.attempts >= 3:
                enough.set()

        link = _Refused("127.0.0.1:1", client_id="test", changed=pump, request_timeout_s=1.0)
        link.metadata.brokers[0] = BrokerEndpoint(0, "127.0.0.1", 1, 1)
        pump()
        await asyncio.wait_for(enough.wait(), 10)
        link.close()
        await link.closed()

    asyncio.run(test())


def test_a_silent_broker_is_asked_after_the_others(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparklog.client.cluster.routing_core.PATIENCE_S", 0.2)

    async def test() -> None:
        connected = asyncio.Event()

        def changed() -> None:
            if all(link.connection(broker.broker_id) for broker in fake.brokers):
                connected.set()

        async def answered() -> bool:
            try:
                await asyncio.wait_for(link.ask_any(Metadata(0, ()), MetadataReply), 5)
            except BrokerError:
                return False
            return True

        link = LoopCluster(fake.bootstrap, client_id="test", changed=changed, request_timeout_s=30.0)
        reply = await link.ask_any(Metadata(0, ()), MetadataReply)
        assert isinstance(reply, MetadataReply)
        link.metadata.update(reply)
        changed()
        await asyncio.wait_for(connected.wait(), 10)
        fake.fault(0, lambda broker, connection, request: True)
        assert [await answered() for _ in range(12)].count(False) <= 1
        assert link.connection(0) is not None, "the broker may only be busy, so its requests must stay in flight"
        link.close()
        await link.closed()

    asyncio.run(test())


def test_a_silent_broker_recovers_with_a_response(fake: FakeCluster) -> None:
    """Without the recovery, after all brokers were slow once, the client would ask the broker that hangs as often as
    the others."""
    slow = True

    def keep_silent(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        return slow and isinstance(request, Metadata)

    for broker_id in (0, 1):
        fake.fault(broker_id, keep_silent)

    async def test() -> None:
        nonlocal slow
        link = LoopCluster(fake.bootstrap, client_id="test", changed=lambda: None, request_timeout_s=60.0)
        for _ in range(2):
            with pytest.raises(BrokerError, match="no response within"):
                await link.run(link.core.ask_any(Metadata(0, ()), MetadataReply, longest_s=0.05))
        slow = False
        await link.run(link.core.ask_any(Metadata(0, ()), MetadataReply, longest_s=5.0))
        assert len(link.core._doubted) == 1
        link.close()
        await link.closed()

    asyncio.run(test())


def test_a_broker_with_an_unanswered_request_is_not_asked_for_metadata(
    fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker hosts the hanging leader: a client that waits for its successor would wait for this response as
    well."""
    monkeypatch.setattr("sparklog.client.cluster.routing_core.SUSPICIOUS_S", 0.05)
    monkeypatch.setattr("sparklog.client.cluster.routing_core.PATIENCE_S", 60.0)

    async def test() -> None:
        connected = asyncio.Event()

        def changed() -> None:
            if all(link.connection(broker.broker_id) for broker in fake.brokers):
                connected.set()

        link = LoopCluster(fake.bootstrap, client_id="test", changed=changed, request_timeout_s=60.0)
        reply = await link.ask_any(Metadata(0, ()), MetadataReply)
        assert isinstance(reply, MetadataReply)
        link.metadata.update(reply)
        changed()
        await connected.wait()
        fake.fault(0, lambda broker, connection, request: True)
        hanging = link.connection(0)
        assert hanging is not None
        assert hanging.silent_s == 0
        waiting = hanging.request(Metadata(0, ()))
        await asyncio.sleep(0.1)
        assert hanging.silent_s >= 0.05
        for _ in range(12):
            await link.ask_any(Metadata(0, ()), MetadataReply)
        assert not waiting.done()
        waiting.cancel()
        link.close()
        await link.closed()

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_repeated_request_ends_with_its_cluster_link(fake: FakeCluster) -> None:
    """A cancelled wait may end with the error of a connection that is lost in the same turn."""

    async def test() -> None:
        link = LoopCluster(fake.bootstrap, client_id="test", changed=lambda: None, request_timeout_s=30.0)
        coordination = LoopCoordinator(link, TRANSACTION, "id:x", request_timeout_s=30.0)
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()

        def keep(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
            loop.call_soon_threadsafe(asked.set)
            return True

        fake.fault(0, times(1, TouchTransaction, keep))

        async def ask() -> None:
            await Attempts(coordination, timeout_s=60.0).ask(TouchTransaction(0, "id:x", "run"), Ack)

        link.start(ask())
        await asyncio.wait_for(asked.wait(), 10)
        for connection in link._connections.values():
            connection.abort()
        link.close()
        await asyncio.wait_for(link.closed(), 10)

    asyncio.run(test())
