"""The producers of one log and their last batches, by which a retried batch is recognised as a duplicate.

Pure. The log calls ``known`` before it appends as a leader. It calls ``record`` for every appended batch, as leader or
follower. Entries are immutable, so a snapshot is a shallow copy. The table keeps the newest epoch and its last five
batches of each producer id, because a producer has at most five in flight. Source: KIP-98, KIP-360.

The open transactions of a log are in ``transactions``. They come from the same batches and go into the same snapshots.
A transactional producer's id serves one transaction, and leaves the table with its marker.

An unknown producer id must begin at sequence 0. (Kafka accepts any sequence then. A pipelined batch that overtakes a
refused first batch would be accepted, and the first would be lost.)
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
_SEQUENCES = 2**31

SNAPSHOT_SUFFIX = ".producers"


class AppendedBatch(NamedTuple):
    """One batch of a producer: inclusive sequences, half-open offsets."""

    first_sequence: int
    last_sequence: int
    base_offset: int
    end_offset: int


class ProducerEntry(NamedTuple):
    """The state of one producer id. ``batches`` are those of ``epoch``, oldest first, at most five."""

    epoch: int
    batches: tuple[AppendedBatch, ...]
    last_append_us: int


class ProducerSnapshot(msgspec.Struct, frozen=True):
    """The table at the time when the log ended at ``end_offset``.

    ``entries``: producer id, epoch, time of the last append in us, batches as in ``AppendedBatch``. ``open``: producer
    id, epoch, first offset. ``aborted`` and ``recent`` as in ``TransactionState``. Version 2 added the transactions.
    """

    end_offset: int
    entries: tuple[tuple[int, int, int, tuple[tuple[int, int, int, int], ...]], ...]
    version: int = 2
    open: tuple[tuple[int, int, int], ...] = ()
    aborted: tuple[tuple[int, int, int], ...] = ()
    recent: tuple[tuple[int, int, int], ...] = ()


Entries = Mapping[int, ProducerEntry]


class ProducerState(NamedTuple):
    """A copy of the table that later appends do not change."""

    entries: Entries
    transactions: TransactionState


def check_sequence(entry: ProducerEntry | None, header: BatchHeader) -> OffsetRange | None:
    """Check the sequence of one batch of an idempotent producer.

    Return None if it is the next one.

    Returns:
        The earlier range if it is an exact duplicate of one of the last five batches.

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
        if first != 0:
            what = "unknown here" if entry is None else f"in its new epoch {epoch}"
            raise BrokerError(
                ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                f"producer {header.producer_id}, {what}: sequence {first} found, 0 expected",
            )
        return None
    expected = (entry.batches[-1].last_sequence + 1) % _SEQUENCES
    if first == expected:  # no duplicate: five batches hold fewer records than there are sequences
        return None
    last = _last_sequence(header)
    for batch in reversed(entry.batches):
        if batch.first_sequence == first and batch.last_sequence == last:
            return OffsetRange(batch.base_offset, batch.end_offset)
    if (expected - 1 - last) % _SEQUENCES < _SEQUENCES // 2:
        raise BrokerError(
            ErrorCode.DUPLICATE_SEQUENCE_NUMBER,
            f"producer {header.producer_id}: sequences {first} to {last} are older than the last five batches, "
            f"{expected} expected",
        )
    raise BrokerError(
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        f"producer {header.producer_id}: sequence {first} found, {expected} expected",
    )


def with_batch(entry: ProducerEntry | None, header: BatchHeader) -> ProducerEntry:
    """Return the entry after the append of ``header``, which has its final offsets."""
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
    """The producers of one log. Owned by its ``Log``; no I/O."""

    def __init__(self, entries: Entries | None = None, transactions: TransactionState | None = None) -> None:
        self._entries: dict[int, ProducerEntry] = dict(entries or {})
        #: The count of all logs of the directory. None: no count is kept.
        self._count: ProducerCount | None = None
        self.transactions = TransactionTable(transactions)

    def __len__(self) -> int:
        return len(self._entries)

    def count_in(self, count: ProducerCount | None) -> None:
        """Count this table's ids in ``count`` from now on, and no longer in the earlier count."""
        if self._count is not None:
            self._count.add(-len(self._entries))
        self._count = count
        if count is not None:
            count.add(len(self._entries))

    def _changed(self, before: int) -> None:
        """Update the count after a change. There were ``before`` ids."""
        if self._count is not None:
            self._count.add(len(self._entries) - before)

    def get(self, producer_id: int) -> ProducerEntry | None:
        return self._entries.get(producer_id)

    def entries(self) -> Iterable[ProducerEntry]:
        return self._entries.values()

    def known(self, batches: Sequence[tuple[BatchHeader, object]], tp: TopicPartition) -> list[OffsetRange]:
        """Return the offset ranges of the first of these batches, as far as the log already has them.

        They are a prefix, because a retry begins with the oldest batch. ``tp`` is for the error.

        Raises:
            BrokerError: as ``check_sequence``; INVALID_REQUEST for a known batch after a new one;
                THROTTLING_QUOTA_EXCEEDED for a new producer id if there is no room for it.
        """
        if len(batches) == 1:
            earlier = self._earlier(batches[0][0])
            return [] if earlier is None else [earlier]
        return self._known_of_several(batches, tp)

    def _earlier(self, header: BatchHeader) -> OffsetRange | None:
        producer_id, first = header.producer_id, header.first_sequence
        if producer_id < 0 or first < 0:
            return None
        entry = self._entries.get(producer_id)
        if entry is not None and entry.epoch == header.producer_epoch and entry.batches:
            next_in_line = (entry.batches[-1].last_sequence + 1) % _SEQUENCES
            if first == next_in_line:  # the usual case
                return None
        earlier = check_sequence(entry, header)
        if entry is None and self._count is not None:
            self._count.require_room()
        return earlier

    def _known_of_several(self, batches: Sequence[tuple[BatchHeader, object]], tp: TopicPartition) -> list[OffsetRange]:
        """Check each batch as if the batches before it were in the log."""
        known: list[OffsetRange] = []
        staged: dict[int, ProducerEntry] = {}
        for number, (header, _) in enumerate(batches):
            producer_id = header.producer_id
            if producer_id < 0 or header.first_sequence < 0:
                continue
            entry = staged.get(producer_id) or self._entries.get(producer_id)
            earlier = check_sequence(entry, header)
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
        """Record the appended batch ``header``. ``marker`` is its content if it is a marker."""
        producer_id, entries = header.producer_id, self._entries
        if marker is not None:
            before = len(entries)
            self.transactions.ended(header, marker)
            for ended_id, _ in (*marker.committed, *marker.aborted):
                entries.pop(ended_id, None)
            self._changed(before)
        elif producer_id != NO_PRODUCER and header.first_sequence >= 0:
            entry = entries.get(producer_id)
            entries[producer_id] = with_batch(entry, header)
            self.transactions.appended(header)
            if entry is None and self._count is not None:
                self._count.add(1)

    def record_plain(self, header: BatchHeader, base_offset: int, append_time: int) -> None:
        """Record a batch that is neither a marker nor in a transaction.

        ``header`` is the one that the producer sent.
        """
        producer_id, entries = header.producer_id, self._entries
        if producer_id != NO_PRODUCER and header.first_sequence >= 0:
            entry = entries.get(producer_id)
            entries[producer_id] = _with_appended(entry, header, base_offset, append_time)
            if entry is None and self._count is not None:
                self._count.add(1)

    def state(self) -> ProducerState:
        """Return a copy of the producers' state, which later appends do not change."""
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
    """Update the table with batches found in the log, and with the content of their markers."""
    for header, marker in found:
        table.record(header, marker)


def _last_sequence(header: BatchHeader) -> int:
    """Return the last sequence, computed from offsets: a cleaned batch has fewer records than its producer sent."""
    return (header.first_sequence + header.offset_span - 1) % _SEQUENCES
