"""Properties of placement: distinct brokers, the maximum number of hosts and racks, even load, clear refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sparklog.controller.placement import MAX_NEW_PARTITIONS, Load, TopicAssignment, check_assignment, check_new, place
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint


def endpoint(broker_id: int, *, host: str = "", rack: str | None = None) -> BrokerEndpoint:
    return BrokerEndpoint(broker_id, host or f"h{broker_id}", 9092, 1, rack)


@st.composite
def clusters(draw: st.DrawFn) -> list[BrokerEndpoint]:
    """Generate brokers on a few hosts, each host in one rack or none."""
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


def even_cluster(racks: int, hosts: int, brokers: int) -> list[BrokerEndpoint]:
    """Return racks with equal numbers of hosts, and hosts with equal numbers of brokers. ``racks`` 0 means no racks."""
    numbers = [(rack, host) for rack in range(racks or 1) for host in range(hosts) for _ in range(brokers)]
    return [
        endpoint(i, host=f"h{rack}.{host}", rack=f"r{rack}" if racks else None)
        for i, (rack, host) in enumerate(numbers)
    ]


def even_clusters() -> st.SearchStrategy[list[BrokerEndpoint]]:
    shapes = [(0, 5, 1), (0, 12, 1), (0, 3, 3), (2, 2, 2), (3, 1, 3), (4, 3, 1)]
    return st.sampled_from(shapes).map(lambda shape: even_cluster(*shape))


@st.composite
def loads(draw: st.DrawFn, brokers: list[BrokerEndpoint]) -> Load:
    counts = st.dictionaries(st.sampled_from([b.broker_id for b in brokers]), st.integers(0, 30))
    return Load(draw(counts), draw(counts))


def led(assignment: TopicAssignment, brokers: list[BrokerEndpoint]) -> Counter[int]:
    counts = Counter(replicas[0] for replicas in assignment)
    return Counter({broker.broker_id: counts[broker.broker_id] for broker in brokers})


def held(assignment: TopicAssignment, brokers: list[BrokerEndpoint]) -> Counter[int]:
    counts = Counter(broker_id for replicas in assignment for broker_id in replicas)
    return Counter({broker.broker_id: counts[broker.broker_id] for broker in brokers})


def difference(counts: Counter[int]) -> int:
    return max(counts.values()) - min(counts.values())


def apartness(replicas: Sequence[int], brokers: Sequence[BrokerEndpoint]) -> tuple[list[int], list[int]]:
    """Return the number of replicas that share each host and each rack, the largest first. Smaller is better."""
    of = {broker.broker_id: broker for broker in brokers}
    hosts = Counter(of[i].host for i in replicas)
    racks = Counter(of[i].rack or str(i) for i in replicas)
    return sorted(hosts.values(), reverse=True), sorted(racks.values(), reverse=True)


@given(even_clusters(), st.integers(1, 60), st.data())
def test_each_topic_is_even_for_any_load_of_the_cluster(
    brokers: list[BrokerEndpoint], partitions: int, data: st.DataObject
) -> None:
    factor = data.draw(st.integers(1, len(brokers)))
    load = data.draw(loads(brokers))
    assignment = place(brokers, partitions=partitions, replication_factor=factor, load=load).assignment
    assert difference(led(assignment, brokers)) <= 1
    assert difference(held(assignment, brokers)) <= 1
    more = {i for i, count in led(assignment, brokers).items() if count > partitions // len(brokers)}
    least = sorted(load.leaders.get(b.broker_id, 0) for b in brokers)[: len(more)]
    assert sorted(load.leaders.get(i, 0) for i in more) == least


@given(clusters(), st.integers(1, 40), st.data())
def test_replicas_of_a_topic_are_balanced_as_far_as_distance_allows(
    brokers: list[BrokerEndpoint], partitions: int, data: st.DataObject
) -> None:
    factor = data.draw(st.integers(1, len(brokers)))
    load = data.draw(loads(brokers))
    assignment = place(brokers, partitions=partitions, replication_factor=factor, load=load).assignment
    assert difference(led(assignment, brokers)) <= 1
    counts = held(assignment, brokers)
    for replicas in assignment:
        for place_of, taker in product(range(1, factor), set(counts).difference(replicas)):
            moved = (*replicas[:place_of], taker, *replicas[place_of + 1 :])
            if apartness(moved, brokers) <= apartness(replicas, brokers):
                assert counts[replicas[place_of]] <= counts[taker] + 1


@given(even_clusters(), st.lists(st.tuples(st.integers(1, 20), st.integers(2, 3)), min_size=1, max_size=12))
# A broker that hosted more replicas than others and led fewer partitions had to lead the last topic.
@example(even_cluster(2, 2, 2), [(1, 2), (8, 2), (12, 3), (1, 3), (2, 2)])
def test_the_cluster_stays_even_topic_after_topic(brokers: list[BrokerEndpoint], topics: list[tuple[int, int]]) -> None:
    everything: TopicAssignment = ()
    for partitions, factor in topics:
        load = Load(led(everything, brokers), held(everything, brokers))
        everything += place(brokers, partitions=partitions, replication_factor=factor, load=load).assignment
        assert difference(led(everything, brokers)) <= 1
        assert difference(held(everything, brokers)) <= 2


@given(even_clusters(), st.lists(st.integers(1, 20), min_size=2, max_size=6), st.data())
def test_a_topic_stays_even_as_partitions_are_added(
    brokers: list[BrokerEndpoint], additions: list[int], data: st.DataObject
) -> None:
    factor = data.draw(st.integers(1, 3))
    load = data.draw(loads(brokers))
    topic: TopicAssignment = ()
    for added in additions:
        topic += place(brokers, partitions=added, replication_factor=factor, load=load, beside=topic).assignment
        assert difference(led(topic, brokers)) <= 1
        # The next leader may already be the broker with one replica more, and existing replicas stay.
        assert difference(held(topic, brokers)) <= 2


def test_added_partitions_go_first_to_a_newer_broker() -> None:
    brokers = [endpoint(i) for i in range(4)]
    topic = place(brokers[:3], partitions=9, replication_factor=2).assignment
    topic += place(brokers, partitions=3, replication_factor=2, beside=topic).assignment
    assert led(topic, brokers) == {0: 3, 1: 3, 2: 3, 3: 3}
    # Partitions with replicas on a dead broker are as many as the live ones can carry.
    topic += place(brokers[1:], partitions=3, replication_factor=2, beside=topic).assignment
    assert led(topic, brokers) == {0: 3, 1: 4, 2: 4, 3: 4}


def test_a_topic_has_leaders_on_all_brokers() -> None:
    brokers = [endpoint(i) for i in range(3)]
    load = Load(leaders={0: 500, 1: 500, 2: 0}, replicas={0: 1000, 1: 1000, 2: 0})
    assignment = place(brokers, partitions=16, replication_factor=3, load=load).assignment
    assert led(assignment, brokers) == {0: 5, 1: 5, 2: 6}


def test_a_full_host_leads_no_more_than_others() -> None:
    brokers = [endpoint(0, host="a"), *(endpoint(i, host="b") for i in range(1, 10))]
    assignment = place(brokers, partitions=90, replication_factor=2).assignment
    assert set(led(assignment, brokers).values()) == {9}
    assert held(assignment, brokers) == {0: 90, **dict.fromkeys(range(1, 10), 10)}


def test_placement_at_the_maximum_number_of_brokers_and_partitions() -> None:
    brokers = [endpoint(i, host=f"h{i // 2}", rack=f"r{i // 20}") for i in range(100)]
    load = Load({i: 2000 - i % 7 for i in range(100)}, {i: 6000 + i % 11 for i in range(100)})
    assignment = place(brokers, partitions=10_007, replication_factor=3, load=load).assignment
    assert difference(led(assignment, brokers)) == 1
    assert difference(held(assignment, brokers)) == 1
    successors = Counter(replicas[:2] for replicas in assignment)
    assert max(successors.values()) <= 6


@given(clusters(), st.integers(1, 40), st.data())
def test_the_order_of_brokers_does_not_change_the_placement(
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


def test_a_dead_leaders_topics_have_several_successors() -> None:
    brokers = [endpoint(i) for i in range(4)]
    everything: TopicAssignment = ()
    for _ in range(24):
        load = Load(led(everything, brokers), held(everything, brokers))
        everything += place(brokers, partitions=1, replication_factor=4, load=load).assignment
    successors = Counter(replicas[1] for replicas in everything if replicas[0] == 0)
    assert sorted(successors.values()) == [2, 2, 2]


def test_new_topics_go_to_the_least_loaded_brokers() -> None:
    brokers = [endpoint(i) for i in range(3)]
    load = Load(leaders={0: 5, 1: 0, 2: 5}, replicas={0: 9, 1: 9, 2: 2})
    assert place(brokers, partitions=1, replication_factor=2, load=load).assignment == ((1, 2),)


def test_a_single_host_is_a_warning_with_figures() -> None:
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
def test_impossible_requests_name_found_and_expected(partitions: int, factor: int, code: ErrorCode, text: str) -> None:
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
def test_an_invalid_assignment_names_its_partition(assignment: tuple[tuple[int, ...], ...], text: str) -> None:
    with pytest.raises(BrokerError) as refused:
        check_assignment(assignment, [endpoint(i) for i in range(3)])
    assert refused.value.code is ErrorCode.INVALID_REPLICA_ASSIGNMENT
    assert text in str(refused.value)


def test_one_request_creates_a_bounded_number_of_partitions() -> None:
    check_new(MAX_NEW_PARTITIONS)
    with pytest.raises(BrokerError) as caught:
        check_new(MAX_NEW_PARTITIONS + 1)
    assert caught.value.code is ErrorCode.INVALID_PARTITIONS
    assert str(MAX_NEW_PARTITIONS) in caught.value.detail and "more requests" in caught.value.detail
