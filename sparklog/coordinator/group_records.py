"""What a group coordinator writes into its partition of the internal topic, and reads back.

An offset has a record of its own, and so has what was last handed over by a transaction. The last record of a key
counts; a null value ends it. Keys and values are MessagePack arrays that begin with a format version; a newer one is
refused by name.
"""

from __future__ import annotations

import msgspec

from sparklog.coordinator.records import Record
from sparklog.errors import ClusterError
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

_encode = msgspec.msgpack.Encoder().encode
_decode_key = msgspec.msgpack.Decoder(GroupKey).decode
_decode_offset = msgspec.msgpack.Decoder(CommittedOffset).decode
_decode_handover = msgspec.msgpack.Decoder(Handover).decode


def group_record(key: GroupKey, value: GroupValue | None) -> Record:
    return _encode(key), None if value is None else _encode(value)


def decode_group_record(record: Record) -> tuple[GroupKey, GroupValue | None]:
    """Raises ClusterError for a record of a newer format, or one that is none of ours."""
    key_bytes, value_bytes = record
    try:
        key = _decode_key(key_bytes)
        _check_version(key.version)
        if value_bytes is None:
            return key, None
        value = _decode_offset(value_bytes) if isinstance(key, OffsetKey) else _decode_handover(value_bytes)
        _check_version(value.version)
        return key, value
    except msgspec.MsgspecError as error:
        raise ClusterError(f"a record of the groups' topic cannot be read: {error}: {key_bytes[:80]!r}") from None


def _check_version(version: int) -> None:
    if version > FORMAT_VERSION:
        raise ClusterError(
            f"a record of the groups' topic has format version {version}; this sparklog reads up to "
            f"{FORMAT_VERSION}: upgrade it"
        )
