"""One log directory: one disk, one broker slot, all the logs of that broker.

::

    <log dir>/meta.json, broker.lock, supervisor.lock      meta
              checkpoint, running, clean-stop              checkpoints
              <topic>-<partition>/...                      log
              removed/<n>                                  on its way out
              set-aside/<topic>-<partition>                unreadable; kept for people

Owned by the broker's event loop. Removal of files runs in a thread of its own; ``checkpoint_job`` may run in any.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sparklog.config import BrokerConfig, TopicConfig, broker_config, topic_config
from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.model import TopicPartition, TopicSchema
from sparklog.storage.checkpoints import (
    BootMark,
    Checkpoint,
    PartitionCheckpoint,
    begin_running,
    mark_clean_stop,
    mark_running,
    read_boot_id,
    read_checkpoint,
    write_checkpoint,
)
from sparklog.storage.clean_stop import SyncAhead, at_once, make_durable
from sparklog.storage.disk import Disk, RealDisk, is_full
from sparklog.storage.formats import NewerFormatError
from sparklog.storage.hot_batches import HotBatches
from sparklog.storage.log import Log
from sparklog.storage.log_services import LogServices
from sparklog.storage.meta import DirectoryMeta, lock_for_broker, read_meta, write_meta
from sparklog.storage.open_files import OpenFiles
from sparklog.storage.partition_file import (
    PartitionFile,
    directory_name,
    parse_directory_name,
    read_partition_file,
)

_REMOVED = "removed"
_SET_ASIDE = "set-aside"

logger = logging.getLogger(__name__)


class LogDirectory:
    """Made by ``open``; then ``load`` once; ``close`` at the end."""

    def __init__(
        self,
        path: Path,
        *,
        meta: DirectoryMeta,
        disk: Disk,
        lock: int,
        boot_id: str,
        config: BrokerConfig,
        in_background: Callable[[Callable[[], None]], object] | None,
        max_open_segments: int | None,
    ) -> None:
        self.path = path
        self.meta = meta
        #: why the directory is offline; None while it is usable
        self.offline: str | None = None
        self._disk = disk
        self._lock = lock
        self._boot_id = boot_id
        self._logs: dict[TopicPartition, Log] = {}
        self._defaults = topic_config(config.topic_defaults)
        self._threads: ThreadPoolExecutor | None = None
        if in_background is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="log-removal")
            in_background = self._threads.submit
        self._in_background = in_background
        self._removals = itertools.count()
        self._checkpoint_lock = threading.Lock()
        self._checkpoint_numbers = itertools.count(1)
        self._checkpoint_written = 0
        self._checkpoint_content: tuple[PartitionCheckpoint, ...] | None = None
        #: of each log that holds something, as last taken; and all of it, as last taken
        self._marks: dict[TopicPartition, PartitionCheckpoint] = {}
        self._taken: tuple[PartitionCheckpoint, ...] = ()
        self._changed: set[TopicPartition] = set()
        #: see ``flush_later``; the function is called when there is one more
        self.unflushed: set[TopicPartition] = set()
        self.on_unflushed: Callable[[], None] = lambda: None
        self._closed = False
        #: logs that had files when the last checkpoint was taken
        self.on_disk = 0
        self._services = LogServices(
            disk=disk,
            files=OpenFiles(max_open_segments),
            hot=HotBatches(config.hot_batches_bytes),
            remove_later=self._remove_later,
            remove_directory=self._remove_directory,
            checkpoint_now=self.checkpoint,
            failed=self._failed,
            flush_later=self.flush_later,
            producer_id_expiration_ms=config.producer_id_expiration_ms,
        )
        #: nothing was in flight when the last process ended
        self.clean = True
        #: everything the last process had written is there: its page cache was not lost, ``load`` found no damage
        self.trusted = True
        #: the broker's last one that this directory knows of; None: it was not noted
        self.incarnation: int | None = None
        #: topic ids of logs in the checkpoint that ``load`` did not find: deleted just before the end, or lost
        self.missing: dict[TopicPartition, str] = {}

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        cluster_id: str,
        broker_id: int,
        port: int = 0,
        config: BrokerConfig | None = None,
        disk: Disk | None = None,
        boot_id: str | None = None,
        in_background: Callable[[Callable[[], None]], object] | None = None,
        max_open_segments: int | None = None,
    ) -> LogDirectory:
        """Take the directory for this process; made, with its meta.json, if it is new.

        ``disk``, ``boot_id`` and ``in_background`` (which runs a removal, maybe later) are for the simulator.

        Raises:
            StorageError: in use by another process; of another cluster or broker; of a newer format; on NFS or FUSE;
                not writable.
        """
        disk = disk or RealDisk()
        boot_id = boot_id or read_boot_id()
        lock = lock_for_broker(disk, path)
        try:
            meta = read_meta(disk, path, cluster_id=cluster_id)
            if meta is not None and meta.broker_id != broker_id:
                raise StorageError(f"log directory {path} is of broker {meta.broker_id}, this is broker {broker_id}")
            try:
                if meta is None or (port and meta.port != port):
                    meta = DirectoryMeta(cluster_id, broker_id, port)
                    write_meta(disk, path, meta)
                last_stop = begin_running(disk, path, boot_id=boot_id)
            except OSError as failure:
                raise StorageError(
                    f"log directory {path} cannot be written: {failure.strerror or failure}"
                ) from failure
            directory = cls(
                path,
                meta=meta,
                disk=disk,
                lock=lock,
                boot_id=boot_id,
                config=config or broker_config({}),
                in_background=in_background,
                max_open_segments=max_open_segments,
            )
            directory.clean, directory.trusted, directory.incarnation = last_stop
        except BaseException:
            disk.close(lock)
            raise
        return directory

    # --- logs ---------------------------------------------------------------------------------------------------

    def load(self) -> list[Log]:
        """Open and, where need be, repair every log there is. Topic settings are the defaults until the controller
        says otherwise (``Log.config``).

        A partition directory without a readable partition.json was never fsynced and promised nothing: it is set
        aside. Where the checkpoint says that the log was, the file is made anew: its topic id is in the checkpoint, its
        schemas in the segments.

        Raises:
            NewerFormatError: something was written by a newer release.
            StorageError: the disk failed, or fsynced files are missing.
        """
        started = time.monotonic()
        checkpoints = read_checkpoint(self._disk, self.path)
        try:
            lost = False
            for name in self._disk.names(self.path):
                if parse_directory_name(name) is not None:
                    lost |= self._load_one(name, checkpoints)
            if lost:
                self._note_cuts()
            self.missing = {tp: entry.topic_id for tp, entry in checkpoints.items() if tp not in self._logs}
            self._remove_leftovers()
        except OSError as failure:
            raise StorageError(f"log directory {self.path}: {failure}") from failure
        logger.info(
            "%s: %d logs loaded in %.1f s (%s)",
            self.path,
            len(self._logs),
            time.monotonic() - started,
            "clean stop" if self.clean else "process crash" if self.trusted else "page cache lost",
        )
        return list(self._logs.values())

    def _load_one(self, name: str, checkpoints: dict[TopicPartition, PartitionCheckpoint]) -> bool:
        """Whether something that was there once is not there any more."""
        restored = False
        try:
            content = read_partition_file(self._disk, self.path / name)
        except NewerFormatError:
            raise
        except NotADirectoryError as failure:
            self._set_aside(name, str(failure))
            return False
        except (StorageError, FileNotFoundError) as failure:
            named = parse_directory_name(name)
            entry = checkpoints.get(named) if named is not None else None
            if entry is None or entry.recovery_point <= 0:
                self._set_aside(name, str(failure))
                return False
            logger.error("%s: %s; it is made anew, of topic id %s", self.path / name, failure, entry.topic_id)
            content, restored = PartitionFile(entry.topic, entry.partition, entry.topic_id, ()), True
        tp = TopicPartition(content.topic, content.partition)
        if directory_name(tp) != name:
            self._set_aside(name, f"partition.json names {tp}")
            return False
        log = self._new_log(content)
        checkpoint = checkpoints.get(tp)
        if checkpoint is not None and checkpoint.topic_id != content.topic_id:
            checkpoint = None
        log.recover(checkpoint, clean=self.clean, trusted=self.trusted)
        if restored:
            log.restore_partition_file()
        self._logs[tp] = log
        claimed = max(checkpoint.high_watermark, checkpoint.recovery_point) if checkpoint is not None else 0
        if restored or log.findings or log.log_end_offset < claimed:
            self._doubt()
            return True
        return False

    def _doubt(self) -> None:
        """Once repaired the logs show no damage: the next process must hear of it if this one ends too early."""
        if self.trusted:
            self.trusted = False
            mark_running(self._disk, self.path, BootMark(self._boot_id, self.incarnation, doubted=True))

    def _note_cuts(self) -> None:
        """What comes in the place of what was cut is not fsynced, whatever the checkpoint says of what was there."""
        try:
            self.checkpoint()
        except OSError as failure:  # nor is there room for much to come
            logger.error("%s: the checkpoint claims more than is left: %s", self.path, failure)

    def note_incarnation(self, incarnation: int) -> None:
        """This process has, or is about to get, ``incarnation``, and its registration says whether its logs are
        trusted. Blocks for an fsync; in any thread.

        Raises:
            OSError: it is not noted. The next process then counts as untrusted.
        """
        self.incarnation = incarnation
        mark_running(self._disk, self.path, BootMark(self._boot_id, incarnation))

    def _new_log(self, content: PartitionFile, config: TopicConfig | None = None) -> Log:
        tp = TopicPartition(content.topic, content.partition)
        return Log(
            tp,
            content.topic_id,
            directory=self.path / directory_name(tp),
            schemas=content.schemas,
            config=config or self._defaults,
            services=self._services,
        )

    def create(self, tp: TopicPartition, topic_id: str, *, schemas: Iterable[TopicSchema], config: TopicConfig) -> Log:
        """The log of ``tp``: the present one, with what is new in ``schemas`` and ``config``, or a new empty one.

        Raises:
            BrokerError: INCONSISTENT_TOPIC_ID when the log here is of a deleted topic of the same name: delete it
                first; KAFKA_STORAGE_ERROR when the directory is offline.
        """
        self._check_online()
        log = self._logs.get(tp)
        if log is None:
            content = PartitionFile(tp.topic, tp.partition, topic_id, tuple(schemas))
            log = self._logs[tp] = self._new_log(content, config)
            return log
        if log.topic_id != topic_id:
            raise BrokerError(
                ErrorCode.INCONSISTENT_TOPIC_ID, f"{tp}: topic id {log.topic_id} found, {topic_id} expected"
            )
        for schema in schemas:
            log.add_schema(schema)
        log.config = config
        return log

    def get(self, tp: TopicPartition) -> Log | None:
        return self._logs.get(tp)

    def logs(self) -> list[Log]:
        return list(self._logs.values())

    def delete(self, tp: TopicPartition) -> None:
        """Delete the log of ``tp``: out of sight at once, its files in a thread. Absent ones are fine.

        Raises:
            StorageError: the directory must go offline.
        """
        log = self._logs.pop(tp, None)
        self._marks.pop(tp, None)
        self.unflushed.discard(tp)
        if log is not None:
            log.delete()

    # --- durability ---------------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Write high watermarks, recovery points and log start offsets. Blocks for an fsync.

        Raises:
            StorageError: the directory must go offline.
            OSError: the disk is full; the checkpoint of before stands.
        """
        self.checkpoint_job()()
        self._delete_retired()

    def checkpoint_job(self) -> Callable[[], None]:
        """The same in two parts: what is to be written is taken now; the returned function writes it, in any
        thread. An older one that comes late writes nothing. Raises as ``checkpoint``, in either part."""
        self._delete_retired()
        number = next(self._checkpoint_numbers)
        entries = self._take_checkpoint()
        self.on_disk = len(entries)

        def write() -> None:
            with self._checkpoint_lock:
                if number < self._checkpoint_written:
                    return
                # Also when there is nothing to write: what was taken before this must not come after it.
                self._checkpoint_written = number
                if entries is self._checkpoint_content or entries == self._checkpoint_content:
                    return
                try:
                    write_checkpoint(self._disk, self.path, Checkpoint(entries))
                except OSError as failure:
                    if is_full(failure):
                        raise
                    self._failed(f"writing the checkpoint: {failure}")
                    raise StorageError(f"log directory {self.path}: writing the checkpoint: {failure}") from failure
                self._checkpoint_content = entries

        return write

    def _take_checkpoint(self) -> tuple[PartitionCheckpoint, ...]:
        """Of all logs that hold something; the very tuple of the last time where nothing has moved."""
        moved, self._services.moved = self._services.moved, set()
        self._changed |= moved
        for tp in moved:
            log = self._logs.get(tp)
            # A log that holds nothing yet has no directory: the next start would take it for one that was lost.
            if log is not None and log.on_disk:
                self._marks[tp] = log.checkpoint()
        if moved or len(self._marks) != len(self._taken):
            self._taken = tuple(self._marks.values())
        return self._taken

    def take_changed(self) -> set[TopicPartition]:
        """Logs of which something else is committed, durable, sealed, cleaned or deleted than when this was last asked,
        or a segment or a transaction has begun: about all others there is to do what there was. Some may be gone."""
        changed, self._changed = self._changed | self._services.moved, set()
        return changed

    def flush_later(self, tp: TopicPartition) -> None:
        """The log of ``tp`` is to be fsynced by time: in ``unflushed`` until whoever looks finds that it has been."""
        self.unflushed.add(tp)
        self.on_unflushed()

    def sync_ahead(self) -> SyncAhead | None:
        """A round of making durable what is here, before a clean stop and while there is still work. None: of few logs
        it does not pay. A disk tells once that it has lost something: then the directory is offline, the stop not
        clean, and what another round would be told proves nothing."""
        if self.offline is not None or not at_once(self._logs, self._disk, self._lock):
            return None
        return SyncAhead(self._logs.values(), disk=self._disk, handle=self._lock, failed=self._failed)

    def write_clean_marker(self) -> None:
        """fsync all logs, then say so on disk. Nothing may be appended afterwards. Blocks.

        Raises:
            StorageError: the disk failed; the next start will check everything.
        """
        self._check_online()
        try:
            left = [log for log in self._logs.values() if not log.durability.is_clean]
            make_durable(left, self._disk, self._lock, in_threads=self._threads is not None)
            self.checkpoint()
            mark_clean_stop(self._disk, self.path, boot_id=self._boot_id)
        except OSError as failure:
            raise StorageError(f"log directory {self.path}: {failure}") from failure

    def close(self, *, process_ends: bool = False) -> None:
        """Close all files and free the directory. Without ``write_clean_marker`` before, this is a crash to the
        next start. Where the process ends it closes the files of logs at which no cleaner can be at work: of ten
        thousand that takes a tenth of a second."""
        if self._closed:
            return
        self._closed = True
        for log in self._logs.values():
            if not process_ends or log.config.compacted:
                log.close()
        if self._threads is not None:
            self._threads.shutdown(wait=True)
        self._disk.close(self._lock)

    # --- inside -------------------------------------------------------------------------------------------------

    def _failed(self, detail: str) -> None:
        if self.offline is None:
            self.offline = detail
            logger.error("log directory %s goes offline: %s", self.path, detail)

    def _check_online(self) -> None:
        if self.offline is not None:
            raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, f"log directory {self.path} is offline: {self.offline}")

    def _delete_retired(self) -> None:
        """Segments below a log start that is on disk by now can go."""
        retired = self._services.retired
        if not retired:
            return
        waiting = {tp: self._logs[tp] for tp in retired if tp in self._logs}
        for entry in self._checkpoint_content or ():
            log = waiting.get(TopicPartition(entry.topic, entry.partition))
            if log is not None and log.topic_id == entry.topic_id:
                log.delete_retired(entry.log_start_offset)
        retired.intersection_update([tp for tp, log in waiting.items() if log.has_retired])

    def _remove_later(self, paths: Sequence[Path]) -> None:
        def remove() -> None:
            for path in paths:
                try:
                    self._disk.remove(path)
                except OSError as failure:  # noqa: PERF203 - a failed one must not stop the others
                    # not in anybody's way: the next start removes it
                    logger.warning("cannot remove %s: %s", path, failure)

        if paths:
            self._in_background(remove)

    def _remove_directory(self, directory: Path) -> None:
        try:
            self._disk.make_directory(self.path / _REMOVED)
            target = self.path / _REMOVED / f"{os.getpid()}-{time.time_ns()}-{next(self._removals)}"
            self._disk.rename(directory, target)
        except OSError as failure:
            detail = f"deleting {directory}: {failure}"
            self._failed(detail)
            raise StorageError(f"log directory {self.path}: {detail}") from failure
        self._remove_tree_later(target)

    def _remove_tree_later(self, target: Path) -> None:
        def remove() -> None:
            try:
                self._disk.remove_tree(target)
            except OSError as failure:
                logger.warning("cannot remove %s: %s", target, failure)

        self._in_background(remove)

    def _remove_leftovers(self) -> None:
        if self._disk.exists(self.path / _REMOVED):
            for name in self._disk.names(self.path / _REMOVED):
                self._remove_tree_later(self.path / _REMOVED / name)

    def _set_aside(self, name: str, reason: str) -> None:
        target = self.path / _SET_ASIDE / f"{time.time_ns()}-{name}"[:255]
        self._disk.make_directory(target.parent)
        self._disk.rename(self.path / name, target)
        logger.error("%s: set aside as %s: %s", self.path / name, target, reason)
