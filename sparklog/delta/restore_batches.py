"""The encoding of one partition's archived rows as batches with the original offsets and times.

The timestamp of a record is its event time. A record without an event time has the maximum time of its batch. This is
the leader's append time if no record of the batch has an event time. So rows can be in one batch only if this rule
gives them the times that are in the table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog.record.codec import NO_TIMESTAMP, EncodedBatch, event_time_range
from sparklog.record.compacted_batch import MAX_SPAN
from sparklog.record.restored_batch import place_batch, place_nothing

Numbers = npt.NDArray[np.int64]

#: The approximate bytes of records in a batch.
_BATCH_BYTES = 1 << 20
#: The maximum bytes of a batch in addition to its records, for its message and the padding of buffers.
_ROOM_BYTES = 4096
#: The maximum number of offsets without records that a batch itself covers before its first record.
_LONGEST_GAP = MAX_SPAN // 2


class RestoredRows(NamedTuple):
    """Archived rows of one partition, in ascending order of offsets.

    ``records`` has the topic's columns. ``times`` are the timestamps in microseconds.
    """

    records: pa.RecordBatch
    offsets: Numbers
    times: Numbers

    def part(self, start: int, end: int) -> RestoredRows:
        return RestoredRows(self.records.slice(start, end - start), self.offsets[start:end], self.times[start:end])


class RestoreBatches(NamedTuple):
    """An encoder of archived rows as batches of one topic.

    ``event_time`` is the column of event times, or None if the topic uses append times. ``compression`` is "none",
    "lz4" or "zstd"; None means "none".
    """

    schema: pa.Schema
    schema_id: int
    event_time: str | None
    max_message_bytes: int
    compression: str | None = None

    def batches(self, rows: RestoredRows, begin: int) -> Iterator[EncodedBatch]:
        """Yield batches that contain ``rows`` and that together cover all offsets from ``begin`` to the last row.

        ``begin`` is at or below the offset of the first row. Offsets without a record are covered by the next batch or,
        in a long gap, by empty batches.

        Raises:
            BrokerError: a row cannot be encoded.
        """
        starts = [*time_cuts(rows, self.event_time), len(rows.offsets)]
        for start, end in itertools.pairwise(starts):
            for piece in self._pieces(rows.part(start, end)):
                first = int(piece.offsets[0])
                if first - begin > _LONGEST_GAP:
                    yield from self.nothing(begin, first)
                    begin = first
                yield self._encode(piece, begin)
                begin = int(piece.offsets[-1]) + 1

    def nothing(self, begin: int, end: int) -> list[EncodedBatch]:
        """Return empty batches that cover the offsets ``[begin, end)``."""
        return place_nothing(self.schema, begin=begin, end=end, schema_id=self.schema_id)

    def _pieces(self, rows: RestoredRows) -> Iterator[RestoredRows]:
        count = len(rows.offsets)
        limit = self.max_message_bytes - _ROOM_BYTES
        target = min(_BATCH_BYTES, limit)
        step = max(1, int(count * target // max(rows.records.nbytes, 1)))
        for start in range(0, count, step):
            yield from self._small_enough(rows.part(start, min(start + step, count)), limit)

    def _small_enough(self, rows: RestoredRows, limit: int) -> Iterator[RestoredRows]:
        """Split rows in halves until each part is smaller than ``limit`` or has a single record."""
        count = len(rows.offsets)
        is_wide = int(rows.offsets[-1]) - int(rows.offsets[0]) >= _LONGEST_GAP
        if count > 1 and (rows.records.nbytes > limit or is_wide):
            yield from self._small_enough(rows.part(0, count // 2), limit)
            yield from self._small_enough(rows.part(count // 2, count), limit)
        else:
            yield rows

    def _encode(self, rows: RestoredRows, begin: int) -> EncodedBatch:
        return place_batch(
            rows.records,
            rows.offsets,
            begin=begin,
            end=int(rows.offsets[-1]) + 1,
            times=_times(rows, self.event_time),
            schema_id=self.schema_id,
            compression=self.compression,
        )


def time_cuts(rows: RestoredRows, event_time: str | None) -> list[int]:
    """Return the indexes in ``rows`` at which a new batch must begin so that each record keeps its time.

    The first row has index 0.
    """
    lacking = _lacking(rows, event_time)
    times = rows.times
    changes = (lacking[1:] != lacking[:-1]) | (lacking[1:] & (times[1:] != times[:-1]))
    starts = [0, *(np.flatnonzero(changes) + 1).tolist()]
    if event_time is None:
        return starts
    cuts = [0]
    stamp: int | None = None  # The time of the records without an event time in the current batch.
    latest: int | None = None  # The maximum event time of the current batch.
    for start, end in zip(starts, [*starts[1:], len(times)], strict=True):
        if lacking[start]:
            time = int(times[start])
            fits = stamp == time if stamp is not None else latest is None or latest <= time
            stamp, latest = time, latest if fits else None
        else:
            greatest = event_time_range(rows.records.slice(start, end - start), event_time)[1]
            fits = stamp is None or greatest <= stamp
            stamp, latest = (stamp, max(latest or greatest, greatest)) if fits else (None, greatest)
        if not fits:
            cuts.append(start)
    return cuts


def _times(rows: RestoredRows, event_time: str | None) -> tuple[int, int]:
    """Return the minimum and maximum time for the batch header, in microseconds."""
    lacking = _lacking(rows, event_time)
    found = event_time_range(rows.records, event_time)
    if not lacking.any():
        return found
    stamp = int(rows.times[int(np.argmax(lacking))])
    has_times = found != (NO_TIMESTAMP, NO_TIMESTAMP)
    return (min(found[0], stamp) if has_times else stamp), stamp


def _lacking(rows: RestoredRows, event_time: str | None) -> npt.NDArray[np.bool_]:
    """Return a mask of the records without an event time."""
    if event_time is None:
        return np.ones(len(rows.times), dtype=bool)
    column = rows.records.column(event_time)
    if not column.null_count:
        return np.zeros(len(column), dtype=bool)
    return column.is_null().to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
