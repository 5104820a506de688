"""The read of one task: a range of offsets of one partition, in full or not at all.

The plan of the range has the topic's id and a leader epoch of the log. The task fails if the topic was deleted or
recreated, if records of the range were deleted, or if the log was truncated. With failOnDataLoss=false it reads the
remaining records and logs the missing offsets. Offsets without a record (markers, aborted transactions, compacted
batches) are no loss. Only tasks load this module: the driver only plans ranges.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.offsets import list_offsets
from sparklog.client.errors import LogTruncated
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_EPOCH
from sparklog.record.arrays import array_of
from sparklog.spark.coalesce_batches import gathered
from sparklog.spark.columns import offset_run, plan_timestamps
from sparklog.spark.gc_freeze import freeze_worker
from sparklog.spark.options import CLIENT_ID
from sparklog.spark.range_read import DataLoss, RangeRead
from sparklog.spark.token_renewal import renewing

if TYPE_CHECKING:
    from sparklog.client.consumer.fetched_batches import FetchedBatch
    from sparklog.record.header import BatchHeader

_LOG = logging.getLogger(__name__)

_GONE = {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INCONSISTENT_TOPIC_ID}
_LOSSES = {*_GONE, ErrorCode.OFFSET_OUT_OF_RANGE}
#: The bytes that make a batch for Spark large enough. In larger batches the fixed time per batch does not matter.
_ENOUGH_BYTES = 256 * 1024


class TaskReader(DataSourceReader):
    """The reader that tasks get: it has only ``read``.

    When Spark pickles a reader of the planning process, the copy is a ``TaskReader``. So no option of the read, such as
    a reference to a password, reaches an executor.
    """

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of a task as batches of the declared columns. Raises the same errors as ``read_task``."""
        return read_task(partition)


def read_task(partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a task.

    If a read has no tasks, Spark runs one task with a placeholder. For the placeholder, this function yields nothing.

    Raises:
        DataLoss: the range cannot be read in full.
        ArchiveFileGone: VACUUM has deleted a file of the archive.
        BrokerError: a value does not fit its column, or an error persists after retries.
    """
    from sparklog.spark.history_read_task import FilesRead, read_files

    if isinstance(partition, RangeRead):
        yield from read_range(partition)
    elif isinstance(partition, FilesRead):
        yield from read_files(partition)
    freeze_worker()


def read_range(wanted: RangeRead) -> Iterator[pa.RecordBatch]:
    """Yield the records of a range as batches of the wanted columns.

    Small stored batches are combined, because the JVM needs as much time for a batch as for thousands of rows.

    Raises:
        DataLoss: the range cannot be read in full.
        BrokerError: a value does not fit its column, or an error persists after retries.
    """
    return gathered(_assembled(wanted), _ENOUGH_BYTES)


def _assembled(wanted: RangeRead) -> Iterator[pa.RecordBatch]:
    """Yield one batch per stored batch. Raises the same errors as ``read_range``."""
    position, end, epoch = wanted.start, wanted.end, wanted.last_epoch
    assembler = _Assembler(wanted)
    with (
        renewing(wanted.bootstrap, wanted.security, wanted.renewal),
        BlockingCluster(wanted.bootstrap, client_id=CLIENT_ID, security=wanted.security) as link,
    ):
        while position < end:
            try:
                for found in _fetched(link, wanted, position, end=end, last_epoch=epoch, keep=assembler.keep):
                    offsets = _offsets(found)
                    made = assembler.assemble(found, offsets)
                    # Set the position before the yield: if the consumer of this generator raises, the batch must not be
                    # read again.
                    position = int(offsets[-1].as_py()) + 1
                    if made.num_rows:
                        yield made
                return
            except BrokerError as error:  # noqa: PERF203 - it rarely runs more than once
                if error.code not in _LOSSES:
                    raise
                if wanted.archive is not None and _is_trimmed(error):
                    from sparklog.spark.history_read_task import taken_over

                    found_end, batches = taken_over(wanted, position)
                    if found_end > position:
                        yield from batches
                        position, epoch = found_end, NO_EPOCH
                        continue
                if wanted.fail_on_data_loss:
                    raise DataLoss(f"offsets {position} to {end} of {wanted.partition}: {error}") from error
                position, end = _behind_loss(link, wanted, position, end=end, error=error)
                epoch = NO_EPOCH


def _is_trimmed(error: BrokerError) -> bool:
    """Return whether the error means that the log begins later or ends earlier than expected."""
    return error.code == ErrorCode.OFFSET_OUT_OF_RANGE and not isinstance(error, LogTruncated)


def _fetched(
    link: BlockingCluster,
    wanted: RangeRead,
    position: int,
    *,
    end: int,
    last_epoch: int,
    keep: Callable[[BatchHeader], bool] | None,
) -> Iterator[FetchedBatch]:
    from sparklog.client.consumer.partition_reader import PartitionReader

    with PartitionReader(
        link,
        wanted.partition,
        position,
        end,
        columns=_stored_columns(wanted),
        keep=keep,
        topic_id=wanted.topic_id,
        last_epoch=last_epoch,
        isolation=wanted.isolation,
        local=wanted.local,
    ) as reader:
        yield from reader.fetched()


def _stored_columns(wanted: RangeRead) -> list[str]:
    """Return the columns to fetch: the wanted ones and those that filter rows. If empty, batch headers are enough."""
    needed = set(wanted.columns.stored_columns)
    if wanted.times is not None:
        needed.update(plan_timestamps(wanted.columns.shape).stored_columns)
    return [name for name in wanted.columns.shape.schema.names if name in needed]


def _behind_loss(
    link: BlockingCluster, wanted: RangeRead, position: int, *, end: int, error: BrokerError
) -> tuple[int, int]:
    """Log a warning about lost records, and return the part of the range that can still be read."""
    if error.code in _GONE:
        low = high = end
    else:
        tp = wanted.partition
        earliest = list_offsets(link, {tp: "earliest"})[tp]
        latest = list_offsets(link, {tp: "latest"}, isolation=wanted.isolation, known={tp: end})[tp]
        high = min(end, latest)
        low = min(max(position, earliest), high)
        if low == position and high == end and not isinstance(error, LogTruncated):
            raise error  # No records are missing, so skipping them would loop forever.
    _LOG.warning(
        "%s: records were lost: of offsets %d to %d only %d to %d can be read: %s",
        *(wanted.partition, position, end, low, high, error),
    )
    return low, high


def _offsets(found: FetchedBatch) -> pa.Array:
    if found.offsets is None:
        return offset_run(found.first_offset, found.batch.num_rows)
    return array_of(found.offsets.astype("i8", copy=False), pa.int64())


class _Assembler:
    """A converter of the log's batches to batches for Spark. It drops records whose times the read excludes."""

    def __init__(self, wanted: RangeRead) -> None:
        self._wanted = wanted
        self._times = wanted.times
        self._timestamps = plan_timestamps(wanted.columns.shape)
        self.keep = None if wanted.times is None else self._keep

    def _keep(self, header: BatchHeader) -> bool:
        assert self._times is not None
        return header.max_timestamp >= self._times.low and header.min_timestamp < self._times.high

    def assemble(self, found: FetchedBatch, offsets: pa.Array) -> pa.RecordBatch:
        tp = self._wanted.partition
        made = self._wanted.columns.assemble(found.header, found.batch, partition=tp, offsets=offsets)
        if self._times is None:
            return made
        times = self._timestamps.assemble(found.header, found.batch, partition=tp, offsets=offsets)
        us = times.column(0).cast(pa.int64()).to_numpy()
        return made.filter(pa.array((us >= self._times.low) & (us < self._times.high), pa.bool_()))
