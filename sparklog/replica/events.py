"""The events of one replica of a partition. Each event is a fact, with a name in the past tense.

The caller (the broker process, or the simulator) passes them to ``Replica.step(event, now_ms)`` one at a time. The
caller carries out the returned effects in order before it passes the next event.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sparklog.model import LeaderAndIsr


class Decided(msgspec.Struct, frozen=True, gc=False):
    """The event that a state of the partition has come from the controller, or was read from ZooKeeper.

    ``version`` is the version of the partition's ZooKeeper node. A decision with an older version than the known one
    does not change the known ``state``. A decision with the current version updates only the fields that the node does
    not have: all except ``state``.

    ``incarnations`` maps the ids of live brokers to their current incarnations. ``min_isr`` is the topic's
    min.insync.replicas. Brokers in ``stopping`` are about to stop and may not join an ISR. Replicas in ``leaving`` must
    leave the ISR: a reassignment removes them, and at this ``version`` the remaining replicas are in sync. ``factor``
    limits ``min_isr`` during a reassignment; if it is 0, the number of replicas limits ``min_isr``.
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
    """The event that brokers have joined, left or registered again.

    ``incarnations`` has all live brokers. ``stopping`` has the same meaning as in Decided.

    If ``incarnations`` lacks the replica's own broker, the map is outdated. The replica then considers no broker dead.
    """

    incarnations: Mapping[int, int]
    stopping: frozenset[int] = frozenset()


class ProduceArrived(msgspec.Struct, frozen=True, gc=False):
    """The event that a validated produce for this partition has arrived.

    ``ticket`` identifies the produce. ``acks`` is 0, 1 or -1 (all).
    """

    ticket: int
    acks: int
    deadline_ms: int


class LeaderAppended(msgspec.Struct, frozen=True, gc=False):
    """The event that the batches of ``ticket`` were appended: records ``[base_offset, end_offset)``.

    For a duplicate of an earlier batch, the offsets are those of the earlier batch. ``end_offset`` may then be below
    the log end offset.
    """

    ticket: int
    base_offset: int
    end_offset: int


class LeaderAppendFailed(msgspec.Struct, frozen=True, gc=False):
    """The event that the append for ``ticket`` has failed.

    The log contains no part of the batches.

    The caller knows the reason and responds to the client itself. No RespondToProduce follows.
    """

    ticket: int


class FollowerFetched(msgspec.Struct, frozen=True, gc=False):
    """The event that a follower has fetched from ``offset``.

    The follower's log has all records below ``offset``. ``last_epoch`` is the leader epoch of the last batch in the
    follower's log, or -1 if that log is empty. ``refuses`` means that the follower holds committed records that this
    leader lacks, and refuses to truncate them.
    """

    replica_id: int
    incarnation: int
    leader_epoch: int
    offset: int
    last_epoch: int
    refuses: bool = False


class IsrWritten(msgspec.Struct, frozen=True, gc=False):
    """The event that the WriteIsr with this ``isr`` has succeeded. The partition's node now has ``version``."""

    isr: tuple[int, ...]
    version: int


class IsrRefused(msgspec.Struct, frozen=True, gc=False):
    """The event that ZooKeeper refused the WriteIsr.

    ``state`` and ``version`` are the current content and version of the partition's node.

    ``expected_version`` is the expected version in the WriteIsr. With this version, the replica distinguishes the
    results of two writes. ``expected_version`` may be -1 if the caller never has two writes of a partition in flight.
    """

    state: LeaderAndIsr
    version: int
    expected_version: int = -1


class IsrWriteFailed(msgspec.Struct, frozen=True, gc=False):
    """The event that the WriteIsr failed, or that its result is unknown because the connection was lost.

    The caller then reads the node and sends IsrRefused with the node's current state. ``expected_version`` has the same
    meaning as in IsrRefused.
    """

    expected_version: int = -1


class FollowerConnectionLost(msgspec.Struct, frozen=True, gc=False):
    """The event that the last connection from a follower has closed, so the follower may be dead.

    The leader may then shrink the ISR early.

    The event is not sent while another connection of the follower is open: the follower may have a fetch waiting on
    that connection and be in sync.
    """

    replica_id: int


class LeaderResponded(msgspec.Struct, frozen=True, gc=False):
    """The event that the leader has responded to a fetch of this follower.

    ``leader_epoch``, ``fetch_offset`` and ``last_epoch`` are the fields of the request. ``last_epoch`` is needed for a
    repeated or late response: the log may have the same end as at the request, but other records. A caller whose
    connections deliver no response twice or late may pass -2 (unknown).

    ``end_offset`` is the log end offset after the append of the ``batch_count`` received batches, or -1 if it is
    unknown. Only traces use it. ``diverging`` is (epoch, end offset) or None. ``code`` is an error code of the
    protocol. ``outdated`` means that the follower must copy its whole log again, although the leader has the next
    records.
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
    """The event that the AppendAsFollower was carried out.

    The log now ends at ``end_offset``. If a batch was invalid, the log is unchanged: ``end_offset`` is the old log end,
    and the next fetch requests the same batches again.
    """

    end_offset: int


class Truncated(msgspec.Struct, frozen=True, gc=False):
    """The event that the TruncateLog or RestartLog was carried out. The log now ends at ``end_offset``."""

    end_offset: int


class TruncationFailed(msgspec.Struct, frozen=True, gc=False):
    """The event that the truncation of a TruncateLog is not possible now, perhaps because the disk is full.

    The log is unchanged. The event is not sent after a RoleChanged, which cancels the truncation.
    """


class LogFailed(msgspec.Struct, frozen=True, gc=False):
    """The event that the log directory has gone offline. This replica stays offline until the process restarts."""

    detail: str


class LogNamed(msgspec.Struct, frozen=True, gc=False):
    """The event that a durable checkpoint now contains the log (``LogView.named``).

    If the log is lost later, the next start of the broker detects the loss.
    """


class ReplicaTicked(msgspec.Struct, frozen=True, gc=False):
    """The event that time has passed. The caller sends it at ``Replica.deadline_ms`` or later."""


class Stopped(msgspec.Struct, frozen=True, gc=False):
    """The event that the replica no longer belongs to this broker, or that the broker stops."""


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
    | ReplicaTicked
    | Stopped
)
