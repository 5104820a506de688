"""``partition.json``: the partition and topic id of a log, and the schemas of its segments.

The log's first append writes the file. The file is fsynced before any record of the log counts as fsynced. Later
versions of the file are fsynced at once, because the next start would set the log aside if a power failure emptied the
file. A new schema is at first only in memory and at the beginning of its segments. ``PartitionFileJob`` writes it to
the file.
"""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from sparklog.errors import StorageError
from sparklog.model import TopicPartition, TopicSchema
from sparklog.storage.disk import Disk, is_full, read_file, replace_file
from sparklog.storage.formats import decode_state, encode_state

PARTITION_FILE = "partition.json"


class PartitionFile(msgspec.Struct, frozen=True):
    """The content of ``partition.json``: the partition and topic id of a log, and the schemas of its segments."""

    topic: str
    partition: int
    topic_id: str
    schemas: tuple[TopicSchema, ...]
    version: int = 1


def directory_name(tp: TopicPartition) -> str:
    """Return the name of the partition's directory: topic and partition number, as in Kafka.

    The name has at most 255 bytes: at most 249 for the topic, a dash, and at most 5 digits for the partition.
    """
    return f"{tp.topic}-{tp.partition}"


def parse_directory_name(name: str) -> TopicPartition | None:
    topic, dash, partition = name.rpartition("-")
    if not topic or not dash or not (partition.isascii() and partition.isdigit()):
        return None
    return TopicPartition(topic, int(partition))


def read_partition_file(disk: Disk, directory: Path) -> PartitionFile:
    """Return the content of ``partition.json`` in ``directory``.

    Raises FileNotFoundError, StorageError or NewerFormatError.
    """
    path = directory / PARTITION_FILE
    return decode_state(read_file(disk, path), PartitionFile, path=path)


def write_partition_file(disk: Disk, directory: Path, content: PartitionFile, *, sync: bool) -> None:
    replace_file(disk, directory / PARTITION_FILE, encode_state(content), sync=sync)


class PartitionFileJob:
    """A job that writes ``content`` to ``partition.json``.

    The event loop creates the job and handles its end. Call ``run`` once, in any thread.
    """

    def __init__(self, disk: Disk, directory: Path, content: PartitionFile) -> None:
        self.content = content
        #: Whether the file has the content and is durable.
        self.done = False
        self._cancelled = False
        self._disk = disk
        self._directory = directory
        self._by_path = threading.Lock()

    def cancel(self) -> None:
        """Stop the job. After this method returns, the job writes nothing.

        Otherwise it might write into a new directory of the same name, which belongs to another log.
        """
        with self._by_path:
            self._cancelled = True

    def run(self) -> None:
        """Write the file.

        If the job is canceled or the disk is full, ``done`` stays False, and the caller needs a new job.

        Raises:
            StorageError: the log directory must go offline.
        """
        with self._by_path:
            if self._cancelled:
                return
            try:
                write_partition_file(self._disk, self._directory, self.content, sync=True)
            except OSError as failure:
                if not is_full(failure):
                    raise StorageError(f"storing the schemas of {self._directory}: {failure}") from failure
            else:
                self.done = True
