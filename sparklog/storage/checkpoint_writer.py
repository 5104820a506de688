"""The writer of a log directory's checkpoint, and the steps that must wait until a checkpoint is durable.

A checkpoint has one entry for each log with records. Only the entries of changed logs are renewed. Any thread may write
the checkpoint. When a checkpoint is durable, the replicas of the new logs in it may confirm and commit records
(``CheckpointWriter.name_logs``), and the segments below the log start offsets in it may be deleted.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from sparklog.errors import StorageError
from sparklog.model import TopicPartition
from sparklog.storage.checkpoints import Checkpoint, PartitionCheckpoint, write_checkpoint
from sparklog.storage.directory_trust import DirectoryTrust
from sparklog.storage.disk import Disk, is_full
from sparklog.storage.log import Log
from sparklog.storage.log_context import LogContext


class CheckpointWriter:
    """A writer of the checkpoint file of one ``LogDirectory``.

    Not thread-safe: use it only on the broker's event loop. Other threads only run the function that ``job`` returns.
    """

    def __init__(
        self,
        disk: Disk,
        path: Path,
        *,
        logs: Mapping[TopicPartition, Log],
        services: LogContext,
        trust: DirectoryTrust,
    ) -> None:
        self._disk = disk
        self._path = path
        self._logs = logs
        self._services = services
        self._trust = trust
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._written = 0
        #: The entries that this process wrote last. None: it has written no checkpoint.
        self._content: tuple[PartitionCheckpoint, ...] | None = None
        #: The last entry of each log with records, and the tuple of all entries that was made last.
        self._marks: dict[TopicPartition, PartitionCheckpoint] = {}
        self._taken: tuple[PartitionCheckpoint, ...] = ()
        self._changed: set[TopicPartition] = set()
        #: The number of logs that had files when the last checkpoint was taken.
        self.on_disk = 0
        #: Logs that have a directory, but are in no durable checkpoint.
        self.unnamed: set[TopicPartition] = set()
        #: Called when ``unnamed`` grows. None: a replica may confirm records even if no checkpoint has its log.
        self._on_unnamed: Callable[[], None] | None = None
        #: The logs that were added to a checkpoint since the last call of ``consume_named``.
        self._newly_named: list[Log] = []

    # --- names ----------------------------------------------------------------------------------------------------

    @property
    def names_logs(self) -> bool:
        """Return whether ``name_logs`` was called.

        If so, the replica of a new log may confirm or commit records only when a durable checkpoint has the log.
        """
        return self._on_unnamed is not None

    def name_logs(self, on_unnamed: Callable[[], None]) -> None:
        """Call ``on_unnamed`` for each log that gets a directory, because the log is in no durable checkpoint yet.

        Call it now too if there is such a log. The caller of this method then writes a checkpoint and calls
        ``consume_named``. Until then ``Log.named`` is false. As a follower, the log's replica does not fetch, because a
        fetch confirms to the leader that the replica has all records below the fetch offset. As a leader, the replica
        commits no records.

        So the next start can distinguish a lost log from a log that never had records. Both lack a directory, but only
        the lost log is in the checkpoint.
        """
        self._on_unnamed = on_unnamed
        if self.unnamed:
            on_unnamed()

    def created(self, tp: TopicPartition) -> None:
        """Record that the log of ``tp`` has created its directory. The log is in no checkpoint yet."""
        self.unnamed.add(tp)
        if self._on_unnamed is not None:
            self._on_unnamed()

    def found_unnamed(self, tps: Iterable[TopicPartition]) -> None:
        """Record that these logs are on disk, but not in the checkpoint."""
        self.unnamed.update(tps)

    def removed(self, tp: TopicPartition) -> None:
        """Forget the log of ``tp``, because it is no longer in the log directory."""
        self._marks.pop(tp, None)
        self.unnamed.discard(tp)

    def consume_named(self) -> list[Log]:
        """Find the logs that were added to a durable checkpoint since the last call, and return them.

        This method also sets ``Log.named`` of these logs to true, because a durable checkpoint has their entries.
        """
        with self._lock:
            found, self._newly_named = self._newly_named, []
        named = []
        for log in found:
            if self._logs.get(log.tp) is log:
                self.unnamed.discard(log.tp)
                if not log.named:
                    log.mark_named()
                    named.append(log)
        return named

    # --- writes ---------------------------------------------------------------------------------------------------

    @property
    def has_written(self) -> bool:
        """Return whether this process has written a checkpoint."""
        return self._content is not None

    def write(self) -> None:
        """Write the checkpoint, and block until it is fsynced.

        Raises:
            StorageError: the log directory must go offline.
            OSError: the disk is full. The previous checkpoint stays valid.
        """
        self.job()()
        self._delete_retired()

    def job(self) -> Callable[[], None]:
        """Collect the entries of the checkpoint now, and return a function that writes them.

        Any thread may call the function. This method and the function raise the same errors as ``write``.
        """
        self._delete_retired()
        number = next(self._numbers)
        entries = self._take()
        self.on_disk = len(entries)
        unnamed = [self._logs[tp] for tp in self.unnamed if tp in self._logs]

        def write() -> None:
            with self._lock:
                if number < self._written:
                    return  # The later checkpoint names these logs too, and has reported them.
                # Set this even if nothing has to be written: an older job must not write its entries later.
                self._written = number
                content = entries if self._trust.offline is None else self._with_earlier_syncs(entries)
                if content is self._content or content == self._content:
                    self._newly_named += unnamed
                    return
                try:
                    write_checkpoint(self._disk, self._path, Checkpoint(content))
                except OSError as failure:
                    if is_full(failure):
                        raise
                    self._trust.fail(f"writing the checkpoint: {failure}")
                    raise StorageError(f"log directory {self._path}: writing the checkpoint: {failure}") from failure
                self._content = content
                self._newly_named += unnamed

        return write

    def _with_earlier_syncs(self, entries: Iterable[PartitionCheckpoint]) -> tuple[PartitionCheckpoint, ...]:
        """Return ``entries``, but with no recovery point above the one in the last written checkpoint.

        A recovery point may have risen because of an fsync after the failed one. Such an fsync proves nothing.
        """
        before = {(entry.topic_id, entry.partition): entry.recovery_point for entry in self._content or ()}
        return tuple(
            msgspec.structs.replace(
                entry, recovery_point=min(entry.recovery_point, before.get((entry.topic_id, entry.partition), 0))
            )
            for entry in entries
        )

    def _take(self) -> tuple[PartitionCheckpoint, ...]:
        """Return the entries of all logs with records: the same tuple object as last time if no entry changed."""
        moved = self._services.consume_moved()
        self._changed |= moved
        for tp in moved:
            log = self._logs.get(tp)
            # A log without records has no directory. If the checkpoint named this log, the next start would report
            # that it is lost.
            if log is not None and log.on_disk:
                self._marks[tp] = log.checkpoint()
        if moved or len(self._marks) != len(self._taken):
            self._taken = tuple(self._marks.values())
        return self._taken

    def consume_changed(self) -> set[TopicPartition]:
        """Return the partitions whose logs have changed since the last call. See ``LogDirectory.consume_changed``."""
        changed, self._changed = self._changed | self._services.moved, set()
        return changed

    def _delete_retired(self) -> None:
        """Delete the retired segments that are below the log start offset in the written checkpoint."""
        retired = self._services.retired
        if not retired:
            return
        waiting = {tp: self._logs[tp] for tp in retired if tp in self._logs}
        for entry in self._content or ():
            log = waiting.get(TopicPartition(entry.topic, entry.partition))
            if log is not None and log.topic_id == entry.topic_id:
                log.retention.delete_retired(entry.log_start_offset)
        retired.intersection_update([tp for tp, log in waiting.items() if log.retention.has_retired])
