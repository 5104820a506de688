"""What can happen to one replica of one partition: facts, in the past tense.

The performer (the broker process, or the simulator) hands them to ``Replica.step(event, now_ms)`` one at a time and
carries out the returned effects in order before it hands over the next event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparklog.model import LeaderAndIsr


@dataclass(frozen=True, slots=True)
class Decided:
    """A newer state of the partition became known: from the controller, or read from ZooKeeper.

    Older or equal ``version``s are ignored. ``incarnations`` are the live brokers' current ones, broker id to
    incarnation; ``min_isr`` is min.insync.replicas of the topic.
    """

    state: LeaderAndIsr
    version: int
    replicas: tuple[int, ...]
    incarnations: Mapping[int, int]
    min_isr: int


@dataclass(frozen=True, slots=True)
class BrokersChanged:
    """Brokers came, went or re-registered: id to incarnation of all that are live."""

    incarnations: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class ProduceArrived:
    """A checked produce for this partition is waiting under ``ticket``; acks is 0, 1 or -1 (all)."""

    ticket: int
    acks: int
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class LeaderAppended:
    """The append ordered for ``ticket`` is in the log: records ``[base_offset, end_offset)``.

    A duplicate of an earlier batch reports that batch's offsets; ``end_offset`` may then lie below the log end.
    """

    ticket: int
    base_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class LeaderAppendFailed:
    """The append ordered for ``ticket`` did not happen; nothing of it is in the log."""

    ticket: int


@dataclass(frozen=True, slots=True)
class FollowerFetched:
    """A follower asked for records from ``offset`` on: everything below is on its log.

    ``last_epoch`` is the leader epoch of its last batch, -1 for an empty log.
    """

    replica_id: int
    incarnation: int
    leader_epoch: int
    offset: int
    last_epoch: int


@dataclass(frozen=True, slots=True)
class IsrWritten:
    """The WriteIsr with this ``isr`` is durable; the node now has ``version``."""

    isr: tuple[int, ...]
    version: int


@dataclass(frozen=True, slots=True)
class IsrRefused:
    """The compare-and-set lost; this is what ZooKeeper holds now (Decided's fields apply)."""

    state: LeaderAndIsr
    version: int


@dataclass(frozen=True, slots=True)
class IsrWriteFailed:
    """The write did not get through, or its fate is unknown (connection lost): the performer will re-read the node
    and follow with IsrRefused, which carries whatever is true then."""


@dataclass(frozen=True, slots=True)
class FollowerConnectionLost:
    """The connection from that follower closed: it may be dead. The leader may shrink early; it never elects."""

    replica_id: int


@dataclass(frozen=True, slots=True)
class LeaderAnswered:
    """The leader answered this follower's fetch made at (``leader_epoch``, ``fetch_offset``).

    ``end_offset`` is where the log will end after appending the ``batch_count`` batches that came. ``diverging`` is
    (epoch, end offset) or None. ``code`` is a wire error code.
    """

    leader_epoch: int
    fetch_offset: int
    code: int
    high_watermark: int
    log_start_offset: int
    log_end_offset: int
    diverging: tuple[int, int] | None
    batch_count: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class FollowerAppended:
    """The append ordered by AppendAsFollower is in the log, which now ends at ``end_offset``."""

    end_offset: int


@dataclass(frozen=True, slots=True)
class Truncated:
    """The log now ends at ``end_offset``, as TruncateLog or RestartLog ordered."""

    end_offset: int


@dataclass(frozen=True, slots=True)
class LogFailed:
    """The log directory went offline; this replica can do nothing until the process is restarted."""

    detail: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed; sent when ``Replica.deadline_ms`` is reached or later."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The replica is not this broker's any more, or the broker stops."""


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
    | LeaderAnswered
    | FollowerAppended
    | Truncated
    | LogFailed
    | Ticked
    | Stopped
)
