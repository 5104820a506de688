"""What a transaction coordinator writes into its partition of the internal topic, and reads back.

Two kinds of records, by key: a transaction, and a participant of it. A participant has a record of its own so that the
thousandth task of a write costs as many bytes as the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from sparklog.coordinator.log_records import Record, RecordCodec
from sparklog.protocol.messages import GroupOffset

FORMAT_VERSION = 1

#: States of a transaction. "committing" and "aborting": decided, the markers are on their way.
EMPTY, OPEN, COMMITTING, ABORTING = "empty", "open", "committing", "aborting"

#: ``Transaction.version`` of a producer's transactions, which are not numbered.
UNNUMBERED = -1
#: Takes part in nothing. That it leaves is written to see whether this log can still be written.
NOBODY = -1
#: Fenced runs remembered for each key. One that comes back after so many others is taken for a new one: it fences the
#: present run, but cannot commit what it wrote before, for that was aborted.
FENCED_KEPT = 32
#: Keys that begin so name one write that nobody will ever repeat under this key.
ONCE_PREFIX = "write:"


class TopicVersion(msgspec.Struct, frozen=True, array_like=True):
    """``version``: greatest one committed in the topic with this id; ``used_ms``: when, for who forgets it."""

    topic_id: str
    version: int
    used_ms: int


class Transaction(msgspec.Struct, frozen=True, array_like=True):
    """All that is durable about one key but its participants. Times are milliseconds since the epoch."""

    state: str = EMPTY
    run_id: str = ""
    run: int = 0  #: runs seen so far; ``run_id`` is the last one
    version: int = UNNUMBERED  #: of the transaction that is open or being ended
    last_version: int = UNNUMBERED  #: greatest committed one
    timeout_ms: int = 0
    began_ms: int = 0
    used_ms: int = 0  #: when the key was last written: idle ones are forgotten
    decision: int = 0  #: decisions so far; the present one's number while it is being carried out
    winners: tuple[int, ...] = ()  #: producer ids that the present or last decision committed
    decided_run: str = ""  #: whose decision that was
    offsets: tuple[tuple[str, tuple[GroupOffset, ...]], ...] = ()  #: by group, for when it commits
    fenced: tuple[str, ...] = ()  #: run ids that may do nothing any more, newest last
    turn: int = 0  #: which transaction of its run the present or last one is, of a producer; of a sink 0
    producer_id: int = -1  #: the one that a producer's transaction was begun with; -1: a sink's tasks have their own
    by_topic: bool = False  #: versions count for each topic: in ``versions``, and ``last_version`` stays -1
    versions: tuple[TopicVersion, ...] = ()  #: one for each topic, if ``by_topic``

    @property
    def numbered(self) -> bool:
        return self.version != UNNUMBERED

    @property
    def decided_version(self) -> int:
        """Greatest version whose commit is decided, its markers written or not; by topic there is no such one."""
        if self.by_topic:
            return UNNUMBERED
        return max(self.last_version, self.version) if self.state == COMMITTING else self.last_version

    def version_in(self, topic_id: str) -> int:
        """Greatest version committed; in the topic with this id, if one is given."""
        if not topic_id:
            return self.decided_version
        return max((found.version for found in self.versions if found.topic_id == topic_id), default=UNNUMBERED)

    def versions_used_since(self, at_ms: int) -> tuple[TopicVersion, ...]:
        return tuple(found for found in self.versions if found.used_ms > at_ms)

    def fencing(self, run_id: str) -> tuple[str, ...]:
        """``fenced`` with one more."""
        if not run_id or run_id in self.fenced:
            return self.fenced
        return (*self.fenced, run_id)[-FENCED_KEPT:]


class Place(NamedTuple):
    """A partition of one topic, not of whatever has its name later; ``topic_id`` empty: not known."""

    topic: str
    partition: int
    topic_id: str = ""


class RegisteredTopic(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    numbers: tuple[int, ...]
    topic_id: str = ""


class Participant(msgspec.Struct, frozen=True, array_like=True):
    """One producer id and the partitions it may append to."""

    epoch: int
    topics: tuple[RegisteredTopic, ...] = ()

    def places(self) -> set[Place]:
        return {Place(found.topic, number, found.topic_id) for found in self.topics for number in found.numbers}

    def with_places(self, added: Iterable[Place]) -> Participant:
        by_topic: dict[tuple[str, str], list[int]] = {}
        for place in sorted(self.places().union(added)):
            by_topic.setdefault((place.topic, place.topic_id), []).append(place.partition)
        topics = (RegisteredTopic(topic, tuple(found), topic_id) for (topic, topic_id), found in by_topic.items())
        return Participant(self.epoch, tuple(topics))


class TransactionKey(msgspec.Struct, frozen=True, array_like=True, tag="transaction"):
    version: int
    key: str


class ParticipantKey(msgspec.Struct, frozen=True, array_like=True, tag="participant"):
    version: int
    key: str
    producer_id: int


class _TransactionValue(msgspec.Struct, frozen=True, array_like=True):
    version: int
    transaction: Transaction


class _ParticipantValue(msgspec.Struct, frozen=True, array_like=True):
    version: int
    participant: Participant


Change = tuple[TransactionKey, Transaction | None] | tuple[ParticipantKey, Participant | None]
_Key = TransactionKey | ParticipantKey
_Value = _TransactionValue | _ParticipantValue

_codec: RecordCodec[_Key, _Value] = RecordCodec(
    "transactions", {TransactionKey: _TransactionValue, ParticipantKey: _ParticipantValue}, newest=FORMAT_VERSION
)


def transaction_record(key: str, value: Transaction | None) -> Record:
    found = None if value is None else _TransactionValue(FORMAT_VERSION, value)
    return _codec.encode(TransactionKey(FORMAT_VERSION, key), found)


def participant_record(key: str, producer_id: int, value: Participant | None) -> Record:
    found = None if value is None else _ParticipantValue(FORMAT_VERSION, value)
    return _codec.encode(ParticipantKey(FORMAT_VERSION, key, producer_id), found)


def decode_record(record: Record) -> Change:
    """Raises ClusterError for a record of a newer format, or one that is none of ours."""
    key, value = _codec.decode(record)
    if isinstance(key, TransactionKey):
        assert value is None or isinstance(value, _TransactionValue)
        return key, None if value is None else value.transaction
    assert value is None or isinstance(value, _ParticipantValue)
    return key, None if value is None else value.participant
