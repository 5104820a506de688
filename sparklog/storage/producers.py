"""The producers of one log and their last batches, with which the leader recognizes a retried batch as a duplicate.

This module is pure. A leader calls ``known`` before it appends. Leader and follower call ``record`` for every appended
batch. For each producer id the table has the newest producer epoch and the last five batches of this epoch, because a
producer has at most five batches in flight. Entries are immutable, so a copy of the table is a shallow copy. Source:
KIP-98, KIP-360.

``ProducerTable.transactions`` has the log's transactions. The transactions are derived from the same batches and stored
in the same snapshots. The id of a transactional producer of sparklog has epoch 0 and is used for one transaction only.
The marker of the transaction removes the id from the table. The id of a transactional Kafka producer has an epoch from
1 on and is used for many transactions. The id stays in the table after a marker, so that a retry of a batch before the
marker is still a duplicate.

The first batch of an unknown producer id must have sequence 0. Otherwise, if the first of two pipelined batches were
refused, the second would be accepted, and the records of the first could never be appended. Kafka accepts any sequence
from an unknown producer id. Kafka's clients rely on this, because they use their ids for longer than this table keeps
the entries. So the batches of Kafka clients may begin at any sequence. If the first of two pipelined batches of such a
client was refused, the retry of this batch gets OUT_OF_ORDER_SEQUENCE_NUMBER, and the client sends its records again in
a new epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_PRODUCER, OffsetRange, TopicPartition
from sparklog.record.header import BatchHeader
from sparklog.record.marker import Marker
from sparklog.storage.producer_count import ProducerCount
from sparklog.storage.transactions import EndedTransaction, OpenTransaction, TransactionState, TransactionTable

KEPT_BATCHES = 5
#: The epoch of producer ids that serve one transaction only.
ONE_TRANSACTION = 0
_SEQUENCES = 2**31

SNAPSHOT_SUFFIX = ".producers"


class AppendedBatch(NamedTuple):
    """The sequences and offsets of one batch of a producer.

    ``last_sequence`` is inclusive, ``end_offset`` is exclusive.
    """

    first_sequence: int
    last_sequence: int
    base_offset: int
    end_offset: int


class ProducerEntry(NamedTuple):
    """The state of one producer id: its newest epoch and its last batches.

    ``batches`` are the last five batches of ``epoch`` (or fewer), oldest first.
    """

    epoch: int
    batches: tuple[AppendedBatch, ...]
    last_append_us: int


class ProducerSnapshot(msgspec.Struct, frozen=True):
    """The content of a snapshot file: the producers and transactions of a log when it ended at ``end_offset``.

    An entry has the producer id, the epoch, the time of the last append in microseconds, and the batches with the
    fields of ``AppendedBatch``. An ``open`` transaction has the producer id, the epoch and the first offset.
    ``aborted`` and ``recent`` have the fields of ``EndedTransaction``, see ``TransactionState``. Version 2 added the
    transactions.
    """

    end_offset: int
    entries: tuple[tuple[int, int, int, tuple[tuple[int, int, int, int], ...]], ...]
    version: int = 2
    open: tuple[tuple[int, int, int], ...] = ()
    aborted: tuple[tuple[int, int, int], ...] = ()
    recent: tuple[tuple[int, int, int], ...] = ()


ProducerEntries = Mapping[int, ProducerEntry]


class ProducerState(NamedTuple):
    """A copy of a ``ProducerTable`` that later appends do not change."""

    entries: ProducerEntries
    transactions: TransactionState


def check_sequence(
    entry: ProducerEntry | None, header: BatchHeader, *, begins_anywhere: bool = False
) -> OffsetRange | None:
    """Check the sequence of one batch of an idempotent producer.

    With ``begins_anywhere`` the first batch of an unknown producer id may have any sequence.

    Returns:
        None if the sequence is the next one. If the batch is an exact duplicate of one of the last five batches, the
        offset range of that batch.

    Raises:
        BrokerError: INVALID_PRODUCER_EPOCH, OUT_OF_ORDER_SEQUENCE_NUMBER or, for a duplicate older than the last five
            batches, DUPLICATE_SEQUENCE_NUMBER.
    """
    first, epoch = header.first_sequence, header.producer_epoch
    if entry is not None and epoch < entry.epoch:
        raise BrokerError(
            ErrorCode.INVALID_PRODUCER_EPOCH,
            f"producer {header.producer_id}: epoch {epoch} found, {entry.epoch} is the newest",
        )
    if entry is None or epoch > entry.epoch or not entry.batches:
        if first != 0 and not (begins_anywhere and entry is None):
            what = "unknown here" if entry is None else f"in its new epoch {epoch}"
            raise BrokerError(
                ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                f"producer {header.producer_id}, {what}: sequence {first} found, 0 expected",
            )
        return None
    expected = (entry.batches[-1].last_sequence + 1) % _SEQUENCES
    if first == expected:  # This is no duplicate, because five batches have fewer records than there are sequences.
        return None
    last = _last_sequence(header)
    for batch in reversed(entry.batches):
        if batch.first_sequence == first and batch.last_sequence == last:
            return OffsetRange(batch.base_offset, batch.end_offset)
    is_older = (expected - 1 - last) % _SEQUENCES < _SEQUENCES // 2
    if is_older and not (begins_anywhere and _is_before_first(entry, last)):
        raise BrokerError(
            ErrorCode.DUPLICATE_SEQUENCE_NUMBER,
            f"producer {header.producer_id}: sequences {first} to {last} are older than the last five batches, "
            f"{expected} expected",
        )
    raise BrokerError(
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        f"producer {header.producer_id}: sequence {first} found, {expected} expected",
    )


def _is_before_first(entry: ProducerEntry, last: int) -> bool:
    """Return whether a batch that ends at sequence ``last`` is older than the first batch of the entry's epoch.

    Then the batch is not in the log: the producer began at a later sequence. This is unknown if the entry has five
    batches, because it may have had earlier ones.
    """
    begun = entry.batches[0].first_sequence
    return begun > 0 and len(entry.batches) < KEPT_BATCHES and (begun - 1 - last) % _SEQUENCES < _SEQUENCES // 2


def with_batch(entry: ProducerEntry | None, header: BatchHeader) -> ProducerEntry:
    """Return the producer's entry after the append of a batch. ``header`` has the batch's final offsets."""
    return _with_appended(entry, header, header.base_offset, header.append_time)


def _with_appended(
    entry: ProducerEntry | None, header: BatchHeader, base_offset: int, append_time: int
) -> ProducerEntry:
    first, span = header.first_sequence, header.offset_span
    # Built as the classes do it, but without a Python call, because this runs for every batch.
    batch = tuple.__new__(AppendedBatch, (first, (first + span - 1) % _SEQUENCES, base_offset, base_offset + span))
    if entry is None or header.producer_epoch > entry.epoch:
        return ProducerEntry(header.producer_epoch, (batch,), append_time)
    batches = (*entry.batches[1 - KEPT_BATCHES :], batch)
    return tuple.__new__(ProducerEntry, (entry.epoch, batches, append_time))


class ProducerTable:
    """A table of the producers of one log, which recognizes retried batches. It does no I/O."""

    def __init__(self, entries: ProducerEntries | None = None, transactions: TransactionState | None = None) -> None:
        self._entries: dict[int, ProducerEntry] = dict(entries or {})
        #: The count of all logs of the directory. None: no count is kept.
        self._count: ProducerCount | None = None
        self.transactions = TransactionTable(transactions)

    def __len__(self) -> int:
        return len(self._entries)

    def count_in(self, count: ProducerCount | None) -> None:
        """Count this table's producer ids in ``count`` from now on, and no longer in the earlier counter."""
        if self._count is not None:
            self._count.add(-len(self._entries))
        self._count = count
        if count is not None:
            count.add(len(self._entries))

    def _changed(self, before: int) -> None:
        """Update the count after a change of the table, which had ``before`` ids."""
        if self._count is not None:
            self._count.add(len(self._entries) - before)

    def get(self, producer_id: int) -> ProducerEntry | None:
        return self._entries.get(producer_id)

    def append_time_us(self, producer_id: int, base_offset: int) -> int:
        """Return the time of the append of the producer's batch at ``base_offset``, in microseconds since 1970.

        The result is -1 unless the batch is the newest one of the producer, because an entry keeps only this time.
        """
        entry = self._entries.get(producer_id)
        newest = entry is not None and entry.batches and entry.batches[-1].base_offset == base_offset
        return entry.last_append_us if entry is not None and newest else -1

    def entries(self) -> Iterable[ProducerEntry]:
        return self._entries.values()

    def known(
        self, batches: Sequence[tuple[BatchHeader, object]], tp: TopicPartition, *, begins_anywhere: bool = False
    ) -> list[OffsetRange]:
        """Return the offset ranges of the batches that are already in the log, because the producer has retried them.

        These are the first batches of ``batches``, because a retry begins with the oldest batch. ``tp`` is for error
        messages. With ``begins_anywhere`` the first batch of an unknown producer id may have any sequence.

        Raises:
            BrokerError: INVALID_PRODUCER_EPOCH, OUT_OF_ORDER_SEQUENCE_NUMBER or DUPLICATE_SEQUENCE_NUMBER, see
                ``check_sequence``; INVALID_REQUEST if a known batch follows a new one; THROTTLING_QUOTA_EXCEEDED for a
                new producer id if there is no room for it.
        """
        if len(batches) == 1:
            earlier = self._earlier(batches[0][0], begins_anywhere=begins_anywhere)
            return [] if earlier is None else [earlier]
        return self._known_of_several(batches, tp, begins_anywhere=begins_anywhere)

    def _earlier(self, header: BatchHeader, *, begins_anywhere: bool) -> OffsetRange | None:
        producer_id, first = header.producer_id, header.first_sequence
        if producer_id < 0 or first < 0:
            return None
        entry = self._entries.get(producer_id)
        if entry is not None and entry.epoch == header.producer_epoch and entry.batches:
            next_in_line = (entry.batches[-1].last_sequence + 1) % _SEQUENCES
            if first == next_in_line:  # the usual case
                return None
        earlier = check_sequence(entry, header, begins_anywhere=begins_anywhere)
        if entry is None and self._count is not None:
            self._count.require_room()
        return earlier

    def _known_of_several(
        self, batches: Sequence[tuple[BatchHeader, object]], tp: TopicPartition, *, begins_anywhere: bool = False
    ) -> list[OffsetRange]:
        """Check each batch as if the batches before it were in the log."""
        known: list[OffsetRange] = []
        staged: dict[int, ProducerEntry] = {}
        for number, (header, _) in enumerate(batches):
            producer_id = header.producer_id
            if producer_id < 0 or header.first_sequence < 0:
                continue
            entry = staged.get(producer_id) or self._entries.get(producer_id)
            earlier = check_sequence(entry, header, begins_anywhere=begins_anywhere)
            if entry is None and self._count is not None:
                self._count.require_room()
            if earlier is None:
                staged[producer_id] = with_batch(entry, header)
            elif len(known) < number:
                raise BrokerError(
                    ErrorCode.INVALID_REQUEST,
                    f"{tp}: a known batch of producer {producer_id} follows a new one in one request",
                )
            else:
                known.append(earlier)
        return known

    def record(self, header: BatchHeader, marker: Marker | None = None) -> None:
        """Record an appended batch. ``marker`` is the content of a control batch, and None for any other batch."""
        producer_id, entries = header.producer_id, self._entries
        if marker is not None:
            before = len(entries)
            self.transactions.ended(header, marker)
            for ended_id, epoch in (*marker.committed, *marker.aborted):
                if epoch <= ONE_TRANSACTION:
                    entries.pop(ended_id, None)
            self._changed(before)
        elif producer_id != NO_PRODUCER and header.first_sequence >= 0:
            entry = entries.get(producer_id)
            entries[producer_id] = with_batch(entry, header)
            self.transactions.appended(header)
            if entry is None and self._count is not None:
                self._count.add(1)

    def record_plain(self, header: BatchHeader, base_offset: int, append_time: int) -> None:
        """Record an appended batch that is neither a marker nor transactional.

        ``header`` may be the header that the producer sent. ``base_offset`` and ``append_time`` are those of the batch
        in the log.
        """
        producer_id, entries = header.producer_id, self._entries
        if producer_id != NO_PRODUCER and header.first_sequence >= 0:
            entry = entries.get(producer_id)
            entries[producer_id] = _with_appended(entry, header, base_offset, append_time)
            if entry is None and self._count is not None:
                self._count.add(1)

    def state(self) -> ProducerState:
        """Return a copy of the producers and transactions. Later appends do not change the copy."""
        return ProducerState(dict(self._entries), self.transactions.state())

    def expire(self, before_us: int) -> None:
        """Drop producers whose last append is older than ``before_us``, except those with an open transaction."""
        stale = [
            producer_id
            for producer_id, entry in self._entries.items()
            if entry.last_append_us < before_us and producer_id not in self.transactions
        ]
        before = len(self._entries)
        for producer_id in stale:
            del self._entries[producer_id]
        self._changed(before)

    def clear(self) -> None:
        before = len(self._entries)
        self._entries.clear()
        self._changed(before)
        self.transactions.clear()


def to_snapshot(state: ProducerState, end_offset: int) -> ProducerSnapshot:
    transactions = state.transactions
    return ProducerSnapshot(
        end_offset,
        tuple(
            (producer_id, entry.epoch, entry.last_append_us, entry.batches)
            for producer_id, entry in state.entries.items()
        ),
        open=tuple((producer_id, *begun) for producer_id, begun in transactions.open.items()),
        aborted=transactions.aborted,
        recent=transactions.recent,
    )


def from_snapshot(snapshot: ProducerSnapshot) -> ProducerTable:
    entries = {
        producer_id: ProducerEntry(epoch, tuple(AppendedBatch(*batch) for batch in batches), last_append_us)
        for producer_id, epoch, last_append_us, batches in snapshot.entries
    }
    transactions = TransactionState(
        {producer_id: OpenTransaction(epoch, first_offset) for producer_id, epoch, first_offset in snapshot.open},
        tuple(EndedTransaction(*over) for over in snapshot.aborted),
        tuple(EndedTransaction(*over) for over in snapshot.recent),
    )
    return ProducerTable(entries, transactions)


def replay(table: ProducerTable, found: Iterable[tuple[BatchHeader, Marker | None]]) -> None:
    """Update the table with batches that were read from the log. For a marker, ``found`` also has its content."""
    for header, marker in found:
        table.record(header, marker)


def _last_sequence(header: BatchHeader) -> int:
    """Return the last sequence of a batch, by its offset span: a compacted batch has fewer records than were sent."""
    return (header.first_sequence + header.offset_span - 1) % _SEQUENCES
