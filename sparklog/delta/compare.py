"""The comparison of a restored partition with its table. All rows must be equal."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparklog.client.admin.descriptions import TopicDescription
from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.consumer.fetched_batches import FetchedBatch
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.config import topic_config
from sparklog.delta.archive_reader import Archive
from sparklog.delta.restore_batches import Numbers, RestoredRows
from sparklog.errors import SparklogError
from sparklog.model import TopicPartition

_UTC_US = pa.timestamp("us", tz="UTC")


class RestoreDiffersError(SparklogError):
    """The error for a restored log that differs from the table from which it was restored."""


def compare(link: BlockingCluster, topic: TopicDescription, archive: Archive, partition: int) -> int:
    """Compare the rows of one partition in the restored log and in the archive. Return the number of rows.

    Raises:
        RestoreDiffersError: the rows differ. The message names the difference.
        BrokerError, ClientTimeout: the log cannot be read.
    """
    tp = TopicPartition(topic.name, partition)
    end = archive.end(partition)
    count = 0
    with PartitionReader(
        link, tp, min(archive.first_offset(partition), end), end, topic_id=topic.topic_id, local="auto"
    ) as reader:
        log = _Log(reader.fetched(), topic)
        for expected in archive.rows(partition):
            found = log.take(len(expected.offsets))
            if not _same(found, expected):
                raise RestoreDiffersError(f"{tp}: {_difference(found, expected)}")
            count += len(expected.offsets)
        if left := log.take(1):
            raise RestoreDiffersError(f"{tp}: offset {int(left.offsets[0])} is in the log but not in the table")
    return count


class _Log:
    """A reader of a log that returns rows in pieces of a requested size."""

    def __init__(self, batches: Iterator[FetchedBatch], topic: TopicDescription) -> None:
        self._batches = batches
        self._topic = topic
        is_stamped = topic_config(topic.config).timestamp_type == "LogAppendTime"
        self._event_time = None if is_stamped else topic.event_time
        self._left: RestoredRows | None = None

    def take(self, count: int) -> RestoredRows | None:
        """Return the next ``count`` rows. Return fewer rows at the end of the log, and None after that."""
        parts: list[RestoredRows] = []
        missing = count
        while missing and (rows := self._next()) is not None:
            part = rows.part(0, min(missing, len(rows.offsets)))
            taken = len(part.offsets)
            self._left = rows.part(taken, len(rows.offsets)) if taken < len(rows.offsets) else None
            parts.append(part)
            missing -= taken
        return _joined(parts) if parts else None

    def _next(self) -> RestoredRows | None:
        if self._left is not None:
            return self._left
        found = next(self._batches, None)
        return None if found is None else self._rows(found)

    def _rows(self, found: FetchedBatch) -> RestoredRows:
        batch = found.batch
        dense: Numbers = np.arange(found.first_offset, found.first_offset + batch.num_rows, dtype=np.int64)
        offsets = dense if found.offsets is None else found.offsets
        stamp = pa.scalar(found.header.max_timestamp, pa.int64()).cast(_UTC_US)
        if self._event_time is None:
            times = pa.repeat(stamp, batch.num_rows)
        else:
            # The Spark source, and so the archive, has the same.
            how = pc.CastOptions(_UTC_US, allow_time_truncate=True)
            times = pc.cast(batch.column(self._event_time), options=how).fill_null(stamp)
        return RestoredRows(batch, offsets, times.cast(pa.int64()).to_numpy(zero_copy_only=False))


def _joined(parts: list[RestoredRows]) -> RestoredRows:
    if len(parts) == 1:
        return parts[0]
    return RestoredRows(
        pa.concat_batches([part.records for part in parts]),
        np.concatenate([part.offsets for part in parts]),
        np.concatenate([part.times for part in parts]),
    )


def _same(found: RestoredRows | None, expected: RestoredRows) -> bool:
    if found is None or not np.array_equal(found.offsets, expected.offsets):
        return False
    if not np.array_equal(found.times, expected.times):
        return False
    # NaN is not equal to itself, but its text is.
    return bool(found.records.equals(expected.records)) or repr(found.records.to_pylist()) == repr(
        expected.records.to_pylist()
    )


def _difference(found: RestoredRows | None, expected: RestoredRows) -> str:
    """Return a description of the first row that differs."""
    for at, offset in enumerate(expected.offsets.tolist()):
        if found is None or at >= len(found.offsets):
            return f"offset {offset} is in the table but not in the log"
        if found.offsets[at] != offset:
            return f"the log has offset {found.offsets[at]} where the table has {offset}"
        log, table = found.part(at, at + 1), expected.part(at, at + 1)
        if not _same(log, table):
            shown = [f"{one.records.to_pylist()[0]} at {int(one.times[0])} us" for one in (log, table)]
            return f"offset {offset}: {shown[0][:500]} in the log, {shown[1][:500]} in the table"
    return "the rows differ"
