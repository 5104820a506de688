"""What an operator is told of an election that was asked for, by what ZooKeeper and this broker know afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparklog.broker.elections import PREFERRED, UNCLEAN, _carried_out, _outcome
from sparklog.errors import ErrorCode
from sparklog.model import NO_LEADER, BrokerEndpoint, LeaderAndIsr, VersionedState
from sparklog.protocol.messages import ControlUpdate, ElectLeaders, PartitionDecision
from sparklog.zk import codecs
from sparklog.zk.cluster_store import MAX_TOPIC_BYTES
from tests.broker.support import broker_state


@pytest.mark.parametrize(
    ("kind", "live", "leader", "isr", "code", "said"),
    [
        (PREFERRED, (1, 2), 1, (1, 2), ErrorCode.NONE, ""),
        (PREFERRED, (2,), 2, (1, 2), ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "broker 1 is not alive"),
        (PREFERRED, (1, 2), 2, (2,), ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "broker 1 is not in sync"),
        (PREFERRED, (1, 2), 2, (1, 2), ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "broker 1 is not chosen"),
        (UNCLEAN, (2,), 2, (2,), ErrorCode.NONE, ""),
        (UNCLEAN, (3,), NO_LEADER, (1,), ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, "no replica of [1, 2] is alive"),
        (UNCLEAN, (2, 3), NO_LEADER, (1,), ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, "[1] are not given up yet"),
    ],
)
def test_the_reason_is_the_one_that_holds(
    tmp_path: Path, kind: str, *, live: tuple[int, ...], leader: int, isr: tuple[int, ...], code: ErrorCode, said: str
) -> None:
    broker = broker_state(3, tmp_path)
    endpoints = tuple(BrokerEndpoint(number, "host", 1, 1) for number in live)
    broker.cache.apply(ControlUpdate(0, "c", 1, 1, False, endpoints, (), (), sequence=1))
    state = LeaderAndIsr(leader, 4, isr, 1)
    known = PartitionDecision("t", "id", 0, state, 7, (1, 2))
    result = _outcome(broker, kind, known, VersionedState(state, 7))
    assert result.code == code
    assert said in result.detail


def test_an_election_of_thousands_is_asked_for_in_nodes_that_zookeeper_takes() -> None:
    asked: list[codecs.ElectionRequest] = []

    async def request_election(request: codecs.ElectionRequest) -> str:
        asked.append(request)
        return f"/{len(asked)}"

    async def request_done(path: str) -> None:
        assert path == f"/{len(asked)}", "one after the other"

    broker: Any = SimpleNamespace(
        registry=SimpleNamespace(request_election=request_election, request_done=request_done)
    )
    state = LeaderAndIsr(2, 4, (1, 2), 1)
    wanting = [PartitionDecision("t" * 249, "id", number, state, 7, (1, 2)) for number in range(10_000)]
    asyncio.run(_carried_out(broker, ElectLeaders(0, PREFERRED, timeout_ms=1000), wanting))
    assert max(len(codecs.encode(request)) for request in asked) < MAX_TOPIC_BYTES
    named = [partition for request in asked for partition in request.partitions or ()]
    assert named == [("t" * 249, number) for number in range(10_000)]
