"""One log directory: one disk, one broker slot, all the logs of that broker.

::

    <log dir>/meta.json, broker.lock, supervisor.lock      meta
              checkpoint, running, clean-stop              checkpoints
              <topic>-<partition>/...                      log
              removed/<n>                                  on its way out
              set-aside/<n>-<topic>-<partition>            not served, and kept: set_aside

Owned by the broker's event loop. Removal of files runs in a thread of its own; ``checkpoint_job`` may run in any.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from sparklog.config import BrokerConfig, TopicConfig, broker_config, topic_config
from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.model import SeenNumbers, TopicNote, TopicPartition, TopicSchema
from sparklog.storage.batch_cache import BatchCache
from sparklog.storage.checkpoints import (
    BootMark,
    Checkpoint,
    DoubtedLog,
    PartitionCheckpoint,
    begin_running,
    find_checkpoint,
    mark_clean_stop,
    mark_failed,
    mark_running,
    read_boot_id,
    write_checkpoint,
)
from sparklog.storage.clean_shutdown import SyncAhead, at_once, make_durable
from sparklog.storage.cluster_seen import SeenFile
from sparklog.storage.directory_meta import DirectoryMeta, lock_for_broker, read_meta, write_meta
from sparklog.storage.disk import Disk, RealDisk, is_full
from sparklog.storage.formats import NewerFormatError
from sparklog.storage.log import Log
from sparklog.storage.log_context import LogContext
from sparklog.storage.open_files import OpenFiles
from sparklog.storage.partition_file import (
    PartitionFile,
    directory_name,
    parse_directory_name,
    read_partition_file,
)
from sparklog.storage.producer_count import ProducerCount
from sparklog.storage.segment import DATA_SUFFIX
from sparklog.storage.set_aside import MARK_FILE, SET_ASIDE, SetAside, SetAsideMark
from sparklog.storage.topic_notes import read_topic_notes, write_topic_notes

_REMOVED = "removed"

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
        #: logs that are kept though no replica here has them
        self.kept_aside = SetAside(disk, path)
        #: Directories of logs that were taken out of ``set-aside/`` and could not be opened.
        self._not_put_back: set[str] = set()
        #: what this broker has seen its cluster count to
        self.seen_file = SeenFile(disk, path)
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
        #: held while ``running`` is written; a failure of that is noted in it as well
        self._mark_lock = threading.RLock()
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
        self._services = LogContext(
            disk=disk,
            files=OpenFiles(max_open_segments),
            hot=BatchCache(config.hot_batches_bytes),
            remove_later=self._remove_later,
            remove_directory=self._remove_directory,
            checkpoint_now=self.checkpoint,
            failed=self.fail,
            flush_later=self.flush_later,
            created=self._created,
            producer_id_expiration_ms=config.producer_id_expiration_ms,
            producer_count=ProducerCount(config.producer_ids_max, self._expire_producers),
        )
        #: nothing was in flight when the last process ended
        self.clean = True
        #: everything the last process had written is there: its page cache was not lost, ``load`` found no damage
        self.trusted = True
        #: the disk has failed a process of this boot, so that the page cache may show what the disk does not have
        self._failed_before = False
        #: the broker's last one that this directory knows of; None: it was not noted
        self.incarnation: int | None = None
        #: topic ids of logs in the checkpoint that ``load`` did not find: deleted just before the end, or lost
        self.missing: dict[TopicPartition, str] = {}
        #: topic ids of logs that may lack acknowledged records, where the directory as a whole is trusted: those that
        #: are ``missing``, and those whose partition.json could not be read. An empty id is not known.
        self.doubted: dict[TopicPartition, str] = {}
        #: logs with a directory that no durable checkpoint names
        self.unnamed: set[TopicPartition] = set()
        #: called on the event loop when ``unnamed`` grows; None: nothing waits for names
        self._on_unnamed: Callable[[], None] | None = None
        #: logs that a checkpoint has named since ``take_named`` was called last
        self._newly_named: list[Log] = []
        #: the checkpoint names each log whose replica has counted
        self._names_complete = False

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
            directory.clean, directory.trusted, directory.incarnation, directory._failed_before = last_stop[:4]
            directory.doubted = {log.tp: log.topic_id for log in last_stop.doubted}
            directory._names_complete = last_stop.named
            disk.on_sync_failed = directory._sync_failed
        except BaseException:
            disk.close(lock)
            raise
        return directory

    # --- logs ---------------------------------------------------------------------------------------------------

    def load(self) -> list[Log]:
        """Open and, where need be, repair every log there is. Topic settings are the defaults until the controller
        says otherwise (``Log.config``).

        A partition directory without a readable partition.json is set aside, or, where the checkpoint says that the log
        was fsynced, the file is written again: its topic id is in the checkpoint, its schemas in the segments. Each log
        that the checkpoint names and that is not found as it should be is in ``doubted``: its directory is missing, set
        aside, or holds the log of another partition or topic.

        Raises:
            NewerFormatError: something was written by a newer release.
            StorageError: the disk failed, or fsynced files are missing.
        """
        started = time.monotonic()
        found = find_checkpoint(self._disk, self.path)
        checkpoints = found or {}
        try:
            if self._failed_before:
                self._write_out()
            if found is None and self._names_complete:
                logger.error("%s: the checkpoint is missing or damaged: every log is in doubt", self.path)
                self._doubt()
            lost = False
            for name in self._disk.names(self.path):
                if parse_directory_name(name) is not None:
                    lost |= self._load_one(name, checkpoints)
            self.missing = {tp: entry.topic_id for tp, entry in checkpoints.items() if self._lacks(entry)}
            self._doubt_logs(self.missing)
            unnamed = {tp for tp, log in self._logs.items() if not _named_in(checkpoints, log)}
            self.unnamed |= unnamed
            if lost or found is None or unnamed:
                self._note_cuts()
            self._names_complete = self._checkpoint_content is not None or (found is not None and not unnamed)
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

    def _write_out(self) -> None:
        """Leave nothing in the page cache that was not written: recovery reads doubted logs from the disk, and what is
        not written it would read from the cache."""
        if self._disk.can_sync_file_system(self._lock):
            self._disk.sync_file_system(self._lock)

    def _lacks(self, entry: PartitionCheckpoint) -> bool:
        log = self._logs.get(TopicPartition(entry.topic, entry.partition))
        return log is None or log.topic_id != entry.topic_id

    def _load_one(self, name: str, checkpoints: dict[TopicPartition, PartitionCheckpoint]) -> bool:
        """Open one log; return whether something is lost of what it held."""
        restored = False
        expected = parse_directory_name(name)
        try:
            content = read_partition_file(self._disk, self.path / name)
        except NewerFormatError:
            raise
        except NotADirectoryError as failure:
            self._set_aside(name, str(failure))
            return False
        except (StorageError, FileNotFoundError) as failure:
            entry = checkpoints.get(expected) if expected is not None else None
            if expected is not None and (entry is not None or self._may_have_counted(name)):
                self._doubt_logs({expected: entry.topic_id if entry is not None else ""})
            if entry is None or entry.recovery_point <= 0:
                self._set_aside(name, str(failure))
                return False
            logger.error("%s: %s; it is made anew, of topic id %s", self.path / name, failure, entry.topic_id)
            content, restored = PartitionFile(entry.topic, entry.partition, entry.topic_id, ()), True
        tp = TopicPartition(content.topic, content.partition)
        if directory_name(tp) != name:
            if expected is not None and self._may_have_counted(name):
                self._doubt_logs({expected: ""})
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
        if log.findings or log.log_end_offset < claimed:
            self._doubt()
            return True
        return restored

    def _may_have_counted(self, name: str) -> bool:
        """Whether a log that no checkpoint names may have held acknowledged records: only where an earlier release,
        which did not name logs first, was the last to write here, and there are records."""
        if self._names_complete:
            return False
        return any(file.endswith(DATA_SUFFIX) for file in self._disk.names(self.path / name))

    def _doubt(self) -> None:
        """Doubt all logs. Once repaired the logs show no damage: the next process must hear of it if this one ends too
        early."""
        if self.trusted:
            self.trusted = False
            self._mark_doubt()

    def _doubt_logs(self, logs: Mapping[TopicPartition, str]) -> None:
        """Doubt these logs alone, by their topic ids. The checkpoint that is written next does not name those that are
        missing: the next process must hear of them if this one ends too early."""
        known = len(self.doubted)
        for tp, topic_id in logs.items():
            self.doubted[tp] = topic_id or self.doubted.get(tp, "")
        if len(self.doubted) > known and self.trusted:
            self._mark_doubt()

    def _mark_doubt(self) -> None:
        logs = tuple(DoubtedLog(*tp, topic_id) for tp, topic_id in self.doubted.items()) if self.trusted else ()
        mark = BootMark(self._boot_id, self.incarnation, doubted=True, logs=logs, named=self._names_complete)
        with self._mark_lock:
            try:
                mark_running(self._disk, self.path, mark)
            except OSError as failure:
                if not is_full(failure):
                    raise
                mark_failed(self._disk, self.path, mark)

    def _note_cuts(self) -> None:
        """What comes in the place of what was cut is not fsynced, whatever the checkpoint says of what was there."""
        try:
            self.checkpoint()
        except OSError as failure:  # nor is there room for much to come
            logger.error("%s: the checkpoint claims more than is left: %s", self.path, failure)
        self.take_named()

    def note_incarnation(self, incarnation: int) -> None:
        """Record ``incarnation``, which this process has or is about to get.

        The registration says whether the broker's logs are trusted, so the directory is not in doubt any more, unless
        its disk failed this process. Blocks for an fsync. May be called in any thread.

        Raises:
            OSError: it is not noted. The next process then counts as untrusted.
        """
        with self._mark_lock:
            self.incarnation = incarnation
            if self.offline is None:
                mark = BootMark(self._boot_id, incarnation, named=self._names_complete)
                mark_running(self._disk, self.path, mark)
                return
        self._note_failure()

    @property
    def counted(self) -> int:
        """The broker's last incarnation that ZooKeeper has counted, as far as it was noted; -1: none was."""
        return self.seen_file.seen.incarnation

    def note_counted(self, incarnation: int) -> None:
        """ZooKeeper has counted ``incarnation``. Blocks for an fsync; in any thread. Raises OSError."""
        self.seen_file.note_incarnation(incarnation)

    def topic_notes(self) -> dict[str, TopicNote]:
        """Return what was noted of topics, by topic id."""
        return read_topic_notes(self._disk, self.path)

    def write_topic_notes(self, notes: dict[str, TopicNote]) -> None:
        """Blocks for an fsync; in any thread. Raises OSError."""
        write_topic_notes(self._disk, self.path, notes)

    def seen(self) -> SeenNumbers:
        """Return what a registration says of the numbers seen."""
        seen = self.seen_file.seen
        last_epoch = max((log.last_epoch for log in self._logs.values()), default=-1)
        return SeenNumbers(seen.controller_epoch, seen.controller_id, seen.producer_ids, last_epoch)

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
            log.named = self._on_unnamed is None
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

    @property
    def producer_ids(self) -> int:
        """How many producer ids all logs together remember, each log for itself."""
        count = self._services.producer_count
        return count.used if count is not None else 0

    def _expire_producers(self) -> None:
        now_us = time.time_ns() // 1000
        for log in self._logs.values():
            log.expire_producers(now_us)

    def delete(self, tp: TopicPartition) -> None:
        """Delete the log of ``tp``: out of sight at once, its files in a thread. Absent ones are fine.

        Raises:
            StorageError: the directory must go offline.
        """
        log = self._logs.pop(tp, None)
        self._marks.pop(tp, None)
        self.unflushed.discard(tp)
        self.unnamed.discard(tp)
        if log is not None:
            log.delete()

    def set_aside(self, tp: TopicPartition, *, reason: str) -> None:
        """Close the log of ``tp`` and move it to ``set-aside/``. A log without files is forgotten; an absent one is
        fine.

        Raises:
            StorageError: the directory must go offline.
        """
        log = self._logs.pop(tp, None)
        self._marks.pop(tp, None)
        self.unflushed.discard(tp)
        self.unnamed.discard(tp)
        if log is None:
            return
        log.close()
        if not log.on_disk:
            return
        at = log.checkpoint()
        mark = SetAsideMark(
            *tp,
            log.topic_id,
            reason,
            since_ms=time.time_ns() // 1_000_000,
            intact=True,
            high_watermark=at.high_watermark,
            recovery_point=at.recovery_point,
            log_start_offset=at.log_start_offset,
            log_end_offset=log.log_end_offset,
            last_epoch=log.last_epoch,
        )
        try:
            name = self.kept_aside.add(directory_name(tp), mark, now_ns=time.time_ns())
        except OSError as failure:
            self.fail(f"setting {tp} aside: {failure}")
            raise StorageError(f"log directory {self.path}: setting {tp} aside: {failure}") from failure
        logger.warning("%s: set aside the log of topic id %s as %s/%s: %s", tp, log.topic_id, SET_ASIDE, name, reason)

    def put_back(self, tp: TopicPartition, topic_id: str) -> Log | None:
        """Serve the newest intact set-aside log of this topic's partition again, if there is one. The partition has no
        log here.

        Raises:
            StorageError: the log cannot be opened; it stays where it is now.
        """
        assert tp not in self._logs
        entry = self.kept_aside.newest_intact(tp, topic_id)
        target = self.path / directory_name(tp)
        if target.name in self._not_put_back:
            raise StorageError(
                f"log directory {self.path}: {target.name} could not be opened when it was put back; "
                "start the broker again, which examines it"
            )
        if entry is None or self._disk.exists(target):
            return None
        mark = entry.mark
        at = PartitionCheckpoint(*tp, topic_id, mark.high_watermark, mark.recovery_point, mark.log_start_offset)
        try:
            content = read_partition_file(self._disk, self.kept_aside.path / entry.name)
            # Until the log is open, no new log may be made over its files.
            self._not_put_back.add(target.name)
            self.kept_aside.take_out(entry.name, target)
            self._disk.remove(target / MARK_FILE)
            log = self._new_log(content)
            log.recover(at, clean=False, trusted=self.trusted)
        except OSError as failure:
            raise StorageError(f"log directory {self.path}: putting {entry.name} back: {failure}") from failure
        self._not_put_back.discard(target.name)
        log.named = self._on_unnamed is None
        self._logs[tp] = log
        self._services.moved.add(tp)
        self._created(tp)
        logger.warning("%s: log of topic id %s is served again; it was %s/%s", tp, topic_id, SET_ASIDE, entry.name)
        return log

    def remove_set_aside(self, name: str) -> None:
        """Delete one entry of ``set-aside/``: out of sight at once, its files in a thread.

        Raises:
            OSError: it is not there, or could not be moved.
        """
        if name not in self._disk.names(self.kept_aside.path):
            raise FileNotFoundError(errno.ENOENT, "not set aside", name)
        target = self._removed_path()
        self.kept_aside.take_out(name, target)
        self._remove_tree_later(target)

    # --- names --------------------------------------------------------------------------------------------------

    def name_logs(self, on_unnamed: Callable[[], None]) -> None:
        """From now on a new log is not ``named`` before a checkpoint names it durably; ``on_unnamed`` is called when
        there is one more that has to be. The caller then writes a checkpoint and calls ``take_named``.

        A replica counts for nothing before its log is named: neither does its fetch confirm records, nor does it commit
        any as leader. So the next start can tell a log that was lost from one that never held anything: neither has a
        directory, but the checkpoint names the first."""
        self._on_unnamed = on_unnamed
        if self.unnamed:
            on_unnamed()

    def _created(self, tp: TopicPartition) -> None:
        self.unnamed.add(tp)
        if self._on_unnamed is not None:
            self._on_unnamed()

    def take_named(self) -> list[Log]:
        """Mark the logs that checkpoints have named durably since the last call, and return them."""
        with self._checkpoint_lock:
            found, self._newly_named = self._newly_named, []
        named = []
        for log in found:
            if self._logs.get(log.tp) is log:
                self.unnamed.discard(log.tp)
                if not log.named:
                    log.named = True
                    named.append(log)
        return named

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
        unnamed = [self._logs[tp] for tp in self.unnamed if tp in self._logs]

        def write() -> None:
            with self._checkpoint_lock:
                if number < self._checkpoint_written:
                    return  # a later one names these logs as well, and has reported them
                # Also when there is nothing to write: what was taken before this must not come after it.
                self._checkpoint_written = number
                content = entries if self.offline is None else self._with_earlier_syncs(entries)
                if content is self._checkpoint_content or content == self._checkpoint_content:
                    self._newly_named += unnamed
                    return
                try:
                    write_checkpoint(self._disk, self.path, Checkpoint(content))
                except OSError as failure:
                    if is_full(failure):
                        raise
                    self.fail(f"writing the checkpoint: {failure}")
                    raise StorageError(f"log directory {self.path}: writing the checkpoint: {failure}") from failure
                self._checkpoint_content = content
                self._newly_named += unnamed

        return write

    def _with_earlier_syncs(self, entries: Iterable[PartitionCheckpoint]) -> tuple[PartitionCheckpoint, ...]:
        """The same without recovery points that have risen since the checkpoint was written: the fsyncs that raised
        them may have come after the one that failed, and such an fsync proves nothing."""
        before = {(entry.topic_id, entry.partition): entry.recovery_point for entry in self._checkpoint_content or ()}
        return tuple(
            msgspec.structs.replace(
                entry, recovery_point=min(entry.recovery_point, before.get((entry.topic_id, entry.partition), 0))
            )
            for entry in entries
        )

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
        return SyncAhead(self._logs.values(), disk=self._disk, handle=self._lock, failed=self.fail)

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

    def fail(self, detail: str) -> None:
        """Take the directory offline: its disk cannot be counted on. The next process doubts it. In any thread; only
        the first call counts."""
        with self._mark_lock:
            if self.offline is not None:
                return
            self.offline = detail
        logger.error("log directory %s goes offline: %s", self.path, detail)
        self._note_failure()

    def _note_failure(self) -> None:
        with self._mark_lock:
            try:
                mark = BootMark(self._boot_id, self.incarnation, doubted=True, named=self._names_complete)
                mark_failed(self._disk, self.path, mark)
            except OSError as failure:
                logger.critical("%s: the next start must not trust it, which cannot be noted: %s", self.path, failure)

    def _sync_failed(self, failure: OSError) -> None:
        """A full disk need not have lost anything: whoever asked for the fsync knows."""
        if not is_full(failure):
            self.fail(f"fsync: {failure}")

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

    def _removed_path(self) -> Path:
        """Return a new name in ``removed/``. Raises OSError."""
        self._disk.make_directory(self.path / _REMOVED)
        return self.path / _REMOVED / f"{os.getpid()}-{time.time_ns()}-{next(self._removals)}"

    def _remove_directory(self, directory: Path) -> None:
        try:
            target = self._removed_path()
            self._disk.rename(directory, target)
        except OSError as failure:
            detail = f"deleting {directory}: {failure}"
            self.fail(detail)
            raise StorageError(f"log directory {self.path}: {detail}") from failure
        self._remove_tree_later(target)

    def _remove_tree_later(self, target: Path) -> None:
        def remove() -> None:
            try:
                try:
                    self._disk.remove_tree(target)
                except NotADirectoryError:  # a file that was set aside
                    self._disk.remove(target)
            except OSError as failure:
                logger.warning("cannot remove %s: %s", target, failure)

        self._in_background(remove)

    def _remove_leftovers(self) -> None:
        if self._disk.exists(self.path / _REMOVED):
            for name in self._disk.names(self.path / _REMOVED):
                self._remove_tree_later(self.path / _REMOVED / name)

    def _set_aside(self, name: str, reason: str) -> None:
        named = parse_directory_name(name) or TopicPartition(name, -1)
        mark = SetAsideMark(*named, "", reason, time.time_ns() // 1_000_000)
        target = self.kept_aside.add(name, mark, now_ns=time.time_ns())
        logger.error("%s: set aside as %s/%s: %s", self.path / name, SET_ASIDE, target, reason)


def _named_in(checkpoints: Mapping[TopicPartition, PartitionCheckpoint], log: Log) -> bool:
    entry = checkpoints.get(log.tp)
    return entry is not None and entry.topic_id == log.topic_id
