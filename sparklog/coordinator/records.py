"""Records that a transaction coordinator writes to its partition of the internal topic and reads back.

There are two kinds of keys: a transaction, and a participant (a producer id) of a transaction. Each participant has its
own record, so that registering the thousandth task of a write takes as many bytes as the first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from sparklog.coordinator.log_records import Record, RecordCodec
from sparklog.protocol.messages import GroupOffset

FORMAT_VERSION = 1

#: The states of a transaction. In "committing" and "aborting" the decision is made, and markers are being sent.
EMPTY, OPEN, COMMITTING, ABORTING = "empty", "open", "committing", "aborting"

#: The ``Transaction.version`` of a producer's transactions, which have no versions.
UNNUMBERED = -1
#: A producer id that no transaction has. Writing its removal changes nothing, but shows that this coordinator can still
#: write to the log.
NO_PRODUCER = -1
#: The number of fenced runs that are kept for a key. A run is one life of a producer or one start of a query. If a run
#: returns after this number of later runs, the coordinator treats it as a new run. The returning run then fences the
#: current run, but cannot commit its own earlier records, because they were aborted.
FENCED_KEPT = 32
#: The first and the last epoch of a Kafka producer's producer id. After the last epoch the producer gets another
#: producer id. An epoch has 16 bits.
FIRST_EPOCH, LAST_EPOCH = 1, 32_700
#: A key with this prefix is used for a single write, and never again.
ONCE_PREFIX = "write:"


class TopicVersion(msgspec.Struct, frozen=True, array_like=True):
    """The greatest number of a sink's transaction (version) that is committed in the topic with this id.

    ``used_ms`` is the time of that commit, in milliseconds since the Unix epoch.
    """

    topic_id: str
    version: int
    used_ms: int


class KafkaProducer(msgspec.Struct, frozen=True, array_like=True):
    """The Kafka producer that has a transactional id: its producer id and epoch.

    One producer id serves many transactions. Its epochs begin at 1 (see ``storage.producers``).
    """

    producer_id: int
    epoch: int
    timeout_ms: int
    #: The producer id and epoch that a request of the same producer has replaced. -1 if the producer was fenced or is
    #: new. A repetition of that request still has them.
    last_producer_id: int = -1
    last_epoch: int = -1
    #: The producer id and epoch of the last transaction that was decided, and whether it was committed.
    decided_producer_id: int = -1
    decided_epoch: int = -1
    committed: bool = False

    def decided(self, *, commit: bool) -> KafkaProducer:
        return msgspec.structs.replace(
            self, decided_producer_id=self.producer_id, decided_epoch=self.epoch, committed=commit
        )

    def raised(self, fresh_id: int = -1) -> KafkaProducer | None:
        """Return the producer with its epoch raised by one, because the producer itself sent a request for that.

        The old id and epoch are kept, so that a repetition of the request is recognized. ``fresh_id`` is an unused
        producer id, which replaces the present one if the epochs are used up. Return None if a fresh id is needed and
        missing.
        """
        producer_id, epoch = self.producer_id, self.epoch + 1
        if self.epoch >= LAST_EPOCH:
            if fresh_id < 0:
                return None
            producer_id, epoch = fresh_id, FIRST_EPOCH
        return msgspec.structs.replace(
            self, producer_id=producer_id, epoch=epoch, last_producer_id=self.producer_id, last_epoch=self.epoch
        )

    def fenced(self) -> KafkaProducer | None:
        """Return the producer with its epoch raised by one, which fences it. Return None if the epochs are used up."""
        found = self.raised()
        return None if found is None else msgspec.structs.replace(found, last_producer_id=-1, last_epoch=-1)

    def is_last(self, producer_id: int, epoch: int) -> bool:
        return epoch >= 0 and (producer_id, epoch) == (self.last_producer_id, self.last_epoch)


class Transaction(msgspec.Struct, frozen=True, array_like=True):
    """The durable state of one transactional key, without the participants of its transaction.

    A transactional key is a producer's transactional id or the name of a sink. Times are milliseconds since the Unix
    epoch.
    """

    state: str = EMPTY
    run_id: str = ""
    run: int = 0  #: the number of runs so far; ``run_id`` is the last one
    version: int = UNNUMBERED  #: the version of the open or ending transaction; -1 for a producer
    last_version: int = UNNUMBERED  #: the greatest committed version
    timeout_ms: int = 0
    began_ms: int = 0
    used_ms: int = 0  #: the time of the last write of the state; the key expires some time later
    decision: int = 0  #: the number of decisions so far, including one in progress
    winners: tuple[int, ...] = ()  #: the producer ids that the current or last decision commits
    decided_run: str = ""  #: the run whose transaction was decided last
    offsets: tuple[tuple[str, tuple[GroupOffset, ...]], ...] = ()  #: the offsets of a commit, by group
    fenced: tuple[str, ...] = ()  #: the ids of fenced runs, the newest last
    turn: int = 0  #: the number of the current or last transaction in its producer's run; 0 for a sink
    producer_id: int = -1  #: the producer's id; -1 for a sink, because each task has its own id
    by_topic: bool = False  #: whether each topic has a last version of its own; ``last_version`` is then -1
    versions: tuple[TopicVersion, ...] = ()  #: the last version of each topic, if ``by_topic``
    kafka: KafkaProducer | None = None  #: the Kafka producer that has the key; None for a producer of sparklog

    @property
    def numbered(self) -> bool:
        return self.version != UNNUMBERED

    @property
    def decided_version(self) -> int:
        """Return the greatest version (number of a sink's transaction) that is decided to be committed.

        The markers of this transaction may not be written yet. Return -1 if each topic has its own last version
        (``by_topic``).
        """
        if self.by_topic:
            return UNNUMBERED
        return max(self.last_version, self.version) if self.state == COMMITTING else self.last_version

    def version_in(self, topic_id: str) -> int:
        """Return the greatest version (number of a sink's transaction) that is committed in the topic with this id.

        For an empty id, return ``decided_version``.
        """
        if not topic_id:
            return self.decided_version
        return max((found.version for found in self.versions if found.topic_id == topic_id), default=UNNUMBERED)

    def versions_used_since(self, at_ms: int) -> tuple[TopicVersion, ...]:
        return tuple(found for found in self.versions if found.used_ms > at_ms)

    def fencing(self, run_id: str) -> tuple[str, ...]:
        """Return the ids of fenced runs with ``run_id`` added, at most the newest ``FENCED_KEPT``.

        A run is one start of a query, or a producer from its start to its end.
        """
        if not run_id or run_id in self.fenced:
            return self.fenced
        return (*self.fenced, run_id)[-FENCED_KEPT:]


class PartitionPlace(NamedTuple):
    """A partition with the id of its topic. A later topic with the same name has another id.

    If the id is unknown, ``topic_id`` is empty.
    """

    topic: str
    partition: int
    topic_id: str = ""


class RegisteredTopic(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    numbers: tuple[int, ...]
    topic_id: str = ""


class Participant(msgspec.Struct, frozen=True, array_like=True):
    """One producer id of a transaction: its epoch, and the partitions to which it may append."""

    epoch: int
    topics: tuple[RegisteredTopic, ...] = ()

    @property
    def place_count(self) -> int:
        return sum(len(found.numbers) for found in self.topics)

    def places(self) -> set[PartitionPlace]:
        return {
            PartitionPlace(found.topic, number, found.topic_id) for found in self.topics for number in found.numbers
        }

    def has(self, place: PartitionPlace) -> bool:
        for found in self.topics:
            if (found.topic, found.topic_id) == (place.topic, place.topic_id):
                at = bisect_left(found.numbers, place.partition)
                return at < len(found.numbers) and found.numbers[at] == place.partition
        return False

    def with_places(self, added: Iterable[PartitionPlace]) -> Participant:
        """Return the participant with these partitions added. If it already has all of them, return the same object."""
        by_topic: dict[tuple[str, str], set[int]] = {}
        for place in added:
            by_topic.setdefault((place.topic, place.topic_id), set()).add(place.partition)
        known = {(found.topic, found.topic_id): found for found in self.topics}
        topics = dict(known)
        for (topic, topic_id), numbers in by_topic.items():
            found = known.get((topic, topic_id))
            if found is None or not numbers.issubset(found.numbers):
                together = numbers.union(found.numbers) if found is not None else numbers
                topics[topic, topic_id] = RegisteredTopic(topic, tuple(sorted(together)), topic_id)
        return self if topics == known else Participant(self.epoch, tuple(topics[name] for name in sorted(topics)))


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
    """Return the key and the value of a record.

    Raises:
        ClusterError: the record has a newer format or an unknown kind.
    """
    key, value = _codec.decode(record)
    if isinstance(key, TransactionKey):
        assert value is None or isinstance(value, _TransactionValue)
        return key, None if value is None else value.transaction
    assert value is None or isinstance(value, _ParticipantValue)
    return key, None if value is None else value.participant
