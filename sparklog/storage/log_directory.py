"""One log directory: one disk, one broker slot, and all logs of that broker.

::

    <log dir>/meta.json, broker.lock, supervisor.lock      directory_meta
              checkpoint                                   checkpoint_writer
              running, clean-stop                          directory_trust, clean_shutdown
              <topic>-<partition>/...                      log
              removed/<n>                                  deleted: file_removal
              set-aside/<n>-<topic>-<partition>            kept, but not served: set_aside

Only the broker's event loop uses the directory. A separate thread removes files. Any thread may run the function that
``checkpoint_job`` returns.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path

from msgspec.structs import replace

from sparklog.config import BrokerConfig, TopicConfig, broker_config, topic_config
from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.model import SeenNumbers, TopicNote, TopicPartition, TopicSchema
from sparklog.storage.batch_cache import BatchCache
from sparklog.storage.checkpoint_writer import CheckpointWriter
from sparklog.storage.checkpoints import PartitionCheckpoint, find_checkpoint
from sparklog.storage.clean_shutdown import SyncAhead, at_once, make_durable
from sparklog.storage.cluster_seen import SeenFile
from sparklog.storage.directory_meta import DirectoryMeta, lock_for_broker, read_meta, write_meta
from sparklog.storage.directory_trust import DirectoryTrust, begin_running, read_boot_id
from sparklog.storage.disk import Disk, RealDisk
from sparklog.storage.file_removal import FileRemoval
from sparklog.storage.group_access import group_id, share_with_group
from sparklog.storage.log import Log
from sparklog.storage.log_context import LogContext
from sparklog.storage.log_loader import LogLoader
from sparklog.storage.open_files import OpenFiles
from sparklog.storage.partition_file import (
    PartitionFile,
    directory_name,
    read_partition_file,
)
from sparklog.storage.producer_count import ProducerCount
from sparklog.storage.set_aside import MARK_FILE, SET_ASIDE, SetAside, SetAsideMark
from sparklog.storage.topic_notes import read_topic_notes, write_topic_notes

logger = logging.getLogger(__name__)


class LogDirectory:
    """The log directory of one broker process, with all logs in it.

    ``open`` returns the object and locks the directory. Then ``load`` opens the logs. ``close`` unlocks the directory.
    """

    def __init__(
        self,
        path: Path,
        *,
        meta: DirectoryMeta,
        disk: Disk,
        lock: int,
        trust: DirectoryTrust,
        config: BrokerConfig,
        in_background: Callable[[Callable[[], None]], object] | None,
        max_open_segments: int | None,
    ) -> None:
        self.path = path
        self.meta = meta
        #: The record of whether the disk has everything that earlier processes wrote, and whether the disk is usable
        #: now.
        self.trust = trust
        #: Logs that are kept although no replica on this broker uses them.
        self.kept_aside = SetAside(disk, path)
        #: Names of partition directories that were moved out of ``set-aside/``, but could not be opened as logs.
        self._not_put_back: set[str] = set()
        #: The highest controller epoch, producer id and incarnation that this broker knows of its cluster.
        self.seen_file = SeenFile(disk, path)
        self._disk = disk
        self._lock = lock
        self._logs: dict[TopicPartition, Log] = {}
        self._defaults = topic_config(config.topic_defaults)
        self._removal = FileRemoval(disk, path, in_background=in_background, failed=trust.fail)
        #: The logs that wait for a flush, see ``flush_later``.
        self.unflushed: set[TopicPartition] = set()
        #: Called when a log is added to ``unflushed``.
        self.on_unflushed: Callable[[], None] = lambda: None
        self._closed = False
        self._services = LogContext(
            disk=disk,
            files=OpenFiles(max_open_segments),
            hot=BatchCache(config.hot_batches_bytes),
            remove_later=self._removal.remove_files,
            remove_directory=self._removal.remove_directory,
            checkpoint_now=self.checkpoint,
            failed=trust.fail,
            flush_later=self.flush_later,
            created=self._created,
            producer_id_expiration_ms=config.producer_id_expiration_ms,
            producer_count=ProducerCount(config.producer_ids_max, self._expire_producers),
        )
        self._checkpoints = CheckpointWriter(disk, path, logs=self._logs, services=self._services, trust=trust)
        #: Topic ids of the logs that the checkpoint names and ``load`` did not find. Such logs are lost, or were
        #: deleted after the last checkpoint.
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
        """Lock the directory for this process.

        Create the directory and its ``meta.json`` if they do not exist.

        Only the simulator passes ``disk``, ``boot_id`` and ``in_background``. ``in_background`` receives functions that
        remove files, and runs them, possibly later.

        Raises:
            StorageError: another process uses the directory; or the directory belongs to another cluster or broker, has
                a newer format, is on NFS or FUSE, or is not writable; or the group of ``log.dir.group`` cannot get
                rights.
            ConfigError: the host does not have that group.
        """
        group = config.log_dir_group if config is not None else ""
        disk = disk or RealDisk(for_group=bool(group))
        boot_id = boot_id or read_boot_id()
        lock = lock_for_broker(disk, path, for_group=bool(group))
        try:
            if group:
                share_with_group(path, group_id(group))
            meta = read_meta(disk, path, cluster_id=cluster_id)
            if meta is not None and meta.broker_id != broker_id:
                raise StorageError(
                    f"log directory {path} belongs to broker {meta.broker_id}, this is broker {broker_id}"
                )
            try:
                if meta is None or (port and meta.port != port):
                    meta = DirectoryMeta(cluster_id, broker_id, port, kafka_ports=meta.kafka_ports if meta else {})
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
                trust=DirectoryTrust(disk, path, boot_id=boot_id, last_stop=last_stop),
                config=config or broker_config({}),
                in_background=in_background,
                max_open_segments=max_open_segments,
            )
            disk.on_sync_failed = directory.trust.sync_failed
        except BaseException:
            disk.close(lock)
            raise
        return directory

    # --- trust --------------------------------------------------------------------------------------------------

    @property
    def offline(self) -> str | None:
        """Return the reason why the directory is offline, or None if it is usable."""
        return self.trust.offline

    @property
    def trusted(self) -> bool:
        """Return whether the disk has everything that the last process wrote, and ``load`` found no damage."""
        return self.trust.trusted

    @property
    def doubted(self) -> dict[TopicPartition, str]:
        """Return the topic ids of the logs that may lack acknowledged records although the directory is trusted.

        These are the ``missing`` logs, and logs with a wrong or unreadable ``partition.json``. An empty topic id means
        that it is unknown.
        """
        return self.trust.doubted

    # --- logs ---------------------------------------------------------------------------------------------------

    def load(self) -> list[Log]:
        """Open every log of the directory and repair the logs that need it.

        The logs have the default topic settings until the controller sends the topics' settings (``Log.config``).

        A log in the checkpoint is added to ``doubted`` if its directory is missing, is moved to ``set-aside/`` because
        it cannot be opened, or belongs to another partition or topic.

        Raises:
            NewerFormatError: a newer release wrote a file or batch.
            StorageError: the disk failed, or fsynced files are missing.
        """
        started, trust = time.monotonic(), self.trust
        found = find_checkpoint(self._disk, self.path)
        checkpoints = found or {}
        try:
            if trust.failed_before:
                self._write_out()
            if found is None and trust.names_complete:
                logger.error("%s: the checkpoint is missing or damaged: every log is in doubt", self.path)
                trust.doubt_all()
            lost = False
            loader = LogLoader(self._disk, self.path, trust=trust, kept_aside=self.kept_aside, new_log=self._new_log)
            for log, is_shorter in loader.load(checkpoints):
                self._logs[log.tp] = log
                lost |= is_shorter
            self.missing = {tp: entry.topic_id for tp, entry in checkpoints.items() if self._is_missing(entry)}
            trust.doubt(self.missing)
            unnamed = {tp for tp, log in self._logs.items() if not _named_in(checkpoints, log)}
            self._checkpoints.found_unnamed(unnamed)
            if lost or found is None or unnamed:
                self._checkpoint_truncations()
            trust.set_names_complete(self._checkpoints.has_written or (found is not None and not unnamed))
            self._removal.remove_leftovers()
        except OSError as failure:
            raise StorageError(f"log directory {self.path}: {failure}") from failure
        logger.info(
            "%s: %d logs loaded in %.1f s (%s)",
            self.path,
            len(self._logs),
            time.monotonic() - started,
            "clean stop" if trust.clean else "process crash" if trust.trusted else "page cache lost",
        )
        return list(self._logs.values())

    def _write_out(self) -> None:
        """Write all dirty pages of the page cache to the disk.

        Recovery must read logs that may lack records from the disk. Pages that are not written would be read from the
        page cache.
        """
        if self._disk.can_sync_file_system(self._lock):
            self._disk.sync_file_system(self._lock)

    def _is_missing(self, entry: PartitionCheckpoint) -> bool:
        log = self._logs.get(TopicPartition(entry.topic, entry.partition))
        return log is None or log.topic_id != entry.topic_id

    def _checkpoint_truncations(self) -> None:
        """Write a checkpoint after recovery has truncated logs.

        New records will get the offsets of the truncated ones. The old checkpoint would claim that these are fsynced.
        """
        try:
            self.checkpoint()
        except OSError as failure:  # A full disk has little room for new records too.
            logger.error("%s: the checkpoint claims records that the logs no longer have: %s", self.path, failure)
        self.consume_named()

    @property
    def incarnation(self) -> int | None:
        """Return the broker's last incarnation that this directory records, or None if it records none."""
        return self.trust.incarnation

    def note_incarnation(self, incarnation: int) -> None:
        """Record durably the incarnation with which this process registers, or has registered, in ZooKeeper.

        See ``DirectoryTrust.note_incarnation``. Any thread may call this method. Raises OSError.
        """
        self.trust.note_incarnation(incarnation)

    @property
    def counted(self) -> int:
        """Return the last incarnation that this directory records as registered in ZooKeeper, or -1 for none."""
        return self.seen_file.seen.incarnation

    def note_counted(self, incarnation: int) -> None:
        """Record that ``incarnation`` was registered in ZooKeeper.

        Block for an fsync. Any thread may call this method. Raises OSError.
        """
        self.seen_file.note_incarnation(incarnation)

    def note_kafka_ports(self, ports: dict[str, int]) -> None:
        """Record the ports of the listeners for Kafka clients, by listener name, so that a restart keeps them.

        Block for an fsync if a port is new. Raises OSError.
        """
        if self.meta.kafka_ports != ports:
            meta = replace(self.meta, kafka_ports=ports)
            write_meta(self._disk, self.path, meta)
            self.meta = meta

    def topic_notes(self) -> dict[str, TopicNote]:
        """Return the stored copies of the metadata of the topics that this broker hosts, by topic id."""
        return read_topic_notes(self._disk, self.path)

    def write_topic_notes(self, notes: dict[str, TopicNote]) -> None:
        """Store copies of the metadata of the topics that this broker hosts, by topic id.

        Block for an fsync. Any thread may call this method. Raises OSError.
        """
        write_topic_notes(self._disk, self.path, notes)

    def seen(self) -> SeenNumbers:
        """Return the highest epochs and producer ids that this directory has recorded.

        The broker's registration contains these numbers.
        """
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
            named=not self._checkpoints.names_logs,
        )

    def create(self, tp: TopicPartition, topic_id: str, *, schemas: Iterable[TopicSchema], config: TopicConfig) -> Log:
        """Return the log of ``tp``: the existing one, updated from ``schemas`` and ``config``, or a new empty one.

        Raises:
            BrokerError: INCONSISTENT_TOPIC_ID if the existing log belongs to a deleted topic of the same name; delete
                the log first. KAFKA_STORAGE_ERROR if the directory is offline.
        """
        self.trust.check_online()
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

    @property
    def producer_ids(self) -> int:
        """Return the number of producer ids that the logs remember. An id counts once for each log."""
        count = self._services.producer_count
        return count.used if count is not None else 0

    def _expire_producers(self) -> None:
        now_us = time.time_ns() // 1000
        for log in self._logs.values():
            log.expire_producers(now_us)

    def delete(self, tp: TopicPartition) -> None:
        """Delete the log of ``tp``, if there is one.

        The log's directory is moved away at once. A thread removes its files later.

        Raises:
            StorageError: the log directory must go offline.
        """
        log = self._pop(tp)
        if log is not None:
            log.delete()

    def _pop(self, tp: TopicPartition) -> Log | None:
        """Remove the log of ``tp`` from the logs of this directory, and return it."""
        self._checkpoints.removed(tp)
        self.unflushed.discard(tp)
        return self._logs.pop(tp, None)

    def set_aside(self, tp: TopicPartition, *, reason: str) -> None:
        """Close the log of ``tp``, if there is one, and move its files to ``set-aside/``.

        Raises:
            StorageError: the directory must go offline.
        """
        log = self._pop(tp)
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
            self.trust.fail(f"setting {tp} aside: {failure}")
            raise StorageError(f"log directory {self.path}: setting {tp} aside: {failure}") from failure
        logger.warning("%s: set aside the log of topic id %s as %s/%s: %s", tp, log.topic_id, SET_ASIDE, name, reason)

    def put_back(self, tp: TopicPartition, topic_id: str) -> Log | None:
        """Move a log of this partition and topic id back from ``set-aside/``, open it and return it.

        Only intact logs count. If there are several, the one that was set aside last is chosen. Return None if there is
        none. The partition must not have a log in this directory.

        Raises:
            StorageError: the log cannot be opened. Its files are no longer in ``set-aside/``.
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
            # If the log cannot be opened, ``create`` must not make a new log in its directory.
            self._not_put_back.add(target.name)
            self.kept_aside.take_out(entry.name, target)
            self._disk.remove(target / MARK_FILE)
            log = self._new_log(content)
            log.recover(at, clean=False, trusted=self.trust.trusted)
        except OSError as failure:
            raise StorageError(f"log directory {self.path}: putting {entry.name} back: {failure}") from failure
        self._not_put_back.discard(target.name)
        self._logs[tp] = log
        self._services.moved.add(tp)
        self._created(tp)
        logger.warning("%s: log of topic id %s is served again; it was %s/%s", tp, topic_id, SET_ASIDE, entry.name)
        return log

    def remove_set_aside(self, name: str) -> None:
        """Delete one entry of ``set-aside/``.

        The entry is moved away at once. A thread removes its files later.

        Raises:
            OSError: the entry does not exist, or the disk failed.
        """
        if name not in self._disk.names(self.kept_aside.path):
            raise FileNotFoundError(errno.ENOENT, "not set aside", name)
        target = self._removal.new_path()
        self.kept_aside.take_out(name, target)
        self._removal.remove_tree(target)

    # --- names --------------------------------------------------------------------------------------------------

    @property
    def unnamed(self) -> Set[TopicPartition]:
        """Return the partitions whose log has a directory, but is in no durable checkpoint yet."""
        return self._checkpoints.unnamed

    def name_logs(self, on_unnamed: Callable[[], None]) -> None:
        """Call ``on_unnamed`` for each log that gets a directory, because the log is in no durable checkpoint yet.

        From now on, the replica of a new log may confirm or commit records only when a durable checkpoint has the log.
        See ``CheckpointWriter.name_logs``.
        """
        self._checkpoints.name_logs(on_unnamed)

    def _created(self, tp: TopicPartition) -> None:
        self._checkpoints.created(tp)

    def consume_named(self) -> list[Log]:
        """Find the logs that were added to a durable checkpoint since the last call, and return them.

        This method also sets ``Log.named`` of these logs to true, because a durable checkpoint has their entries.
        """
        return self._checkpoints.consume_named()

    # --- durability ---------------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Write high watermarks, recovery points and log start offsets to the checkpoint. Block for an fsync.

        Raises:
            StorageError: the directory must go offline.
            OSError: the disk is full. The previous checkpoint stays valid.
        """
        self._checkpoints.write()

    def checkpoint_job(self) -> Callable[[], None]:
        """Collect the checkpoint's content now, and return a function that writes it.

        Any thread may call the function. The function writes nothing if a later checkpoint is already written. This
        method and the function raise the same errors as ``checkpoint``.
        """
        return self._checkpoints.job()

    @property
    def on_disk(self) -> int:
        """Return the number of logs that had files when the content of the last checkpoint was collected."""
        return self._checkpoints.on_disk

    def consume_changed(self) -> set[TopicPartition]:
        """Return the partitions whose logs have changed since the last call. Some of these logs may no longer exist.

        A log has changed if a further part of it is now committed, durable, sealed, compacted or deleted, or if a
        segment or transaction has begun. For every other log the next maintenance is due at the same time as before.
        """
        return self._checkpoints.consume_changed()

    def flush_later(self, tp: TopicPartition) -> None:
        """Add the log to ``unflushed``, because its records must be fsynced when they are ``flush.ms`` old.

        The broker's periodic flush removes the log from the set.
        """
        self.unflushed.add(tp)
        self.on_unflushed()

    def sync_ahead(self) -> SyncAhead | None:
        """Return a sync of the whole file system to run before a clean shutdown, while the broker serves requests.

        Return None if the clean shutdown will fsync single files.

        If the sync fails, the directory goes offline and the shutdown is not clean. A second sync would prove nothing,
        because a disk reports a lost write only once.
        """
        if self.trust.offline is not None or not at_once(self._logs, self._disk, self._lock):
            return None
        return SyncAhead(self._logs.values(), disk=self._disk, handle=self._lock, failed=self.trust.fail)

    def write_clean_marker(self) -> None:
        """Fsync all logs, and then write ``clean-stop``. Block until this is done. No append may follow.

        Raises:
            BrokerError: KAFKA_STORAGE_ERROR if the directory is offline.
            StorageError: the disk failed. The next start will check everything.
        """
        self.trust.check_online()
        try:
            left = [log for log in self._logs.values() if not log.durability.is_clean]
            make_durable(left, self._disk, self._lock, in_threads=self._removal.uses_threads)
            self.checkpoint()
            self.trust.mark_clean_stop()
        except OSError as failure:
            raise StorageError(f"log directory {self.path}: {failure}") from failure

    def close(self, *, process_ends: bool = False) -> None:
        """Close all files and unlock the directory.

        If ``write_clean_marker`` has not been called, the next start treats this as a crash.

        ``process_ends`` means that the process ends next, which closes all files. Then this method closes only
        compacted logs, because a cleaner may be reading them. It does not close the other logs, because closing ten
        thousand logs would take a tenth of a second.
        """
        if self._closed:
            return
        self._closed = True
        for log in self._logs.values():
            if not process_ends or log.config.compacted:
                log.close()
        self._removal.close()
        self._disk.close(self._lock)


def _named_in(checkpoints: Mapping[TopicPartition, PartitionCheckpoint], log: Log) -> bool:
    entry = checkpoints.get(log.tp)
    return entry is not None and entry.topic_id == log.topic_id
