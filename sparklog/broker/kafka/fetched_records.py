"""The records of a Fetch response: batches of the log, encoded as record batches of Kafka with the original offsets.

A batch of the log may be larger than the client's limit, so its rows are encoded in pieces, from the requested offset
on. Offsets without records need no batch, because consumers accept gaps between batches. But if a response ends with
such offsets, the response needs a last batch from which the consumer learns the next offset. This batch is a control
batch, because every client skips it and continues at the offset after it. Offsets have no records in two cases:

- The records belong to an aborted transaction, and the consumer reads only committed records.
- Compaction has removed the last records of a batch, and the requested offset is after the batch's remaining records.

A response lists no aborted transactions, because it has no batches of aborted transactions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog.broker.kafka.stored_batches import run_by_size
from sparklog.broker.requests.slices import Waited
from sparklog.kafka.records.batch_view import placed_batch
from sparklog.kafka.records.control import encode_control_batch
from sparklog.kafka.records.encode import encode_batch, rows_that_fit
from sparklog.model import NO_PRODUCER
from sparklog.protocol.frames import Buffer
from sparklog.protocol.messages import AbortedRange
from sparklog.record.codec import decode_batch
from sparklog.record.compacted_batch import offsets_of
from sparklog.record.header import BatchHeader, Flag, unpack_headers
from sparklog.record.marker import decode_marker
from sparklog.record.schema import DEFAULT_SCHEMA

_CONTROL, _TRANSACTIONAL, _ARRAY = int(Flag.CONTROL), int(Flag.TRANSACTIONAL), int(Flag.OFFSET_ARRAY)
_SEQUENCES = 2**31
#: The maximum number of bytes of one record batch in a response, so that the encoding of one takes a few milliseconds.
_PIECE_BYTES = 1024 * 1024
#: Batches with at most this number of records and bytes are encoded together.
_SMALL_RECORDS, _SMALL_BYTES = 50, 16 * 1024
#: A response that has records gets no further piece if less than one sixteenth of its size limit is left.
_LEAST_PART = 16
_COLUMNS = DEFAULT_SCHEMA.names
#: The approximate size of JSON documents, divided by the size of the columns. The column names are most of the surplus.
_JSON_FACTOR = 4


class Rows(NamedTuple):
    """The records of one batch of the log, and their offsets.

    The records have the columns of ``DEFAULT_SCHEMA``, or the columns of a typed topic whose rows are sent as JSON.
    """

    rows: pa.RecordBatch
    #: The offset of each row. None means consecutive offsets from the batch's base offset on.
    offsets: npt.NDArray[np.int64] | None


class DecodedBatches:
    """A cache of decoded batches that were only partly sent.

    The next fetch continues such a batch, and need not decode it again.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._known: OrderedDict[tuple[str, int, int, int], Rows] = OrderedDict()

    def get(self, key: tuple[str, int, int, int]) -> Rows | None:
        return self._known.get(key)

    def add(self, key: tuple[str, int, int, int], rows: Rows) -> None:
        """Add a batch, and remove the oldest batches while the limit is exceeded. Never remove the added batch."""
        if key in self._known:
            self._known.move_to_end(key)
            return
        self._known[key] = rows
        self._size_bytes += _size(rows)
        while self._size_bytes > self._limit_bytes and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            self._size_bytes -= _size(oldest)


def _size(rows: Rows) -> int:
    return int(rows.rows.get_total_buffer_size())


class RecordSource(Protocol):
    """The part of a partition that ``encode_fetched`` uses: schemas, settings and caches."""

    @property
    def stamped(self) -> bool:
        """Return whether the topic has timestamp type LogAppendTime."""

    def schema(self, schema_id: int) -> pa.Schema:
        """Return the schema with this id."""

    @property
    def json(self) -> bool:
        """Return whether the topic's rows are sent as JSON."""

    def records(self, rows: pa.RecordBatch, header: BatchHeader) -> pa.RecordBatch:
        """Return the rows of a batch, converted to the columns of ``DEFAULT_SCHEMA``."""

    def sent(self, header: BatchHeader) -> memoryview | None:
        """Return the bytes of the batch as a Kafka client has sent them, or None if the broker does not have them."""

    def decoded(self, header: BatchHeader) -> Rows | None:
        """Return the batch's rows if an earlier fetch decoded them, or None."""

    def keep_decoded(self, header: BatchHeader, rows: Rows) -> None:
        """Cache the rows of a batch that was only partly sent."""


class FetchedRecords(NamedTuple):
    """The record batches for one partition in a response: consecutive buffers, and their total size."""

    buffers: list[Buffer]
    size: int


def encode_fetched(
    body: Sequence[Buffer], offset: int, source: RecordSource, *, max_bytes: int, aborted: Sequence[AbortedRange]
) -> Generator[Waited, None, FetchedRecords]:
    """Encode the records from ``offset`` on.

    Yield after each piece, so that the event loop may run other work. Yield the future if a thread decodes a batch.

    ``body`` has the headers of the batches, then their bodies, as a partition's log has them. ``aborted`` are the
    aborted transactions whose records are left out. The result has about ``max_bytes`` at most. If there is
    a record, the result has at least one, even if this record is larger than ``max_bytes``.

    Raises:
        BrokerError: CORRUPT_MESSAGE for a damaged batch at ``offset``.
    """
    encoder = _Encoder(offset, source, max_bytes)
    for header, stored in _batches(body):
        is_aborted = bool(header.flags & _TRANSACTIONAL) and _is_aborted(header, aborted)
        if not is_aborted and encoder.is_small(header):
            yield from encoder.add_small(header, stored)
        else:
            yield from encoder.add_merged()
            if encoder.full:
                break
            if header.flags & _CONTROL:
                encoder.add_marker(header, stored)
            elif is_aborted:
                encoder.skip(header.next_offset)
            elif not encoder.add_sent(header):
                yield from encoder.add_rows(header, stored)
        if encoder.full:
            break
    yield from encoder.add_merged()
    encoder.fill_gap()
    return FetchedRecords(encoder.buffers, encoder.size)


def _batches(body: Sequence[Buffer]) -> Iterator[tuple[BatchHeader, memoryview]]:
    """Return each header with the stored bytes of its batch.

    The first buffer has the headers. Each further buffer has one or several batches.
    """
    if not body:
        return
    buffers = (memoryview(buffer) for buffer in body[1:])
    rest = memoryview(b"")
    for header in unpack_headers(memoryview(body[0])):
        while not rest.nbytes:
            rest = next(buffers)
        size = header.stored_bytes
        yield header, rest[:size]
        rest = rest[size:]


def _is_aborted(header: BatchHeader, aborted: Sequence[AbortedRange]) -> bool:
    return any(
        found.producer_id == header.producer_id and found.first_offset <= header.base_offset <= found.last_offset
        for found in aborted
    )


class _Encoder:
    """The state of the encoding of one partition's records."""

    def __init__(self, offset: int, source: RecordSource, max_bytes: int) -> None:
        self._offset = offset
        self._source = source
        self._max_bytes = max_bytes
        #: The offset at which a consumer continues after ``buffers``, and the offset at which the encoder continues.
        #: The offsets between them have no records.
        self._reached = self._seen = offset
        self._epoch = -1
        self._time_ms = -1
        self.buffers: list[Buffer] = []
        self.size = 0
        #: Whether no further batch fits.
        self.full = False
        #: Small batches that are encoded together, with their rows, and the sum of their sizes in bytes.
        self._small: list[tuple[BatchHeader, pa.RecordBatch]] = []
        self._small_bytes = 0

    def _add(self, buffers: Sequence[Buffer], header: BatchHeader, next_offset: int) -> None:
        self.buffers += buffers
        self.size += sum(map(len, buffers))
        self._reached = self._seen = next_offset
        self._note(header)

    def _note(self, header: BatchHeader) -> None:
        self._epoch, self._time_ms = header.leader_epoch, header.max_timestamp // 1000

    def _has_room(self, size: int) -> bool:
        return not self.size or self.size + size <= self._max_bytes

    def skip(self, next_offset: int) -> None:
        """Record that the offsets before ``next_offset`` have no further records."""
        self._seen = next_offset

    def add_marker(self, header: BatchHeader, stored: memoryview) -> None:
        """Add the control batch of a marker.

        One marker of the log may end several transactions. The control batch names only the first, which is enough
        for a consumer.
        """
        marker = decode_marker(header, stored)
        committed = bool(marker.committed)
        ended = marker.committed or marker.aborted or ((-1, -1),)
        producer_id, producer_epoch = ended[0]
        batch = encode_control_batch(
            offset=header.base_offset,
            leader_epoch=header.leader_epoch,
            committed=committed,
            timestamp_ms=header.max_timestamp // 1000,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
        )
        if self._has_room(len(batch)):
            self._add((batch,), header, header.next_offset)
        else:
            self.full = True

    def add_sent(self, header: BatchHeader) -> bool:
        """Add the bytes of the batch as its producer has sent them.

        Return False if the batch must be encoded instead: the broker does not have these bytes, the requested offset
        is inside the batch, or the bytes alone exceed the limit. If the response has no room left, set ``full``.
        """
        if header.base_offset < self._offset:
            return False
        sent = self._source.sent(header)
        if sent is None:
            return False
        if not self._has_room(len(sent)):
            self.full = True
            return True
        if not self.size and len(sent) > self._max_bytes:
            return False
        placed = placed_batch(sent, base_offset=header.base_offset, leader_epoch=header.leader_epoch)
        self._add(placed, header, header.next_offset)
        return True

    def is_small(self, header: BatchHeader) -> bool:
        """Return whether the batch is encoded together with other small batches, as one batch of Kafka.

        A producer that sends each record alone makes such batches. If each of them became a batch of the response,
        it would need a header of 61 bytes, and the headers would take more time than the records. The merged batch
        has no producer id.

        A batch with a record at each of its offsets is required, because the offsets in the merged batch follow each
        other. The cleaner also makes batches with a gap at the end, which have no offset array.
        """
        return (
            0 < header.record_count <= _SMALL_RECORDS
            and header.record_count == header.offset_span
            and header.length <= _SMALL_BYTES
            and not header.flags & (_CONTROL | _ARRAY)
            and header.base_offset >= self._offset
            and not self._source.stamped
            and not self._source.json
            and self._source.sent(header) is None
        )

    def add_small(self, header: BatchHeader, stored: memoryview) -> Generator[Waited, None, None]:
        """Collect a small batch. Encode the collected batches when they are large enough for a piece.

        Encode them even if the batch cannot follow them in one batch: it has another epoch, or offsets are missing
        between them.
        """
        if self._small:
            before = self._small[-1][0]
            if before.leader_epoch != header.leader_epoch or before.next_offset != header.base_offset:
                yield from self.add_merged()
                if self.full:
                    return
        try:
            rows = (yield from _decode(header, stored, self._source)).rows
        except Exception:
            if self.buffers or self._small:  # The client gets the records before the damaged batch now.
                yield from self.add_merged()
                self.full = True
                return
            raise
        self._small.append((header, rows))
        self._small_bytes += header.length
        if self._small_bytes >= min(_PIECE_BYTES, self._max_bytes - self.size):
            yield from self.add_merged()

    def add_merged(self) -> Generator[Waited, None, None]:
        """Encode the collected small batches, in one or several pieces."""
        small, self._small, self._small_bytes = self._small, [], 0
        if not small:
            return
        first, last = small[0][0], small[-1][0]
        if len(small) == 1:
            yield from self._add_pieces(first, Rows(small[0][1], None))
            return
        rows = pa.concat_batches([found for _, found in small])
        span = last.next_offset - first.base_offset
        together = first._replace(
            max_timestamp=last.max_timestamp,
            offset_span=span,
            record_count=span,
            producer_id=NO_PRODUCER,
            producer_epoch=-1,
            first_sequence=-1,
            flags=0,
        )
        yield from self._add_pieces(together, Rows(rows, None), keep=False)

    def add_rows(self, header: BatchHeader, stored: memoryview) -> Generator[Waited, None, None]:
        """Add the rows of a batch from the requested offset on, in pieces, until the limit is reached."""
        try:
            found = self._source.decoded(header) or (yield from _decode(header, stored, self._source))
        except Exception:
            if self.buffers:  # The client gets the records before the damaged batch now, and the error next.
                self.full = True
                return
            raise
        yield from self._add_pieces(header, found)

    def _add_pieces(self, header: BatchHeader, found: Rows, *, keep: bool = True) -> Generator[Waited, None, None]:
        """Add the rows from the requested offset on. If only a part fits and ``keep`` is set, cache the rows."""
        rows, offsets = found
        first, count = _first_row(header, offsets, self._offset), rows.num_rows
        self._note(header)
        if first >= count:
            self.skip(header.next_offset)
            return
        while first < count:
            left = self._max_bytes - self.size
            if self.size and left < max(self._max_bytes // _LEAST_PART, 1):
                self.full = True
                break
            part = self._source.records(rows.slice(first, self._most_rows(rows)), header)
            taken = rows_that_fit(part, min(max(left, 1), _PIECE_BYTES))
            buffers, next_offset = self._piece(
                header, part.slice(0, taken), offsets, first, last=first + taken == count
            )
            if taken == 1 and not self._has_room(sum(map(len, buffers))):
                self.full = True
                break
            self._add(buffers, header, next_offset)
            first += taken
            yield None
        if keep and first < count:
            self._source.keep_decoded(header, found)

    def _most_rows(self, rows: pa.RecordBatch) -> int:
        """Return how many rows are converted at once: all, or about as many as have ``_PIECE_BYTES`` as JSON."""
        if not self._source.json:
            return int(rows.num_rows)
        return max(_PIECE_BYTES * int(rows.num_rows) // (_JSON_FACTOR * int(rows.nbytes) + 1), 1)

    def _piece(
        self,
        header: BatchHeader,
        rows: pa.RecordBatch,
        offsets: npt.NDArray[np.int64] | None,
        first: int,
        *,
        last: bool,
    ) -> tuple[Sequence[Buffer], int]:
        """Encode rows of a batch, and return the piece and the offset after it.

        ``first`` is the position of the first row in the batch. ``last`` means that the rows include the last row of
        the batch.
        """
        sequence, base_offset = header.first_sequence, header.base_offset
        part = None
        if offsets is not None:
            part = offsets[first : first + rows.num_rows]
            if first:
                base_offset = int(part[0])
            next_offset = header.next_offset if last else int(part[-1]) + 1
        else:
            base_offset += first
            next_offset = header.next_offset if last else base_offset + rows.num_rows
        if sequence >= 0:
            sequence = (sequence + base_offset - header.base_offset) % _SEQUENCES
        buffers = encode_batch(
            rows,
            base_offset=base_offset,
            offsets=part,
            last_offset=next_offset - 1,
            leader_epoch=header.leader_epoch,
            append_time_ms=header.max_timestamp // 1000 if self._source.stamped else None,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=sequence,
            transactional=bool(header.flags & _TRANSACTIONAL),
        )
        return buffers, next_offset

    def fill_gap(self) -> None:
        """Add a control batch if the response ends with offsets without records."""
        if self._seen <= self._reached:
            return
        filler = encode_control_batch(
            offset=self._seen - 1, leader_epoch=self._epoch, committed=True, timestamp_ms=self._time_ms
        )
        self.buffers.append(filler)
        self.size += len(filler)
        self._reached = self._seen


def _first_row(header: BatchHeader, offsets: npt.NDArray[np.int64] | None, offset: int) -> int:
    """Return the position of the first row at or after ``offset``."""
    if offset <= header.base_offset:
        return 0
    if offsets is None:
        return offset - header.base_offset
    return int(np.searchsorted(offsets, offset))


def _decode(header: BatchHeader, stored: memoryview, source: RecordSource) -> Generator[Waited, None, Rows]:
    body = stored[: header.length + header.offset_array_length]
    rows = yield from run_by_size(header, body, partial(decode_batch, header, body, source.schema(header.schema_id)))
    if rows.num_columns > len(_COLUMNS) and not source.json:
        rows = rows.select(_COLUMNS)
    return Rows(rows, offsets_of(header, stored) if header.flags & _ARRAY else None)
