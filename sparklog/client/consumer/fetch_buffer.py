"""The batches that were fetched but not returned, and the positions of a consumer that follow from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np

from sparklog.client.consumer.batch_slicing import head, tail
from sparklog.client.consumer.fetcher import CursorBatch, PartitionCursor
from sparklog.model import TopicPartition


class FetchBuffer:
    """The buffer. Owner: its ``Consumer``. ``cursors`` belong to the fetcher."""

    def __init__(self, cursors: Mapping[TopicPartition, PartitionCursor]) -> None:
        #: The buffered batches; those of one partition are in order.
        self.ready: deque[CursorBatch] = deque()
        self._cursors = cursors

    def position(self, tp: TopicPartition) -> int:
        """Return the offset of the next record to return. Raises KeyError for a partition that is not assigned."""
        return self._position(tp, self.ready)

    def positions(self) -> dict[TopicPartition, int]:
        return {tp: self._position(tp, self.ready) for tp in self._cursors}

    def drop(self, partitions: Collection[TopicPartition]) -> None:
        """Drop the buffered batches of these partitions."""
        self.ready = deque(found for found in self.ready if found.tp not in partitions)

    def consume(self, limit: int | None, *, batch_records: int | None) -> Iterator[CursorBatch]:
        """Yield buffered batches, of at most ``limit`` records in total, or else of at most ``batch_records`` each."""
        left = limit
        while self.ready and left != 0:
            found = self.ready.popleft()
            most = batch_records if left is None else left
            if most is not None and found.fetched.batch.num_rows > most:
                self.ready.appendleft(CursorBatch(found.tp, tail(found.fetched, most)))
                found = CursorBatch(found.tp, head(found.fetched, most))
            if left is not None:
                left -= found.fetched.batch.num_rows
            yield found

    def consume_until(
        self,
        ends: Mapping[TopicPartition, int],
        more: Callable[[Mapping[TopicPartition, int]], None],
    ) -> list[CursorBatch]:
        """Return all records below these offsets; the records above them stay in the buffer.

        ``more`` receives the current positions of these partitions, and waits for batches. If it raises, all buffered
        batches are dropped.
        """
        taken: list[CursorBatch] = []
        kept: deque[CursorBatch] = deque()
        try:
            while True:
                while self.ready:
                    _cut(self.ready.popleft(), ends, taken, kept)
                reached = {tp: self._position(tp, kept) for tp in ends}
                if all(position >= ends[tp] for tp, position in reached.items()):
                    return taken
                more(reached)
        except BaseException:
            kept.clear()
            raise
        finally:
            self.ready.extendleft(reversed(kept))

    def _position(self, tp: TopicPartition, waiting: Iterable[CursorBatch]) -> int:
        first = next((found.fetched.first_offset for found in waiting if found.tp == tp), None)
        return self._cursors[tp].position if first is None else first


def _cut(
    found: CursorBatch, ends: Mapping[TopicPartition, int], taken: list[CursorBatch], kept: deque[CursorBatch]
) -> None:
    """Split a batch at the end of its partition's range: the head is taken, the tail is kept for later."""
    if found.tp not in ends:
        kept.append(found)
        return
    batch, first, offsets = found.fetched.batch, found.fetched.first_offset, found.fetched.offsets
    end = ends[found.tp]
    rows = max(0, end - first) if offsets is None else int(np.searchsorted(offsets, end))
    if rows >= batch.num_rows:
        taken.append(found)
        return
    if rows:
        taken.append(CursorBatch(found.tp, head(found.fetched, rows)))
    kept.append(CursorBatch(found.tp, tail(found.fetched, rows)))
