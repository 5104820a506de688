"""A log in memory with real batch headers and a broker's real table of producers. Its simulated disk can fail.

It models ``storage.Log`` without files: it has the same offsets, epochs, sequences, and truncation at batch boundaries.
An append writes the data and then the header. ``recover`` drops an append that a crash has interrupted. A loss of the
page cache (``lose_page_cache``) loses all unflushed data, or a part of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from sparklog.coordinator.log_records import Record
from sparklog.model import NO_EPOCH, NO_PRODUCER, EpochEnd, OffsetRange, TopicPartition
from sparklog.record.header import BatchHeader, Flag
from sparklog.record.marker import Marker
from sparklog.storage.producers import ProducerTable, replay
from sparklog.storage.transactions import TransactionTable

#: The content of a batch that matters: a marker, the records of a coordinator, or the name of a transaction.
Content = Marker | tuple[Record, ...] | str | None


class SimBatch(NamedTuple):
    """A stored batch. ``body`` identifies the produced batch, and is the same on every replica."""

    header: BatchHeader
    body: str
    content: Content = None

    @property
    def marker(self) -> Marker | None:
        return self.content if isinstance(self.content, Marker) else None


class Sequenced(NamedTuple):
    """The fields that make a batch idempotent: the producer id, its epoch, and the sequence of the first record."""

    producer_id: int
    producer_epoch: int
    first_sequence: int
    flags: int = 0


NOT_IDEMPOTENT = Sequenced(NO_PRODUCER, -1, -1)
#: The sequence of a marker. A marker has an offset, but no records.
A_MARKER = Sequenced(NO_PRODUCER, -1, -1, int(Flag.CONTROL))
_TP = TopicPartition("simulated", 0)


class SimLog:
    """A simulated log of one partition on one broker. It survives a crash of the broker's process."""

    def __init__(self, start_offset: int = 0) -> None:
        self.log_start_offset = start_offset
        #: The first offset of the first segment. It changes only in a restart, or in a truncation below a log start
        #: that a test has raised.
        self.first_segment_offset = start_offset
        self.log_end_offset = start_offset
        #: The leader epoch of the last batch.
        self.last_epoch = NO_EPOCH
        #: True if the log directory's checkpoint names the log. It names a log from the log's first batch on.
        self.named = True
        self.batches: list[SimBatch] = []
        #: The end offset of each batch.
        self._ends: list[int] = []
        #: The end of the data that fsync has made durable.
        self.flushed_end = start_offset
        self.producers = ProducerTable()
        #: The number of first batches that the checker has found equal to the committed batches. It is stored here
        #: because a truncation lowers it.
        self.verified = 0
        #: An incomplete write after the end of the log: its header is not complete.
        self.torn: SimBatch | None = None

    def last_stable_offset(self, high_watermark: int) -> int:
        return self.producers.transactions.last_stable_offset(high_watermark)

    def end_of_epoch(self, epoch: int) -> EpochEnd:
        at = bisect_right(self.batches, epoch, key=lambda batch: batch.header.leader_epoch)
        if at == 0:
            return EpochEnd(NO_EPOCH, self.log_start_offset)
        header = self.batches[at - 1].header
        return EpochEnd(header.leader_epoch, header.next_offset)

    # --- appending ----------------------------------------------------------------------------------------------

    @property
    def transactions(self) -> TransactionTable:
        return self.producers.transactions

    def known(
        self, batches: Sequence[tuple[BatchHeader, object]], *, begins_anywhere: bool = False
    ) -> list[OffsetRange]:
        """Return the offsets of the batches that the log already has.

        Raises:
            BrokerError: a batch does not follow the producer's last batch.
        """
        return self.producers.known(batches, _TP, begins_anywhere=begins_anywhere)

    def forget_producer(self, producer_id: int) -> None:
        """Forget the last batches of an idle producer, as if producer.id.expiration.ms had passed."""
        state = self.producers.state()
        entries = {known: entry for known, entry in state.entries.items() if known != producer_id}
        self.producers = ProducerTable(entries, state.transactions)

    def append(
        self, body: str, count: int, *, leader_epoch: int, now_ms: int, sequence: Sequenced = NOT_IDEMPOTENT
    ) -> SimBatch:
        """Append a batch as leader. The batch must not be a duplicate."""
        batch = self.planned(body, count, leader_epoch=leader_epoch, now_ms=now_ms, sequence=sequence)
        self._add(batch)
        return batch

    def planned(
        self,
        body: str,
        count: int,
        *,
        leader_epoch: int,
        now_ms: int,
        sequence: Sequenced,
        content: Content = None,
    ) -> SimBatch:
        """Return the batch that ``append`` would write."""
        header = self._header(count, sequence, leader_epoch=leader_epoch, now_ms=now_ms, length=len(body))
        return SimBatch(header, body, content)

    def append_copies(self, batches: Sequence[SimBatch]) -> int:
        """Append a leader's batches as a follower; return the new end offset.

        The batches must not leave a gap or have a lower leader epoch than the log.
        """
        for batch in batches:
            end, epoch = self.log_end_offset, self.last_epoch
            assert batch.header.base_offset == end, f"batch at {batch.header.base_offset} appended at {end}"
            assert batch.header.leader_epoch >= epoch, f"epoch {batch.header.leader_epoch} appended after {epoch}"
            self._add(batch)
        return self.log_end_offset

    def _add(self, batch: SimBatch) -> None:
        header = batch.header
        self.batches.append(batch)
        self.log_end_offset = header.base_offset + header.offset_span
        self._ends.append(self.log_end_offset)
        self.last_epoch = header.leader_epoch
        self.producers.record(header, batch.marker)

    def _header(self, count: int, sequence: Sequenced, *, leader_epoch: int, now_ms: int, length: int) -> BatchHeader:
        now_us = now_ms * 1000
        last = self.batches[-1].header if self.batches else None
        return BatchHeader(
            base_offset=self.log_end_offset,
            position=last.position + last.length if last else 0,
            max_timestamp=now_us,
            running_max=max(now_us, last.running_max) if last else now_us,
            append_time=now_us,
            producer_id=sequence.producer_id,
            min_timestamp=now_us,
            offset_span=count,
            record_count=count,
            length=length,
            body_crc=0,
            leader_epoch=leader_epoch,
            schema_id=0,
            first_sequence=sequence.first_sequence,
            offset_array_length=0,
            producer_epoch=sequence.producer_epoch,
            flags=sequence.flags,
        )

    # --- reading ------------------------------------------------------------------------------------------------

    def read(self, offset: int, max_batches: int) -> tuple[SimBatch, ...]:
        if offset >= self.log_end_offset:
            return ()
        at = bisect_right(self._ends, offset)
        return tuple(self.batches[at : at + max_batches])

    def batch_at(self, offset: int) -> SimBatch | None:
        """Return the batch that starts at ``offset``."""
        at = bisect_right(self._ends, offset)
        if at < len(self.batches) and self.batches[at].header.base_offset == offset:
            return self.batches[at]
        return None

    # --- truncation ------------------------------------------------------------------------------------------------

    def truncate(self, offset: int) -> int:
        """Truncate the log to the batches that end at or below ``offset``; return the new end offset."""
        if offset < self.log_end_offset:
            del self.batches[bisect_right(self._ends, offset) :]
            self._truncate()
            self.rebuild_producers()
        return self.log_end_offset

    def restart_at(self, offset: int) -> None:
        self.batches.clear()
        self.log_start_offset = self.first_segment_offset = self.flushed_end = offset
        self._truncate()
        self.producers.clear()

    def _truncate(self) -> None:
        last = self.batches[-1].header if self.batches else None
        del self._ends[len(self.batches) :]
        self.log_end_offset = last.next_offset if last else self.first_segment_offset
        self.log_start_offset = min(self.log_start_offset, self.log_end_offset)
        self.last_epoch = last.leader_epoch if last else NO_EPOCH
        self.flushed_end = min(self.flushed_end, self.log_end_offset)
        self.verified = min(self.verified, len(self.batches))

    def rebuild_producers(self) -> None:
        self.producers.clear()
        replay(self.producers, ((batch.header, batch.marker) for batch in self.batches))

    # --- the disk -----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        self.flushed_end = self.log_end_offset

    def tear(self, batch: SimBatch) -> None:
        """Leave this batch half written at the end of the log, as after a crash of the process."""
        self.torn = batch

    def lose_page_cache(self, chance: Random) -> None:
        """Lose the unflushed data, as in a crash of the host. A first part of this data may have reached the disk."""
        survives = chance.randint(self.flushed_end, self.log_end_offset) if chance.random() < 0.5 else self.flushed_end
        self.torn = None
        self.truncate(survives)

    def recover(self) -> None:
        """Open the log in a new process: drop a half-written append, and rebuild the table of producers."""
        self.torn = None
        self.rebuild_producers()
