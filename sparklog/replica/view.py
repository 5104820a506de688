"""The state that a replica needs in every role, and its view of the log.

The ``Replica`` owns one ``PartitionView``. ``replica.py`` chooses the role, and ``leader.py`` and ``follower.py``
implement the roles. All of them use this object. This module makes no decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sparklog.model import NO_EPOCH, EpochEnd, LeaderAndIsr
from sparklog.replica.events import Decided


class LogView(Protocol):
    """The part of a log that its replica reads.

    The view shows the log after all effects that were carried out so far.
    """

    @property
    def log_start_offset(self) -> int: ...

    @property
    def first_segment_offset(self) -> int:
        """Return the first offset of the log's first segment, where a new follower begins to copy.

        This offset is at or below the log start. Followers copy the leader's first segment from its beginning.
        """

    @property
    def log_end_offset(self) -> int: ...

    @property
    def last_epoch(self) -> int:
        """Return the leader epoch of the last batch, or -1 if the log is empty."""

    @property
    def named(self) -> bool:
        """Return whether a durable checkpoint contains this log, so that the next start would notice its loss.

        Until this is true, a leader commits no records.
        """

    def last_stable_offset(self, high_watermark: int) -> int:
        """Return the last stable offset: the start of the first open transaction, at most ``high_watermark``."""

    def end_of_epoch(self, epoch: int) -> EpochEnd:
        """Return the log's largest epoch <= ``epoch``, and the offset after the last record of that epoch.

        If the log has no such epoch, return (-1, log start).
        """


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """The topic's settings for a replica (``replica.lag.*``), and the pauses between ISR changes."""

    #: The time after which a follower that has not caught up leaves the ISR.
    lag_time_max_ms: int = 10_000
    #: The number of records by which a follower may lag; 0 for no limit.
    lag_max_messages: int = 0
    #: The time within which a follower that lost its connection may reconnect before it leaves the ISR.
    connection_grace_ms: int = 200
    #: The pause before an ISR change that ZooKeeper refused is proposed again.
    isr_retry_ms: int = 1_000


@dataclass(slots=True)
class PartitionView:
    """The state of one replica that all its roles use, such as the last decision and the high watermark.

    A part of ``Replica``. Mutable and not thread-safe.
    """

    broker_id: int
    log: LogView
    settings: ReplicaSettings
    #: The first offset that is not known to be committed. It is always within the log, even while a truncation is in
    #: progress.
    high_watermark: int
    #: The last known version of the partition's ZooKeeper node. Decisions are ordered by this version.
    version: int = -1
    state: LeaderAndIsr | None = None
    replicas: tuple[int, ...] = ()
    min_isr: int = 1
    #: The live brokers and their current incarnations, from the last event that contained them.
    incarnations: Mapping[int, int] = field(default_factory=dict)
    #: Live brokers that are about to stop. They may not join an ISR.
    stopping: frozenset[int] = frozenset()
    #: Replicas that must leave the ISR, according to the decision for ``version``. The set stays valid when the ISR
    #: changes, unless a replica that is not in the set leaves the ISR. Any later decision can remove replicas from the
    #: set, even a decision with an older version.
    leaving: frozenset[int] = frozenset()
    #: The leader epoch of the decision that set ``replicas``. If a refused write reveals a newer epoch, the replicas
    #: may have changed.
    replicas_epoch: int = -1
    #: During a reassignment, the smaller of the old and the new replication factor; otherwise 0.
    factor: int = 0

    @property
    def min_committed(self) -> int:
        """Return the number of members that the committed ISR needs to commit records and to accept acks=all.

        This is ``min_isr``, but at most the replication factor. During a reassignment the limit is ``factor``, the
        smaller of the old and the new replication factor. A partition that moves from one broker to three has three
        replicas long before the new replicas have any records.
        """
        return min(self.min_isr, self.factor or len(self.replicas))

    def accept_decision(self, event: Decided) -> None:
        """Copy the fields of a decision that do not depend on the version of the partition's node.

        ``state`` and ``leaving`` depend on the version, and are not copied. All other fields are current when the
        decision arrives.
        """
        self.replicas = event.replicas
        self.incarnations = event.incarnations
        self.stopping = event.stopping
        self.min_isr = event.min_isr
        self.replicas_epoch = event.state.leader_epoch
        self.factor = event.factor

    def repeats(self, event: Decided) -> bool:
        """Return whether a decision has the known values in all fields except ``version`` and ``state``.

        Of ``state``, only the leader epoch is compared.
        """
        return (
            self.incarnations == event.incarnations
            and self.replicas == event.replicas
            and self.replicas_epoch == event.state.leader_epoch
            and self.min_isr == event.min_isr
            and self.stopping == event.stopping
            and self.leaving == event.leaving
            and self.factor == event.factor
        )

    def known_dead(self, broker_id: int) -> bool:
        """Return whether the table of live brokers lacks ``broker_id``, although it contains this replica's own broker.

        A table without this replica's own broker is outdated and proves nothing.
        """
        return broker_id not in self.incarnations and self.broker_id in self.incarnations


def divergence_point(log: LogView, offset: int, last_epoch: int) -> EpochEnd | None:
    """Return the point where a follower's log diverges from ``log``, or None if the logs agree.

    The follower's log ends at ``offset``, and its last batch has the epoch ``last_epoch``. ``log`` must begin at or
    below ``offset``. Source: KIP-101, KIP-279.

    The leader's log may begin exactly at ``offset`` and have no batch of an epoch up to ``last_epoch``. Then all
    records that could be compared were deleted. The result is None, because a follower with all earlier records may be
    in sync.
    """
    ours = log.end_of_epoch(last_epoch)
    if ours.epoch == NO_EPOCH and offset == log.first_segment_offset:
        return None
    return ours if ours.epoch != last_epoch or ours.end_offset < offset else None
