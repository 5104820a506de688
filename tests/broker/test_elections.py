"""Tests of an operator's result of a requested election, from the later state of ZooKeeper and of the broker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from sparklog.broker.requests.elections import PREFERRED, UNCLEAN, ElectionRequests, _outcome
from sparklog.broker.requests.slices import Slices
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_LEADER, BrokerEndpoint, LeaderAndIsr, VersionedState
from sparklog.protocol.messages import ControlUpdate, ElectLeaders, PartitionDecision
from sparklog.zk import codecs
from sparklog.zk.cluster_store import MAX_TOPIC_BYTES
from tests.broker.support import broker_context


@pytest.mark.parametrize(
    ("kind", "live", "leader", "isr", "code", "said"),
    [
        (PREFERRED, (1, 2), 1, (1, 2), ErrorCode.NONE, ""),
        (PREFERRED, (2,), 2, (1, 2), ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "broker 1 is not alive"),
        (PREFERRED, (1, 2), 2, (2,), ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "broker 1 is not in sync"),
        (PREFERRED, (1, 2), 2, (1, 2), ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "broker 1 is not chosen"),
        (UNCLEAN, (2,), 2, (2,), ErrorCode.NONE, ""),
        (UNCLEAN, (3,), NO_LEADER, (1,), ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, "no replica of [1, 2] is alive"),
        (UNCLEAN, (2, 3), NO_LEADER, (1,), ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, "[1] may still return"),
    ],
)
def test_an_election_is_refused_for_the_right_reason(
    tmp_path: Path, kind: str, *, live: tuple[int, ...], leader: int, isr: tuple[int, ...], code: ErrorCode, said: str
) -> None:
    cache = broker_context(3).cache
    endpoints = tuple(BrokerEndpoint(number, "host", 1, 1) for number in live)
    cache.apply(ControlUpdate(0, "c", 1, 1, False, endpoints, (), (), sequence=1))
    state = LeaderAndIsr(leader, 4, isr, 1)
    known = PartitionDecision("t", "id", 0, state, 7, (1, 2))
    result = _outcome(cache, kind, known, VersionedState(state, 7))
    assert result.code == code
    assert said in result.detail


class _Registry:
    """A registry that performs requests, except those that ``held`` names."""

    def __init__(self, held: tuple[str, int] | None = None) -> None:
        self.asked: dict[str, codecs.ElectionRequest] = {}
        self.withdrawn: list[str] = []
        self._held = held

    async def request_election(self, request: codecs.ElectionRequest) -> str:
        path = f"/{len(self.asked)}"
        self.asked[path] = request
        return path

    async def request_done(self, path: str) -> None:
        if self._held in (self.asked[path].partitions or ()):
            await asyncio.Event().wait()

    def withdraw_request(self, path: str) -> None:
        self.withdrawn.append(path)


def _carry_out(registry: _Registry, kind: str, *, timeout_ms: int) -> None:
    requests = ElectionRequests(broker_context(3), Slices(), cast(Any, registry))
    state = LeaderAndIsr(2, 4, (1, 2), 1)
    wanting = [PartitionDecision("t" * 249, "id", number, state, 7, (1, 2)) for number in range(10_000)]
    asyncio.run(requests._carried_out(ElectLeaders(0, kind, timeout_ms=timeout_ms), wanting))


def test_an_election_of_thousands_is_split_into_small_zookeeper_nodes() -> None:
    registry = _Registry()
    _carry_out(registry, PREFERRED, timeout_ms=60_000)
    assert max(len(codecs.encode(request)) for request in registry.asked.values()) < MAX_TOPIC_BYTES
    named = [partition for request in registry.asked.values() for partition in request.partitions or ()]
    assert named == [("t" * 249, number) for number in range(10_000)]
    assert registry.withdrawn == []


def test_an_election_that_waits_for_a_broker_delays_no_other() -> None:
    registry = _Registry(held=("t" * 249, 7))
    with pytest.raises(BrokerError, match="election of 3000 of 10000 leaders") as refused:
        _carry_out(registry, UNCLEAN, timeout_ms=50)
    assert refused.value.code == ErrorCode.REQUEST_TIMED_OUT
    assert len(registry.asked) == 4
    assert registry.withdrawn == ["/0"]
