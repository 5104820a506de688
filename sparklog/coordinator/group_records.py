"""What a group coordinator writes into its partition of the internal topic, and reads back.

An offset has a record of its own, and so has what was last handed over by a transaction.
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


GroupKey = OffsetKey | HandoverKey
GroupValue = CommittedOffset | Handover

_codec: RecordCodec[GroupKey, GroupValue] = RecordCodec(
    "groups", {OffsetKey: CommittedOffset, HandoverKey: Handover}, newest=FORMAT_VERSION
)


def group_record(key: GroupKey, value: GroupValue | None) -> Record:
    return _codec.encode(key, value)


def decode_group_record(record: Record) -> tuple[GroupKey, GroupValue | None]:
    """Raises ClusterError for a record of a newer format, or one that is none of ours."""
    return _codec.decode(record)
