"""What a transaction coordinator writes into its partition of the internal topic, and reads back.

Two kinds of records, by key: a transaction, and a participant of it. A participant has a record of its own so that the
thousandth task of a write costs as many bytes as the first. The last record of a key counts; a null value ends it.
Keys and values are MessagePack arrays that begin with a format version; a newer one is refused by name.
"""

from __future__ import annotations

import msgspec

from sparklog.errors import ClusterError
from sparklog.protocol.messages import GroupOffset

FORMAT_VERSION = 1

#: States of a transaction. "committing" and "aborting": decided, the markers are on their way.
EMPTY, OPEN, COMMITTING, ABORTING = "empty", "open", "committing", "aborting"

#: ``Transaction.version`` of a producer's transactions, which are not numbered.
UNNUMBERED = -1
#: Fenced runs remembered for each key. One that comes back after so many others is taken for a new one: it fences the
#: present run, but cannot commit what it wrote before, for that was aborted.
FENCED_KEPT = 32
#: Keys that begin so name one write that nobody will ever repeat under this key.
ONCE_PREFIX = "write:"


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

    @property
    def numbered(self) -> bool:
        return self.version != UNNUMBERED

    @property
    def decided_version(self) -> int:
        """Greatest version whose commit is decided, its markers written or not."""
        return max(self.last_version, self.version) if self.state == COMMITTING else self.last_version

    def fencing(self, run_id: str) -> tuple[str, ...]:
        """``fenced`` with one more."""
        if not run_id or run_id in self.fenced:
            return self.fenced
        return (*self.fenced, run_id)[-FENCED_KEPT:]


class Participant(msgspec.Struct, frozen=True, array_like=True):
    """One producer id and the partitions it may append to."""

    epoch: int
    partitions: tuple[tuple[str, tuple[int, ...]], ...] = ()  #: by topic

    def all_partitions(self) -> set[tuple[str, int]]:
        return {(topic, number) for topic, numbers in self.partitions for number in numbers}

    def with_partitions(self, added: set[tuple[str, int]]) -> Participant:
        by_topic: dict[str, list[int]] = {}
        for topic, number in sorted(self.all_partitions() | added):
            by_topic.setdefault(topic, []).append(number)
        return Participant(self.epoch, tuple((topic, tuple(numbers)) for topic, numbers in by_topic.items()))


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


#: (key, value) as they stand in the internal topic; value None: forget it.
Record = tuple[bytes, bytes | None]
Change = tuple[TransactionKey, Transaction | None] | tuple[ParticipantKey, Participant | None]

_encode = msgspec.msgpack.Encoder().encode
_decode_key = msgspec.msgpack.Decoder(TransactionKey | ParticipantKey).decode
_decode_transaction = msgspec.msgpack.Decoder(_TransactionValue).decode
_decode_participant = msgspec.msgpack.Decoder(_ParticipantValue).decode


def transaction_record(key: str, value: Transaction | None) -> Record:
    encoded = None if value is None else _encode(_TransactionValue(FORMAT_VERSION, value))
    return _encode(TransactionKey(FORMAT_VERSION, key)), encoded


def participant_record(key: str, producer_id: int, value: Participant | None) -> Record:
    encoded = None if value is None else _encode(_ParticipantValue(FORMAT_VERSION, value))
    return _encode(ParticipantKey(FORMAT_VERSION, key, producer_id)), encoded


def decode_record(record: Record) -> Change:
    """Raises ClusterError for a record of a newer format, or one that is none of ours."""
    key_bytes, value = record
    try:
        key = _decode_key(key_bytes)
        _check_version(key.version)
        if isinstance(key, TransactionKey):
            if value is None:
                return key, None
            found = _decode_transaction(value)
            _check_version(found.version)
            return key, found.transaction
        if value is None:
            return key, None
        joined = _decode_participant(value)
        _check_version(joined.version)
        return key, joined.participant
    except msgspec.MsgspecError as error:
        raise ClusterError(f"a record of the transactions' topic cannot be read: {error}: {key_bytes[:80]!r}") from None


def _check_version(version: int) -> None:
    if version > FORMAT_VERSION:
        raise ClusterError(
            f"a record of the transactions' topic has format version {version}; this sparklog reads up to "
            f"{FORMAT_VERSION}: upgrade it"
        )
