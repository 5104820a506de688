"""The start of a consumer at a time instead of at an offset.

For a time, a leader returns the offset of a batch. The first records of this batch may be older than the time, so this
module removes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.consumer.fetched_batches import ConsumedBatch
from sparklog.model import TopicPartition


class TimestampSeek:
    """A part of a ``Consumer`` that starts at a time: it removes older records at the start of each partition."""

    def __init__(self, cluster: BlockingCluster) -> None:
        self._cluster = cluster
        #: The start time, in microseconds, of each partition that has not reached its start time yet.
        self._not_before_us: dict[TopicPartition, int] = {}

    def __bool__(self) -> bool:
        """Return whether some partitions have not reached their start time yet."""
        return bool(self._not_before_us)

    def begin(self, partitions: Iterable[TopicPartition], time_us: int) -> None:
        self._not_before_us.update(dict.fromkeys(partitions, time_us))

    def drop(self, tp: TopicPartition) -> None:
        """Drop the start time of a partition, because it is now read from another position or not at all."""
        self._not_before_us.pop(tp, None)

    def cut(self, found: Iterable[ConsumedBatch]) -> Iterator[ConsumedBatch]:
        """Yield the batches, without the older records at the start of each partition.

        A partition's records are yielded from the first record at or after the partition's start time.
        """
        for one in found:
            start_us = self._not_before_us.get(one.tp)
            row = 0 if start_us is None else self._first_row_at(one, start_us)
            if row < one.fetched.batch.num_rows:
                self._not_before_us.pop(one.tp, None)
                yield one if row == 0 else ConsumedBatch(one.tp, one.fetched.tail(row))

    def _first_row_at(self, found: ConsumedBatch, start_us: int) -> int:
        topic = self._cluster.metadata.topic(found.tp.topic)
        batch = found.fetched.batch
        if topic is None or topic.event_time is None or topic.event_time not in batch.schema.names:
            return 0  # The times are append times, so all records of the batch have the same time.
        times = batch.column(topic.event_time).cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        reached = np.flatnonzero(times.fill_null(-(2**63)).to_numpy(zero_copy_only=False) >= start_us)
        return int(reached[0]) if len(reached) else batch.num_rows
