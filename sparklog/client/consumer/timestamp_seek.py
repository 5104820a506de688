"""The start at a time: leaders return the batch that contains it, and its first records may be older."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.consumer.fetched_batches import ConsumedBatch
from sparklog.model import TopicPartition


class TimestampSeek:
    """The pending starts. Owner: its ``Consumer``."""

    def __init__(self, cluster: BlockingCluster) -> None:
        self._cluster = cluster
        #: The start times in us of partitions that have not reached them.
        self._not_before_us: dict[TopicPartition, int] = {}

    def __bool__(self) -> bool:
        """Return whether any batch may have to be cut."""
        return bool(self._not_before_us)

    def begin(self, partitions: Iterable[TopicPartition], time_us: int) -> None:
        self._not_before_us.update(dict.fromkeys(partitions, time_us))

    def drop(self, tp: TopicPartition) -> None:
        """Drop the start time of a partition that is read from elsewhere, or not any more."""
        self._not_before_us.pop(tp, None)

    def cut(self, found: Iterable[ConsumedBatch]) -> Iterator[ConsumedBatch]:
        """Yield the batches without the records before the first one that is not older than the start time."""
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
            return 0  # append times: all records of a batch have the same time
        times = batch.column(topic.event_time).cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        reached = np.flatnonzero(times.fill_null(-(2**63)).to_numpy(zero_copy_only=False) >= start_us)
        return int(reached[0]) if len(reached) else batch.num_rows
