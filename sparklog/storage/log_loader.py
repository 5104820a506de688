"""The opening of all logs of a log directory at the start of a broker.

A partition directory without a readable ``partition.json`` is set aside. But if the checkpoint says that the log has
fsynced records, the file is written again: the topic id is in the checkpoint, and the schemas are in the segments.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from sparklog.errors import StorageError
from sparklog.model import TopicPartition
from sparklog.storage.checkpoints import PartitionCheckpoint
from sparklog.storage.directory_trust import DirectoryTrust
from sparklog.storage.disk import Disk
from sparklog.storage.formats import NewerFormatError
from sparklog.storage.log import Log
from sparklog.storage.partition_file import PartitionFile, directory_name, parse_directory_name, read_partition_file
from sparklog.storage.segment import DATA_SUFFIX
from sparklog.storage.set_aside import SetAside

logger = logging.getLogger(__name__)


class LogLoader:
    """A loader that opens the logs of one log directory. Use it once."""

    def __init__(
        self,
        disk: Disk,
        path: Path,
        *,
        trust: DirectoryTrust,
        kept_aside: SetAside,
        new_log: Callable[[PartitionFile], Log],
    ) -> None:
        self._disk = disk
        self._path = path
        self._trust = trust
        self._kept_aside = kept_aside
        self._new_log = new_log

    def load(self, checkpoints: Mapping[TopicPartition, PartitionCheckpoint]) -> Iterator[tuple[Log, bool]]:
        """Open and repair the logs. Yield each log, and whether it may have lost records.

        Also report to ``DirectoryTrust`` the logs that may lack acknowledged records, including logs that are set
        aside.

        Raises:
            NewerFormatError: a newer release wrote a file or batch.
            OSError, StorageError: the disk failed, or fsynced files are missing.
        """
        for name in self._disk.names(self._path):
            if parse_directory_name(name) is not None:
                found = self._load_one(name, checkpoints)
                if found is not None:
                    yield found

    def _load_one(
        self, name: str, checkpoints: Mapping[TopicPartition, PartitionCheckpoint]
    ) -> tuple[Log, bool] | None:
        """Open one log. Return the log, and whether it may have lost records. Return None if it is set aside."""
        restored = False
        expected = parse_directory_name(name)
        try:
            content = read_partition_file(self._disk, self._path / name)
        except NewerFormatError:
            raise
        except NotADirectoryError as failure:
            self._set_aside(name, str(failure))
            return None
        except (StorageError, FileNotFoundError) as failure:
            entry = checkpoints.get(expected) if expected is not None else None
            if expected is not None and (entry is not None or self._may_have_counted(name)):
                self._trust.doubt({expected: entry.topic_id if entry is not None else ""})
            if entry is None or entry.recovery_point <= 0:
                self._set_aside(name, str(failure))
                return None
            logger.error("%s: %s; writing it again with topic id %s", self._path / name, failure, entry.topic_id)
            content, restored = PartitionFile(entry.topic, entry.partition, entry.topic_id, ()), True
        tp = TopicPartition(content.topic, content.partition)
        if directory_name(tp) != name:
            if expected is not None and self._may_have_counted(name):
                self._trust.doubt({expected: ""})
            self._set_aside(name, f"partition.json names {tp}")
            return None
        log = self._new_log(content)
        checkpoint = checkpoints.get(tp)
        if checkpoint is not None and checkpoint.topic_id != content.topic_id:
            checkpoint = None
        log.recover(checkpoint, clean=self._trust.clean, trusted=self._trust.trusted)
        if restored:
            log.restore_partition_file()
        claimed = max(checkpoint.high_watermark, checkpoint.recovery_point) if checkpoint is not None else 0
        if log.findings or log.log_end_offset < claimed:
            self._trust.doubt_all()
            return log, True
        return log, restored

    def _set_aside(self, name: str, reason: str) -> None:
        self._kept_aside.add_unreadable(name, reason, now_ns=time.time_ns())

    def _may_have_counted(self, name: str) -> bool:
        """Return whether a log may have acknowledged records although no checkpoint names it.

        This is possible only if an earlier release wrote the directory last, and the log has segments. The earlier
        release acknowledged records of logs that no checkpoint named.
        """
        if self._trust.names_complete:
            return False
        return any(file.endswith(DATA_SUFFIX) for file in self._disk.names(self._path / name))
