"""The compaction of a broker's logs in a thread: one log at a time, beginning with the log that needs it most.

The bytes per second that the cleaner reads and writes are limited. Each replica compacts its own log at its own time,
because the result that a reader sees does not depend on this time. A log with damaged bytes cannot be compacted. Such a
log stays as it is until the topic's settings change or the broker restarts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sparklog.broker.context import BrokerContext
from sparklog.broker.replication.partition import OnLogFailed, Partition
from sparklog.broker.replication.partitions import Partitions
from sparklog.errors import BrokerError, StorageError
from sparklog.model import is_internal
from sparklog.storage.cleaning import CleaningRules, CleanJob, Replacement
from sparklog.storage.cleaning_plan import CleanerState
from sparklog.storage.disk import is_full

_log = logging.getLogger(__name__)

#: The number of partitions to check before the event loop runs other work, because a check may read some headers.
_CHECKS_A_TURN = 50
_Result = TypeVar("_Result")


class Cleaner:
    """The component that compacts the logs of a broker, one log at a time.

    Not thread-safe: use it only on the broker's event loop. ``start`` begins the work, and ``close`` ends it.
    """

    def __init__(self, context: BrokerContext, partitions: Partitions, log_failed: OnLogFailed) -> None:
        self._context = context
        self._partitions = partitions
        self._log_failed = log_failed
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cleaner")
        self._job: CleanJob | None = None
        #: partitions whose logs could not be cleaned, with their settings at that time
        self._uncleanable: dict[Partition, object] = {}
        #: partitions that are skipped until the next pass
        self._put_off: set[Partition] = set()
        self._closed = False

    def start(self) -> None:
        if self._context.config.cleaner_enable:
            self._context.spawn(self._run(), "cleaner")

    def close(self) -> None:
        """Start no new compaction, and cancel the one in progress."""
        self._closed = True
        if self._job is not None:
            try:
                self._job.cancel()
            except OSError as error:  # the next start of the broker finishes the replacement of files
                _log.error("could not finish a log cleaning: %s", error)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        while not self._closed:
            await asyncio.sleep(self._context.config.cleaner_backoff_ms / 1000)
            self._put_off.clear()
            while not self._closed and (partition := await self._dirtiest()) is not None:
                await self._clean(partition)

    async def _dirtiest(self) -> Partition | None:
        found, most = None, -1.0
        maintenance_index = self._partitions.maintenance_index
        now_us = time.time_ns() // 1000
        for number, partition in enumerate(maintenance_index.to_clean(now_us)):
            if number % _CHECKS_A_TURN == _CHECKS_A_TURN - 1:
                await asyncio.sleep(0)
            if not self._may_clean(partition):
                continue
            try:
                ratio = partition.log.cleaning.dirty_ratio(now_us)
                if ratio is None:
                    maintenance_index.clean_later(partition, partition.log.cleaning.due_again_us(now_us))
            except StorageError as error:
                self._log_failed(partition, error)
                continue
            if ratio is not None and ratio > most:
                found, most = partition, ratio
        return found

    def _may_clean(self, partition: Partition) -> bool:
        if partition.stopped or partition.offline is not None or not partition.rules.key_columns:
            return False
        if partition in self._put_off:
            return False
        if self._uncleanable.get(partition) is partition.log.config:
            return False
        self._uncleanable.pop(partition, None)
        return True

    async def _clean(self, partition: Partition) -> None:
        if not self._may_clean(partition):  # the partition may have stopped since
            return
        began = time.monotonic()
        try:
            job = partition.log.cleaning.begin(self._rules(partition), time.time_ns() // 1000)
        except StorageError as error:
            self._log_failed(partition, error)
            return
        if job is None:  # no room for the files that the cleaning would write
            self._put_off.add(partition)
            return
        self._job = job
        state: CleanerState | None = None
        try:
            state = await self._carry_out(partition, job)
        except Exception as error:
            self._failed(partition, job, error)
        finally:
            self._job = None
            partition.log.cleaning.finished(job, state)
            if state is None:
                self._put_off.add(partition)
        self._count(partition, job, state, took_s=time.monotonic() - began)

    def _rules(self, partition: Partition) -> CleaningRules:
        config, rules = partition.log.config, partition.rules
        return CleaningRules(
            rules.key_columns,
            rules.event_time if config.timestamp_type == "CreateTime" else None,
            config,
            self._context.config.cleaner_buffer_bytes,
            self._context.config.cleaner_io_bytes,
            seed=int.from_bytes(os.urandom(16), "little"),
            # each record of a coordinator has its own time, which no reader sees: such records may share a batch
            keep_times=not is_internal(partition.tp.topic),
        )

    async def _carry_out(self, partition: Partition, job: CleanJob) -> CleanerState | None:
        await self._in_thread(job.read_keys)
        for group in job.groups():
            found = await self._in_thread(lambda group=group: job.rewrite(group))  # type: ignore[misc]
            if job.cancelled:
                return None
            if found is not None and self._replaced(partition, job, found):
                await self._in_thread(job.settle)
        return await self._in_thread(lambda: job.finish(time.time_ns() // 1_000_000))

    def _replaced(self, partition: Partition, job: CleanJob, found: Replacement) -> bool:
        try:
            return partition.log.cleaning.replace_segments(job, found)
        except StorageError as error:
            self._log_failed(partition, error)
            return False

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _failed(self, partition: Partition, job: CleanJob, error: Exception) -> None:
        """Report a failed cleaning.

        A cancelled cleaning needs no report: a truncation or deletion of the log may have removed its segments. A log
        with damaged bytes is not cleaned again, and an operator must repair it. A broken disk takes all its logs
        offline.
        """
        if job.cancelled or self._closed:
            return
        counters = self._context.counters
        if isinstance(error, OSError) and is_full(error):
            counters["cleaner.full"] += 1
            _log.error("%s: no disk space for cleaning: %s", partition.tp, error)
        elif isinstance(error, OSError):
            self._log_failed(partition, StorageError(f"cleaning {partition.tp}: {error}"))
        else:
            counters["cleaner.uncleanable"] += 1
            self._uncleanable[partition] = partition.log.config
            trace = None if isinstance(error, (BrokerError, StorageError)) else error
            _log.error("%s: cannot be cleaned, and is left unchanged: %s", partition.tp, error, exc_info=trace)

    def _count(self, partition: Partition, job: CleanJob, state: CleanerState | None, *, took_s: float) -> None:
        tally, counters = job.tally, self._context.counters
        counters["cleaner.runs"] += state is not None
        counters["cleaner.given.up"] += state is None
        counters["cleaner.ms"] += round(took_s * 1000)
        counters["cleaner.records"] += tally.records
        counters["cleaner.bytes.read"] += tally.bytes_read
        counters["cleaner.bytes.before"] += tally.bytes_before
        counters["cleaner.bytes.after"] += tally.bytes_after
        counters["cleaner.bytes.spilled"] += tally.bytes_spilled
        counters["cleaner.segments.replaced"] += tally.segments
        counters["cleaner.records.removed"] += tally.records - tally.kept
        if state is not None:
            _log.info(
                "%s: cleaned up to %d in %.1f s: %d keys, kept %d of %d records, %d bytes before, %d after",
                partition.tp,
                state.end,
                took_s,
                tally.keys,
                tally.kept,
                tally.records,
                tally.bytes_before,
                tally.bytes_after,
            )
