"""Tests of the view of ``sparklog top`` over two samples of a cluster."""

from __future__ import annotations

import pyarrow as pa

from sparklog.cli.top_view import TopSnapshot, compare
from sparklog.client.admin.descriptions import BrokerAddress, BrokerDescription, PartitionDescription, TopicDescription
from sparklog.model import TopicPartition
from sparklog.protocol.messages import ReplicaDescription


def look(
    at_s: float,
    ends: dict[int, int],
    *,
    leader: int | None = 0,
    isr: tuple[int, ...] = (0, 1),
    committed: dict[int, int] | None = None,
) -> TopSnapshot:
    """Return a sample with one topic ``t``, led by broker 0. Each record takes ten bytes."""
    hosted = tuple(
        ReplicaDescription("t", number, "leader", 1, 0, end, end, 10 * end, "/logs") for number, end in ends.items()
    )
    broker = BrokerDescription(
        BrokerAddress(0, "h", 9092, 1), "running", replicas=hosted, counters={"isr.changes": int(at_s)}
    )
    parts = tuple(PartitionDescription(number, leader, 1, (0, 1), isr) for number in ends)
    topic = TopicDescription("t", "id", parts, pa.schema([]), 0, (), None)
    groups = {"g": {TopicPartition("t", number): offset for number, offset in (committed or {}).items()}}
    return TopSnapshot(at_s, [broker], [topic], groups)


def test_without_an_earlier_sample_there_are_no_rates() -> None:
    view = compare(None, look(5, {0: 100}, committed={0: 40}))
    assert view.brokers[0].records_per_s is None
    assert (view.groups[0].lag, view.groups[0].per_s) == (60, None)
    assert view.changes == []


def test_the_view_has_rates_lag_and_the_busiest_partitions() -> None:
    before = look(10, {0: 100, 1: 0, 2: 500}, committed={0: 40, 1: 0})
    view = compare(before, look(14, {0: 180, 1: 400, 2: 20}, committed={0: 80, 1: 100}))
    assert [(row.partition.partition, row.records_per_s, row.bytes_per_s) for row in view.busiest] == [
        (1, 100.0, 1000.0), (0, 20.0, 200.0),
    ]  # fmt: skip
    assert [row.partition.partition for row in compare(None, before).busiest] == [2, 0, 1]
    assert view.brokers[0].records_per_s == 120.0
    assert view.brokers[0].isr_changes == 14
    (group,) = view.groups
    assert (group.lag, group.worst, group.per_s) == (100 + 300, TopicPartition("t", 1), 35.0)


def test_changes_of_leaders_and_in_sync_sets_are_counted() -> None:
    before = look(0, {0: 1})
    away = look(1, {0: 1}, leader=None, isr=(1,))
    assert compare(before, away).changes == ["t-0: leader 0 -> none", "t-0: 0 left the ISR"]
    assert (compare(before, away).under_replicated, compare(before, away).leaderless) == (1, 1)
    assert compare(away, before).changes == ["t-0: leader none -> 0", "t-0: 0 joined the ISR"]
    assert compare(before, look(1, {0: 1, 1: 1})).changes == [], "a new partition is not a change"
