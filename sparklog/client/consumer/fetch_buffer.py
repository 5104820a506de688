"""The batches that a consumer has fetched and not returned yet, and the consumer's positions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from sparklog.client.consumer.fetch_decoder import FetchDecoder
from sparklog.client.consumer.fetched_batches import ConsumedBatch
from sparklog.client.consumer.fetcher import Fetcher
from sparklog.client.consumer.partition_cursor import CompletedFetch
from sparklog.client.consumer.timestamp_seek import TimestampSeek
from sparklog.model import TopicPartition


class FetchBuffer:
    """A buffer of the batches that a consumer has fetched and not returned yet. A part of ``Consumer``."""

    def __init__(self, fetcher: Fetcher, decoder: FetchDecoder, timestamp_seek: TimestampSeek) -> None:
        #: The buffered batches. The batches of one partition are in the order of their offsets.
        self.ready: deque[ConsumedBatch] = deque()
        self._fetcher = fetcher
        self._decoder = decoder
        self._timestamp_seek = timestamp_seek

    def fill(self, timeout_s: float, *, or_moved: bool = False) -> None:
        """Wait until batches arrive, or the fetcher's ``wake_fd`` becomes readable, for at most ``timeout_s``.

        The fetcher moves past the batches, and past records that are not returned (markers, aborted records). With
        ``or_moved`` this method also returns when the fetcher has moved past such records.

        Raises:
            BrokerError, ClientTimeout: see ``Fetcher.advance`` and ``FetchDecoder.decode``.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            completed = self._fetcher.advance(max(0.0, deadline - time.monotonic()))
            self._decode(completed)
            if self.ready or self._fetcher.woken or (or_moved and completed) or time.monotonic() >= deadline:
                return

    def _decode(self, completed: Sequence[CompletedFetch]) -> None:
        """Decode fetches. If there is an error, first return all other batches, and raise the error afterwards."""
        found: list[ConsumedBatch] = []
        failure: Exception | None = None
        for fetch in completed:
            tp = fetch.cursor.tp
            try:
                for batch in self._decoder.decode(fetch):
                    found.append(ConsumedBatch(tp, batch))  # noqa: PERF401 - keep the batches before an error
            except Exception as error:
                failure = failure or error
        self.ready.extend(self._timestamp_seek.cut(found) if self._timestamp_seek else found)
        if failure is not None:
            if not found:
                raise failure
            self._fetcher.defer(failure)

    def position(self, tp: TopicPartition) -> int:
        """Return the offset of the next record that the user gets. Raises KeyError if the partition is not assigned."""
        return self._position(tp, self.ready)

    def positions(self) -> dict[TopicPartition, int]:
        return {tp: self._position(tp, self.ready) for tp in self._fetcher.cursors}

    def drop(self, partitions: Collection[TopicPartition]) -> None:
        """Drop the buffered batches of these partitions."""
        self.ready = deque(found for found in self.ready if found.tp not in partitions)

    def consume(self, limit: int | None, *, batch_records: int | None) -> Iterator[ConsumedBatch]:
        """Yield buffered batches, with at most ``limit`` records in total.

        If ``limit`` is None, each batch has at most ``batch_records`` records.
        """
        left = limit
        while self.ready and left != 0:
            found = self.ready.popleft()
            most = batch_records if left is None else left
            if most is not None and found.fetched.batch.num_rows > most:
                self.ready.appendleft(ConsumedBatch(found.tp, found.fetched.tail(most)))
                found = ConsumedBatch(found.tp, found.fetched.head(most))
            if left is not None:
                left -= found.fetched.batch.num_rows
            yield found

    def consume_until(
        self,
        ends: Mapping[TopicPartition, int],
        more: Callable[[Mapping[TopicPartition, int]], None],
    ) -> list[ConsumedBatch]:
        """Return all records below the offsets ``ends``. The other records stay in the buffer.

        The method calls ``more`` with the current positions of these partitions; ``more`` waits for more batches. If
        ``more`` raises, all buffered batches are dropped.
        """
        taken: list[ConsumedBatch] = []
        kept: deque[ConsumedBatch] = deque()
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

    def _position(self, tp: TopicPartition, waiting: Iterable[ConsumedBatch]) -> int:
        first = next((found.fetched.first_offset for found in waiting if found.tp == tp), None)
        return self._fetcher.cursors[tp].position if first is None else first


def _cut(
    found: ConsumedBatch, ends: Mapping[TopicPartition, int], taken: list[ConsumedBatch], kept: deque[ConsumedBatch]
) -> None:
    """Split a batch at its partition's end offset: the records below it go to ``taken``, the others to ``kept``."""
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
        taken.append(ConsumedBatch(found.tp, found.fetched.head(rows)))
    kept.append(ConsumedBatch(found.tp, found.fetched.tail(rows)))
