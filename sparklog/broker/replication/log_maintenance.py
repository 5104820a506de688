"""The background work on a broker's logs, such as seals, retention, checkpoints and flushes.

When the high watermark rises, complete segments are sealed and new schemas are stored. Before a truncation, the part of
a segment that the truncation keeps may have to be copied. Timers start checkpoints, retention and flushes. Disk work
runs in threads. Only the event loop changes a log. A sealed segment is durable, is an ordinary Arrow file, and never
grows again.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from sparklog.broker.context import BrokerContext
from sparklog.broker.groups.retention_holds import RetentionHolds, read_to
from sparklog.broker.replication.partition import Answer, OnLogFailed, Partition, PendingProduce
from sparklog.broker.replication.partitions import Partitions
from sparklog.errors import ErrorCode, StorageError
from sparklog.record.marker import Marker, encode_marker
from sparklog.replica.purgatory import NEVER
from sparklog.storage.flushing import FlushJob
from sparklog.storage.log_directory import LogDirectory
from sparklog.storage.partition_file import PartitionFileJob
from sparklog.storage.sealing import SealJob
from sparklog.storage.truncation_job import TruncationJob

_log = logging.getLogger(__name__)

_SEAL_THREADS = 2
_FLUSH_THREADS = 2
_FLUSH_CHECK_MS = 100
#: The pauses before a follower fetches again after the copy for a truncation has failed; the last one repeats. They
#: grow because a copy uses disk bandwidth and disk space that other logs need.
_TRUNCATION_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
#: The pause before a checkpoint with new logs is tried again on a full disk.
_NAMES_PAUSE_S = 1.0
#: The change in the number of partitions and of logs with files after which ``gc.freeze`` or ``gc.unfreeze`` is called.
_SPARED_AT_ONCE = 1000


class LogMaintenance:
    """The component that does the background work on all logs of a broker, such as retention, seals and flushes.

    Not thread-safe: use it on the broker's event loop. ``start`` begins the work, and ``close`` ends it.
    """

    def __init__(
        self,
        context: BrokerContext,
        partitions: Partitions,
        *,
        directory: LogDirectory,
        holds: RetentionHolds,
        log_start_moved: Callable[[Partition], None],
        log_failed: OnLogFailed,
    ) -> None:
        self._context = context
        self._partitions = partitions
        self._directory = directory
        self._holds = holds
        self._log_start_moved = log_start_moved
        self._log_failed = log_failed
        self._pool = ThreadPoolExecutor(_SEAL_THREADS, thread_name_prefix="seal")
        #: A separate pool: thousands of logs may be due for a flush, and seals and checkpoints must not wait for these
        #: flushes.
        self._flush_pool = ThreadPoolExecutor(_FLUSH_THREADS, thread_name_prefix="flush")
        #: A separate pool, so that checkpoints do not wait for copies: deletions, which free disk space, wait for
        #: checkpoints. It has one thread, because a copy uses disk bandwidth and disk space.
        self._truncation_pool = ThreadPoolExecutor(1, thread_name_prefix="cut")
        #: For each partition whose log a thread is sealing, the segments that are still to be sealed.
        self._seals: dict[Partition, deque[SealJob]] = {}
        #: A separate pool for checkpoints with new logs, because the records of these logs wait for it.
        self._name_pool = ThreadPoolExecutor(1, thread_name_prefix="name")
        self._naming = False
        #: Set while logs wait for a flush by time. The flush task checks logs only while this is set.
        self._unflushed = asyncio.Event()
        self._closed = False
        #: The first failure in a thread. ``ended`` raises the failure even if no task waits for the thread's work any
        #: more.
        self._failure: StorageError | None = None
        #: The number of partitions and of logs with files at the last call of ``gc.freeze``.
        self._spared = 0

    def start(self) -> None:
        config = self._context.config
        self._every(config.checkpoint_interval_ms, self._checkpoint, "checkpoint")
        self._every(config.retention_check_interval_ms, self._retain, "retention")
        self._directory.name_logs(self._name_soon)
        self._directory.on_unflushed = self._unflushed.set
        if self._directory.unflushed:
            self._unflushed.set()
        self._every(_FLUSH_CHECK_MS, self._flush, "flush", while_set=self._unflushed)

    def close(self) -> None:
        """Start no new work. Work that already runs in threads continues: ``ended`` waits for it."""
        self._closed = True
        self._holds.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._flush_pool.shutdown(wait=False, cancel_futures=True)
        self._truncation_pool.shutdown(wait=False, cancel_futures=True)
        self._name_pool.shutdown(wait=False, cancel_futures=True)

    def ended(self) -> None:
        """Block until the work that still runs in threads has ended. Call this after ``close``.

        The wait is needed because a disk reports a lost write only once. If work in a thread gets the error, a later
        flush of the same files succeeds, and without the wait the broker would not know of the loss.

        Raises:
            StorageError: a flush or a seal has failed.
        """
        self._pool.shutdown(wait=True)
        self._flush_pool.shutdown(wait=True)
        self._truncation_pool.shutdown(wait=True)
        self._name_pool.shutdown(wait=True)
        if self._failure is not None:
            raise self._failure

    def _noted(self, work: Callable[[], None]) -> None:
        """Run ``work``, and remember its StorageError if it is the first one. Call this in a thread."""
        try:
            work()
        except StorageError as error:
            self._failure = self._failure or error
            raise

    def committed(self, partition: Partition) -> None:
        """Start the work that a higher high watermark allows: seal complete segments, and store new schemas."""
        durability = partition.log.durability
        if self._closed or not durability.may_be_due:
            return  # the case after almost every append
        schemas = durability.schemas_due()
        if schemas is not None:
            self._context.spawn(self._store_schemas(partition, schemas), f"schemas of {partition.tp}")
        jobs = durability.seals_due()
        if not jobs:
            return
        waiting = self._seals.get(partition)
        if waiting is not None:
            waiting.extend(jobs)
            return
        self._seals[partition] = deque(jobs)
        self._context.spawn(self._seal(partition), f"seal {partition.tp}")

    async def _seal(self, partition: Partition) -> None:
        """Seal the segments of one log in order, oldest first.

        Each seal also writes the leader epochs up to the end of the segment.
        """
        waiting = self._seals[partition]
        try:
            while waiting and not self._closed:
                job = waiting.popleft()
                await asyncio.get_running_loop().run_in_executor(self._pool, self._noted, job.run)
                partition.log.durability.seal_finished(job)
                self._context.counters["segments.sealed"] += job.done
        except StorageError as error:
            self._log_failed(partition, error)
        finally:
            del self._seals[partition]

    def prepare_truncation(self, partition: Partition, job: TruncationJob) -> None:
        """Start to copy the part of a segment that a truncation keeps. Do nothing if the process is ending."""
        if not self._closed:
            self._context.spawn(self._prepare_truncation(partition, job), f"cut {partition.tp}")

    async def _prepare_truncation(self, partition: Partition, job: TruncationJob) -> None:
        """Make the copy that a truncation needs, then truncate the log.

        The log does not change during the copy, because the replica does not fetch meanwhile. If the copy fails, the
        follower fetches from its leader again after a pause. The leader's log may start later by then, so that no copy
        is needed.
        """
        if self._closed:
            return
        pause_s = _TRUNCATION_PAUSES_S[min(partition.failed_truncations, len(_TRUNCATION_PAUSES_S) - 1)]
        try:
            await asyncio.get_running_loop().run_in_executor(self._truncation_pool, self._noted, job.run)
        except StorageError as error:
            self._log_failed(partition, error)
            return
        except Exception:
            self._context.counters["cuts.failed"] += 1
            _log.exception("%s: the copy for a truncation failed, retrying in %g s", partition.tp, pause_s)
        else:
            if not job.awaits_room:
                partition.truncation_prepared(job)
                return
            self._context.counters["cuts.without.room"] += 1
            _log.error("%s: no disk space for the copy of a truncation, retrying in %g s", partition.tp, pause_s)
        await asyncio.sleep(pause_s)
        partition.truncation_failed(job)

    async def _store_schemas(self, partition: Partition, job: PartitionFileJob) -> None:
        """Store the log's schemas in its partition file. If they are not stored, they are still in the segments."""
        if self._closed:
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._pool, self._noted, job.run)
        except StorageError as error:
            self._log_failed(partition, error)
        else:
            partition.log.durability.schemas_stored(job)

    def _every(
        self, interval_ms: int, work: Callable[[], object], name: str, *, while_set: asyncio.Event | None = None
    ) -> None:
        async def repeat() -> None:
            while True:
                if while_set is not None:
                    await while_set.wait()
                await asyncio.sleep(interval_ms / 1000)
                if self._closed:
                    return
                try:
                    done = work()
                    if asyncio.iscoroutine(done):
                        await done
                except StorageError as error:
                    self._log_failed(None, error)
                except OSError as error:  # a full disk: the write is tried again
                    self._context.counters[f"{name}.failed"] += 1
                    _log.error("%s failed: %s", name, error)

        self._context.spawn(repeat(), name)

    async def _checkpoint(self) -> None:
        self._freeze_objects()
        await self._write_checkpoint(self._pool)

    async def _write_checkpoint(self, pool: ThreadPoolExecutor) -> None:
        write = self._directory.checkpoint_job()
        await asyncio.get_running_loop().run_in_executor(pool, write)
        self._context.counters["checkpoints"] += 1
        for log in self._directory.consume_named():
            partition = self._partitions.get(log.tp)
            if partition is not None and partition.log is log:
                partition.log_named()

    def _name_soon(self) -> None:
        """Schedule a checkpoint that contains a new log.

        One checkpoint covers all logs that are created before it begins.
        """
        if not self._naming and not self._closed:
            self._naming = True
            self._context.spawn(self._name_logs(), "name logs")

    async def _name_logs(self) -> None:
        """Write checkpoints until they contain all logs.

        If thousands of logs are new, each checkpoint adds those that were created during the previous one. A pause as
        long as the last write leaves time for other work.
        """
        try:
            while self._directory.unnamed and not self._closed:
                began_s = time.monotonic()
                try:
                    await self._write_checkpoint(self._name_pool)
                except StorageError as error:
                    self._log_failed(None, error)
                    return
                except OSError as error:  # a full disk: retention may free space
                    self._context.counters["names.failed"] += 1
                    _log.error("could not record new logs, so their records are not committed: %s", error)
                    await asyncio.sleep(_NAMES_PAUSE_S)
                await asyncio.sleep(time.monotonic() - began_s if self._directory.unnamed else 0)
        finally:
            self._naming = False

    def _freeze_objects(self) -> None:
        """Exclude the objects of partitions from garbage collection, or include them again.

        Each partition has about a hundred objects, which live as long as the partition. If every full collection
        visited all of them, it would stop the event loop for some tenths of a second. So they are frozen after
        ``_SPARED_AT_ONCE`` more partitions or logs, and unfrozen after this number was removed.
        """
        kept = len(self._partitions) + self._directory.on_disk
        if kept >= self._spared + _SPARED_AT_ONCE:
            gc.collect(1)  # a freeze would keep young garbage forever; a collection of old garbage takes too long
            gc.freeze()
            self._spared = kept
        elif kept <= self._spared - _SPARED_AT_ONCE:
            gc.unfreeze()
            self._spared = 0

    async def _retain(self) -> None:
        """Delete old segments by age and size in the partitions that this broker leads.

        Followers delete what their leader has deleted.
        """
        await self._roll()
        maintenance_index = self._partitions.maintenance_index
        for partition in maintenance_index.with_backlog():
            if partition.offline is None and not partition.stopped:
                self.committed(partition)
        due = maintenance_index.due(time.time_ns() // 1000)
        committed = await self._holds.ask(sorted(_awaited_groups(due)))
        now_us = time.time_ns() // 1000
        for partition in due:
            if partition.offline is not None or partition.stopped or not partition.replica.is_leader:
                continue
            groups = partition.log.config.awaited_groups
            end = read_to(partition.tp, partition.topic_id, groups, committed) if groups else None
            deleted = self._guarded(partition, lambda log, end=end: log.retention.apply(now_us, read_to=end))
            self._context.counters["segments.deleted"] += deleted
            if deleted:
                self._log_start_moved(partition)

    async def _roll(self) -> None:
        """Roll active segments whose records are older than the retention time and that get no writes.

        A follower begins a new segment only with a batch that its leader has put into a new segment. So the leader
        appends a marker without a transaction as the first batch. Readers find no record at its offset.
        """
        now_us = time.time_ns() // 1000
        for partition in self._partitions.maintenance_index.due(now_us):
            if not partition.replica.is_leader or partition.stopped or partition.offline is not None:
                continue
            if not partition.log.retention.roll_due(now_us):
                continue
            if self._context.quiesced or self._closed:
                return
            rules = partition.rules
            header, body = encode_marker(Marker(), rules.schema, schema_id=rules.schema_id)
            pending = PendingProduce([(header, memoryview(body))], self._rolled, own=True, roll=True)
            partition.produce(pending, acks=1, deadline_ms=NEVER)
            await asyncio.sleep(0)  # each roll creates files, which takes time

    def _rolled(self, answer: Answer) -> None:
        self._context.counters["segments.rolled" if answer.code is ErrorCode.NONE else "segments.not.rolled"] += 1

    def _flush(self) -> None:
        now_us = time.time_ns() // 1000
        unflushed = self._directory.unflushed
        for tp in list(unflushed):
            partition = self._partitions.get(tp)
            if partition is None or partition.offline is not None or not partition.log.durability.awaits_flush:
                unflushed.discard(tp)
                continue
            self.committed(partition)  # records with a new schema count as flushed only once the schema is stored
            job = partition.log.durability.flush_due(now_us)
            if job is not None:
                self._context.spawn(self._flush_one(partition, job), f"flush {partition.tp}")
        if not unflushed:
            # an empty set keeps the large table that thousands of logs needed, and each iteration would scan it
            unflushed.clear()
            self._unflushed.clear()

    async def _flush_one(self, partition: Partition, job: FlushJob) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._flush_pool, self._noted, job.run)
        except StorageError as error:
            self._log_failed(partition, error)
        else:
            partition.log.durability.flush_finished(job)

    def _guarded(self, partition: Partition, work: Callable[..., int]) -> int:
        try:
            return work(partition.log)
        except StorageError as error:
            self._log_failed(partition, error)
            return 0


def _awaited_groups(due: Iterable[Partition]) -> set[str]:
    """Return the groups that retention waits for in the due topics."""
    return {
        group
        for partition in due
        if partition.replica.is_leader and partition.log.config.retention_wait_for_groups
        for group in partition.log.config.awaited_groups
    }
