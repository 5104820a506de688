"""Placement by properties: distinct brokers, as many hosts and racks as there are, even load, clear refusals."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.controller.placement import Load, check_assignment, place
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint


def endpoint(broker_id: int, *, host: str = "", rack: str | None = None) -> BrokerEndpoint:
    return BrokerEndpoint(broker_id, host or f"h{broker_id}", 9092, 1, rack)


@st.composite
def clusters(draw: st.DrawFn) -> list[BrokerEndpoint]:
    """Brokers on a few hosts, each host in one rack or none."""
    ids = draw(st.lists(st.integers(0, 50), min_size=1, max_size=9, unique=True))
    racks = draw(st.dictionaries(st.integers(0, 3), st.sampled_from(["r1", "r2", None])))
    hosts = [draw(st.integers(0, 3)) for _ in ids]
    return [endpoint(i, host=f"h{h}", rack=racks.get(h)) for i, h in zip(ids, hosts, strict=True)]


@given(clusters(), st.integers(1, 40), st.data())
def test_replicas_are_distinct_and_on_as_many_hosts_as_possible(
    brokers: list[BrokerEndpoint], partitions: int, data: st.DataObject
) -> None:
    factor = data.draw(st.integers(1, len(brokers)))
    assignment, warning = place(brokers, partitions=partitions, replication_factor=factor)
    host_of = {broker.broker_id: broker.host for broker in brokers}
    most = min(factor, len(set(host_of.values())))
    assert len(assignment) == partitions
    for replicas in assignment:
        assert len(set(replicas)) == factor
        assert set(replicas) <= set(host_of)
        assert len({host_of[broker_id] for broker_id in replicas}) == most
    assert bool(warning) == (most < factor)
    assert check_assignment(assignment, brokers) == (assignment, warning)


@given(st.integers(1, 12), st.integers(1, 60), st.data())
def test_leaders_and_replicas_are_even_where_every_broker_has_a_host(
    count: int, partitions: int, data: st.DataObject
) -> None:
    factor = data.draw(st.integers(1, count))
    assignment, _ = place([endpoint(i) for i in range(count)], partitions=partitions, replication_factor=factor)
    leaders = Counter(dict.fromkeys(range(count), 0))
    leaders.update(replicas[0] for replicas in assignment)
    held = Counter(dict.fromkeys(range(count), 0))
    held.update(broker_id for replicas in assignment for broker_id in replicas)
    assert max(leaders.values()) - min(leaders.values()) <= 1
    assert max(held.values()) - min(held.values()) <= 2


@given(clusters(), st.integers(1, 40), st.data())
def test_the_same_question_has_the_same_answer_in_any_order(
    brokers: list[BrokerEndpoint], partitions: int, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(brokers))
    factor = data.draw(st.integers(1, len(brokers)))
    assert place(brokers, partitions=partitions, replication_factor=factor) == place(
        shuffled, partitions=partitions, replication_factor=factor
    )


def test_racks_come_after_hosts_and_before_load() -> None:
    brokers = [
        endpoint(1, host="a", rack="r1"),
        endpoint(2, host="b", rack="r1"),
        endpoint(3, host="c", rack="r2"),
        endpoint(4, host="c", rack="r2"),
    ]
    rack_of = {broker.broker_id: broker.rack for broker in brokers}
    for replicas in place(brokers, partitions=12, replication_factor=2).assignment:
        assert {rack_of[i] for i in replicas} == {"r1", "r2"}
    for replicas in place(brokers, partitions=12, replication_factor=3).assignment:
        assert {brokers[i - 1].host for i in replicas} == {"a", "b", "c"}


def test_a_dead_leaders_partitions_fall_to_several_successors() -> None:
    assignment, _ = place([endpoint(i) for i in range(4)], partitions=24, replication_factor=3)
    successors = Counter(replicas[1] for replicas in assignment if replicas[0] == 0)
    assert sorted(successors.values()) == [2, 2, 2]


def test_new_topics_go_where_there_is_least() -> None:
    brokers = [endpoint(i) for i in range(3)]
    load = Load(leaders={0: 5, 1: 0, 2: 5}, replicas={0: 9, 1: 9, 2: 2})
    assert place(brokers, partitions=1, replication_factor=2, load=load).assignment == ((1, 2),)


def test_one_host_is_a_warning_with_figures() -> None:
    brokers = [endpoint(i, host="h") for i in range(3)]
    warning = place(brokers, partitions=6, replication_factor=3).warning
    assert "6 of 6 partitions share a host" in warning
    assert "replication factor 3, live hosts 1" in warning


@pytest.mark.parametrize(
    ("partitions", "factor", "code", "text"),
    [
        (1, 4, ErrorCode.INVALID_REPLICATION_FACTOR, "found replication factor 4; expected 1 to 3, the live brokers"),
        (1, 0, ErrorCode.INVALID_REPLICATION_FACTOR, "found replication factor 0"),
        (0, 1, ErrorCode.INVALID_PARTITIONS, "found 0 partitions; expected 1 to 100000"),
        (100_001, 1, ErrorCode.INVALID_PARTITIONS, "found 100001 partitions"),
    ],
)
def test_impossible_wishes_name_found_and_expected(partitions: int, factor: int, code: ErrorCode, text: str) -> None:
    with pytest.raises(BrokerError) as refused:
        place([endpoint(i) for i in range(3)], partitions=partitions, replication_factor=factor)
    assert refused.value.code is code
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        (((0,), ()), "partition 1 has no replica"),
        (((0, 0),), "partition 0 names a broker twice"),
        (((0, 7),), "partition 0 names brokers [7]; live are [0, 1, 2]"),
        (((0, 1), (2,)), "partition 1 has 1 replicas; partition 0 has 2"),
    ],
)
def test_a_bad_assignment_names_its_partition(assignment: tuple[tuple[int, ...], ...], text: str) -> None:
    with pytest.raises(BrokerError) as refused:
        check_assignment(assignment, [endpoint(i) for i in range(3)])
    assert refused.value.code is ErrorCode.INVALID_REPLICA_ASSIGNMENT
    assert text in str(refused.value)
