"""What a replica knows of its partition whatever its role, and the log it looks at.

No decisions here: ``replica.py`` decides roles, ``leader.py`` and ``follower.py`` act in them, and all three share the
one ``PartitionView`` that the ``Replica`` owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sparklog.model import NO_EPOCH, EpochEnd, LeaderAndIsr
from sparklog.replica.events import Decided


class LogView(Protocol):
    """The replica's window on its log: read only, and as the effects so far have left it; only a batch
    appended at once is in it before ``AppendedAtOnce`` says so."""

    @property
    def log_start_offset(self) -> int: ...

    @property
    def first_segment_offset(self) -> int:
        """Where followers begin, at or below the log start: they hold the leader's first segment as a whole."""

    @property
    def log_end_offset(self) -> int: ...

    @property
    def last_epoch(self) -> int:
        """Leader epoch of the last batch; -1 when the log is empty."""

    @property
    def named(self) -> bool:
        """Whether the log directory would miss this log if it were lost. A leader commits nothing before."""

    def last_stable_offset(self, high_watermark: int) -> int:
        """First offset whose transaction is open, at most ``high_watermark``."""

    def end_of_epoch(self, epoch: int) -> EpochEnd:
        """The largest epoch in the log <= ``epoch`` and its exclusive end; (-1, log start) if there is none."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """The topic's settings a replica lives by (``replica.lag.*``), and pacing of ISR changes."""

    #: a follower not caught up for so long leaves the ISR
    lag_time_max_ms: int = 10_000
    #: records a follower may lag; 0: no limit
    lag_max_messages: int = 0
    #: a follower whose connection was lost may come back within this time before the ISR shrinks
    connection_grace_ms: int = 200
    #: pause before an ISR change that ZooKeeper refused is proposed again
    isr_retry_ms: int = 1_000


@dataclass(slots=True)
class PartitionView:
    """Mutable, owned by one ``Replica``; on the thread that steps it."""

    broker_id: int
    log: LogView
    settings: ReplicaSettings
    #: first offset not known to be committed; never outside the log, also where a cut that was ordered will leave less
    high_watermark: int
    #: of the partition's ZooKeeper node as last seen; orders decisions
    version: int = -1
    state: LeaderAndIsr | None = None
    replicas: tuple[int, ...] = ()
    min_isr: int = 1
    #: live brokers and their current incarnations, as last told
    incarnations: Mapping[int, int] = field(default_factory=dict)
    #: live brokers on their way out: they keep their place in an ISR until they are removed, and are not added
    stopping: frozenset[int] = frozenset()
    #: replicas to be taken out of the ISR, as told for ``version``; a later ISR is theirs only as long as nobody who
    #: stays has fallen out of it. A later decision withdraws the order, even one that is made for an older version.
    leaving: frozenset[int] = frozenset()
    #: leader epoch that ``replicas`` were told with; a newer one, found by a refused write, may have others
    told_epoch: int = -1
    #: replication factor while the partition moves; 0: it does not
    factor: int = 0

    @property
    def min_committed(self) -> int:
        """Members the committed ISR needs for the high watermark to move and for acks=all to be accepted. A partition
        that moves from one broker to three has three replicas long before the others have anything."""
        return min(self.min_isr, self.factor or len(self.replicas))

    def take(self, event: Decided) -> None:
        """Take over what a decision says besides the node's state and who is to leave: versions order only these, all
        else is as new as the decision is late."""
        self.replicas = event.replicas
        self.incarnations = event.incarnations
        self.stopping = event.stopping
        self.min_isr = event.min_isr
        self.told_epoch = event.state.leader_epoch
        self.factor = event.factor

    def as_told(self, event: Decided) -> bool:
        """The decision says nothing that is not known, but for what the node holds."""
        return (
            self.incarnations == event.incarnations
            and self.replicas == event.replicas
            and self.told_epoch == event.state.leader_epoch
            and self.min_isr == event.min_isr
            and self.stopping == event.stopping
            and self.leaving == event.leaving
            and self.factor == event.factor
        )

    def known_dead(self, broker_id: int) -> bool:
        """True only on evidence: a table of live brokers that names this broker but not that one."""
        return broker_id not in self.incarnations and self.broker_id in self.incarnations


def parted(log: LogView, offset: int, last_epoch: int) -> EpochEnd | None:
    """Where a log that ends at ``offset`` with a record of ``last_epoch`` stopped being ``log``, which begins at or
    below ``offset``; None: it has not. Source: KIP-101, KIP-279.

    Where ``log`` begins and has none of that epoch it has let go of all that could be compared: whoever has everything
    up to there may be in sync, and is to go on, not to throw that away.
    """
    ours = log.end_of_epoch(last_epoch)
    if ours.epoch == NO_EPOCH and offset == log.first_segment_offset:
        return None
    return ours if ours.epoch != last_epoch or ours.end_offset < offset else None
