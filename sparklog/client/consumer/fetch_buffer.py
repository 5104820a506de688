"""Batches that were fetched and not handed out yet, and with them the positions of a consumer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np

from sparklog.client.consumer.batch_slicing import head, tail
from sparklog.client.consumer.fetcher import CursorBatch, PartitionCursor
from sparklog.model import TopicPartition


class FetchBuffer:
    """Owned by its ``Consumer``; ``feeds`` are its fetcher's."""

    def __init__(self, feeds: Mapping[TopicPartition, PartitionCursor]) -> None:
        #: Those of a partition in order.
        self.ready: deque[CursorBatch] = deque()
        self._feeds = feeds

    def position(self, tp: TopicPartition) -> int:
        """The offset of the next record to be handed out. Raises KeyError for a partition that is not assigned."""
        return self._position(tp, self.ready)

    def positions(self) -> dict[TopicPartition, int]:
        return {tp: self._position(tp, self.ready) for tp in self._feeds}

    def drop(self, partitions: Collection[TopicPartition]) -> None:
        """Hand out nothing of what was fetched of these."""
        self.ready = deque(found for found in self.ready if found.tp not in partitions)

    def take(self, limit: int | None, *, batch_records: int | None) -> Iterator[CursorBatch]:
        """What is ready, ``limit`` records at most; without one, in batches of at most ``batch_records``."""
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

    def take_until(
        self,
        ends: Mapping[TopicPartition, int],
        more: Callable[[Mapping[TopicPartition, int]], None],
    ) -> list[CursorBatch]:
        """All records below these offsets; what lies behind stays ready. ``more`` is called with the positions that
        these partitions have come to, and waits for batches; after what it raises nothing of the batches is kept."""
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
        return self._feeds[tp].position if first is None else first


def _cut(
    found: CursorBatch, ends: Mapping[TopicPartition, int], taken: list[CursorBatch], kept: deque[CursorBatch]
) -> None:
    """Cut a batch at the end of its partition's range: the head is taken, the tail kept for later."""
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
