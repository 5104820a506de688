"""What can happen to one replica of one partition: facts, in the past tense.

The performer (the broker process, or the simulator) hands them to ``Replica.step(event, now_ms)`` one at a time and
carries out the returned effects in order before it hands over the next event.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sparklog.model import LeaderAndIsr


class Decided(msgspec.Struct, frozen=True, gc=False):
    """A newer state of the partition became known: from the controller, or read from ZooKeeper.

    Older ``version``s are ignored; an equal one renews only what the node does not hold (everything but ``state``).
    ``incarnations`` are the live brokers' current ones, broker id to incarnation; ``min_isr`` is min.insync.replicas
    of the topic. Brokers in ``stopping`` are on their way out and are not added to an ISR. Replicas in ``leaving`` are
    to be taken out of the ISR: the partition moves, and whoever stays is in sync at this ``version``. ``factor`` is
    the replication factor that min_isr is measured against while the partition moves; 0: the number of replicas.
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
    """Brokers came, went or re-registered: id to incarnation of all that are live; ``stopping`` as in Decided.

    A map that does not name the replica's own broker is too old to judge others by: nobody is taken for dead then.
    """

    incarnations: Mapping[int, int]
    stopping: frozenset[int] = frozenset()


class ProduceArrived(msgspec.Struct, frozen=True, gc=False):
    """A checked produce for this partition is waiting under ``ticket``; acks is 0, 1 or -1 (all)."""

    ticket: int
    acks: int
    deadline_ms: int


class LeaderAppended(msgspec.Struct, frozen=True, gc=False):
    """The append ordered for ``ticket`` is in the log: records ``[base_offset, end_offset)``.

    A duplicate of an earlier batch reports that batch's offsets; ``end_offset`` may then lie below the log end.
    """

    ticket: int
    base_offset: int
    end_offset: int


class AppendedAtOnce(msgspec.Struct, frozen=True, gc=False):
    """A produce that nobody ordered to be appended is in the log: ProduceArrived, and LeaderAppended, in one.

    Only where ``Replica.append_epoch`` had said, in the same turn and with nothing between, which epoch to append it
    with: what AppendAsLeader would have said.
    """

    ticket: int
    acks: int
    deadline_ms: int
    base_offset: int
    end_offset: int


class LeaderAppendFailed(msgspec.Struct, frozen=True, gc=False):
    """The append ordered for ``ticket`` did not happen; nothing of it is in the log.

    The performer knows why and answers the client itself: no AnswerProduce follows.
    """

    ticket: int


class FollowerFetched(msgspec.Struct, frozen=True, gc=False):
    """A follower asked for records from ``offset`` on: everything below is on its log.

    ``last_epoch`` is the leader epoch of its last batch, -1 for an empty log. ``refuses``: it holds committed records
    that this leader has said it lacks, and does not cut them.
    """

    replica_id: int
    incarnation: int
    leader_epoch: int
    offset: int
    last_epoch: int
    refuses: bool = False


class IsrWritten(msgspec.Struct, frozen=True, gc=False):
    """The WriteIsr with this ``isr`` is durable; the node now has ``version``."""

    isr: tuple[int, ...]
    version: int


class IsrRefused(msgspec.Struct, frozen=True, gc=False):
    """The compare-and-set lost; this is what ZooKeeper holds now (Decided's fields apply).

    ``expected_version`` echoes the WriteIsr's, so that the answer to an outlived write cannot settle a later one;
    -1: the performer never has two writes of one partition under way.
    """

    state: LeaderAndIsr
    version: int
    expected_version: int = -1


class IsrWriteFailed(msgspec.Struct, frozen=True, gc=False):
    """The write did not get through, or its fate is unknown (connection lost): the performer will re-read the node
    and follow with IsrRefused, which carries whatever is true then. ``expected_version`` as there."""

    expected_version: int = -1


class FollowerConnectionLost(msgspec.Struct, frozen=True, gc=False):
    """The last connection from that follower closed: it may be dead. The leader may shrink early; it never elects.

    Not sent while another connection of the same follower is open, or its long poll there would look like silence.
    """

    replica_id: int


class LeaderAnswered(msgspec.Struct, frozen=True, gc=False):
    """The leader answered this follower's fetch made at (``leader_epoch``, ``fetch_offset``, ``last_epoch``).

    ``last_epoch`` is what the fetch named as such: a doubled or late answer may find the log at the same end again,
    yet with another history; -2: not told, for a performer whose connections bring no answer twice or late.
    ``end_offset`` is where the log will end after appending the ``batch_count`` batches that came: for traces, -1: not
    told. ``diverging`` is (epoch, end offset) or None. ``code`` is a wire error code. ``outdated``: the leader has what
    follows, and this log is to be copied again as a whole.
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
    """The append ordered by AppendAsFollower is done; the log now ends at ``end_offset``.

    A batch that failed its checks leaves the log as it was: then this names the unchanged end, and the next fetch
    asks for the same again.
    """

    end_offset: int


class Truncated(msgspec.Struct, frozen=True, gc=False):
    """The log now ends at ``end_offset``, as TruncateLog or RestartLog ordered."""

    end_offset: int


class TruncationFailed(msgspec.Struct, frozen=True, gc=False):
    """What TruncateLog ordered cannot be done for now, for want of room perhaps: the log is as it was. Not after a
    RoleChanged, which has that forgotten already."""


class LogFailed(msgspec.Struct, frozen=True, gc=False):
    """The log directory went offline; this replica can do nothing until the process is restarted."""

    detail: str


class LogNamed(msgspec.Struct, frozen=True, gc=False):
    """The log's name is durable (``LogView.named``): were the log lost, the next start would know."""


class Ticked(msgspec.Struct, frozen=True, gc=False):
    """Time passed; sent when ``Replica.deadline_ms`` is reached or later."""


class Stopped(msgspec.Struct, frozen=True, gc=False):
    """The replica is not this broker's any more, or the broker stops."""


Event = (
    Decided
    | BrokersChanged
    | ProduceArrived
    | LeaderAppended
    | AppendedAtOnce
    | LeaderAppendFailed
    | FollowerFetched
    | IsrWritten
    | IsrRefused
    | IsrWriteFailed
    | FollowerConnectionLost
    | LeaderAnswered
    | FollowerAppended
    | Truncated
    | TruncationFailed
    | LogFailed
    | LogNamed
    | Ticked
    | Stopped
)
