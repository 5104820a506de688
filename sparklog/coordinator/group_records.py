"""Records that a group coordinator writes to its partition of the internal topic and reads back.

Each offset, each member and the group's epoch has its own record. For each transactional key, one record names the last
transaction whose offsets the group has committed (``Handover``), and another one protects the offsets that an open
transaction may still commit (``Hold``). A record has all data of its key, so the newest record of each key is enough.
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
    """The key of a ``Handover`` record. ``key`` is the transactional key."""

    version: int
    group: str
    key: str


class CommittedOffset(msgspec.Struct, frozen=True, array_like=True):
    """The record of a committed offset. ``commit_ms`` is in milliseconds since the Unix epoch."""

    version: int
    offset: GroupOffset
    commit_ms: int


class Handover(msgspec.Struct, frozen=True, array_like=True):
    """The record that the group has committed offsets that a transaction coordinator sent for a committed transaction.

    There is one record per transactional key, for the last such transaction. ``decision`` is the number of the
    coordinator's decision to commit the transaction. ``commit_ms`` is in milliseconds since the Unix epoch.
    """

    version: int
    decision: int
    commit_ms: int


class HoldKey(msgspec.Struct, frozen=True, array_like=True, tag="hold"):
    """The key of the record that stores which offsets of a group are held for an open transaction (``Hold``).

    ``key`` is the key of the transaction with which the offsets are sent.
    """

    version: int
    group: str
    key: str


class Hold(msgspec.Struct, frozen=True, array_like=True):
    """A hold: until a transaction ends, only the member that takes part in it may fetch certain offsets of the group.

    The offsets are those of ``partitions`` (pairs of topic and number). The member ``member_id`` sends them with the
    transaction of ``producer_id``. If the member loses one of the partitions and gets it again in an epoch after
    ``member_epoch``, it must wait for the end of the transaction like every other member.

    ``coordinator_epoch`` is the leader epoch of the transaction's coordinator when the hold began. A coordinator with
    an earlier leader epoch must not report the end of the transaction, because it may not know the transaction.
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


class ClassicMemberState(msgspec.Struct, frozen=True, array_like=True):
    """A member of a classic group in the group's record.

    ``metadata`` is the member's metadata for the group's protocol.
    """

    member_id: str
    instance_id: str
    client_id: str
    host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    metadata: bytes
    assignment: bytes


class ClassicState(msgspec.Struct, frozen=True, array_like=True):
    """The members of a classic group in one generation, with their assignments."""

    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""
    members: tuple[ClassicMemberState, ...] = ()


class GroupEpoch(msgspec.Struct, frozen=True, array_like=True):
    """The record of a group's epoch. ``commit_ms`` is the time at which the epoch started.

    A classic group has ``classic``, and its epoch is the generation. So the last record of this key also decides the
    group's protocol. Releases before the Kafka listener ignore ``classic``: they see a group without members.
    """

    version: int
    epoch: int
    commit_ms: int
    classic: ClassicState | None = None


class MemberKey(msgspec.Struct, frozen=True, array_like=True, tag="member"):
    version: int
    group: str
    member_id: str


class About(msgspec.Struct, frozen=True, array_like=True):
    """The data that a member reports about itself. The fields have the same meaning as in ``messages.Heartbeat``."""

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
        """Return the fields that affect which partitions the member gets."""
        return self.topics, self.pattern, self.rack


class OwnedTopic(msgspec.Struct, frozen=True, array_like=True):
    """The partitions of one topic that a member owns.

    ``epochs`` has the group epoch in which each partition was assigned.
    """

    topic: str
    topic_id: str
    partitions: tuple[int, ...]
    epochs: tuple[int, ...]


class MemberState(msgspec.Struct, frozen=True, array_like=True):
    """The record of a group member's state.

    ``epoch`` is the member's epoch, and ``sequence`` the sequence number of its last heartbeat, at the time of this
    record. No other member may have the partitions in ``owned``. ``joined`` is the group's epoch when the member
    joined.
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
    """Return the key and the value of a record.

    Raises:
        ClusterError: the record has a newer format or an unknown kind.
    """
    return _codec.decode(record)
