"""Tests of the brokers that the controller excludes in a cluster whose brokers have TLS certificates."""

from __future__ import annotations

import logging
from typing import cast

import pytest

from sparklog.cluster.required_proofs import RequiredProofs
from sparklog.model import BrokerRegistration, ListenerEndpoint
from sparklog.security.listeners import InterBroker, SecurityProtocol
from sparklog.zk.session import ZkSession


def broker(broker_id: int, *endpoints: ListenerEndpoint, proves: bool = True) -> BrokerRegistration:
    return BrokerRegistration(broker_id, "host", 9092, "boot", "c", proves=proves, endpoints=endpoints)


def test_brokers_without_the_listener_for_brokers_are_excluded(caplog: pytest.LogCaptureFixture) -> None:
    proofs = RequiredProofs(
        cast(ZkSession, None), enabled=True, inter_broker=InterBroker("BROKER", SecurityProtocol.SSL)
    )
    client = ListenerEndpoint("CLIENT", "SSL", "host", 9092)
    brokers = [
        broker(0, client, ListenerEndpoint("BROKER", "SSL", "host", 9093)),
        broker(1, client),
        broker(2),
        broker(3, proves=False),
        broker(4, client, ListenerEndpoint("BROKER", "PLAINTEXT", "host", 9093)),
    ]
    with caplog.at_level(logging.ERROR):
        assert [found.broker_id for found in proofs.admitted(brokers)] == [0]
    assert sum("has no listener BROKER with TLS" in line for line in caplog.messages) == 4
