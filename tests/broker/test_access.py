"""Tests that the refusal of a request of brokers or the controller is counted, and written to the audit log."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from sparklog.broker.requests.access import Access
from sparklog.broker.security.audit_log import Audit
from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.greeting import Credentials
from sparklog.protocol.proof import Identity, KeyRing, Secret
from sparklog.protocol.senders import SenderKind
from sparklog.security.principals import ANONYMOUS
from tests.broker.support import broker_context

BROKER_1 = Identity(SenderKind.BROKER, 1, 7)
CONTROLLER = Identity(SenderKind.CONTROLLER, -1, 3)


class Denials:
    def __init__(self) -> None:
        self.lines: list[tuple[str, ...]] = []

    def denied(self, connection: Any, request: Any, operation: str, resource: str, rule: str) -> None:
        self.lines.append((connection.peer_host, request, operation, resource, rule))


def connection(identity: Identity | None) -> Any:
    return SimpleNamespace(identity=identity, principal=ANONYMOUS, peer_host="10.0.0.9", listener="BROKER")


def access(denials: Any, *, secret: bool = True) -> tuple[Access, Counter[str]]:
    keys = KeyRing((Secret(b"s" * 32),)) if secret else KeyRing()
    counters: Counter[str] = Counter()
    return Access(Credentials(keys, lambda: BROKER_1), broker_context().cache, counters, denials), counters


@pytest.mark.parametrize(
    ("identity", "found"),
    [(None, "no proof"), (CONTROLLER, "a proof of controller -1")],
)
def test_refusals_of_unproved_brokers_are_reported(identity: Identity | None, found: str) -> None:
    denials = Denials()
    checked, counters = access(denials)
    stranger = connection(identity)
    with pytest.raises(BrokerError) as caught:
        checked.require(stranger, SenderKind.BROKER, "WriteMarkers")
    assert caught.value.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    with pytest.raises(BrokerError):
        checked.require_follower(stranger, 1)
    assert counters["requests.unauthorized"] == 2
    first, second = denials.lines
    assert first[:4] == ("10.0.0.9", "WriteMarkers", "ClusterAction", "Cluster:kafka-cluster") and found in first[4]
    assert second[1] == "a fetch of follower 1" and found in second[4]


def test_a_control_update_of_another_term_is_reported() -> None:
    denials = Denials()
    checked, counters = access(denials)
    with pytest.raises(BrokerError, match="epoch 9"):
        checked.require_controller(connection(CONTROLLER), 9)
    assert counters["requests.unauthorized"] == len(denials.lines) == 1
    assert denials.lines[0][4] == "its connection has proved epoch 3"


def test_proved_senders_and_clusters_without_a_secret_report_nothing() -> None:
    denials = Denials()
    checked, _ = access(denials)
    checked.require(connection(BROKER_1), SenderKind.BROKER, "WriteMarkers")
    checked.require_follower(connection(BROKER_1), 1)
    checked.require_controller(connection(CONTROLLER), 3)
    without, _ = access(denials, secret=False)
    without.require(connection(None), SenderKind.BROKER, "WriteMarkers")
    assert not denials.lines


def test_repeated_refusals_have_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    counters: Counter[str] = Counter()

    async def test() -> None:
        audit = Audit(counters)
        checked, _ = access(audit)
        for _ in range(1000):
            with pytest.raises(BrokerError):
                checked.require(connection(None), SenderKind.BROKER, "WriteMarkers")
        for number in range(1000):
            with pytest.raises(BrokerError):
                checked.require_follower(connection(None), number)
        audit.close()

    with caplog.at_level("INFO", logger="sparklog.audit"):
        asyncio.run(test())
    assert counters["requests.denied"] == 2000
    assert 2 <= len(caplog.records) <= 300
