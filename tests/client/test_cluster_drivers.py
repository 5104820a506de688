"""Tests that both drivers of the routing core perform its effects in the same way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.bootstrap import Address
from sparklog.client.cluster.loop_cluster import LoopCluster
from sparklog.client.cluster.routing_core import (
    Ask,
    Connect,
    Disconnect,
    ListOpen,
    NoResponse,
    Prepare,
    RoutingCore,
    RoutingSteps,
)
from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.messages import Ack, FindCoordinator, Metadata, MetadataReply
from tests.client.fake_cluster import FakeCluster
from tests.client.producing import hang_up, say_nothing


class Driver:
    """A driver, and the way in which a test runs its steps."""

    def __init__(self, core: RoutingCore, run: Callable[[RoutingSteps[Any]], Any]) -> None:
        self.core = core
        self.run = run


@pytest.fixture(params=["blocking", "loop"])
def driver(request: pytest.FixtureRequest, fake: FakeCluster) -> Iterator[Driver]:
    if request.param == "blocking":
        with BlockingCluster(fake.bootstrap) as blocking:
            yield Driver(blocking.core, blocking.run)
        return
    loop = asyncio.new_event_loop()
    link = LoopCluster(fake.bootstrap, client_id="test", changed=lambda: None, request_timeout_s=30.0, loop=loop)
    yield Driver(link.core, lambda steps: loop.run_until_complete(link.run(steps)))
    link.close()
    loop.run_until_complete(link.closed())
    loop.run_until_complete(asyncio.sleep(0))  # sockets are closed in the next turn
    loop.close()


def address(fake: FakeCluster, broker_id: int) -> Address:
    return Address("127.0.0.1", fake.brokers[broker_id].port)


def test_each_effect_has_its_result(driver: Driver, fake: FakeCluster) -> None:
    def steps() -> RoutingSteps[None]:
        assert (yield ListOpen()) == {}
        with pytest.raises(BrokerError) as refused:
            yield Connect(Address("127.0.0.1", 1))
        assert refused.value.code == ErrorCode.NETWORK_EXCEPTION
        assert (yield Connect(address(fake, 0))) == 0
        assert (yield Connect(address(fake, 0))) == 0
        assert (yield ListOpen()) == {0: 0.0}
        reply = yield Ask(0, Metadata(0, ()), 30.0)
        assert isinstance(reply, MetadataReply)
        with pytest.raises(BrokerError) as not_connected:
            yield Ask(1, Metadata(0, ()), 30.0)
        assert not_connected.value.retriable
        driver.core.metadata.update(reply)
        assert (yield Prepare(1)) is None
        while 1 not in (yield ListOpen()):
            yield Ask(0, Metadata(0, ()), 30.0)
        assert (yield Disconnect(0)) is None
        while 0 in (yield ListOpen()):
            yield Ask(1, Metadata(0, ()), 30.0)

    driver.run(steps())


def test_a_lost_connection_ends_the_request(driver: Driver, fake: FakeCluster) -> None:
    def steps() -> RoutingSteps[None]:
        yield Connect(address(fake, 0))
        with pytest.raises(BrokerError) as lost:
            yield Ask(0, FindCoordinator(0, "group", "g"), 30.0)
        assert lost.value.code == ErrorCode.NETWORK_EXCEPTION
        assert (yield ListOpen()) == {}

    fake.fault(0, hang_up)
    driver.run(steps())


def test_a_failed_attempt_is_followed_by_the_next_broker(driver: Driver, fake: FakeCluster) -> None:
    """The client may connect to any broker first."""
    fake.stop(0)
    for _ in range(3):
        reply = driver.run(driver.core.ask_any(Metadata(0, ()), MetadataReply))
        assert [broker.broker_id for broker in reply.brokers] == [1]
    with pytest.raises(BrokerError, match="responded to Metadata with MetadataReply"):
        driver.run(driver.core.ask_any(Metadata(0, ()), Ack))
    driver.run(driver.core.refresh(()))


def test_a_silent_broker_is_replaced(driver: Driver, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparklog.client.cluster.routing_core.PATIENCE_S", 0.2)

    def steps() -> RoutingSteps[None]:
        yield Connect(address(fake, 0))
        with pytest.raises(NoResponse, match=r"no response within 0\.2 s"):
            yield from driver.core.ask_any(Metadata(0, ()), MetadataReply)
        replies = []
        for _ in range(2):
            with contextlib.suppress(NoResponse):
                replies.append((yield from driver.core.ask_any(Metadata(0, ()), MetadataReply)))
        assert replies

    fake.fault(0, say_nothing)
    driver.run(steps())
