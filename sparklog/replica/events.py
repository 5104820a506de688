"""The events of one replica of a partition: facts. The names are in the past tense.

The caller (the broker process, or the simulator) passes them to ``Replica.step(event, now_ms)`` one at a time. It
carries out the returned effects in order before it passes the next event.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sparklog.model import LeaderAndIsr


class Decided(msgspec.Struct, frozen=True, gc=False):
    """A newer state of the partition, from the controller or read from ZooKeeper.

    ``version`` is the version of the partition's node. A decision with an older version does not change ``state``. One
    with the current version updates only the other fields, which the node does not have. ``incarnations`` maps the ids
    of live brokers to their current incarnations. ``min_isr`` is the topic's min.insync.replicas. Brokers in
    ``stopping`` are about to stop and may not join an ISR. Replicas in ``leaving`` must leave the ISR: a reassignment
    removes them, and at this ``version`` the remaining replicas are in sync. ``factor`` limits min_isr during a
    reassignment; if it is 0, the number of replicas limits min_isr.
    """

    state: LeaderAndIsr
    version: int
    replicas: tuple[int, ...]
    incarnations: Mapping[int, int]
    min_isr: int
    stopping: frozenset[int] = frozenset()
    leaving: frozenset[int] = frozenset()
    factor: int = 0


class BrokersChanged(msgspec.Struct, frozen=True, gc=False):
    """Brokers have joined, left or registered again.

    ``incarnations`` has all live brokers; ``stopping`` is as in Decided.

    If ``incarnations`` lacks the replica's own broker, it is outdated, and no broker counts as dead because of it.
    """

    incarnations: Mapping[int, int]
    stopping: frozenset[int] = frozenset()


class ProduceArrived(msgspec.Struct, frozen=True, gc=False):
    """A validated produce for this partition has arrived. ``ticket`` identifies it. acks is 0, 1 or -1 (all)."""

    ticket: int
    acks: int
    deadline_ms: int


class LeaderAppended(msgspec.Struct, frozen=True, gc=False):
    """The batches of ``ticket`` have been appended: records ``[base_offset, end_offset)``.

    For a duplicate of an earlier batch, the offsets are those of the earlier batch. ``end_offset`` may then be below
    the log end offset.
    """

    ticket: int
    base_offset: int
    end_offset: int


class LeaderAppendFailed(msgspec.Struct, frozen=True, gc=False):
    """The append for ``ticket`` has failed.

    The log contains no part of it.

    The caller knows the reason and responds to the client itself. No RespondToProduce follows.
    """

    ticket: int


class FollowerFetched(msgspec.Struct, frozen=True, gc=False):
    """A follower has fetched from ``offset``.

    The follower's log has all records below ``offset``. ``last_epoch`` is the leader epoch of its last batch, -1 for an
    empty log. ``refuses`` means that the follower holds committed records that this leader lacks, and refuses to
    truncate them.
    """

    replica_id: int
    incarnation: int
    leader_epoch: int
    offset: int
    last_epoch: int
    refuses: bool = False


class IsrWritten(msgspec.Struct, frozen=True, gc=False):
    """The WriteIsr with this ``isr`` has succeeded. The node now has ``version``."""

    isr: tuple[int, ...]
    version: int


class IsrRefused(msgspec.Struct, frozen=True, gc=False):
    """ZooKeeper refused the WriteIsr.

    ``state`` and ``version`` are the node's current content, as in Decided.

    ``expected_version`` is that of the WriteIsr, so that the result of an earlier write is not taken as that of a later
    one. It may be -1 if the caller never has two writes of a partition in flight.
    """

    state: LeaderAndIsr
    version: int
    expected_version: int = -1


class IsrWriteFailed(msgspec.Struct, frozen=True, gc=False):
    """The WriteIsr failed, or its result is unknown because the connection was lost.

    The caller then reads the node and sends IsrRefused with its current state. ``expected_version`` is as in
    IsrRefused.
    """

    expected_version: int = -1


class FollowerConnectionLost(msgspec.Struct, frozen=True, gc=False):
    """The last connection from a follower has closed, so the follower may be dead.

    The leader may then shrink the ISR early.

    The event is not sent while another connection of the follower is open: the follower may have a fetch waiting there
    and be in sync.
    """

    replica_id: int


class LeaderResponded(msgspec.Struct, frozen=True, gc=False):
    """The leader has responded to this follower's fetch (``leader_epoch``, ``fetch_offset``, ``last_epoch``).

    These three fields are those of the request. ``last_epoch`` is needed because, when a repeated or late response
    arrives, the log may have the same end as before but another history. A caller whose connections deliver no response
    twice or late may pass -2 (unknown). ``end_offset`` is the log end offset after the append of the ``batch_count``
    received batches. It is only for traces; -1 if unknown. ``diverging`` is (epoch, end offset) or None. ``code`` is an
    error code of the protocol. ``outdated`` means that the follower's whole log must be copied again, although the
    leader has the next records.
    """

    leader_epoch: int
    fetch_offset: int
    code: int
    high_watermark: int
    log_start_offset: int
    log_end_offset: int
    diverging: tuple[int, int] | None
    batch_count: int
    end_offset: int = -1
    last_epoch: int = -2
    outdated: bool = False


class FollowerAppended(msgspec.Struct, frozen=True, gc=False):
    """The AppendAsFollower has been carried out.

    The log now ends at ``end_offset``. If a batch was invalid, the log is unchanged: ``end_offset`` is the old end, and
    the next fetch requests the same batches again.
    """

    end_offset: int


class Truncated(msgspec.Struct, frozen=True, gc=False):
    """The TruncateLog or RestartLog has been carried out. The log now ends at ``end_offset``."""

    end_offset: int


class TruncationFailed(msgspec.Struct, frozen=True, gc=False):
    """The TruncateLog is not possible now, perhaps because the disk is full.

    The log is unchanged. The event is not sent after a RoleChanged, which cancels the truncation.
    """


class LogFailed(msgspec.Struct, frozen=True, gc=False):
    """The log directory has gone offline. This replica stays offline until the process restarts."""

    detail: str


class LogNamed(msgspec.Struct, frozen=True, gc=False):
    """The log's name is now durable (``LogView.named``).

    If the log is lost, the next start of the broker detects that.
    """


class Ticked(msgspec.Struct, frozen=True, gc=False):
    """Time has passed. The caller sends the event at ``Replica.deadline_ms`` or later."""


class Stopped(msgspec.Struct, frozen=True, gc=False):
    """The replica no longer belongs to this broker, or the broker stops."""


Event = (
    Decided
    | BrokersChanged
    | ProduceArrived
    | LeaderAppended
    | LeaderAppendFailed
    | FollowerFetched
    | IsrWritten
    | IsrRefused
    | IsrWriteFailed
    | FollowerConnectionLost
    | LeaderResponded
    | FollowerAppended
    | Truncated
    | TruncationFailed
    | LogFailed
    | LogNamed
    | Ticked
    | Stopped
)
