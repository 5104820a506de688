"""The events of one replica of one partition: facts, in the past tense.

The caller (the broker process, or the simulator) passes them to ``Replica.step(event, now_ms)`` one at a time. It
carries out the returned effects in order before it passes the next event.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sparklog.model import LeaderAndIsr


class Decided(msgspec.Struct, frozen=True, gc=False):
    """A newer state of the partition, from the controller or read from ZooKeeper.

    A lower ``version`` than the current one is ignored. An equal one updates only what the node does not have:
    everything but ``state``. ``incarnations`` maps the ids of live brokers to their current incarnations. ``min_isr``
    is the topic's min.insync.replicas. Brokers in ``stopping`` are about to stop and may not join an ISR. Replicas in
    ``leaving`` must leave the ISR: a reassignment removes them, and the remaining replicas are in sync at this
    ``version``. ``factor`` is the replication factor to compare min_isr with during a reassignment; 0: the number of
    replicas.
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
    """Brokers joined, left or registered again.

    ``incarnations`` has all live ones; ``stopping`` is as in Decided.

    A map without the replica's own broker is too old to judge other brokers by: no broker then counts as dead.
    """

    incarnations: Mapping[int, int]
    stopping: frozenset[int] = frozenset()


class ProduceArrived(msgspec.Struct, frozen=True, gc=False):
    """A checked produce for this partition waits under ``ticket``. acks is 0, 1 or -1 (all)."""

    ticket: int
    acks: int
    deadline_ms: int


class LeaderAppended(msgspec.Struct, frozen=True, gc=False):
    """The append ordered for ``ticket`` is in the log: records ``[base_offset, end_offset)``.

    A duplicate of an earlier batch has that batch's offsets. ``end_offset`` may then be below the log end offset.
    """

    ticket: int
    base_offset: int
    end_offset: int


class LeaderAppendFailed(msgspec.Struct, frozen=True, gc=False):
    """The append ordered for ``ticket`` failed.

    The log has no part of it.

    The caller knows the reason and answers the client itself: no AnswerProduce follows.
    """

    ticket: int


class FollowerFetched(msgspec.Struct, frozen=True, gc=False):
    """A follower fetched from ``offset``.

    Its log has everything below. ``last_epoch`` is the leader epoch of its last batch, -1 for an empty log.
    ``refuses``: it holds committed records that this leader lacks, and does not truncate them.
    """

    replica_id: int
    incarnation: int
    leader_epoch: int
    offset: int
    last_epoch: int
    refuses: bool = False


class IsrWritten(msgspec.Struct, frozen=True, gc=False):
    """The WriteIsr with this ``isr`` is durable. The node now has ``version``."""

    isr: tuple[int, ...]
    version: int


class IsrRefused(msgspec.Struct, frozen=True, gc=False):
    """The compare-and-set lost.

    The fields have the current content of the node, as in Decided.

    ``expected_version`` repeats the WriteIsr's, so that the result of an earlier write cannot settle a later one. -1:
    the caller never has two writes of one partition in flight.
    """

    state: LeaderAndIsr
    version: int
    expected_version: int = -1


class IsrWriteFailed(msgspec.Struct, frozen=True, gc=False):
    """The write failed, or its result is unknown because the connection was lost.

    The caller reads the node again and follows with IsrRefused, which has the current state. ``expected_version`` is as
    there.
    """

    expected_version: int = -1


class FollowerConnectionLost(msgspec.Struct, frozen=True, gc=False):
    """The last connection from that follower closed, so it may be dead.

    The leader may shrink the ISR early; it never elects.

    The event is not sent while another connection of the same follower is open. Its long poll there would count as
    silence.
    """

    replica_id: int


class LeaderResponded(msgspec.Struct, frozen=True, gc=False):
    """The leader's response to this follower's fetch from (``leader_epoch``, ``fetch_offset``, ``last_epoch``).

    ``last_epoch`` is the one in the request: when a repeated or late response arrives, the log may have the same end
    again, but another history. -2: unknown, if the caller's connections deliver no response twice or late.
    ``end_offset`` is the log end offset after the append of the ``batch_count`` received batches. It is for traces; -1:
    unknown. ``diverging`` is (epoch, end offset) or None. ``code`` is a wire error code. ``outdated``: the leader has
    the following records, but this log must be copied again as a whole.
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
    """The append ordered by AppendAsFollower is done.

    The log now ends at ``end_offset``. If a batch failed its checks the log is unchanged. ``end_offset`` is then the
    old end, and the next fetch requests the same batches again.
    """

    end_offset: int


class Truncated(msgspec.Struct, frozen=True, gc=False):
    """The log now ends at ``end_offset``, as TruncateLog or RestartLog ordered."""

    end_offset: int


class TruncationFailed(msgspec.Struct, frozen=True, gc=False):
    """The truncation that TruncateLog ordered is not possible now, perhaps for lack of disk space.

    The log is unchanged. Not sent after a RoleChanged, which has already withdrawn the order.
    """


class LogFailed(msgspec.Struct, frozen=True, gc=False):
    """The log directory went offline. This replica can do nothing until the process restarts."""

    detail: str


class LogNamed(msgspec.Struct, frozen=True, gc=False):
    """The log's name is durable (``LogView.named``). If the log is lost, the next start detects it."""


class Ticked(msgspec.Struct, frozen=True, gc=False):
    """Time passed. Sent when ``Replica.deadline_ms`` is reached or later."""


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
