"""The state of a partition that a replica needs in every role, and its view of the log.

This module decides nothing. ``replica.py`` decides roles, and ``leader.py`` and ``follower.py`` act in them. All three
share the one ``PartitionView`` that the ``Replica`` owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sparklog.model import NO_EPOCH, EpochEnd, LeaderAndIsr
from sparklog.replica.events import Decided


class LogView(Protocol):
    """The replica's read-only view of its log, as the effects have left it so far."""

    @property
    def log_start_offset(self) -> int: ...

    @property
    def first_segment_offset(self) -> int:
        """Return the offset at which a new follower begins, at or below the log start.

        Followers copy the leader's first segment whole.
        """

    @property
    def log_end_offset(self) -> int: ...

    @property
    def last_epoch(self) -> int:
        """Return the leader epoch of the last batch, -1 if the log is empty."""

    @property
    def named(self) -> bool:
        """Return whether a start would notice the loss of this log. A leader commits nothing before."""

    def last_stable_offset(self, high_watermark: int) -> int:
        """Return the first offset of an open transaction, at most ``high_watermark``."""

    def end_of_epoch(self, epoch: int) -> EpochEnd:
        """Return the largest epoch in the log <= ``epoch`` and its exclusive end; (-1, log start) if there is none."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """The topic's settings for a replica (``replica.lag.*``), and the pauses between ISR changes."""

    #: A follower that was not caught up for this long leaves the ISR.
    lag_time_max_ms: int = 10_000
    #: The number of records that a follower may lag. 0: no limit.
    lag_max_messages: int = 0
    #: A follower that lost its connection may reconnect within this time before the ISR shrinks.
    connection_grace_ms: int = 200
    #: The pause before an ISR change that ZooKeeper refused is proposed again.
    isr_retry_ms: int = 1_000


@dataclass(slots=True)
class PartitionView:
    """The shared state of one replica. Mutable; one ``Replica`` owns it, on the thread that steps it."""

    broker_id: int
    log: LogView
    settings: ReplicaSettings
    #: The first offset that is not known to be committed. Never outside the log, even if an ordered truncation will
    #: leave less.
    high_watermark: int
    #: The last known version of the partition's ZooKeeper node. It orders decisions.
    version: int = -1
    state: LeaderAndIsr | None = None
    replicas: tuple[int, ...] = ()
    min_isr: int = 1
    #: The live brokers and their current incarnations in the last event that had them.
    incarnations: Mapping[int, int] = field(default_factory=dict)
    #: Live brokers that are about to stop. They stay in an ISR until they are removed, and may not join one.
    stopping: frozenset[int] = frozenset()
    #: Replicas that must leave the ISR, according to the decision for ``version``. The order also holds for a later
    #: ISR, as long as no remaining replica has fallen out. A later decision withdraws it, even one for an older
    #: version.
    leaving: frozenset[int] = frozenset()
    #: The leader epoch of the decision that set ``replicas``. A newer epoch, found by a refused write, may have other
    #: replicas.
    replicas_epoch: int = -1
    #: The replication factor during a reassignment, else 0.
    factor: int = 0

    @property
    def min_committed(self) -> int:
        """Return the number of members that the committed ISR needs to commit and to accept acks=all.

        A partition that is reassigned from one broker to three has three replicas long before the new ones have any
        record.
        """
        return min(self.min_isr, self.factor or len(self.replicas))

    def accept_decision(self, event: Decided) -> None:
        """Copy the fields of a decision except the node's state and the leaving replicas.

        Versions order only those two. All other fields are current when the decision arrives.
        """
        self.replicas = event.replicas
        self.incarnations = event.incarnations
        self.stopping = event.stopping
        self.min_isr = event.min_isr
        self.replicas_epoch = event.state.leader_epoch
        self.factor = event.factor

    def repeats(self, event: Decided) -> bool:
        """Return whether the decision changes no field except those of the node."""
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
        """Return whether the table of live brokers has this broker but not ``broker_id``.

        Without evidence no broker is dead.
        """
        return broker_id not in self.incarnations and self.broker_id in self.incarnations


def divergence_point(log: LogView, offset: int, last_epoch: int) -> EpochEnd | None:
    """Return where the history of a log that ends at ``offset`` with ``last_epoch`` diverges from ``log``, or None.

    ``log`` begins at or below ``offset``. Source: KIP-101, KIP-279.

    If ``log`` begins at ``offset`` and has no batch of that epoch, it has deleted everything that could be compared. A
    follower that has everything up to there may be in sync, so it continues and deletes nothing.
    """
    ours = log.end_of_epoch(last_epoch)
    if ours.epoch == NO_EPOCH and offset == log.first_segment_offset:
        return None
    return ours if ours.epoch != last_epoch or ours.end_offset < offset else None
