"""The content of ``sparklog top``: snapshots of a cluster's state, and the changes between two snapshots.

This module is pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sparklog.client.admin.descriptions import BrokerDescription, PartitionDescription, TopicDescription
from sparklog.model import TopicPartition, host_and_port

_KEPT_CHANGES = 200


@dataclass(frozen=True)
class TopSnapshot:
    """The state of a cluster, as its brokers reported it at the time ``at_s`` of a monotonic clock."""

    at_s: float
    brokers: Sequence[BrokerDescription]
    topics: Sequence[TopicDescription]
    #: The committed offsets of each group.
    groups: Mapping[str, Mapping[TopicPartition, int]]
    leaders: Mapping[TopicPartition, tuple[int, int, int]] = field(init=False)

    def __post_init__(self) -> None:
        found: dict[TopicPartition, tuple[int, int, int]] = {}
        for broker in self.brokers:
            for one in broker.replicas:
                if one.role == "leader":
                    found[TopicPartition(one.topic, one.partition)] = (
                        one.log_end_offset,
                        one.high_watermark,
                        one.size_bytes,
                    )
        object.__setattr__(self, "leaders", found)

    def partitions(self) -> dict[TopicPartition, PartitionDescription]:
        return {TopicPartition(topic.name, part.partition): part for topic in self.topics for part in topic.partitions}


class BrokerRow(NamedTuple):
    """The row of one broker in the view.

    ``rate`` is the number of records per second that are written to the partitions that the broker leads. ``rate``
    is None before the second snapshot.
    """

    broker_id: int
    address: str
    state: str
    leaders: int
    replicas: int
    size_bytes: int
    records_per_s: float | None
    isr_changes: int


class PartitionRow(NamedTuple):
    partition: TopicPartition
    leader: int | None
    in_sync: str
    records_per_s: float
    bytes_per_s: float
    end_offset: int


class GroupRow(NamedTuple):
    """The row of one consumer group in the view.

    ``lag`` is the sum of the lags of all partitions with committed offsets. The lag of a partition is the distance from
    its committed offset to its high watermark. ``worst`` is the partition with the largest lag.
    """

    group: str
    partitions: int
    lag: int
    worst: TopicPartition | None
    #: The number of offsets that the group commits per second.
    per_s: float | None


class View(NamedTuple):
    brokers: list[BrokerRow]
    busiest: list[PartitionRow]
    groups: list[GroupRow]
    under_replicated: int
    leaderless: int
    #: The changes of leaders and in-sync replicas since the previous snapshot.
    changes: list[str]


def compare(before: TopSnapshot | None, now: TopSnapshot) -> View:
    """Return the view of the snapshot ``now``. The view has rates if ``before``, the previous snapshot, is given."""
    span_s = now.at_s - before.at_s if before is not None else 0.0
    rates = _rates(before, now, span_s)
    partitions = now.partitions()
    return View(
        brokers=[_broker_row(broker, rates, known=before is not None) for broker in now.brokers],
        busiest=_busiest(now, partitions, rates),
        groups=sorted((_group_row(name, before, now, span_s) for name in now.groups), key=lambda row: -row.lag),
        under_replicated=sum(part.under_replicated for part in partitions.values()),
        leaderless=sum(part.leader is None for part in partitions.values()),
        changes=_changes(before.partitions() if before is not None else {}, partitions),
    )


def _rates(before: TopSnapshot | None, now: TopSnapshot, span_s: float) -> dict[TopicPartition, tuple[float, float]]:
    """Return records and bytes per second of each partition.

    A log that has become smaller, for example by retention, counts as idle.
    """
    if before is None or span_s <= 0:
        return {}
    found = {}
    for tp, (end, _, size) in now.leaders.items():
        if tp in before.leaders:
            was_end, _, was_size = before.leaders[tp]
            found[tp] = (max(0, end - was_end) / span_s, max(0, size - was_size) / span_s)
    return found


def _broker_row(
    broker: BrokerDescription, rates: Mapping[TopicPartition, tuple[float, float]], *, known: bool
) -> BrokerRow:
    led = [TopicPartition(one.topic, one.partition) for one in broker.replicas if one.role == "leader"]
    return BrokerRow(
        broker.address.broker_id,
        host_and_port(broker.address.host, broker.address.port),
        broker.state,
        broker.leaders,
        len(broker.replicas),
        broker.size_bytes,
        sum(rates.get(tp, (0.0, 0.0))[0] for tp in led) if known else None,
        broker.counters.get("isr.changes", 0),
    )


def _busiest(
    now: TopSnapshot,
    partitions: Mapping[TopicPartition, PartitionDescription],
    rates: Mapping[TopicPartition, tuple[float, float]],
) -> list[PartitionRow]:
    """Return the partitions that receive writes, busiest first.

    Without rates, return all partitions, ordered by end offset. The caller limits their number.
    """
    rows = []
    for tp, (end, _, _) in now.leaders.items():
        records, size = rates.get(tp, (0.0, 0.0))
        if rates and not records:
            continue
        part = partitions.get(tp)
        in_sync = f"{len(part.isr)}/{len(part.replicas)}" if part is not None else "-"
        rows.append(PartitionRow(tp, part.leader if part is not None else None, in_sync, records, size, end))
    return sorted(rows, key=lambda row: (-row.records_per_s, -row.end_offset, row.partition))


def _group_row(name: str, before: TopSnapshot | None, now: TopSnapshot, span_s: float) -> GroupRow:
    offsets = now.groups[name]
    lags = {tp: max(0, now.leaders[tp][1] - offset) for tp, offset in offsets.items() if tp in now.leaders}
    worst = max(lags, key=lambda tp: lags[tp], default=None)
    was = before.groups.get(name) if before is not None else None
    moved = sum(max(0, offset - was[tp]) for tp, offset in offsets.items() if tp in was) if was is not None else 0
    return GroupRow(
        name,
        len(offsets),
        sum(lags.values()),
        worst if worst is not None and lags[worst] else None,
        moved / span_s if was is not None and span_s > 0 else None,
    )


def _changes(
    before: Mapping[TopicPartition, PartitionDescription], now: Mapping[TopicPartition, PartitionDescription]
) -> list[str]:
    found = []
    for tp, part in sorted(now.items()):
        was = before.get(tp)
        if was is None:
            continue
        if was.leader != part.leader:
            found.append(f"{tp}: leader {_name(was.leader)} -> {_name(part.leader)}")
        if left := sorted(set(was.isr) - set(part.isr)):
            found.append(f"{tp}: {', '.join(map(str, left))} left the ISR")
        if came := sorted(set(part.isr) - set(was.isr)):
            found.append(f"{tp}: {', '.join(map(str, came))} joined the ISR")
    return found[:_KEPT_CHANGES]


def _name(leader: int | None) -> str:
    return "none" if leader is None else str(leader)
