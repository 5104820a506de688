"""What a group coordinator writes into its partition of the internal topic, and reads back.

An offset has a record of its own, and so have each member, the group's epoch, what was last handed over by a
transaction, and the partitions whose offsets an open one was sent. Each record says all about its key: the newest of
each is enough.
"""

from __future__ import annotations

import msgspec

from sparklog.coordinator.log_records import Record, RecordCodec
from sparklog.protocol.messages import GroupOffset

FORMAT_VERSION = 1


class OffsetKey(msgspec.Struct, frozen=True, array_like=True, tag="offset"):
    version: int
    group: str
    topic: str
    partition: int


class HandoverKey(msgspec.Struct, frozen=True, array_like=True, tag="handover"):
    """``key``: of the transaction whose coordinator hands offsets over."""

    version: int
    group: str
    key: str


class CommittedOffset(msgspec.Struct, frozen=True, array_like=True):
    """``commit_ms``: when, in milliseconds since the epoch."""

    version: int
    offset: GroupOffset
    commit_ms: int


class Handover(msgspec.Struct, frozen=True, array_like=True):
    """``decision``: the last one whose offsets were taken."""

    version: int
    decision: int
    commit_ms: int


class HoldKey(msgspec.Struct, frozen=True, array_like=True, tag="hold"):
    """``key``: of the transaction that offsets of the group were sent with."""

    version: int
    group: str
    key: str


class Hold(msgspec.Struct, frozen=True, array_like=True):
    """A member's, of these partitions (topic, number), until the transaction that ``producer_id`` takes part in has
    ended. ``member_epoch``: what the member is given later it waits for as others do. ``coordinator_epoch``: of the
    coordinator that knew the transaction: an earlier one cannot say that it has ended."""

    version: int
    member_id: str
    member_epoch: int
    producer_id: int
    coordinator_epoch: int
    partitions: tuple[tuple[str, int], ...]
    commit_ms: int


class EpochKey(msgspec.Struct, frozen=True, array_like=True, tag="epoch"):
    version: int
    group: str


class GroupEpoch(msgspec.Struct, frozen=True, array_like=True):
    """``commit_ms``: when it became so."""

    version: int
    epoch: int
    commit_ms: int


class MemberKey(msgspec.Struct, frozen=True, array_like=True, tag="member"):
    version: int
    group: str
    member_id: str


class About(msgspec.Struct, frozen=True, array_like=True):
    """What a member says of itself; as in ``messages.Heartbeat``."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    rack: str = ""
    instance_id: str = ""
    session_timeout_ms: int = 45_000
    rebalance_timeout_ms: int = 300_000
    heartbeat_interval_ms: int = 3000
    client_id: str = ""
    host: str = ""

    @property
    def subscription(self) -> tuple[tuple[str, ...], str, str]:
        """What decides on assignments."""
        return self.topics, self.pattern, self.rack


class OwnedTopic(msgspec.Struct, frozen=True, array_like=True):
    """``epochs``: of the group when each partition was given to the member."""

    topic: str
    topic_id: str
    partitions: tuple[int, ...]
    epochs: tuple[int, ...]


class MemberState(msgspec.Struct, frozen=True, array_like=True):
    """``epoch`` of the member, and ``sequence`` of its last heartbeat, when this was written; ``owned``: what nobody
    else may have; ``joined``: the group's epoch when it came."""

    version: int
    about: About
    epoch: int
    owned: tuple[OwnedTopic, ...] = ()
    sequence: int = -1
    joined: int = 0


GroupKey = OffsetKey | HandoverKey | HoldKey | EpochKey | MemberKey
GroupValue = CommittedOffset | Handover | Hold | GroupEpoch | MemberState

_codec: RecordCodec[GroupKey, GroupValue] = RecordCodec(
    "groups",
    {OffsetKey: CommittedOffset, HandoverKey: Handover, HoldKey: Hold, EpochKey: GroupEpoch, MemberKey: MemberState},
    newest=FORMAT_VERSION,
)


def group_record(key: GroupKey, value: GroupValue | None) -> Record:
    return _codec.encode(key, value)


def decode_group_record(record: Record) -> tuple[GroupKey, GroupValue | None]:
    """Raises ClusterError for a record of a newer format, or one that is none of ours."""
    return _codec.decode(record)
