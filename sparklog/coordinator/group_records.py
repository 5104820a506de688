"""Records that a group coordinator writes to its partition of the internal topic and reads back.

Separate records store each offset, each member, the group's epoch, the last offsets that a transaction handed over, and
the partitions with offsets in an open transaction. Each record has all data of its key, so the newest record of each
key is enough.
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
    """The key of a handover. ``key`` is the transaction whose coordinator hands offsets over."""

    version: int
    group: str
    key: str


class CommittedOffset(msgspec.Struct, frozen=True, array_like=True):
    """A committed offset. ``commit_ms`` is in milliseconds since the Unix epoch."""

    version: int
    offset: GroupOffset
    commit_ms: int


class Handover(msgspec.Struct, frozen=True, array_like=True):
    """A handover. ``decision`` is the last one whose offsets were accepted."""

    version: int
    decision: int
    commit_ms: int


class HoldKey(msgspec.Struct, frozen=True, array_like=True, tag="hold"):
    """The key of a hold. ``key`` is the transaction that offsets of the group were sent with."""

    version: int
    group: str
    key: str


class Hold(msgspec.Struct, frozen=True, array_like=True):
    """A member's hold on these partitions (topic, number) until the transaction of ``producer_id`` ends.

    ``member_epoch``: for partitions that the member gets in a later epoch it waits as other members do.
    ``coordinator_epoch`` is the epoch of the coordinator that knew the transaction; an earlier one cannot report its
    end.
    """

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
    """A group's epoch; ``commit_ms`` is the time at which it started."""

    version: int
    epoch: int
    commit_ms: int


class MemberKey(msgspec.Struct, frozen=True, array_like=True, tag="member"):
    version: int
    group: str
    member_id: str


class About(msgspec.Struct, frozen=True, array_like=True):
    """The data that a member reports of itself, as in ``messages.Heartbeat``."""

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
        """Return the part that affects assignments."""
        return self.topics, self.pattern, self.rack


class OwnedTopic(msgspec.Struct, frozen=True, array_like=True):
    """A topic's owned partitions; ``epochs`` are the group epochs in which each was assigned to the member."""

    topic: str
    topic_id: str
    partitions: tuple[int, ...]
    epochs: tuple[int, ...]


class MemberState(msgspec.Struct, frozen=True, array_like=True):
    """A member's state.

    ``epoch`` is the member's, and ``sequence`` the one of its last heartbeat, at the time of this record. ``owned`` are
    the partitions that no other member may have. ``joined`` is the group's epoch when the member joined.
    """

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
    """Return the key and the value. Raises ClusterError for a record of a newer format or an unknown one."""
    return _codec.decode(record)
