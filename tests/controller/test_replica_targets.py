"""Tests of the target brokers of replicas that have to move."""

from __future__ import annotations

from collections import Counter

import pytest

from sparklog.controller.replica_targets import ReplicaTargets
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint, TopicPartition


def brokers(*hosts: str) -> tuple[BrokerEndpoint, ...]:
    return tuple(BrokerEndpoint(number, host, 9092, 1) for number, host in enumerate(hosts))


def tp(number: int) -> TopicPartition:
    return TopicPartition("t", number)


def test_replicas_that_may_stay_keep_their_place() -> None:
    held = {tp(0): (2, 0, 1)}
    targets = ReplicaTargets(brokers("a", "b", "c", "d"), held)
    assert targets.of(tp(0), held[tp(0)], 3) == (2, 0, 1)
    assert targets.of(tp(0), held[tp(0)], 4) == (2, 0, 1, 3)
    assert targets.of(tp(0), held[tp(0)], 1) == (2,)


def test_a_new_replica_goes_to_another_host_then_the_lightest() -> None:
    held = {tp(0): (0,), tp(1): (2,), tp(2): (2,)}
    targets = ReplicaTargets(brokers("a", "a", "b", "c"), held)
    assert targets.of(tp(0), (0,), 2) == (0, 3)
    assert targets.of(tp(1), (2,), 2) == (2, 1)


def test_a_dropped_replica_is_dead_or_redundant_but_not_the_leader() -> None:
    held = {tp(0): (0, 1, 2), tp(1): (9, 0, 1), tp(2): (0, 2, 3)}
    targets = ReplicaTargets(brokers("a", "a", "b", "c"), held)
    assert targets.of(tp(0), held[tp(0)], 2) == (0, 2)
    assert targets.of(tp(1), held[tp(1)], 2) == (0, 1)
    assert targets.of(tp(2), held[tp(2)], 2) == (0, 3)


def test_a_drained_broker_keeps_nothing_and_others_share_evenly() -> None:
    held = {tp(number): (0, 1 + number % 3) for number in range(12)}
    targets = ReplicaTargets(brokers("a", "b", "c", "d"), held, without={0})
    found = {number: targets.of(tp(number), held[tp(number)], 2) for number in range(12)}
    assert all(0 not in target and len(set(target)) == 2 for target in found.values())
    assert found[0][0] == held[tp(0)][1]
    assert set(Counter(broker_id for target in found.values() for broker_id in target).values()) == {8}


@pytest.mark.parametrize(("factor", "detail"), [(5, r"\[0, 1, 2\]"), (0, "expected 1 or more")])
def test_an_impossible_factor_is_refused(factor: int, detail: str) -> None:
    targets = ReplicaTargets(brokers("a", "b", "c"), {tp(0): (0, 1)})
    with pytest.raises(BrokerError, match=detail) as caught:
        targets.of(tp(0), (0, 1), factor)
    assert caught.value.code == ErrorCode.INVALID_REPLICATION_FACTOR
